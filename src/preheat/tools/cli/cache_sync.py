"""`preheat cache sync`: copy entries between directories, bundles and servers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import click

from preheat.ahead.bundles import merge
from preheat.ahead.stores import (
    Choice,
    bundle_output,
    copy_entries,
    is_bundle,
    open_bundle,
    open_store,
    require_different,
    shown,
)
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.store.bundle import Bundle
from preheat.store.copy import CopyResult
from preheat.tools.cli.output import count, print_json, print_line, print_message, size

__all__ = ["command"]

_EPILOG = """\b
FROM and TO are each a cache directory, a bundle (.heat) or a URL as in PREHEAT_REMOTE. Only missing
entries are copied, and each entry is verified before it is written. The header lists of both stores are
merged. PREHEAT_CACHE_LIMIT and PREHEAT_CACHE_FILES limit a directory TO. A bundle TO has no signature:
'preheat bundle sign' signs it.

\b
Examples:
  preheat cache sync "$(preheat cache dir)" s3://team/kernels
  preheat cache sync s3://team/kernels /opt/layer --arch sm_90
  preheat cache sync kernels.heat ~/.cache/preheat --dry-run

\b
The exit status is 1 if the copy failed before it was complete, or if some entries were damaged, not
trusted or not accepted by the target (the other entries were copied). It is 2 if an argument cannot be
used. If you repeat the command, it copies the rest.
"""
_ARCH = "Copy only entries for this architecture; repeatable."


@click.command("sync", epilog=_EPILOG)
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--arch", "archs", multiple=True, metavar="ARCH", help=_ARCH)
@click.option("--kind", metavar="KIND", help="Only entries of this kind, such as cuda or triton.")
@click.option("--dry-run", is_flag=True, help="Write nothing, and say what would be copied.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    source: str, target: str, archs: tuple[str, ...], kind: str | None, dry_run: bool, as_json: bool
) -> int:
    """Copy the entries of one store that another one lacks."""
    require_different(source, target)
    choice = Choice(frozenset(map(Arch.parse, archs)), kind)
    if is_bundle(source) and is_bundle(target):
        result = _merge_bundles(source, bundle_output(target), choice, dry_run=dry_run)
    else:
        result = _copy(source, target, choice, dry_run=dry_run)
    places = shown(source), shown(target)
    if as_json:
        print_json(_as_dict(*places, result, dry_run=dry_run))
    else:
        _print(*places, result, dry_run=dry_run)
    return 1 if result.refused else 0


def _copy(source: str, target: str, choice: Choice, *, dry_run: bool) -> CopyResult:
    config = Config.from_env()
    with closing(open_store(source, config, write=False)) as opened:
        written = open_store(target, config, write=True)
        result = copy_entries(opened, written, choice, dry_run=dry_run)
        written.close()  # A bundle is written here, and only if the copy is complete.
    return result


def _merge_bundles(source: str, target: Path, choice: Choice, *, dry_run: bool) -> CopyResult:
    """Add the programs of one bundle to another; those that both have stay as they are."""
    if choice != Choice():
        raise InputError(
            "entries of bundles cannot be selected", hint="'preheat bake --arch' bakes a smaller one"
        )
    given = open_bundle(source, Config.from_env())
    before = [Bundle.open(target)] if target.exists() else []
    known = {digest for bundle in before for digest in bundle.digests()}
    missing = [digest for digest in given.digests() if digest not in known]
    if missing and not dry_run:
        merge([*before, given], target, prefer="first")
    held = sum(len(given.get(digest) or b"") for digest in missing)
    return CopyResult(copied=len(missing), bytes=held, present=len(given) - len(missing))


def _as_dict(source: str, target: str, result: CopyResult, *, dry_run: bool) -> dict[str, Any]:
    return {
        "from": source,
        "to": target,
        "dry_run": dry_run,
        "copied": result.copied,
        "bytes": result.bytes,
        "present": result.present,
        "merged_lists": result.merged,
        "left_out": result.left_out,
        "skipped": result.skipped,
        "refused": {digest: row._asdict() for digest, row in result.refused.items()},
    }


def _print(source: str, target: str, result: CopyResult, *, dry_run: bool) -> None:
    for digest, refusal in sorted(result.refused.items()):
        print_line(f"{digest}  {refusal.what}: {refusal.reason}")
    for reason, number in result.skipped.items():
        print_message(f"{count(number, 'entry')} not copied: {reason}")
    parts = [
        f"{count(result.copied, 'entry')} {'would be copied' if dry_run else 'copied'}",
        f"{size(result.bytes)}",
        f"{result.present:,} present",
        *([f"{count(result.merged, 'header list')} merged"] if result.merged else []),
        *([f"{result.left_out:,} of other kinds or architectures"] if result.left_out else []),
        *([f"{len(result.refused):,} refused"] if result.refused else []),
    ]
    print_message(f"{source} to {target}: {', '.join(parts)}")
