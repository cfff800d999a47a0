"""What an adapter does for one library that compiles kernels at run time."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from preheat.adapters.modules import NotPortableError
from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.build.foreign_store import ForeignStore
from preheat.callsite import call_site, format_site
from preheat.errors import AdapterError
from preheat.foreign import ForeignEntry, ForeignRequest

__all__ = [
    "Adapter",
    "RequiredEntries",
    "Row",
    "directory_of",
    "not_importable",
    "obtain",
    "require_version",
]

#: What a recording keeps of one request of a library, as JSON values. Every row has "root", the
#: directory from which its modules are imported, or "" for installed ones; "env", the variables that
#: are set when the request is made again; and "recorded", facts that are not part of the request.
#: A row with "kept" describes an entry that `bake` cannot make, such as a measurement. The content of
#: the entry is kept beside the manifest.
Row = Mapping[str, Any]


class RequiredEntries(NamedTuple):
    """The entries that a launch needs. `notes` are messages about them for the user.

    `outdated` says why the recording cannot be used at all, such as another version of the library.
    """

    entries: tuple[ForeignRequest, ...]
    notes: tuple[str, ...] = ()
    outdated: str = ""


class Adapter(ABC):
    """Connects the compiler of one library to the store of a builder.

    `name` is also the kind of the entries, and `module` is the module of the library. `package` is its
    name for pip, if that is not the first part of `module`.

    Once it is installed, everything that the library compiles is looked up in the store first and
    stored afterwards. A miss in a sealed process raises `SealedError` through `ForeignStore.permit`.
    Each request is emitted as a `foreign_request` event, which a recorder writes to the manifest.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    package: ClassVar[str] = ""

    @abstractmethod
    def install(self, builder: Builder) -> None:
        """Connect the imported library. Raises `AdapterError` for an unknown version."""

    @abstractmethod
    def bake(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Make the entries of a recorded request for `arch`, without a device, and store them.

        It runs in a separate process, in which the adapter is installed. `coverage` is one of
        `COVERAGES` of the manifest.
        """

    @abstractmethod
    def count(self, row: Row, coverage: str) -> int:
        """Return the largest number of kernels that `bake` makes for one architecture."""

    @abstractmethod
    def keys(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Return the entries that `bake` would make, without making them."""


def require_version(library: str, found: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> None:
    """Raise `AdapterError` unless a version is in the range that the adapter accepts.

    As many parts of the version are compared as a limit has: `(3, 9)` accepts 3.9.7.
    """
    parts = tuple(int(part) for part in found.split("+")[0].split(".")[: len(newest)] if part.isdigit())
    if not oldest <= parts or parts > newest:
        first, last = (".".join(map(str, each)) for each in (oldest, newest))
        raise AdapterError(
            f"{library} {found} is not known: the adapter accepts {first} to {last}",
            hint="install one of these versions, or a newer preheat",
        )


def not_importable(error: NotPortableError, row: Row) -> AdapterError:
    """Return the error for a function that a bake cannot import."""
    if error.hint is not None:  # The module was found.
        return AdapterError(str(error), hint=error.hint)
    searched = f" and {row['root']}" if row["root"] else ""
    return AdapterError(
        f"{error} (searched: PYTHONPATH{searched})",
        hint="put the module beside the manifest, or its directory on PYTHONPATH",
    )


def directory_of(module: ModuleType) -> str:
    """Return the directory of a library, whose lines are not those of the program."""
    assert module.__file__ is not None
    return os.path.dirname(os.path.abspath(module.__file__)) + os.sep


def obtain(
    store: ForeignStore,
    request: ForeignRequest,
    make: Callable[[], Mapping[str, bytes]],
    row: Callable[[], Row | None],
    *libraries: str,
) -> ForeignEntry:
    """Return the entry of a request. If no bundle and no cache has it, `make` makes it.

    The request is reported to a recorder with its `row`. The row is None for a request that a bake
    cannot repeat. `libraries` are directories whose lines are not those of the program.
    """
    site = call_site(*libraries)
    entry = store.obtain(request, make, called_by=lambda: format_site(site))
    if store.events.has_sink("foreign_request"):
        store.events.emit("foreign_request", entry=entry, row=row(), site=site)
    return entry
