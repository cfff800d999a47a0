"""The keys that sign entries on servers, and bundles. `preheat.store.signing` has the code."""

from preheat.store.signing.keys import (
    Keyring,
    Keys,
    PublicKey,
    SigningKey,
    UntrustedError,
    load_public,
)

__all__ = ["Keyring", "Keys", "PublicKey", "SigningKey", "UntrustedError", "load_public"]
