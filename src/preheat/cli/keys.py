"""`preheat keys`: make and show the keys that sign entries and bundles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from preheat.cli.output import print_json, print_line, print_message, print_raw
from preheat.store.signing.keys import PublicKey, SigningKey, load_public, require_absent

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat keys new signing.pem --public trusted.pem
  preheat keys show signing.pem

\b
Writers name the private key in PREHEAT_SIGNING_KEY. Readers name files of public keys in
PREHEAT_TRUSTED_KEYS, separated like PATH. To replace a key, let all readers trust the old and the new
one, then let the writers use the new one, and then remove the old one.
"""
_FILE = click.Path(path_type=Path)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(epilog=_EPILOG)
def command() -> None:
    """Make and show the keys that sign entries on servers, and bundles."""


@command.command()
@click.argument("file", type=_FILE)
@click.option("--public", type=_FILE, metavar="FILE", help="Write the public key to this new file.")
@_JSON
def new(file: Path, public: Path | None, as_json: bool) -> None:
    """Make a private key in FILE, which must not exist, and print its public key.

    \b
    Example:
      preheat keys new signing.pem --public trusted.pem
    """
    if public is not None:
        require_absent(public)  # before there is a private key
    key = SigningKey.new()
    key.save(file)
    if public is not None:
        key.public.save(public, comment=_comment(file, key.public))
    if public is None or as_json:
        _print([(file, key.public)], as_json=as_json)
    print_message(f"{file}: private key {key.id.hex()}, readable only by you")
    print_message(f"Writers: keep the file secret, and set PREHEAT_SIGNING_KEY={file.absolute()}")
    if public is not None:
        print_message(f"Readers: set PREHEAT_TRUSTED_KEYS={public.absolute()}")
    else:
        print_message("Readers: put the public key into a file that PREHEAT_TRUSTED_KEYS names")


@command.command()
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@_JSON
def show(files: tuple[Path, ...], as_json: bool) -> None:
    """Print the public keys of each FILE, which has a private key or public keys.

    The output can be saved as a file of public keys.

    \b
    Examples:
      preheat keys show signing.pem
      preheat keys show old.pem new.pem > trusted.pem
    """
    _print([(file, key) for file in files for key in load_public(file)], as_json=as_json)


def _print(keys: Iterable[tuple[Path, PublicKey]], *, as_json: bool) -> None:
    if as_json:
        print_json([{"id": key.id.hex(), "public": key.pem(), "file": file} for file, key in keys])
        return
    for file, key in keys:
        print_line(_comment(file, key))
        print_raw(key.pem())


def _comment(file: Path, key: PublicKey) -> str:
    return f"# preheat key {key.id.hex()}, from {file.name}"
