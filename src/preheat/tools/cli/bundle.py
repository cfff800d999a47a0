"""`preheat bundle`: list, verify, sign and merge bundles, and keep them on a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from preheat.ahead.bundles import (
    all_entries,
    all_foreign,
    faults,
    graphs,
    merge,
    require_place,
    sign,
)
from preheat.ahead.stores import open_bundle
from preheat.build.bundles import BundleEntry
from preheat.errors import BundleError
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.model.foreign import ForeignEntry
from preheat.model.portable_paths import format_spellings
from preheat.model.setting_values import split_pin
from preheat.store.bundle import Bundle
from preheat.store.remote.bundles import pull, push
from preheat.tools.cli.arguments import BUNDLE, LocalFile
from preheat.tools.cli.details import details_as_json
from preheat.tools.cli.keys import claimed_key, require_signable, signature_faults, signing_key
from preheat.tools.cli.output import columns, count, print_json, print_line, print_message, size
from preheat.tools.cli.stored import CUDA

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat bundle ls kernels.heat
  preheat bundle verify *.heat
  preheat bundle sign kernels.heat
  preheat bundle merge decode.heat train.heat -o kernels.heat

A bundle answers the requests it was baked for. It needs no compiler and no headers at run time.
"""
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(epilog=_EPILOG)
def command() -> None:
    """List, verify, sign and merge bundles (.heat)."""


@command.command()
@click.argument("file", type=BUNDLE, metavar="FILE")
@_JSON
def ls(file: Path, as_json: bool) -> None:
    """List the entries of FILE, their compilers and their headers.

    \b
    Example:
      preheat bundle ls kernels.heat
    """
    with Bundle.open(file) as bundle:
        rows = sorted(all_entries(bundle), key=lambda p: (p.artifact.label, p.artifact.arch, p.key))
        foreign = sorted(all_foreign(bundle), key=lambda e: (e.kind, e.label, e.target, e.digest))
        if as_json:
            lists = {"programs": [*map(_as_dict, rows)], "foreign": [*map(details_as_json, foreign)]}
            about = {"file": bundle.path, "bytes": bundle.nbytes, "sha256": bundle.digest()}
            print_json({**bundle.meta, **about, "signed_by": claimed_key(bundle), **lists})
            return
        for line in _list(bundle, rows, foreign):
            print_line(line)
        what = f"{count(len(rows) + len(foreign), 'entry')}, {size(bundle.nbytes)}"
        by = ", ".join(sorted({entry.artifact.toolchain for entry in rows}))
        print_message(f"{what}, made by {by}" if by else what)


def _list(bundle: Bundle, rows: list[BundleEntry], foreign: list[ForeignEntry]) -> Iterator[str]:
    head = ("KEY", "KIND", "PROGRAM", "ARCH", "SIZE", "HEADERS", "COMPILER", "KERNELS")
    lists: dict[tuple[str, Arch], set[object]] = {}
    for entry in rows:
        lists.setdefault(_name(entry), set()).add(entry.include)
    listed = [_row(entry, include=len(lists[_name(entry)]) > 1) for entry in rows]
    yield from columns([head, *listed, *map(_foreign_row, foreign)], right=(4, 5))
    for entry in rows:
        if entry.untracked_reason:
            yield f"{entry.artifact.label} for {entry.artifact.arch}: {entry.untracked_reason}"
    if own := _own_headers(rows):
        yield "\nheader files outside of the toolkit"
        yield from (f"  {line}" for line in columns(sorted(own)))
    if keys := graphs(bundle):
        yield "\ngraphs to capture"
        yield from (f"  {line}" for line in columns((g.name, " ".join(g.keys)) for g in keys))
    yield f"\nname with its pin\n  {bundle.path}@sha256:{bundle.digest()}"
    if key := claimed_key(bundle):
        yield f"\nsigned by\n  key {key}"


def _name(entry: BundleEntry) -> tuple[str, Arch]:
    return entry.artifact.label, entry.artifact.arch


def _row(entry: BundleEntry, *, include: bool) -> tuple[str, ...]:
    """Return the columns of an entry, with its include directories if `include` is True."""
    artifact = entry.artifact
    title = f"{artifact.label} (include {format_spellings(entry.include or ()) or '-'})"
    kernels = entry.entries or [kernel.title for kernel in artifact.entries]
    return (
        *(artifact.digest[:12], CUDA, title if include else artifact.label),
        *(str(artifact.arch), size(artifact.size)),
        *(str(len(artifact.headers) or "-"), artifact.toolchain, ", ".join(kernels)),
    )


def _foreign_row(entry: ForeignEntry) -> tuple[str, ...]:
    return (
        *(entry.digest[:12], entry.kind, entry.label or "-", entry.target, size(entry.size)),
        *("-", entry.kind, ", ".join(entry.files)),
    )


def _own_headers(rows: list[BundleEntry]) -> set[tuple[str, str]]:
    """Return name and digest of the files in include directories of the programs themselves."""
    files = (header for entry in rows for header in entry.artifact.headers)
    return {(f.name, f.digest[:12]) for f in files if f.root.isdecimal() or f.root == "/"}


def _as_dict(entry: BundleEntry) -> dict[str, Any]:
    artifact = entry.artifact
    return {
        "key": artifact.digest,
        "request": entry.key,
        "program": artifact.label,
        "arch": str(artifact.arch),
        "toolchain": artifact.toolchain,
        "bytes": artifact.size,
        "kernels": [kernel.title for kernel in artifact.entries],
        "wanted": entry.entries,
        "include": entry.include,
        "headers": [header._asdict() for header in artifact.headers],
        "note": entry.untracked_reason,
        "parts": artifact.parts,
    }


@command.command()
@click.argument("files", nargs=-1, required=True, type=BUNDLE, metavar="FILE...")
@_JSON
def verify(files: tuple[Path, ...], as_json: bool) -> int:
    """Read every byte of each FILE and check it. The exit status is 1 if one is damaged.

    The signature is verified if PREHEAT_TRUSTED_KEYS or PREHEAT_SIGNING_KEY is set. A signature of an
    untrusted key counts as damage. With PREHEAT_REQUIRE_SIGNED=1, so does a missing signature.

    \b
    Example:
      preheat bundle verify *.heat
    """
    found = {str(file): _faults(file) for file in files}
    if as_json:
        print_json(found)
    for file, wrong in () if as_json else found.items():
        for line in wrong:
            print_line(f"{file}: {line}")
    damaged = sum(map(bool, found.values()))
    print_message(f"Checked {count(len(found), 'bundle')}: {damaged} damaged")
    return 1 if damaged else 0


def _faults(file: Path) -> list[str]:
    try:
        with Bundle.open(file) as bundle:
            return [*signature_faults(bundle), *faults(bundle)]
    except BundleError as error:
        return [str(error).removeprefix(f"{split_pin(file)[0]} is ")]


@command.command(name="sign")
@click.argument("files", nargs=-1, required=True, type=BUNDLE, metavar="FILE...")
@_JSON
def sign_command(files: tuple[Path, ...], as_json: bool) -> None:
    """Sign each FILE with the key in PREHEAT_SIGNING_KEY.

    An existing signature is replaced if PREHEAT_TRUSTED_KEYS has its key, or if FILE has a pin.

    \b
    Example:
      PREHEAT_SIGNING_KEY=signing.pem preheat bundle sign kernels.heat
    """
    key = signing_key()
    bundles = [Bundle.open(file) for file in files]
    for bundle in bundles:
        require_signable(bundle)
    signed = [(bundle, sign(bundle, key)) for bundle in bundles]
    if as_json:
        rows = ({"bundle": bundle.path, "bytes": nbytes} for bundle, nbytes in signed)
        print_json([{**row, "signed_by": key.id.hex()} for row in rows])
    for bundle, nbytes in signed:
        print_message(f"{bundle.path}: signed by key {key.id.hex()}, {size(nbytes)}")


@command.command(name="merge")
@click.argument("files", nargs=-1, required=True, type=BUNDLE, metavar="FILE...")
@click.option("-o", "--output", required=True, type=LocalFile(path_type=Path), help="The new bundle.")
@click.option(
    "--prefer",
    type=click.Choice(["first", "last"]),
    help="Bundle whose code is used where two differ. Without it, a difference is an error.",
)
@click.option("--sign", "signs", is_flag=True, help="Sign it with the key in PREHEAT_SIGNING_KEY.")
@_JSON
def merge_command(
    files: tuple[Path, ...], output: Path, prefer: str | None, signs: bool, as_json: bool
) -> None:
    """Merge several bundles into one.

    With PREHEAT_REQUIRE_SIGNED=1, each FILE has a pin, or a trusted key has signed it.

    \b
    Examples:
      preheat bundle merge decode.heat train.heat -o kernels.heat
      preheat bundle merge old.heat new.heat --prefer last -o kernels.heat
    """
    config = Config.from_env()
    bundles = [open_bundle(str(file), config) for file in files]
    key = signing_key() if signs else None
    for bundle in bundles if signs else ():
        require_signable(bundle)
    entries, nbytes = merge(bundles, output, prefer=prefer, key=key)
    if as_json:
        print_json({"bundle": output, "entries": entries, "bytes": nbytes})
    print_message(f"{output}: {count(entries, 'entry')}, {size(nbytes)}")


# On servers


@command.command("push")
@click.argument("file", type=LocalFile(exists=True, dir_okay=False, path_type=Path))
@click.argument("url")
@_JSON
def push_command(file: Path, url: str, as_json: bool) -> None:
    """Write FILE to the server at URL, and print its pin.

    The bundle is stored under its SHA-256, beside the entries of PREHEAT_REMOTE. The pin always names
    the same bytes. The command first checks that the store can be written to.

    \b
    Example:
      preheat bundle push kernels.heat s3://team/kernels
    """
    digest, written = push(file, url)
    if as_json:
        print_json({"bundle": file, "pin": f"sha256:{digest}", "written": written})
    else:
        print_line(f"sha256:{digest}")
        print_message(f"{file} {'written' if written else 'was there already'}")


@command.command("pull")
@click.argument("url")
@click.argument("pin")
@click.option("-o", "--output", required=True, type=LocalFile(path_type=Path), help="File to write.")
@_JSON
def pull_command(url: str, pin: str, output: Path, as_json: bool) -> None:
    """Read the bundle PIN from the server at URL, and verify it.

    PIN is the pin that `preheat bundle push` printed. A bundle with other bytes is refused, so no key
    is needed.

    \b
    Example:
      preheat bundle pull s3://team/kernels sha256:9f86d081… -o kernels.heat
    """
    require_place(output)
    nbytes = pull(url, pin, output)
    if as_json:
        print_json({"bundle": output, "pin": pin, "bytes": nbytes})
    else:
        print_message(f"{output}: {size(nbytes)}")
