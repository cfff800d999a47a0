"""What an adapter does for one library that compiles kernels at run time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.foreign import ForeignRequest

__all__ = ["Adapter", "RequiredEntries", "Row"]

#: What a recording keeps of one request of a library, as JSON values. Every row has "root", the
#: directory from which its modules are imported, or "" for installed ones; "env", the variables that
#: are set when the request is made again; and "recorded", facts that are not part of the request.
Row = Mapping[str, Any]


class RequiredEntries(NamedTuple):
    """The entries that a launch needs. `notes` say what a user of the entries should know."""

    entries: tuple[ForeignRequest, ...]
    notes: tuple[str, ...] = ()


class Adapter(ABC):
    """Connects the compiler of one library to the store of a builder.

    `name` is also the kind of the entries, and `module` is the module of the library.

    Once it is installed, everything that the library compiles is looked up in the store first and
    stored afterwards. A miss in a sealed process raises `SealedError` through `ForeignStore.permit`.
    Each request is emitted as a `foreign_request` event, which a recorder writes to the manifest.
    """

    name: ClassVar[str]
    module: ClassVar[str]

    @abstractmethod
    def install(self, builder: Builder) -> None:
        """Connect the library, which is imported. Raises `AdapterError` for an unknown version."""

    @abstractmethod
    def bake(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Make the entries of a recorded request for `arch`, without a device, and store them.

        It runs in a process of its own, in which the adapter is installed. `coverage` is one of
        `COVERAGES` of the manifest.
        """

    @abstractmethod
    def count(self, row: Row, coverage: str) -> int:
        """Return how many kernels `bake` makes for one architecture, at most."""

    @abstractmethod
    def keys(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Return the entries that `bake` would make, without making them."""
