"""The facade that `preheat.device()` returns: kernels, arrays, streams and graphs of one device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from preheat import graph
from preheat.build.builder import Builder
from preheat.build.default import default_builder
from preheat.build.request import ModuleRequest, ObjectCode, Source
from preheat.devices import base, registry
from preheat.devices.active_capture import RESET
from preheat.devices.array import Array, Scalar
from preheat.devices.context import Context
from preheat.devices.create import copy_of, new_array
from preheat.devices.host import shape_of
from preheat.devices.kernel import Kernel
from preheat.devices.memory import Buffer
from preheat.devices.module import Module
from preheat.devices.session import Session
from preheat.devices.stream import Event, Stream, record_in, wait_in
from preheat.errors import InputError, PreheatError, SealedError, short_repr
from preheat.graph.methods import GraphMethods
from preheat.graph.profile import DEFAULT_OPTIONS, ReplayOptions
from preheat.graph.warmers import Warmers
from preheat.model.arch import Arch
from preheat.model.artifact import check_name
from preheat.model.config import Config, SealMode
from preheat.model.dtypes import dtype_of
from preheat.model.tracebacks import short_errors, short_methods, shorten_traceback
from preheat.process.lazy import LazyModule
from preheat.process.locks import Lock

if TYPE_CHECKING:
    from preheat.ahead import warmup
    from preheat.ahead.report import WarmReport
    from preheat.ahead.warmup import WarmSource
    from preheat.devices import batch, pending
else:  # Their imports take milliseconds.
    warmup = LazyModule("preheat.ahead.warmup")  # The only import of a higher layer.
    batch = LazyModule("preheat.devices.batch")
    pending = LazyModule("preheat.devices.pending")

__all__ = ["Gpu", "device"]


@short_methods(without={"kernel"})
class Gpu(GraphMethods):
    """A device that runs kernels: a GPU, or the emulator. Every method is safe from any thread.

    `preheat.device` returns it.

    Attributes:
        jit: True if a GPU that is newer than the compiler runs PTX through its driver.
        blocking: True if every launch waits, so that an error names the kernel that caused it.
        reload: True if a program is compiled again after a change of one of its files.

    Examples:
        >>> gpu = preheat.device("emulator")
        >>> saxpy = gpu.kernel(SAXPY, "saxpy")
        >>> x, y = gpu.array([1.0, 2.0], "float32"), gpu.zeros(2)
        >>> saxpy[1, 32](2.0, x, y, 2)
        >>> y.numpy()
        array([2., 4.], dtype=float32)
    """

    def __init__(
        self,
        device: base.Device,
        builder: Builder,
        *,
        jit: bool = False,
        blocking: bool = False,
        reload: bool = True,
        replay_options: ReplayOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.builder = builder
        self.jit = jit
        self.blocking = blocking
        self.reload = reload
        self._replay_options = replay_options
        self._device = device
        self._session = self._new_session()
        builder._bundles.serve(device)
        self._warmers = Warmers()
        self._closed = False

    def _new_session(self) -> Session:
        return Session(
            self._device, self.builder, jit=self.jit, blocking=self.blocking, reload=self.reload
        )

    @property
    def _context(self) -> Context:
        return self._session.context

    # Properties

    @property
    def name(self) -> str:
        """The name of the device, such as `cuda:0` or `emulator:1`."""
        return self._device.name

    @property
    def model(self) -> str:
        """The model that the device reports, such as `NVIDIA H200`."""
        return self._device.model

    @property
    def arch(self) -> Arch:
        """The architecture that the device reports."""
        return self._device.arch

    @property
    def limits(self) -> base.Limits:
        """The limits of the device for one launch."""
        return self._device.limits

    def memory(self) -> base.MemoryInfo:
        """Return the free and the total device memory in bytes.

        Examples:
            >>> gpu.memory().free <= gpu.memory().total
            True
        """
        self._context.require_alive()
        return self._device.memory()

    def __repr__(self) -> str:
        return f"<Gpu {self.name}: {self.model}, {self.arch}>"

    # Kernels

    def kernel(
        self,
        source: Source,
        name: str,
        *,
        label: str | None = None,
        options: Sequence[str] | None = (),
        include: Iterable[str | os.PathLike[str]] | None = (),
        headers: Mapping[str, str] | None = None,
        names: Iterable[str] | None = (),
        arch: Arch | str | None = None,
        strict: bool = False,
        wait: bool = True,
    ) -> Kernel:
        """Return the kernel `name` of `source`, compiled at most once, ever, and loaded once.

        A second call returns the same kernel, unless a file was edited. In that case the new code is
        compiled and loaded, and kernels that are in use keep the old code. The source file is compared
        at each call, and its headers at most once a second.

        Args:
            source: CUDA C++ or PTX text, the path of a `.cu` or `.ptx` file, or a `Program`.
            name: The name of a kernel, which need not be `extern "C"`, or of a template instance such
                as `"tk<float>"`. Parameter types after the name select an overload: `"f(float*)"`.
            label: The name of the program in messages and keys, such as `"saxpy.cu"`.
            options: Options of the compiler, such as `["-use_fast_math"]`.
            include: Directories with header files.
            headers: Texts of header files by name. They are found before any file.
            names: Name expressions of other template instances to compile, such as `["tk<int>"]`.
            arch: The architecture to compile for, if it is not the one that the device reports:
                `"sm_90a"` on an sm_90 device.
            strict: Accept only code for exactly this architecture.
            wait: With False, return at once and compile in the background. The first use of the kernel
                waits, loads it, and raises the errors of the program. A sealed process, which compiles
                nothing, ignores this argument.

        Raises:
            CompileError: The compiler rejects the program.
            UnknownEntryError: The program has no such kernel.
            SealedError: The program is not stored, and this process is sealed.

        Examples:
            >>> saxpy = gpu.kernel(SAXPY, "saxpy")
            >>> saxpy is gpu.kernel(SAXPY, "saxpy")
            True
            >>> SCALE = "template <class T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }"
            >>> x = gpu.array([1.0, 2.0], "float64")
            >>> gpu.kernel(SCALE, "scale<double>")[1, 2](x, 3.0)
            >>> x.numpy()
            array([3., 6.])
        """
        if headers is None:  # Headers are a mapping, which cannot be part of a key.
            # This tuple equals a `ModuleRequest`, unless an argument has to be converted first (below).
            request = (source, label, options, include, None, names, arch, strict, "")
            try:
                entry = self._session.kernels.get((request, name))
            except TypeError:  # An argument is a list, which cannot be part of a key either.
                entry = None
            if entry is not None and (entry.files is None or not entry.files.changed()):
                return entry.value
        try:
            check_name("a kernel", name)
            wanted = ModuleRequest.of(source, label, options, include, headers, names, arch, strict)
            if not wait and self.builder.sealed is not SealMode.ERROR:
                return pending.pending_kernel(self._session, wanted, name)
            return self._session.kernel(wanted, name)
        except SealedError as error:
            raise error.naming(name) from None
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def kernels(
        self,
        requests: Iterable[tuple[Source, str]],
        *,
        options: Sequence[str] | None = (),
        include: Iterable[str | os.PathLike[str]] | None = (),
        headers: Mapping[str, str] | None = None,
        names: Iterable[str] | None = (),
        arch: Arch | str | None = None,
        strict: bool = False,
    ) -> list[Kernel]:
        """Return many kernels, in order. Those that no cache has are compiled on all processors.

        All requests are checked and looked up first. Each program is compiled once, and programs that
        other processes are compiling come last. If this takes more than two seconds, a terminal shows a
        progress bar.

        Args:
            requests: Pairs of a source and a name, as for `kernel`.
            options: See `kernel`. This argument and the following ones apply to all requests. A
                `Program` as source has its own.
            include: See `kernel`.
            headers: See `kernel`.
            names: See `kernel`.
            arch: See `kernel`.
            strict: See `kernel`.

        Raises:
            PreheatError: The first error. Its attribute `others` and a note have the other errors. The
                programs that could be compiled are in the cache.

        Examples:
            >>> SCALE = 'extern "C" __global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }'
            >>> saxpy, scale = gpu.kernels([(SAXPY, "saxpy"), (SCALE, "scale")])
            >>> scale.name
            'scale'
        """
        wanted = batch.kernel_requests(
            requests, options=options, include=include, headers=headers, names=names, arch=arch,
            strict=strict,
        )  # fmt: skip
        return batch.kernels(self._session, wanted)

    def module(
        self,
        source: Source | bytes | ObjectCode,
        *,
        label: str | None = None,
        options: Sequence[str] | None = (),
        include: Iterable[str | os.PathLike[str]] | None = (),
        headers: Mapping[str, str] | None = None,
        names: Iterable[str] | None = (),
        arch: Arch | str | None = None,
        strict: bool = False,
    ) -> Module:
        """Return a whole program, compiled and loaded.

        A file or header that was edited is compiled again. Modules and kernels that are in use keep the
        code that they have.

        Args:
            source: As for `kernel`, or compiled code: the bytes of a cubin, or an `ObjectCode` of
                cuda.core with a cubin or PTX. Compiled code takes only `label` and `strict`. A cubin
                is not cached. A sealed process can load it.
            label: The name of the program in messages and keys, such as `"saxpy.cu"`.
            options: Options of the compiler, such as `["-use_fast_math"]`.
            include: Directories with header files.
            headers: Texts of header files by name. They are found before any file.
            names: Name expressions of template instances, such as `["tk<float>"]`.
            arch: The architecture to compile for, if it is not the one that the device reports:
                `"sm_90a"` on an sm_90 device.
            strict: Accept only code for exactly this architecture.

        Raises:
            CompileError: The compiler rejects the program.
            SealedError: The program is not stored, and this process is sealed.

        Examples:
            >>> module = gpu.module("__device__ int n = 7; __global__ void next() { n++; }")
            >>> module["next"][1, 1]()
            >>> module.symbol("n", "int32").numpy()
            array([8], dtype=int32)
        """
        request = ModuleRequest.of(source, label, options, include, headers, names, arch, strict)
        return self._session.module(request).value

    def warm(self, *sources: WarmSource, jobs: int | None = None) -> WarmReport:
        """Compile and load programs, resolve their kernels and capture graphs before they are needed.

        A bundle is mounted, and each of its programs is loaded for the architecture that runs best on
        this device. Graph keys are captured through warmers: see `GraphCache.warmer` and
        `Graphed.warmer`. A second call does only what is missing.

        Args:
            sources: Manifests and bundles, or their paths.
            jobs: The number of programs of a manifest that are compiled at the same time. The default
                is the number of processors.

        Raises:
            WarmError: Something failed. The call tries everything first, and the error lists all
                failures.

        Examples:
            >>> report = gpu.warm("kernels.toml")
            >>> report.programs, report.entries
            (1, 1)
        """
        return warmup.warm(self, sources, jobs)

    # Memory

    def array(self, data: object, dtype: object = None, *, stream: object = None) -> Array:
        """Copy `data` to the device.

        Args:
            data: Lists, NumPy arrays, or tensors of any library on the host or a device. For bfloat16
                and float8, raw bits (uint16, uint8). bfloat16 also accepts numbers, and rounds them.
            dtype: The element type. The default is the type of `data`.
            stream: The stream of the copy.

        Raises:
            InputError: `data` has no such elements, or a shape that arrays cannot have.

        Examples:
            >>> gpu.array(np.eye(2, dtype="float32"))
            <Array float32[2, 2] on emulator:0>
            >>> gpu.array([1, 2, 3], "float16").numpy()
            array([1., 2., 3.], dtype=float16)
        """
        return copy_of(self._context, data, dtype, stream)

    def empty(self, shape: object, dtype: object = "float32", *, stream: object = None) -> Array:
        """Return a new array with undefined contents.

        Args:
            shape: A number of elements, or a tuple.
            dtype: The element type.
            stream: The stream in which the memory is allocated.

        Raises:
            OutOfMemoryError: The device does not have enough memory.

        Examples:
            >>> gpu.empty((2, 3), "int32").nbytes
            24
        """
        return new_array(self._context, shape_of(shape), dtype_of(dtype), stream)

    def zeros(self, shape: object, dtype: object = "float32", *, stream: object = None) -> Array:
        """Return a new array of zeros. See `empty` for the arguments.

        Examples:
            >>> gpu.zeros(3).numpy()
            array([0., 0., 0.], dtype=float32)
        """
        return self.empty(shape, dtype, stream=stream).fill(0)

    def scalar(self, dtype: object, value: complex = 0, *, name: str | None = None) -> Scalar:
        """Return one value at a fixed device address, which kernels take as a pointer.

        Args:
            dtype: The type of the value.
            value: The first value.
            name: The name by which `Graph.replay` sets the value.

        Examples:
            >>> step = gpu.scalar("int32", 5, name="step")
            >>> step.set(6)
            >>> step.get()
            6
        """
        if name is not None and not isinstance(name, str):
            raise InputError(f"the name of a scalar is text, not {short_repr(name)}")
        if name is not None and name in graph.RESERVED:
            raise InputError(
                f"a scalar cannot be called {name!r}: graph.replay({name}=…) means something else"
            )
        kind = dtype_of(dtype)
        scalar = Scalar(Buffer(self._context, kind.size, self._context.stream), kind, name)
        scalar.set(value)
        return scalar

    # Streams

    def stream(self, *, priority: int = 0) -> Stream:
        """Return a new stream, which runs concurrently with the stream of the device.

        Args:
            priority: A lower number is a higher priority.

        Examples:
            >>> x, y, saxpy = gpu.zeros(4), gpu.zeros(4), gpu.kernel(SAXPY, "saxpy")
            >>> with gpu.stream() as side:
            ...     saxpy.launch(2.0, x, y, 4, grid=1, block=32, stream=side)
        """
        if not isinstance(priority, int):
            raise InputError(f"the priority of a stream is an integer, not {short_repr(priority)}")
        return Stream(self._context, priority)

    def record(self, *, timing: bool = False) -> Event:
        """Return an event after everything that was submitted to the stream of the device.

        Inside a capture, the event is a point of the graph, after everything in the captured stream so
        far.

        Args:
            timing: Let `Event.elapsed` measure the time from or to this event.

        Examples:
            >>> event = gpu.record()
            >>> event.synchronize()
            >>> event.done()
            True
        """
        return record_in(self._context, None, timing=timing)

    def wait(self, other: object) -> None:
        """Let later work of the stream of the device wait for an event, or for a stream's work so far.

        The caller does not wait. Inside a capture, `gpu.record()` and `gpu.wait(…)` mean the captured
        stream: `side.wait(gpu.record())` forks a branch of the graph, and `gpu.wait(side)` joins it.

        Args:
            other: An `Event` or a `Stream`, or a stream of another library.

        Examples:
            >>> side = gpu.stream()
            >>> gpu.wait(side.record())
        """
        self._context.require_alive()
        wait_in(self._context, None, other)

    def synchronize(self) -> None:
        """Wait for all work on the device, and raise its errors.

        Raises:
            DeviceError: A kernel failed since the last check, or the context is lost.

        Examples:
            >>> gpu.synchronize()
        """
        self._context.synchronize()

    # Lifetime

    def trim(self) -> int:
        """Unload every module that only this device holds, and return the number of unloaded modules.

        Examples:
            >>> kernel = gpu.kernel('extern "C" __global__ void unused() {}', "unused")
            >>> del kernel
            >>> gpu.trim() > 0
            True
        """
        return self._session.trim()

    def reset(self) -> None:
        """Reset the device after a fault. All its arrays, kernels and streams become unusable.

        Raises:
            ContextLostError: A fault has ended the context of a GPU. Only a new process can use it.

        Examples:
            >>> spare = preheat.device("emulator:7")
            >>> x = spare.zeros(4)
            >>> spare.reset()
            >>> x.numpy()
            Traceback (most recent call last):
            preheat.errors.StaleBufferError: ...
        """
        if not self._context.recovers:
            self._context.require_alive()
        self._context.refuse_in_capture(RESET)
        self._context.mark_reset()
        self._session.clear()
        self._device.reset()
        self._session = self._new_session()

    def close(self) -> None:
        """Close the device. Nothing of it can be used again. A second call does nothing.

        Examples:
            >>> spare = preheat.device("emulator:6")
            >>> spare.close()
        """
        if self._closed:
            return
        self._context.refuse_in_capture(RESET)
        self._closed = True
        if self._context.lost is None:
            self._context.close()
            self._device.close()
        self._context.mark_closed()
        self.builder._bundles.leave(self._device)
        self._session.clear()
        with _opening:
            for key in [key for key, gpu in _open.items() if gpu is self]:
                del _open[key]

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Opening a device

_open: dict[str, Gpu] = {}  # by name
_opening = Lock()


def find_open(which: str | int) -> Gpu | None:
    """Return a device if it is open, or None. `which` means the same as for `device`."""
    with _opening:
        return _open.get(registry.find(which, {}, Config.from_env()).name)


def open_devices() -> list[Gpu]:
    """Return the devices that `device` has opened and that were not closed."""
    with _opening:
        return list(_open.values())


_SAME = "close it first, or ask for it with the same settings everywhere"


@short_errors
def device(
    which: str | int | None = None,
    *,
    arch: Arch | str | None = None,
    patience: int | None = None,
    schedule: int | None = None,
    sanitize: bool | None = None,
    host_arrays: bool | None = None,
    jit: bool | None = None,
    blocking: bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Gpu:
    """Open a device, or return it if it is open already. The default is the first GPU.

    Args:
        which: `"cuda"`, `"cuda:1"` or 1, `"emulator"`, `"emulator:1"`, or `"auto"` for what
            `PREHEAT_DEVICE` names, or else a GPU if there is one, or else the emulator. The default is
            the value of `PREHEAT_DEVICE`, or `"cuda"`. `preheat.devices.registry` registers other kinds
            of devices.
        arch: The architecture that an emulator emulates.
        patience: How long an emulated kernel may run without progress.
        schedule: The seed of an emulator whose streams defer their work.
        sanitize: Stop an emulated kernel at a value that CUDA leaves undefined, and at a barrier that
            not all threads of a block reach. The default is `PREHEAT_EMULATOR_SANITIZE`.
        host_arrays: Let emulated kernels use host memory in place: NumPy arrays and tensors on the CPU.
            By default they are refused, because a GPU cannot use them.
        jit: Let a GPU that is newer than the compiler run PTX through its driver.
        blocking: Wait after every launch, so that an error names the kernel that caused it.
        cache_dir: The directory of the cache, instead of the one that the environment sets.

    Returns:
        The device. Two calls with the same arguments return the same object. Emulators with different
            settings are different devices with different names: `"emulator:0[sm_100]"` has
            `arch="sm_100"`, and `which` accepts that name.

    Raises:
        NoGpuError: There is no such GPU, or no driver.
        InputError: No kind of device has this name, or a setting does not fit the device.

    Examples:
        >>> preheat.device("emulator")
        <Gpu emulator:0: PTX emulator, sm_90>
        >>> preheat.device("emulator", arch="sm_100").name
        'emulator:0[sm_100]'
    """
    switches = {"sanitize": sanitize, "host_arrays": host_arrays, "jit": jit, "blocking": blocking}
    for setting, wanted in switches.items():
        if not isinstance(wanted, bool | None):
            raise InputError(f"{setting} must be True or False, not {wanted!r}")
    config = Config.from_env()
    given = {"arch": arch, "patience": patience, "schedule": schedule}
    given |= {"sanitize": sanitize, "host_arrays": host_arrays}
    settings = {setting: value for setting, value in given.items() if value is not None}
    with _opening:
        description = registry.find(which, settings, config)
        if description.name not in _open:
            opened = description.open()
            builder = default_builder(cache_dir)
            _open[description.name] = Gpu(
                opened,
                builder,
                jit=config.jit if jit is None else jit,
                blocking=config.blocking if blocking is None else blocking,
                reload=config.reload,
                replay_options=ReplayOptions.of(config, builder.events),
            )
        gpu = _open[description.name]
    for name, wanted in (("jit", jit), ("blocking", blocking)):
        if wanted is not None and getattr(gpu, name) != wanted:
            raise InputError(f"{gpu.name} is open already, with {name}={not wanted}", hint=_SAME)
    if cache_dir is not None and gpu.builder is not default_builder(cache_dir):
        raise InputError(f"{gpu.name} is open already, with another cache directory", hint=_SAME)
    return gpu
