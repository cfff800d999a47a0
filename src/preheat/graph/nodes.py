"""The nodes of a captured graph: what each does, with which arguments."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from preheat.devices import base
from preheat.devices.active_capture import RecordedLaunch
from preheat.devices.arguments import ParamSpec
from preheat.devices.array import Array, Scalar
from preheat.devices.launch import Launch
from preheat.devices.memory import Buffer
from preheat.devices.operands import Operand
from preheat.model.dtypes import DType
from preheat.process.callsite import CallSite, format_site
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

__all__ = ["Argument", "Node", "Record"]

PackedArguments = tuple[Mapping[int, Array], bytes]  # arrays by position, and the packed parameters


_WHOLE = "array"  # the type of an argument that is filled or copied as a whole


@dataclass(frozen=True, slots=True, repr=False)
class Argument:
    """One argument of a node: its bytes and, for an array of preheat, which memory it is.

    `generation` and `offset` distinguish memory from other memory that had the same address.
    """

    type: str
    value: bytes
    param: ParamSpec | None = None
    text: str | None = None  # a description, where the bytes alone do not say enough
    generation: int | None = None
    offset: int = 0
    nbytes: int = 0  # of an array of preheat
    scalar: str | None = None  # the name under which `Graph.replay` sets it

    @classmethod
    def of(cls, param: ParamSpec, data: bytes, tensors: Mapping[int, str]) -> Argument:
        """Return a parameter from the packed bytes of all; `tensors` has descriptions by address."""
        start = param.parameter.offset
        value = data[start : start + param.parameter.size]
        text = tensors.get(int.from_bytes(value, "little")) if param.pointer else None
        return cls(param.title, value, param, text)

    def same(self, other: Argument) -> bool:
        """Return True if a replay would use the same value or memory."""
        if self.generation is not None or other.generation is not None:
            same = (self.generation, self.offset) == (other.generation, other.offset)
            return same and (self.type != _WHOLE or self.text == other.text)
        return self.value == other.value

    def __str__(self) -> str:
        if self.text is not None:
            return self.text
        if self.param is not None and self.param.value is not None and not self.param.value.any_sign:
            (number,) = struct.unpack(f"<{self.param.value.code}", self.value)
            return repr(bool(number)) if self.param.value.boolean else repr(number)
        if len(self.value) <= 8:
            return self.number
        return f"{len(self.value)} bytes {self.value[:8].hex()}…"

    @property
    def number(self) -> str:
        """The bytes as a hexadecimal number."""
        return f"0x{int.from_bytes(self.value, 'little'):x}"

    def __repr__(self) -> str:
        return f"<Argument {self.type}: {self}>"


class Node:
    """A node of a graph.

    `kind` is `kernel`, `fill` or `copy`. Nodes of other libraries are `foreign`: they have the kind
    that the driver reports, and of them only kind and name are known. `after` has the positions of the
    nodes that this one waits for directly; without side streams, that is the node before. A node
    describes its arguments when they are first read, because a capture should be quick.
    """

    __slots__ = (
        "_arguments", "_packed", "_params", "_place", "_tensors", "after", "digest", "entry", "foreign",
        "geometry", "kind", "name",
    )  # fmt: skip

    after: tuple[int, ...]
    digest: str  # of the program, for a kernel of preheat; with `entry` it identifies the code
    entry: str
    geometry: base.Geometry | None

    def __init__(
        self,
        kind: str,
        name: str,
        where: CallSite | None = None,
        *,
        launch: Launch | None = None,
        packed: PackedArguments = ({}, b""),
        tensors: Sequence[Operand] = (),
        foreign: bool = False,
    ) -> None:
        self.kind = kind
        self.name = name
        self.foreign = foreign
        self.after = ()
        self._place = where
        self._packed = packed
        self._tensors = {each.address: _describe_tensor(each) for each in tensors}
        self._arguments: tuple[Argument, ...] | None = None
        self.digest = ""
        self.entry = ""
        self.geometry = None
        self._params = None
        if launch is not None:
            self.digest = launch.module.artifact.digest
            self.entry = launch.function.name
            self.geometry = launch.geometry
            self._params = launch.signature.params

    @classmethod
    def of_launch(cls, record: RecordedLaunch) -> Node:
        """Return the node of a captured launch."""
        launch, data, args, site, tensors = record
        arrays = {at: array for at, array in enumerate(args) if isinstance(array, Array)}
        name = launch.signature.kernel
        return cls("kernel", name, site, launch=launch, packed=(arrays, data), tensors=tensors)

    @property
    def where(self) -> str:
        """The line of the program that captured the node, as `file:line`."""
        return "" if self._place is None else format_site(self._place)

    @property
    def arrays(self) -> Iterable[Array]:
        """Arrays of preheat that the node uses."""
        return self._packed[0].values()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments, by position."""
        if self._arguments is None:
            self._arguments = tuple(self._describe_arguments())
        return self._arguments

    def _describe_arguments(self) -> Iterator[Argument]:
        arrays, data = self._packed
        if self._params is None:
            yield from map(array_argument, arrays.values())
            if data:  # the value of a fill
                yield _element_argument(arrays[0].dtype, data)
            return
        for at, param in enumerate(self._params):
            if at in arrays:
                yield array_argument(arrays[at], param.title)
            else:
                yield Argument.of(param, data, self._tensors)

    def release_arrays(self) -> None:
        """Keep the description of the arguments and release the arrays."""
        self._arguments = self.arguments
        self._packed = ({}, b"")

    @property
    def grid(self) -> base.Dim3 | None:
        """The grid of a kernel of preheat."""
        return self.geometry and self.geometry.grid

    @property
    def block(self) -> base.Dim3 | None:
        """The block of a kernel of preheat."""
        return self.geometry and self.geometry.block

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a kernel of preheat, in bytes."""
        return self.geometry.shared if self.geometry else 0

    def __str__(self) -> str:
        packed = ", ".join(map(str, self.arguments))
        if self.foreign:
            return f"{self.name or self.kind} (another library's)"
        if self.geometry is None:
            return f"{self.kind}({packed})"
        shared = f", shared={self.shared}" if self.shared else ""
        return f"{self.name}[{_dim(self.geometry.grid)}, {_dim(self.geometry.block)}{shared}]({packed})"

    def __repr__(self) -> str:
        return f"<Node {self}>"


#: What a capture keeps of one piece of work: a node, or a launch that becomes one when it is described.
Record = Node | RecordedLaunch


def _dim(size: base.Dim3) -> str:
    return str(size[0]) if size[1:] == (1, 1) else str(size)


def array_argument(array: Array, type: str = _WHOLE) -> Argument:
    """Return an array as an argument."""
    return Argument(
        type,
        array.address.to_bytes(8, "little"),
        text=f"{array!r}"[1:-1].partition(" on ")[0],
        generation=array.buffer.generation,
        offset=array.address - array.buffer.address,
        nbytes=array.nbytes,
        scalar=array.name if isinstance(array, Scalar) else None,
    )


def _describe_tensor(operand: Operand) -> str:
    """Describe memory of another library, without its address, which differs in every run."""
    size = f"tensor of {operand.nbytes:,} bytes"
    return size if operand.dtype is None else f"{operand.dtype} {size}"


def _element_argument(dtype: DType, data: bytes) -> Argument:
    """Return one element of an array as an argument."""
    value = np.frombuffer(data, dtype.numpy())[0].item()
    return Argument(str(dtype), data, text=repr(value))


def first_user(nodes: Sequence[Node], closed: Sequence[Buffer]) -> str:
    """Describe the first node that uses one of these closed buffers."""
    generations = {buffer.generation for buffer in closed}
    for at, node in enumerate(nodes):
        for position, argument in enumerate(node.arguments):
            if argument.generation in generations:
                kind = f"argument {position} ({argument.type})"
                return f"node {at}, {node.name or node.kind}, {kind}: {argument}"
    return "memory that the graph holds"
