"""Launches: arguments are checked and packed, operands are ordered, and the kernel is submitted.

`Launch.run` handles any arguments. The native core does the same for the arguments that most launches
have: see `preheat.devices.native_launch`. Work that another library submits for preheat, such as a
product by cuBLAS, is also an `Operation`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from preheat.devices import base
from preheat.devices.active_capture import ActiveCapture
from preheat.devices.arguments import (
    ArgumentMismatch,
    ParamBuffer,
    ParamSpec,
    Signature,
    new_param_buffer,
)
from preheat.devices.array import Array, Scalar
from preheat.devices.base import ON_HOST
from preheat.devices.context import Context
from preheat.devices.operands import Operand, Pointer, Strided, TensorKind, tensor_kind
from preheat.devices.stream import record_event
from preheat.devices.uses import Uses, add_use
from preheat.errors import (
    DeviceError,
    InputError,
    LaunchError,
    PreheatError,
    StaleBufferError,
    short_repr,
)
from preheat.model.artifact import Artifact
from preheat.model.dtypes import DType
from preheat.model.tracebacks import shorten_traceback

UNORDERED = -1  # In DLPack: do not order the work of the producer. Captures use it.
MANY_STREAMS = 64  # streams for which one launch, or one graph, stays prepared
_CONTIGUOUS = "make a copy that is; or preheat.strided(x), for a kernel that takes strides"
_READ_ONLY = "declare the parameter const, or pass a copy"
_ASTYPE = ("cupy", "jax", "jaxlib", "numpy")  # libraries whose arrays have this method

__all__ = [
    "MANY_STREAMS",
    "UNORDERED",
    "Bound",
    "Launch",
    "LaunchArguments",
    "LoadedModule",
    "Operation",
    "in_order",
    "register_operands",
]


@dataclass(slots=True)
class LaunchArguments:
    """The converted arguments of one operation: values to pack, and the memory that they refer to."""

    values: list[Any] = field(default_factory=list)
    uses: dict[Uses, bool] = field(default_factory=dict)  # of our memory; True for a write
    foreign: list[Operand] = field(default_factory=list)
    foreign_streams: dict[int, str] = field(default_factory=dict)  # their libraries, by handle
    keep_alive: list[object] = field(default_factory=list)  # owners of memory without other owners
    arrays: dict[int, Array] = field(default_factory=dict)  # ours, by argument position
    libraries: set[str] = field(default_factory=set)  # foreign ones with their own streams

    def use(self, array: Array, *, write: bool) -> None:
        """Add a read or a write of one of our arrays."""
        add_use(self.uses, array.buffer.uses, write=write)

    def order_with(self, kind: TensorKind, operand: Operand, device: base.Device) -> bool:
        """Order the work with the streams that use a foreign tensor.

        Return True if the library of the tensor has a current stream on `device`, which is one of them.
        """
        source = kind.source
        has_stream = source is not None and source.device_type == device.dlpack[0]
        if source is not None and has_stream:
            self.libraries.add(source.name)
            self.foreign_streams[source.current(device.dlpack[1])] = source.name
        if operand.ready is not None:
            self.foreign_streams[operand.ready] = kind.library
        return has_stream


class LoadedModule(Protocol):
    """The module of a kernel, which must stay loaded while the kernel can be launched."""

    artifact: Artifact


class Operation(ABC):
    """Work with arguments that a signature describes.

    The work goes to the stream that the caller named, else to the current stream of the library whose
    tensors are among the arguments (torch, CuPy), else to the device's own stream. `RECREATE` is the
    hint for an operation whose context is lost.
    """

    RECREATE: ClassVar[str]

    def __init__(
        self,
        context: Context,
        signature: Signature,
        stream: base.Stream | None,
        *,
        blocking: bool = False,
    ) -> None:
        self.context = context
        self.signature = signature
        self.stream = stream
        self.blocking = blocking

    def run(self, *args: Any, **named: Any) -> None:
        """Check the arguments, raising `LaunchError`; then order the work and submit it.

        In a thread that captures, the work becomes part of the capture. The replay orders it with the
        work that produces its operands outside the graph.
        """
        if named:
            self.signature.refuse_names(named)
        self.context.require_alive(self.RECREATE)
        capture = self.context.active_capture(self.stream)
        if capture is not None:
            with capture.operation():
                self._run_in(capture, self.convert(args, UNORDERED))
            return
        stream = self.choose_stream(args)
        capturing = self.context.order.is_capturing(stream)
        arguments = self.convert(args, UNORDERED if capturing else stream.handle)
        with in_order(self.context, arguments, stream, capturing=capturing):
            self._submit(arguments, stream)
        if self.blocking and not capturing:
            self._wait(stream)

    def _run_in(self, capture: ActiveCapture, arguments: LaunchArguments) -> None:
        """Add the work to a capture, in order with the work of other streams in it."""
        stream = capture.streams.stream_for(self.stream, arguments.foreign_streams)
        with capture.streams.ordered(stream, arguments.uses, arguments.foreign_streams):
            self._capture(arguments, capture, stream)

    @abstractmethod
    def _submit(self, arguments: LaunchArguments, stream: base.Stream) -> object:
        """Submit the work to the device."""

    @abstractmethod
    def _capture(self, arguments: LaunchArguments, capture: ActiveCapture, stream: base.Stream) -> None:
        """Add the work to a capture, in its `stream`, with the memory that it uses."""

    # Arguments

    def convert(self, args: tuple[Any, ...], stream: int) -> LaunchArguments:
        """Check and convert every argument for work in the stream with this handle."""
        self.signature.check_count(args)
        arguments = LaunchArguments()
        for position, (param, given) in enumerate(zip(self.signature.params, args, strict=True)):
            try:
                arguments.values.append(self._value(param, given, stream, arguments))
                array = given.array if isinstance(given, Strided) else given
                if isinstance(array, Array):
                    arguments.use(array, write=param.writes)
                    arguments.arrays[position] = array
            except (ArgumentMismatch, InputError) as mismatch:
                raise self._refusal(mismatch, position) from None
        return arguments

    def _value(self, param: ParamSpec, given: Any, stream: int, arguments: LaunchArguments) -> Any:
        tensor = given
        if isinstance(given, Strided):
            tensor = given.array
            param = replace(param, dtypes=None) if given.any_dtype else param
        if param.pointer and isinstance(tensor, Array):
            return self._address_of_own(param, tensor)
        if param.pointer and (kind := tensor_kind(tensor)) is not None:
            operand = kind.read(tensor, stream)
            name = type(tensor).__name__
            self._require_here(operand, name)
            if not operand.contiguous and tensor is given:
                raise ArgumentMismatch(f"{name} is not contiguous", _CONTIGUOUS)
            return self._address_of_foreign(param, kind, operand, name, arguments)
        if param.pointer and isinstance(given, Pointer):
            return param.address(given.address)
        if param.pointer and given is None:
            return 0
        if param.value is not None:
            return param.number(given)
        if param.pointer:
            hint = "pass an array, such as gpu.array(…); for a bare address, preheat.Pointer(address)"
            why = f"{param.title} cannot take {type(given).__name__} {short_repr(given)}"
            raise ArgumentMismatch(why, hint)
        return param.struct_bytes(given)

    def _address_of_own(self, param: ParamSpec, array: Array) -> int:
        buffer = array.buffer
        if buffer.lost is not None:
            raise _FreedMemory(f"{array!r}: {buffer.lost}", array.remedy)
        if buffer.context is not self.context:
            raise ArgumentMismatch(
                f"{array!r} is not on the device of the kernel, {self.context.device.name}"
            )
        if param.dtypes is not None and array.dtype not in param.dtypes:
            wanted = param.dtypes[0].name
            if isinstance(array, Scalar):
                hint = f"make the scalar with gpu.scalar({wanted!r})"
                raise ArgumentMismatch(f"{param.title} cannot take a scalar of {array.dtype}", hint)
            hint = f"convert it: x = gpu.array(x.numpy(), {wanted!r})"
            raise ArgumentMismatch(f"{param.title} cannot take an array of {array.dtype}", hint)
        return array.address

    def _require_here(self, operand: Operand, name: str) -> None:
        """Raise for memory that kernels on this device cannot use."""
        here = self.context.device
        if not operand.is_usable_on(here):
            why = f"{name} is in {operand.place}, the kernel is on {here.name}"
            raise ArgumentMismatch(why, operand.remedy(here))

    def _address_of_foreign(
        self, param: ParamSpec, kind: TensorKind, operand: Operand, name: str, args: LaunchArguments
    ) -> int:
        if param.dtypes is not None and operand.dtype not in (None, *param.dtypes):
            article = "an" if name == "ndarray" else "a"
            why = f"{param.title} cannot take {article} {name} of {operand.dtype}"
            raise ArgumentMismatch(why, _conversion(kind.library, param.dtypes[0]))
        if not operand.writable and param.writes and param.parameter.type is not None:
            raise ArgumentMismatch(f"{name} is read-only, and {param.title} may be written", _READ_ONLY)
        in_library_order = args.order_with(kind, operand, self.context.device)
        args.foreign.append(operand)
        if self.stream is not None or not in_library_order:
            args.keep_alive.append(operand.owner)
        return operand.address

    def _refusal(self, mismatch: ArgumentMismatch | InputError, position: int) -> LaunchError:
        kind = StaleBufferError if isinstance(mismatch, _FreedMemory) else LaunchError
        hint = self.signature.hint(position, mismatch.hint)
        return kind(self.signature.kernel, str(mismatch), argument=position, hint=hint)

    # Streams

    def choose_stream(self, args: tuple[Any, ...]) -> base.Stream:
        """Return the stream that the work goes to."""
        if self.stream is not None:
            return self.stream
        place, index = self.context.device.dlpack
        for given in args:
            kind = tensor_kind(given.array if isinstance(given, Strided) else given)
            if kind is not None and kind.source is not None and kind.source.device_type == place:
                return self.context.order.adopt(kind.source.current(index))
        return self.context.stream

    def _wait(self, stream: base.Stream) -> None:
        try:
            stream.synchronize()
        except DeviceError as error:
            error.args = (f"{self.signature.kernel}: {error}",)
            if self.context.lost is not None:
                self.context.lost.args = (
                    f"{self.context.device.name} is lost after an error: {error}",
                )
            raise


class Launch(Operation):
    """A kernel with a geometry."""

    RECREATE = "ask for the kernel again: gpu.kernel(…)"

    def __init__(
        self,
        context: Context,
        function: base.Function,
        signature: Signature,
        geometry: base.Geometry,
        stream: base.Stream | None,
        *,
        module: LoadedModule,
        blocking: bool = False,
    ) -> None:
        super().__init__(context, signature, stream, blocking=blocking)
        self.function = function
        self.geometry = geometry
        self.module = module
        self.submits: dict[int, base.Submit] = {}  # by the handle of the stream
        self.buffers: list[ParamBuffer] = []  # unused; each launch takes one

    def __call__(self, *args: Any, **named: Any) -> None:
        """Launch, as users call it."""
        try:
            self.run(*args, **named)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def __repr__(self) -> str:
        return f"<launch of {self.signature.kernel}>"

    def _submit(self, arguments: LaunchArguments, stream: base.Stream) -> None:
        self._submit_packed(self._pack(arguments), arguments, stream)

    def _capture(self, arguments: LaunchArguments, capture: ActiveCapture, stream: base.Stream) -> None:
        buffer = self._pack(arguments)
        data = bytes(buffer.data[: self.signature.layout.size])
        # Before the launch, because the record keeps the memory of the node.
        capture.add_launch(self, data, arguments)
        self._submit_packed(buffer, arguments, stream)

    def _pack(self, arguments: LaunchArguments) -> ParamBuffer:
        """Return a buffer with the parameters."""
        try:
            buffer = self.buffers.pop()
        except IndexError:
            buffer = new_param_buffer(self.signature)
        buffer.pack(*arguments.values)
        return buffer

    def _submit_packed(
        self, buffer: ParamBuffer, arguments: LaunchArguments, stream: base.Stream
    ) -> None:
        """Submit the launch to the device, and keep the buffer for the next one."""
        with register_operands(self.context, arguments):
            status = self.prepare(stream)(buffer.pointers, 0)
        self.buffers.append(buffer)
        if status[0]:
            self.raise_for_status(status)

    def raise_in_capture(
        self, capture: ActiveCapture, status: tuple[int, ...] | None, error: BaseException | None
    ) -> None:
        """Raise `error`, or the one that `status` means, inside a capture, which remembers it."""
        try:
            with capture.operation():
                if error is not None:
                    raise error
                if status is not None:
                    self.raise_for_status(status)
        finally:  # Break the cycle of error and frame, which would keep memory alive.
            del capture, error

    def raise_for_status(self, status: tuple[int, ...]) -> None:
        """Raise the error that the status of a launch means."""
        try:
            self.context.device.check(status, f"launch of {self.signature.kernel}")
        except PreheatError as error:  # The native core calls this method.
            shorten_traceback(error)
            raise

    def prepare(self, stream: base.Stream) -> base.Submit:
        """Return the device's prepared launch for one stream."""
        submit = self.submits.get(stream.handle)
        if submit is None:
            if len(self.submits) >= MANY_STREAMS:
                self.submits.clear()
            submit = self.submits[stream.handle] = self.function.prepare(self.geometry, stream)
        return submit


class Bound:
    """A launch with fixed arguments, made by `Kernel.bind`. It can be called any number of times.

    It keeps its arguments alive, and raises `StaleBufferError` once memory among them was closed.

    Examples:
        >>> x, y = gpu.array([1, 2], "float32"), gpu.zeros(2)
        >>> bound = gpu.kernel(SAXPY, "saxpy").bind(2.0, x, y, 2, grid=1, block=32)
        >>> bound()
        >>> bound()
        >>> y.numpy()
        array([4., 8.], dtype=float32)
    """

    def __init__(self, launch: Launch, args: tuple[Any, ...], keep: object) -> None:
        launch.context.require_alive(Launch.RECREATE)
        self._stream = launch.choose_stream(args)
        arguments = launch.convert(args, UNORDERED)  # Checked now; each launch is ordered separately.
        self._launch = launch
        self._args = args
        self._context = launch.context
        self._keep = keep  # The stream may belong to another library.
        self._uses = arguments.uses
        self._buffer = new_param_buffer(launch.signature)
        self._buffer.pack(*arguments.values)
        self._pointers = self._buffer.pointers
        self._submit = launch.prepare(self._stream)
        foreign = bool(arguments.foreign) or not launch.context.order.owns(self._stream)
        self._always_checked = launch.blocking or foreign
        self._checked = False  # True while the next launch needs no check

    def __call__(self) -> None:
        """Launch."""
        try:
            if not self._checked or not self._context.unrestricted:
                self._launch_checked()
                return
            status = self._submit(self._pointers, 0)
            if status[0]:
                self._launch.raise_for_status(status)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def _launch_checked(self) -> None:
        """Launch with all checks and in order, and try to make the next launch a fast one."""
        if self._always_checked or not self._context.unrestricted:
            self._launch.run(*self._args)
            return
        arguments = self._launch.convert(self._args, UNORDERED)  # Raises when memory was freed.
        with in_order(self._context, arguments, self._stream):
            status = self._submit(self._pointers, 0)
        if status[0]:
            self._launch.raise_for_status(status)
        self._context.order.add_dependent(self, self._stream, self._uses, self._skip_checks)

    def _skip_checks(self) -> None:
        self._checked = True

    def invalidate(self) -> None:
        """Check the next launch: another stream has used its memory, or the memory was closed."""
        self._checked = False

    def __repr__(self) -> str:
        geometry = self._launch.geometry
        return f"<Bound {self._launch.signature.kernel} grid={geometry.grid} block={geometry.block}>"


def register_operands(context: Context, arguments: LaunchArguments) -> AbstractContextManager[object]:
    """Let a device that works in host memory use the foreign operands during one launch."""
    host = context.device.host_memory
    if host is None or not arguments.foreign:
        return _NOTHING
    with ExitStack() as stack:
        for each in arguments.foreign:
            if each.device[0] == ON_HOST:
                stack.enter_context(host.register(each.start, each.nbytes, each.writable))
        return stack.pop_all()


_NOTHING = nullcontext()


@contextmanager
def in_order(
    context: Context, arguments: LaunchArguments, stream: base.Stream, *, capturing: bool = False
) -> Iterator[None]:
    """Order work in `stream` with every other use of its operands, and keep them until it completes.

    `capturing` says that another library captures the stream. Its graph keeps the operands then.
    """
    context.drain_long_queue()
    with context.order.section(stream, arguments.uses, arguments.foreign_streams, capturing=capturing):
        yield
    on_host = context.device.dlpack[0] == ON_HOST
    if arguments.keep_alive and not on_host and not capturing:
        context.hold_until(record_event(context, stream), arguments.keep_alive)


def _conversion(library: str, wanted: DType) -> str | None:
    """Return the hint for a tensor whose element type is not `wanted`."""
    if library == "torch":
        return f"convert it: x = x.to(torch.{wanted})"
    known = library in _ASTYPE and wanted.host == wanted.name  # NumPy lacks some types.
    return f"convert it: x = x.astype('{wanted}')" if known else None


class _FreedMemory(ArgumentMismatch):
    """The memory was freed, or its context was lost."""
