"""`preheat keys`, the key that signs bundles, and reports of their signatures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from preheat.errors import BundleError, InputError
from preheat.model.config import Config
from preheat.model.setting_values import split_pin
from preheat.store.base import UntrustedError
from preheat.store.bundle import Bundle
from preheat.store.signing.bundles import BundleSignature
from preheat.store.signing.keys import (
    Keyring,
    Keys,
    PublicKey,
    SigningKey,
    load_public,
    require_absent,
)
from preheat.tools.cli.output import print_json, print_line, print_message, print_raw

__all__ = ["claimed_key", "command", "require_signable", "signature_faults", "signing_key"]

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


# Signatures of bundles


def signing_key() -> SigningKey:
    """Return the key of the settings that signs; `InputError` when there is none."""
    path = Config.from_env().signing_key
    if path is None:
        raise InputError(
            "there is no key to sign with: PREHEAT_SIGNING_KEY is not set",
            hint="make a key with 'preheat keys new FILE', and set PREHEAT_SIGNING_KEY=FILE",
        )
    return SigningKey.load(path)


def _trusted(config: Config) -> Keyring | None:
    return Keys.load(config.signing_key, config.trusted_keys).trusted


def claimed_key(bundle: Bundle) -> str | None:
    """Return the id of the key that a bundle names as its signer, which is not verified."""
    if bundle.signature is None:
        return None
    try:
        return BundleSignature.decode(bundle.signature).key_id.hex()
    except UntrustedError:
        return "unknown"


def require_signable(bundle: Bundle) -> None:
    """Raise `BundleError` if a key that is not trusted has signed a bundle, and it has no pin.

    A new signature would make others trust what that key has signed. Entries that are read later are
    compared with the signature.
    """
    trusted = _trusted(Config.from_env())
    if bundle.signature is None or trusted is None or split_pin(bundle.source)[1] is not None:
        return
    try:
        bundle.require_signature(trusted)
    except UntrustedError as why:
        raise BundleError(
            f"bundle {bundle.path} is not signed again: {why}",
            hint="trust its key by PREHEAT_TRUSTED_KEYS, or name the bundle with its pin",
        ) from None


def signature_faults(bundle: Bundle) -> Iterator[str]:
    """Yield why the signature of a bundle is not accepted, or print the key of an accepted signature.

    Entries that are read later are compared with the signature.
    """
    config = Config.from_env()
    trusted = _trusted(config)
    if bundle.signature is None:
        if config.require_signed:
            yield "it is not signed"
    elif trusted is None:
        print_message(f"{bundle.path}: signed by key {claimed_key(bundle)}; no key is trusted here")
    else:
        try:
            key = bundle.require_signature(trusted)
            print_message(f"{bundle.path}: signed by key {key.hex()}, which is trusted")
        except UntrustedError as why:
            yield str(why)
