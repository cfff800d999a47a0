"""`preheat check`: verify before a run that nothing is left to compile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import click

from preheat.ahead.check import CheckResult, check
from preheat.ahead.foreign import RECORD_AGAIN
from preheat.ahead.manifest import require_programs, with_coverage
from preheat.build.builder import Builder
from preheat.model.config import Config, SealMode
from preheat.tools.cli.output import count, print_json, print_line, print_message, print_unrecorded
from preheat.tools.cli.programs import archs_option, coverage_option

__all__ = ["command", "run_check"]

_EPILOG = """\b
Examples:
  preheat check kernels.toml --arch sm_90 --bundle kernels.heat
  preheat check kernels.toml --arch sm_90 --arch sm_100

If --bundle or PREHEAT_BUNDLE names bundles, the bundles must have every program. Otherwise the cache
must have them. Code for an older architecture counts if the requested one can run it, such as sm_80
code on sm_89. Header files on this machine are compared with those that were baked. Compiles of the
recording that no adapter covers are listed. They do not count as missing, because their files may have
been built ahead of time. The exit status is 1 if a program is missing, and 2 if the manifest lists
nothing.
"""


@click.command(epilog=_EPILOG)
@click.argument("manifest", type=click.Path(path_type=Path))
@archs_option("as recorded")
@coverage_option
@click.option(
    "--bundle",
    "bundles",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE[@sha256:HEX]",
    help="Bundle that the run will mount; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    manifest: Path,
    archs: tuple[str, ...],
    coverage: str | None,
    bundles: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Check that a sealed run finds every program that MANIFEST lists. Nothing is compiled."""
    return run_check(manifest, archs, bundles, as_json=as_json, coverage=coverage)


def run_check(
    manifest: Path,
    archs: Sequence[str],
    bundles: Sequence[Path],
    *,
    as_json: bool,
    coverage: str | None = None,
    config: Config | None = None,
) -> int:
    """Print what a sealed run with these settings would not find, and return the exit status."""
    listed = with_coverage(require_programs(manifest), coverage)
    config = replace(config or Config.from_env(), sealed=SealMode.ERROR)
    bundles = bundles or config.bundles
    if bundles:  # The cache of this machine says nothing about other machines.
        config = replace(config, bundles=(), layers=(), cache=False, remote=())
    with closing(Builder.open(config)) as builder:
        for path in bundles:
            builder.mount(path)
        checked = check(listed, archs, builder=builder)
    _report(checked, manifest, bundles, as_json=as_json, coverage=coverage)
    return 0 if checked.ok else 1


def _report(
    checked: CheckResult,
    manifest: Path,
    bundles: Sequence[Path],
    *,
    as_json: bool,
    coverage: str | None,
) -> None:
    if as_json:
        print_json(
            {
                "programs": checked.programs,
                "archs": checked.archs,
                "bundles": bundles,
                "missing": [program._asdict() for program in checked.missing],
                "to_record": [program._asdict() for program in checked.to_record],
                "unrecorded": [vars(item) for item in checked.unrecorded],
                "unchecked_headers": checked.unchecked_headers,
                "hints": checked.hints,
            }
        )
    else:
        for title, arch, reason in checked.missing:
            print_line(f"{title}: {reason}" if arch is None else f"{title} {arch}: {reason}")
    if checked.unchecked_headers:
        here = count(len(checked.unchecked_headers), "header file")
        example = checked.unchecked_headers[0]
        print_message(f"{here} not compared, because not on this machine (such as {example})")
    scope = f"{count(checked.programs, 'program')}, {count(len(checked.archs), 'architecture')}"
    place = ", ".join(map(str, bundles)) or "the cache (no bundle was named)"
    if checked.missing:
        print_message(f"{scope}: {len(checked.missing):,} missing from {place}")
        if checked.unasked:
            print_message(
                f"{checked.unasked:,} of them may be on a shared store, which could not be used"
                "\n\nhint: 'preheat doctor' says why it could not be used"
            )
            return print_unrecorded(checked.unrecorded)
        if checked.bakeable:
            bakes = "what is missing" if not checked.hints else f"{checked.bakeable:,} of them"
            options = "--arch" if coverage is None else "--arch and --coverage"
            print_message(f"\nhint: 'preheat bake {manifest}' with the same {options} bakes {bakes}")
        for hint in checked.hints:
            if hint == RECORD_AGAIN:
                all_of_it = len(checked.to_record) == len(checked.missing)
                what = "what is missing" if all_of_it else f"{len(checked.to_record):,} of them"
                print_message(f"\nhint: a bake cannot make {what}: {hint}")
            else:
                print_message(f"\nhint: {hint}")
    elif checked.programs:
        everything = "all that was recorded" if checked.unrecorded else "everything"
        print_message(f"{scope}: {everything} is in {place}")
    else:
        print_message(f"{manifest} lists no program")
    print_unrecorded(checked.unrecorded)
