"""Signatures of bundles on the command line: the key that signs, and reports of signatures."""

from __future__ import annotations

from collections.abc import Iterator

from preheat.cli.output import print_message
from preheat.config import Config
from preheat.errors import BundleError
from preheat.pins import split_pin
from preheat.store.bundle import Bundle
from preheat.store.signing.bundles import BundleSignature
from preheat.store.signing.keys import Keys, SigningKey, UntrustedError

__all__ = ["claimed_key", "require_signable", "signature_faults", "signing_key"]


def signing_key() -> SigningKey:
    """Return the key of the settings that signs; `InputError` when there is none."""
    return Keys.signing_key_of(Config.from_env())


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
    trusted = Keys.of(Config.from_env()).trusted
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
    trusted = Keys.of(config).trusted
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
