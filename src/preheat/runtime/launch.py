"""Launches: arguments checked and packed, operands ordered, the kernel submitted.

There are two roads to the same `Submit`. `Launch.run` is the whole story, for any arguments. `quick`
writes the same for the case that matters, arrays of ours and plain numbers, as one Python function
made for this kernel: it tests what `run` would test and falls back to `run` for anything else.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from preheat.device import base
from preheat.errors import DeviceError, InputError, LaunchError, StaleBufferError
from preheat.runtime.arguments import Block, Refusal, Signature, Slot, Value
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.memory import Buffer
from preheat.runtime.operands import Operand, Pointer, current_stream, is_tensor, operand
from preheat.runtime.stream import Event

__all__ = ["Gathered", "Launch", "quick"]

_CPU = 1  # DLPack's number for host memory


@dataclass(slots=True)
class Gathered:
    """The arguments of one launch: values to pack, and the memory behind them."""

    values: list[Any] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    foreign: list[Operand] = field(default_factory=list)


class Launch:
    """One kernel with a geometry and, where the caller named one, a stream.

    Without one the launch goes to the stream that the library of its operands (torch, CuPy) is working
    in, else to the device's own.
    """

    def __init__(
        self,
        context: Context,
        function: base.Function,
        signature: Signature,
        geometry: base.Geometry,
        stream: base.Stream | None,
        *,
        keep: object,
        blocking: bool = False,
    ) -> None:
        self.context, self.function, self.signature = context, function, signature
        self.geometry, self.stream, self.blocking = geometry, stream, blocking
        self._keep = keep  # the module, which must not be unloaded while this can run
        self._submits: dict[int, base.Submit] = {}
        self.blocks: list[Block] = []  # free ones: a launch takes one, so threads never share

    def run(self, *args: Any) -> None:
        """Check, order and launch. Raises `LaunchError` before anything happened."""
        self.context.require()
        stream = self.choose(args)
        gathered = self.gather(args, stream)
        self._order(gathered, stream)
        block = self.blocks.pop() if self.blocks else Block(self.signature)
        block.pack(*gathered.values)
        with self._lent(gathered):
            self.submit(self.prepared(stream), block.pointers)
        self.blocks.append(block)
        self._settle(gathered, stream)
        if self.blocking:
            self._wait(stream)

    def submit(self, submit: base.Submit, pointers: int) -> None:
        """Hand the launch to the device; an error names the kernel."""
        try:
            status = submit(pointers)
        except DeviceError as error:
            self.complain(error)
            raise
        if status[0]:
            self.complain(status)

    def complain(self, trouble: DeviceError | tuple[int, ...]) -> None:
        """Raise what a status stands for; remember an error that the context does not survive."""
        doing = f"launch of {self.signature.kernel}"
        try:
            if isinstance(trouble, DeviceError):
                raise trouble
            self.context.device.check(trouble, doing)
        except DeviceError as error:
            self.context.failed(error, f"the {doing}")
            raise

    def prepared(self, stream: base.Stream) -> base.Submit:
        """The device's prepared launch for one stream."""
        found = self._submits.get(stream.handle)
        if found is None:
            found = self._submits[stream.handle] = self.function.prepare(self.geometry, stream)
        return found

    # Arguments

    def gather(self, args: tuple[Any, ...], stream: base.Stream) -> Gathered:
        """Every argument as a value to pack, checked against its parameter."""
        self.signature.check_count(args)
        gathered = Gathered()
        for position, (slot, given) in enumerate(zip(self.signature.slots, args, strict=True)):
            try:
                gathered.values.append(self._value(slot, given, stream, gathered))
            except (Refusal, InputError) as bad:
                raise self._refused(bad, position, given) from None
        return gathered

    def _value(self, slot: Slot, given: Any, stream: base.Stream, gathered: Gathered) -> Any:
        if slot.pointer and isinstance(given, Array):
            return self._own(slot, given, gathered)
        if slot.pointer and is_tensor(given):
            return self._foreign(slot, given, stream, gathered)
        if slot.pointer and isinstance(given, Pointer):
            return given.address
        if slot.pointer and given is None:
            return 0
        if slot.value is not None:
            return slot.number(given)
        if slot.pointer:
            hint = "pass an array; for a bare address, preheat.Pointer(address)"
            raise Refusal(f"{slot.title} cannot take {type(given).__name__} {given!r}"[:200], hint)
        return slot.block(given)

    def _own(self, slot: Slot, array: Array, gathered: Gathered) -> int:
        buffer = array.buffer
        if buffer.context.device.name != self.context.device.name:
            raise Refusal(f"{array!r} is on another device than the kernel, {self.context.device.name}")
        if buffer.lost is not None:
            raise _Gone(buffer.lost)
        if slot.dtypes is not None and array.dtype not in slot.dtypes:
            raise Refusal(f"{slot.title} cannot take an array of {array.dtype}")
        gathered.buffers.append(buffer)
        return array.address

    def _foreign(self, slot: Slot, given: Any, stream: base.Stream, gathered: Gathered) -> int:
        found = operand(given, stream.handle)
        here = self.context.device
        if not found.reaches(here.dlpack):
            on_host = found.device[0] == _CPU
            where = "host memory" if on_host else f"GPU {found.device[1]}"
            hint = "copy it first: gpu.array(…)" if on_host else None
            raise Refusal(f"{type(given).__name__} is in {where}, the kernel is on {here.name}", hint)
        if slot.dtypes is not None and found.dtype is not None and found.dtype not in slot.dtypes:
            raise Refusal(f"{slot.title} cannot take a {type(given).__name__} of {found.dtype}")
        gathered.foreign.append(found)
        return found.address

    def _refused(self, bad: Refusal | InputError, position: int, given: Any) -> LaunchError:
        kind = StaleBufferError if isinstance(bad, _Gone) else LaunchError
        shown = f"{given!r}: {bad}" if isinstance(bad, _Gone) else str(bad)
        return kind(self.signature.kernel, shown, argument=position, hint=bad.hint)

    def _lent(self, gathered: Gathered) -> AbstractContextManager[object]:
        """On a device that shares the host's memory: the operands that are in it, for this launch."""
        lend = ExitStack()
        if self.context.device.dlpack[0] == _CPU:
            for each in gathered.foreign:
                lend.enter_context(self.context.device.lend(each.address, each.nbytes, each.writable))
        return lend

    # Streams

    def choose(self, args: tuple[Any, ...]) -> base.Stream:
        """The stream this launch goes to."""
        if self.stream is not None:
            return self.stream
        index = self.context.device.dlpack[1]
        for given in args:
            if not isinstance(given, Array | int | float) and is_tensor(given):
                handle = current_stream(given, index)
                if handle is not None:
                    return self.context.adopt(handle)
        return self.context.stream

    def _order(self, gathered: Gathered, stream: base.Stream) -> None:
        """Let `stream` wait for whatever made the operands."""
        for buffer in gathered.buffers:
            buffer.before(stream)
        handles = {each.ready for each in gathered.foreign} - {None}
        index = self.context.device.dlpack[1]
        handles |= {current_stream(each.owner, index) for each in gathered.foreign} - {None}
        others = [self.context.adopt(handle) for handle in handles if handle is not None]
        if self._borrowed(stream) and gathered.buffers:
            others.append(self.context.stream)
        for other in others:
            if other is not stream:
                event = other.record()
                stream.wait(event)
                event.close()

    def _settle(self, gathered: Gathered, stream: base.Stream) -> None:
        """Keep operands until `stream` is past this launch, and order our own stream behind it."""
        elsewhere = [buffer for buffer in gathered.buffers if buffer.home is not stream]
        held = [each.owner for each in gathered.foreign] if not self._borrowed(stream) else []
        if not elsewhere and not held:
            return
        event = Event(self.context, stream.record())
        for buffer in elsewhere:
            buffer.after(stream, event)
        if elsewhere and self._borrowed(stream):
            self.context.stream.wait(event.raw)
        if held:
            self.context.hold(event, held)

    def _borrowed(self, stream: base.Stream) -> bool:
        """Whether the launch went to another library's stream without the caller saying so."""
        return self.stream is None and stream is not self.context.stream

    def _wait(self, stream: base.Stream) -> None:
        try:
            stream.synchronize()
        except DeviceError as error:
            self.context.failed(error, f"the run of {self.signature.kernel}")
            error.args = (f"{self.signature.kernel}: {error}",)
            raise


class _Gone(Refusal):
    """The memory was freed, or lost with its context."""


def quick(launch: Launch) -> Callable[..., None]:
    """The launch as one Python function for arrays of ours and plain numbers; else it calls `run`."""
    slots = launch.signature.slots
    if launch.blocking or any(slot.value is None and not slot.pointer for slot in slots):
        return launch.run
    stream = launch.stream or launch.context.stream
    tags = launch.context.tags(stream)
    wanted = [tags[dtype] for slot in slots for dtype in slot.dtypes or ()]
    shape = tuple((slot.pointer, slot.value, len(slot.dtypes or ())) for slot in slots)
    make: Callable[..., Callable[..., None]] = _maker(shape)
    return make(launch, launch.context, launch.blocks, launch.prepared(stream), stream, wanted)


@functools.lru_cache(maxsize=256)
def _maker(shape: tuple[tuple[bool, Value | None, int], ...]) -> Any:
    """What makes the quick function for kernels whose parameters have this shape."""
    tests, packed, tag = ["context.lost is None"], [], 0
    for position, (pointer, value, dtypes) in enumerate(shape):
        given = f"a{position}"
        is_number = f"type({given}) is int"
        if value is not None and value.real:
            is_number = f"type({given}) in reals"
        elif value is not None and value.code == "B":
            is_number = f"type({given}) in flags"
        if not pointer:
            tests.append(is_number)
            packed.append(given)
            continue
        is_array = f"{given}.tag[2] is stream"  # any element type
        if dtypes:
            is_array = " or ".join(f"{given}.tag is t{tag + n}" for n in range(dtypes))
        tag += dtypes
        tests.append(f"({is_number} or {is_array})" if value is not None else f"({is_array})")
        packed.append(f"{given} if {is_number} else {given}.address" if value else f"{given}.address")
    text = _QUICK.format(
        tags="".join(f"t{n}, " for n in range(tag)),
        args="".join(f"a{n}, " for n in range(len(shape))),
        tests=" and ".join(tests),
        packed=", ".join(packed),
    )
    scope: dict[str, Any] = {
        "DeviceError": DeviceError,
        "Unfit": (AttributeError, IndexError, TypeError, ValueError, OverflowError, struct.error),
        "reals": frozenset((int, float)),
        "flags": frozenset((int, bool)),
    }
    exec(text, scope)
    return scope["make"]


_QUICK = """\
def make(launch, context, blocks, submit, stream, tags):
    ({tags}) = tags
    run, complain = launch.run, launch.complain
    def quick(*args):
        try:
            ({args}) = args
            if {tests}:
                block = blocks.pop()
                block.pack({packed})
            else:
                block = None
        except Unfit:
            block = None
        if block is None:
            return run(*args)
        try:
            status = submit(block.pointers)
        except DeviceError as error:
            complain(error)
            raise
        blocks.append(block)
        if status[0]:
            complain(status)
    return quick
"""
