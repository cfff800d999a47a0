"""The keys that the signature of a bundle must be made with, if the settings require one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from preheat.errors import InputError
from preheat.model.config import Config
from preheat.process.locks import no_fork

if TYPE_CHECKING:
    from preheat.store.signing.keys import Keyring

__all__ = ["required_signers"]


def required_signers(config: Config) -> Callable[[], Keyring] | None:
    """Return a function that reads the trusted keys; None when bundles need no signature.

    It raises `InputError` when a file of keys cannot be used, or none is named.
    """
    return partial(_trusted_keys, config) if config.require_signed else None


def _trusted_keys(config: Config) -> Keyring:
    with no_fork:
        from preheat.store.signing.keys import Keys  # Few processes need it.

    trusted = Keys.load(config.signing_key, config.trusted_keys).trusted
    if trusted is None:
        raise InputError(
            "PREHEAT_REQUIRE_SIGNED is on, and no key is trusted",
            hint="name files of public keys in PREHEAT_TRUSTED_KEYS",
        )
    return trusted
