"""`preheat run`: run a command whose libraries use the store of preheat, sealed and accounted for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from preheat.ahead.manifest import require_programs
from preheat.audit.compiler_libraries import require_names
from preheat.audit.library import LIBRARY, require_library
from preheat.audit.nested import announce_bundles
from preheat.audit.report import Report
from preheat.audit.session import audit_session
from preheat.audit.sites import STARTS_COVERED
from preheat.audit.verdict import BundleFile, describe_bundles, make_verdict
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode, environ
from preheat.store.publish import publish, unwritable_reason
from preheat.store.trust import unusable_reason
from preheat.tools.cli.arguments import BUNDLE
from preheat.tools.cli.check import run_check
from preheat.tools.cli.child import CannotRunError, run_command
from preheat.tools.cli.output import attempt, count, hint_lines, print_error, print_message
from preheat.tools.cli.programs import archs_option, coverage_option
from preheat.tools.cli.run_settings import Setting, gpu_archs, run_settings

__all__ = ["NOT_ACCOUNTED", "NOT_STARTED", "command"]

#: The exit status when the bundles lack what the manifest lists: the command was not started.
NOT_STARTED = 3
#: The exit status when the command succeeded, and its verdict is negative.
NOT_ACCOUNTED = 4

_EPILOG = """\b
Examples:
  preheat run -- python serve.py
  preheat run --bundle kernels.heat --sealed -- python serve.py --port 8000
  preheat run --bundle kernels.heat --sealed --manifest kernels.toml -- python serve.py
  preheat run --bundle kernels.heat --sealed --verdict verdict.json -- python batch.py
  preheat run --sealed --verdict verdict.json --allow-unseen XLA -- python train.py
  preheat run --bundle kernels.heat --sealed --empty-cache -- python serve.py
  preheat run --bundle kernels.heat --sealed --explain

\b
Every Python process of the command installs the adapters of the libraries that it imports. The
application does not change. PREHEAT_ADAPTERS selects the adapters; the default is all of them.

\b
With --sealed, starting a compiler and loading PTX fail at once, in every process of the command.
Kernels come from bundles and from caches. With --sealed and --empty-cache, they come only from bundles.

\b
The exit status is that of the command. It is 126 or 127 if the command cannot be run, 1 if the command
succeeded and the verdict cannot be written, 2 if an argument or a file cannot be used, 3 if the bundles
lack something that --manifest lists (the command was not started), and 4 if the command succeeded but
--verdict says that something was compiled, is not accounted for or was not seen.
"""


@click.command(epilog=_EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND [ARG]...")
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    type=BUNDLE,
    metavar="FILE[@sha256:HEX]",
    help="Bundle that is asked first; repeatable. Default: PREHEAT_BUNDLE.",
)
@click.option(
    "--sealed",
    is_flag=False,
    flag_value="error",
    type=click.Choice(["error", "warn"]),
    help="Compile nothing: a kernel that is missing is an error, or with 'warn' a warning. "
    "The option wins over PREHEAT_SEALED.",
)
@click.option(
    "--manifest",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Check first that the bundles have all of this manifest for the GPUs of this machine, or for "
    "--arch. If not, COMMAND is not started.",
)
@click.option(
    "--empty-cache",
    is_flag=True,
    help="Use an empty temporary cache, and no shared one, as on a new machine.",
)
@archs_option("those of the GPUs of this machine, or as recorded where there is none")
@coverage_option
@click.option(
    "--verdict",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to FILE which modules were loaded, and whether all are accounted for.",
)
@click.option(
    "--allow-unseen",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="Accept that nobody sees what this library, such as XLA, compiles inside itself; repeatable. "
    "The verdict lists it.",
)
@click.option("--explain", is_flag=True, help="Print each variable that is set, with the reason.")
def command(
    words: tuple[str, ...],
    bundles: tuple[Path, ...],
    sealed: str | None,
    manifest: Path | None,
    empty_cache: bool,
    archs: tuple[str, ...],
    coverage: str | None,
    verdict: Path | None,
    allowed: tuple[str, ...],
    explain: bool,
) -> int:
    """Run COMMAND with kernels from bundles and the cache, including kernels of other libraries."""
    if not words and not explain:
        raise click.UsageError("there is no COMMAND to run", click.get_current_context())
    allowed = require_names(allowed)
    listed = None if manifest is None else require_programs(manifest)
    seal = None if sealed is None else SealMode.of(sealed)
    with _temporary_cache(empty_cache) as cache:
        settings = run_settings(
            environ(), bundles=bundles, sealed=seal, manifest=listed, empty_cache=cache
        )
        env = _environment(settings, explain=explain)
        if not words:
            return 0
        return _run_checked(words, env, manifest, archs, coverage, verdict, allowed)


@contextmanager
def _temporary_cache(wanted: bool) -> Iterator[Path | None]:
    """Yield a new directory for a cache, if it is wanted. The directory is removed in the end."""
    if not wanted:
        yield None
        return
    with TemporaryDirectory(prefix="preheat-cache-", ignore_cleanup_errors=True) as place:
        cache = Path(place).resolve()
        trust = Config.from_env().trust_cache_dir
        if why := unusable_reason(cache, trust=trust):  # The command would use the user's cache.
            fault = f"{cache} cannot be used as a cache: {why}"
            raise InputError(fault, hint="set TMPDIR to a directory of your own")
        yield cache


def _environment(settings: Iterable[Setting], *, explain: bool) -> dict[str, str]:
    """Return the environment of the command."""
    env = dict(environ())
    for setting in settings:
        env[setting.name] = setting.value
        if explain:
            print_message(str(setting))
    return env


def _run_checked(
    words: Sequence[str],
    env: dict[str, str],
    manifest: Path | None,
    archs: tuple[str, ...],
    coverage: str | None,
    verdict: Path | None,
    allowed: tuple[str, ...],
) -> int:
    """Check the verdict file and the bundles, and run the command if they are in order."""
    if verdict is not None:
        _remove_old(verdict)
    config = Config.from_env(env)
    if manifest is not None:
        archs = _choose_archs(archs, config, env)
        bundles = config.bundles
        if run_check(manifest, archs, bundles, as_json=False, coverage=coverage, config=config):
            print_error("the command was not started, because programs of the manifest are missing")
            return NOT_STARTED
    try:
        return _run(words, env, config, verdict, allowed)
    except CannotRunError as error:
        print_error(str(error), error.hint)
        return error.status


def _choose_archs(given: tuple[str, ...], config: Config, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the given architectures, or those of the GPUs that the command sees, if it uses any."""
    gpus = [] if (config.device or "").startswith("emulator") else gpu_archs(env)
    if not given:
        if gpus:
            print_message(f"checking for {', '.join(map(str, gpus))}, the GPU of this machine")
        return tuple(map(str, gpus))
    named = {Arch.parse(text).plain for text in given}
    for gpu in gpus:
        if gpu not in named:
            print_message(f"warning: this machine has a GPU of {gpu}, which --arch does not name")
    return given


def _remove_old(verdict: Path) -> None:
    """Remove the verdict of an earlier run, which must not stay if this run ends without one."""
    require_library()
    why = unwritable_reason(verdict.absolute())
    if why is None:
        try:
            verdict.unlink(missing_ok=True)
        except OSError as fault:
            why = fault.strerror or str(fault)
    if why is not None:
        raise InputError(f"cannot write {verdict}: {why}", hint="name another file with --verdict")


def _run(
    words: Sequence[str],
    env: dict[str, str],
    config: Config,
    verdict: Path | None,
    allowed: Sequence[str],
) -> int:
    """Run the command, in an audit if it is sealed or a verdict is wanted."""
    announce_bundles(environ(), config.bundles)
    if verdict is None and (config.sealed is SealMode.OFF or not LIBRARY.is_file()):
        if config.sealed is not SealMode.OFF:
            print_message("there is no audit library: compilers that are started are not refused")
        return run_command(words, env)
    wants_verdict = verdict is not None
    bundles = describe_bundles(config.bundles) if wants_verdict else ()
    with audit_session(env, seal=config.sealed, cupti=wants_verdict, reports=wants_verdict) as session:
        status = run_command(words, session.env)
        return _conclude(session.report(words, status, allowed), config, verdict, bundles)


def _conclude(
    report: Report, config: Config, verdict: Path | None, bundles: Sequence[BundleFile]
) -> int:
    """Say what was refused, write the verdict, and return the exit status."""
    status = report.status
    for each in dict.fromkeys(each for each in report.refusals if each.refused):
        attempt(print_error, f"the run is sealed: {each.by} tried to {each.what}: {each.name}")
    for line in hint_lines(_uncovered(report)):
        attempt(print_message, line)
    for hidden in report.hidden:
        attempt(print_message, f"not proven: {hidden}")
    if verdict is None:
        return status
    made = make_verdict(report, bundles, config)
    try:
        publish(verdict.absolute(), [json.dumps(made, indent=2).encode(), b"\n"], mode=0o600)
    except OSError as fault:
        attempt(print_error, f"cannot write {verdict}: {fault.strerror or fault}")
        return status or 1
    if config.bundles and config.sealed is not SealMode.OFF:
        _report_cached(made["modules"]["by_origin"].get("store", 0))
    attempt(print_message, f"{_summary(report, made['verdict'])} → {verdict}")
    return NOT_ACCOUNTED if not status and not made["accounted"] else status


def _uncovered(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the libraries and the compilers that were refused and are no part of a recording."""
    for each in report.refusals:
        if each.refused and each.what.endswith("a compiler") and each.by.library not in STARTS_COVERED:
            yield each.by.library, os.path.basename(each.name)


def _report_cached(modules: int) -> None:
    """Say that a sealed run used the cache: on another machine, the bundles may not be enough."""
    if modules:
        came = f"{count(modules, 'module')} came from the cache, and no bundle has the code"
        attempt(print_message, f"{came}: --empty-cache runs with the bundles alone")


def _summary(report: Report, verdict: str) -> str:
    loaded = count(len(report.loaded), "module")
    if verdict == "accounted":
        unseen = dict.fromkeys(each.name for each in report.mapped if each.why)
        allowed = f"no compile was seen (allowed unseen: {', '.join(unseen)})"
        compiled = allowed if unseen else "nothing was compiled"
        return f"{compiled}, and {loaded} loaded, all accounted for"
    parts = [
        f"{verdict}: {count(len(report.compiles), 'compile')}, {len(report.refusals):,} refused",
        f"{len(report.unaccounted):,} of {loaded} not accounted for",
        *(["some activity not seen"] if report.unseen or verdict == "not proven" else []),
    ]
    return ", ".join(parts)
