"""A cache for `Program.compile(…, cache=…)` of cuda.core on the store of a builder."""

from __future__ import annotations

from typing import Any, NoReturn

import cuda.core
import cuda.core.utils

from preheat.adapters.base import NotKeyableError
from preheat.adapters.cuda_core.compile import (
    CODE,
    code_to_load,
    connect,
    connection_of,
    request_of_key,
    use_for_next_compile,
)
from preheat.adapters.cuda_core.request import KIND
from preheat.build.foreign_store import ABSENT, ForeignStore
from preheat.model.foreign import ForeignEntry, ForeignRequest

__all__ = ["Probe", "ProgramCache"]


class Probe(cuda.core.utils.ProgramCacheResource):  # type: ignore[misc]
    """A cache that makes cuda.core compute the key of a program, and has nothing."""

    def __getitem__(self, key: bytes | str) -> NoReturn:
        raise KeyError(key)

    def __setitem__(self, key: bytes | str, value: object) -> None:
        """Store nothing."""

    def __delitem__(self, key: bytes | str) -> None:
        raise KeyError(key)

    def __len__(self) -> int:
        return 0

    def clear(self) -> None:
        """Remove nothing: there is nothing."""


class ProgramCache(cuda.core.utils.ProgramCacheResource):  # type: ignore[misc]
    """The entries of cuda.core in bundles and caches, as cuda.core sees them.

    `Program.compile` looks a program up under a key of preheat: it also holds the contents of the files
    that the program includes and the build of the compiler. As a plain mapping, it has the keys of the
    caller. A miss in a sealed process raises `SealedError`.
    """

    def __init__(self, store: ForeignStore) -> None:
        connect()
        self._store = store
        self._connection = connection_of(store)

    def __getitem__(self, key: bytes | str) -> bytes:
        request = self._identity(key)
        found = None if request is None else self._store.get(request)
        if found is not None:
            self._report(found, key)
            return code_to_load(found, request_of_key(_key_bytes(key)))
        if request_of_key(_key_bytes(key)) is not None:
            use_for_next_compile(self._store)  # It compiles, or raises `SealedError`.
        elif request is not None:
            self._connection.permit(request, ABSENT)
        raise KeyError(key)

    def __setitem__(self, key: bytes | str, value: object) -> None:
        if request_of_key(_key_bytes(key)) is not None:
            return  # The compile has stored it.
        request = self._identity(key)
        assert request is not None
        label = value.name if isinstance(value, cuda.core.ObjectCode) else ""
        entry = ForeignEntry(KIND, request.key, {CODE: _code_bytes(value)}, label=label)
        self._store.put(entry)
        self._report(entry, key)

    def __delitem__(self, key: bytes | str) -> None:
        request = self._identity(key)
        if request is None or self._store.get(request) is None:
            raise KeyError(key)
        self._store.remove(request)

    def __len__(self) -> int:
        return sum(1 for _ in self._store.all(KIND))

    def clear(self) -> None:
        """Remove the entries of cuda.core from all caches. Bundles are not changed."""
        for entry in list(self._store.all(KIND)):
            self._store.remove(entry.request)

    def _identity(self, key: bytes | str) -> ForeignRequest | None:
        """Return the entry of a key; None for a program that no key describes."""
        request = request_of_key(_key_bytes(key))
        if request is None:
            return ForeignRequest(KIND, _key_bytes(key).hex())
        try:
            return request.identity
        except NotKeyableError:
            return None

    def _report(self, entry: ForeignEntry, key: bytes | str) -> None:
        """Report to a recorder that an entry was used."""
        request = request_of_key(_key_bytes(key))
        self._connection.report(entry, lambda: None if request is None else request.row())


def _key_bytes(key: bytes | str) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes | bytearray):
        return bytes(key)
    raise TypeError(f"a key of the cache is bytes or text, not {type(key).__name__}")


def _code_bytes(value: Any) -> bytes:
    if not isinstance(value, cuda.core.ObjectCode):
        return bytes(value)
    code = value.code
    if not isinstance(code, str):
        return bytes(code)
    with open(code, "rb") as file:  # It is the path of a file.
        return file.read()
