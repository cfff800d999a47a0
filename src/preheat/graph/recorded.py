"""The recorded work of a graph: its nodes, and everything it keeps alive so that they can run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from preheat.devices import base
from preheat.devices.active_capture import RecordedLaunch
from preheat.devices.array import Array, Scalar
from preheat.devices.base import ON_HOST
from preheat.devices.host import number_format, packer
from preheat.devices.launch import LaunchArguments
from preheat.devices.libraries import LIBRARIES, Library
from preheat.devices.memory import Buffer
from preheat.devices.operands import Operand
from preheat.devices.uses import Uses
from preheat.errors import CaptureError, InputError, did_you_mean
from preheat.graph.capture import Capture
from preheat.graph.libraries import SharedPool
from preheat.graph.nodes import Node, Record
from preheat.process.lazy import lazy

__all__ = ["RecordedWork"]


@dataclass(eq=False)
class RecordedWork:
    """What a captured graph does and uses."""

    title: str  # the graph in errors
    records: list[Record]
    after: list[tuple[int, ...]] | None  # what each record waits for; None: the one before it
    scalars: dict[str, Scalar]  # by the name that `Graph.replay` takes
    buffers: list[Buffer]
    uses: dict[Uses, bool]  # of these buffers and a shared pool, with True where the graph writes
    foreign: list[Operand]  # memory of other libraries
    libraries: tuple[str, ...]  # other libraries whose work is part of the graph
    modules: list[object]
    pools: tuple[object, ...]  # memory that other libraries allocated inside the capture
    shared_pool: SharedPool | None = None  # the same, if other graphs use it too

    @classmethod
    def of(cls, capture: Capture, title: str) -> RecordedWork:
        """Take over what an ended capture holds."""
        scalars = _scalars_by_name(capture.arrays)
        has_foreign_nodes = any(isinstance(each, Node) and each.foreign for each in capture.records)
        libraries = capture.libraries
        shared_pool = capture.libraries_inside.shared_pool
        released = False if shared_pool is None else _release_tensors(capture, shared_pool)
        pools: tuple[object, ...] = ()
        uses = capture.uses | {scalar.buffer.uses: True for scalar in scalars.values()}
        if has_foreign_nodes:
            libraries = libraries | capture.libraries_inside.names
        if has_foreign_nodes or released:
            pools = capture.libraries_inside.take_pools()
        if shared_pool is not None and pools:
            uses[shared_pool.uses] = True
        capture.libraries_inside.return_pools()
        return cls(
            title=title,
            records=capture.records,
            after=capture.after,
            scalars=scalars,
            buffers=list({array.buffer: None for array in capture.arrays}),
            uses=uses,
            foreign=list(capture.foreign.values()),
            libraries=tuple(sorted(libraries)),
            modules=[*capture.modules],
            pools=pools,
            shared_pool=shared_pool if pools else None,
        )

    @lazy
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, in order."""
        nodes = tuple(
            Node.of_launch(record) if isinstance(record, tuple) else record for record in self.records
        )
        for at, node in enumerate(nodes):
            chain = (at - 1,) if at else ()
            node.after = chain if self.after is None else self.after[at]
        return nodes

    @property
    def foreign_nodes(self) -> tuple[Node, ...]:
        """Return the nodes of other libraries."""
        return tuple(node for node in self.nodes if node.foreign)

    @property
    def leaves_memory_allocated(self) -> bool:
        """Return True if other libraries allocate more often in the graph than they free."""
        kinds = [node.kind for node in self.nodes]
        return kinds.count("allocation") > kinds.count("free")

    def pack(self, name: str, value: Any) -> bytes:
        """Return the bytes of a value for the scalar `name`."""
        scalar = self.scalars.get(name)
        if scalar is None:
            names = ", ".join(self.scalars) or "none"
            raise InputError(
                f"{self.title} uses no scalar called {name!r}; it uses: {names}",
                hint=did_you_mean(name, self.scalars)
                or f"gpu.scalar(…, name={name!r}), given to a captured kernel",
            )
        try:
            return packer(scalar.dtype)(value)
        except InputError as error:
            raise InputError(f"{self.title}, scalar {name!r}: {error}", hint=error.hint) from None

    def number_formats(self, names: Iterable[str]) -> str | None:
        """Return the `struct` formats of these scalars; None if one of them is not a plain number."""
        formats = [number_format(self.scalars[name].dtype) for name in names]
        return None if None in formats else "".join(filter(None, formats))

    def setter(self, names: Iterable[str], device: base.Device, stream: base.Stream) -> base.Setter:
        """Return the device's function that sets these scalars in `stream`."""
        chosen = [self.scalars[name] for name in names]
        return device.setter([(scalar.address, scalar.dtype.size) for scalar in chosen], stream)

    @property
    def library(self) -> Library | None:
        """The library in whose current stream the graph is replayed, or None."""
        return LIBRARIES[self.libraries[-1]] if self.libraries else None

    def is_of_one_library(self, device: base.Device) -> bool:
        """Return True if a replay in the stream of `library` is in order with all foreign memory."""
        registers_memory = bool(self.foreign) and device.dlpack[0] == ON_HOST
        return len(self.libraries) == 1 and not registers_memory

    def operands(self, device: base.Device) -> LaunchArguments:
        """Return what a replay uses, with the current streams of the libraries that take part."""
        index = device.dlpack[1]
        foreign_streams = {LIBRARIES[library].current(index): library for library in self.libraries}
        return LaunchArguments(uses=self.uses, foreign=self.foreign, foreign_streams=foreign_streams)

    def release(self) -> None:
        """Release everything that the graph kept alive. The nodes can still be described."""
        for node in self.nodes:
            node.release_arrays()
        self.records = []
        self.scalars = {}
        self.buffers = []
        self.uses = {}
        self.foreign = []
        self.modules = []
        self.pools = ()
        self.shared_pool = None


def _release_tensors(capture: Capture, shared_pool: SharedPool) -> bool:
    """Release tensors that were allocated from a shared pool; return True if there were some.

    The pool keeps the memory, and other captures may use it once the program has dropped the tensor.
    """
    ranges = shared_pool.ranges() if capture.foreign else []
    inside = {
        key: each
        for key, each in capture.foreign.items()
        if any(each.start in addresses for addresses in ranges)
    }
    for key in inside:
        del capture.foreign[key]
    starts = {each.start for each in inside.values()}
    capture.records = [
        record if isinstance(record, Node) else _without_owners(record, starts)
        for record in capture.records
    ]
    return bool(inside)


def _without_owners(record: RecordedLaunch, starts: set[int]) -> RecordedLaunch:
    """Return a launch that no longer keeps the tensors at these addresses alive."""
    launch, data, args, site, tensors = record
    kept = tuple(each._replace(owner=None) if each.start in starts else each for each in tensors)
    return (launch, data, args, site, kept)


def _scalars_by_name(arrays: Iterable[Array]) -> dict[str, Scalar]:
    scalars: dict[str, Scalar] = {}
    for array in arrays:
        if not isinstance(array, Scalar) or array.name is None:
            continue
        if scalars.setdefault(array.name, array).buffer is not array.buffer:
            raise CaptureError(
                f"two scalars of this graph are called {array.name!r}",
                hint="give each its own name: graph.replay() sets scalars by name",
            )
    return scalars
