"""`preheat keys`: make and show the keys that sign entries and bundles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from preheat.cli.output import print_json, print_message
from preheat.signing import PublicKey, SigningKey, load_public

__all__ = ["command"]

_EPILOG = """\b
Examples:
  preheat keys new signing.pem > trusted.pem
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
@_JSON
def new(file: Path, as_json: bool) -> None:
    """Make a private key in FILE, which must not exist, and print its public key.

    \b
    Example:
      preheat keys new signing.pem > trusted.pem
    """
    key = SigningKey.new()
    key.save(file)
    _print([(file, key.public)], as_json=as_json)
    print_message(f"{file}: private key {key.id.hex()}, readable by you alone")
    print_message(f"Writers: keep the file secret, and set PREHEAT_SIGNING_KEY={file.absolute()}")
    print_message("Readers: put the public key into a file that PREHEAT_TRUSTED_KEYS names")


@command.command()
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@_JSON
def show(files: tuple[Path, ...], as_json: bool) -> None:
    """Print the public keys of each FILE, of private or public keys. The output is a file of keys.

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
        click.echo(f"# preheat key {key.id.hex()}, from {file.name}")
        click.echo(key.pem(), nl=False)
