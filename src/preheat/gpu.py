"""The facade that `preheat.device()` returns: kernels, arrays, streams and graphs of one device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from preheat import graph
from preheat.arch import Arch
from preheat.artifact import check_name
from preheat.build.builder import Builder
from preheat.config import Config, SealMode
from preheat.default import default_builder
from preheat.devices import base, registry
from preheat.dtypes import dtype_of
from preheat.errors import InputError, PreheatError, SealedError, short_repr
from preheat.graph.profile import DEFAULT_OPTIONS, ReplayOptions
from preheat.graph.warmers import Warmers
from preheat.graph_methods import GraphMethods
from preheat.locks import Lock, no_fork
from preheat.runtime.active_capture import RESET
from preheat.runtime.array import Array, Scalar
from preheat.runtime.context import Context
from preheat.runtime.create import copy_of, new_array
from preheat.runtime.host import shape_of
from preheat.runtime.kernel import Kernel, Module
from preheat.runtime.memory import Buffer
from preheat.runtime.request import ModuleRequest, ObjectCode, Source
from preheat.runtime.session import Session
from preheat.runtime.stream import Event, Stream, record_in, wait_in
from preheat.tracebacks import shorten_traceback

if TYPE_CHECKING:
    from preheat.ahead.report import WarmReport
    from preheat.warmup import WarmSource

__all__ = ["Gpu", "device"]


class Gpu(GraphMethods):
    """One device. Every method may be called from any thread.

    `jit` lets a GPU that is newer than the compiler run PTX through its driver. `blocking` waits after
    every launch, so that an error names the kernel that caused it. `reload` compiles a program again
    when one of its files has changed.
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
        """Return the free and the total device memory in bytes."""
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

        `source` is CUDA C++ or PTX text, the path of a `.cu` or `.ptx` file, or a `Program`. `name` may
        be `extern "C"` or not, or a template instance such as `"tk<float>"`; parameter types after it
        choose an overload: `"f(float*)"`. The other arguments are those of `module`. A second call
        returns the same kernel, unless a file was edited: then the new code is compiled and loaded, and
        kernels that are in use keep the old code. The source file is compared at each call, its headers
        at most once a second.

        With `wait=False`, the call returns at once, and the kernel is compiled in the background. Its
        first use waits and loads it, and raises what is wrong with the program. A sealed process, which
        compiles nothing, ignores it.
        """
        if headers is None:  # Headers are a mapping, which cannot be part of a key.
            # This is a `ModuleRequest` unless an argument has another form, which it gets below.
            request = (source, label, options, include, None, names, arch, strict, "")
            try:
                entry = self._session.kernels.get((request, name))
            except TypeError:  # An argument is a list, which cannot be part of a key either.
                entry = None
            if entry is not None and (entry.files is None or not entry.files.changed()):
                return entry.value
        if type(name) is not str:
            check_name("a kernel", name)
        try:
            asked = ModuleRequest.of(source, label, options, include, headers, names, arch, strict)
            if not wait and self.builder.sealed is not SealMode.ERROR:
                with no_fork:
                    from preheat.runtime.pending import pending_kernel  # Takes a millisecond.

                return pending_kernel(self._session, asked, name)
            return self._session.kernel(asked, name)
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
        """Return many kernels, in order: `gpu.kernels([(source, "saxpy"), (other, "scale")])`.

        A request is a source and a name, as for `kernel`. The other arguments are those of `kernel`,
        and hold for all requests; a `Program` as source has its own. Everything is checked and looked
        up first. What no cache has is compiled on all processors, each program once, and programs that
        other processes are compiling come last. When it takes over two seconds, a terminal shows a
        progress bar. If programs are wrong, the first error is raised, with the others in its `others`
        and in a note; the programs that could be compiled are in the cache.
        """
        with no_fork:
            from preheat.runtime import together  # Takes a millisecond.

        try:
            wanted = together.kernel_requests(
                requests, options=options, include=include, headers=headers, names=names, arch=arch,
                strict=strict,
            )  # fmt: skip
            return together.kernels(self._session, wanted)
        except PreheatError as error:
            shorten_traceback(error)
            raise

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
        """Return a whole program, loaded: `module["kernel"]`, `module.symbol("table")`.

        `label`, `options`, `include`, `headers` and `names` are those of `Program`. `arch` compiles for
        another architecture than the device reports (`sm_90a` on an sm_90 device); `strict` accepts
        only code for exactly that one. A file or header that was edited is compiled again; modules and
        kernels that are in use keep the code they have. `source` may also be compiled code, with
        `label` and `strict` alone: the bytes of a cubin, or an `ObjectCode` of cuda.core with a cubin
        or PTX. A cubin is not cached, and a sealed process loads it.
        """
        try:
            request = ModuleRequest.of(source, label, options, include, headers, names, arch, strict)
            return self._session.module(request).value
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def warm(self, *sources: WarmSource, jobs: int | None = None) -> WarmReport:
        """Compile and load programs, resolve their kernels and capture graphs before they are needed.

        A source is a manifest or a bundle, or the path of one. Programs of a manifest that no cache has
        are compiled, `jobs` at once (by default one for each processor). A bundle is mounted, and each
        of its programs is loaded for the architecture that runs best on this device. Graph keys are
        captured through warmers: see `GraphCache.warmer` and `Graphed.warmer`. The call tries
        everything, and then raises `WarmError` with everything that failed. A second call does only
        what is missing.
        """
        from preheat.warmup import warm  # The only import of a higher layer; it takes milliseconds.

        try:
            return warm(self, sources, jobs)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    # Memory

    def array(self, data: object, dtype: object = None, *, stream: object = None) -> Array:
        """Copy `data` to the device: lists, NumPy arrays, or tensors of any library on host or device.

        bfloat16 and float8 accept raw bits (uint16, uint8). bfloat16 also accepts numbers, and rounds.
        """
        return copy_of(self._context, data, dtype, stream)

    def empty(self, shape: object, dtype: object = "float32", *, stream: object = None) -> Array:
        """Return a new array with undefined contents."""
        return new_array(self._context, shape_of(shape), dtype_of(dtype), stream)

    def zeros(self, shape: object, dtype: object = "float32", *, stream: object = None) -> Array:
        """Return a new array of zeros."""
        return self.empty(shape, dtype, stream=stream).fill(0)

    def scalar(self, dtype: object, value: complex = 0, *, name: str | None = None) -> Scalar:
        """Return one value at a fixed device address; graphs set it by its `name`."""
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
        """Return a stream beside the device's own; lower numbers have a higher `priority`."""
        if not isinstance(priority, int):
            raise InputError(f"the priority of a stream is an integer, not {short_repr(priority)}")
        return Stream(self._context, priority)

    def record(self, *, timing: bool = False) -> Event:
        """Return an event after everything submitted to the device's own stream.

        Inside a capture it is a point of the graph, after everything in the captured stream so far.
        """
        return record_in(self._context, None, timing=timing)

    def wait(self, other: object) -> None:
        """Let later work of the device's own stream wait for an event, or for a stream's work so far.

        The caller does not wait. Inside a capture, `gpu.record()` and `gpu.wait(…)` mean the captured
        stream: `side.wait(gpu.record())` forks a branch of the graph, and `gpu.wait(side)` joins it.
        """
        self._context.require_alive()
        wait_in(self._context, None, other)

    def synchronize(self) -> None:
        """Wait for all work on the device, and raise its errors."""
        self._context.synchronize()

    # Lifetime

    def trim(self) -> int:
        """Unload every module that nothing but this device holds, and return how many."""
        return self._session.trim()

    def reset(self) -> None:
        """Reset the device after a fault. All its arrays, kernels and streams become unusable."""
        if not self._context.recovers:
            self._context.require_alive()
        self._context.refuse_in_capture(RESET)
        self._context.mark_reset()
        self._session.clear()
        self._device.reset()
        self._session = self._new_session()

    def close(self) -> None:
        """Close the device. Nothing of it can be used again. A second call does nothing."""
        if self._closed:
            return
        self._context.refuse_in_capture(RESET)
        self._closed = True
        if self._context.lost is None:
            self._context.close()
            self._device.close()
        self._context.mark_closed()
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


_SAME = "close it first, or ask for it with the same settings everywhere"


def device(
    which: str | int | None = None,
    *,
    arch: Arch | str | None = None,
    patience: int | None = None,
    schedule: int | None = None,
    sanitize: bool | None = None,
    jit: bool | None = None,
    blocking: bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Gpu:
    """Return a device, opened at the first call: by default the first GPU.

    `which` is `"cuda"`, `"cuda:1"` or 1, `"emulator"`, `"emulator:1"`, or `"auto"` for a GPU if there
    is one and the emulator otherwise. Without it, `PREHEAT_DEVICE` decides. Other kinds of devices can
    be registered: see `preheat.devices.registry`.

    `arch` is the architecture to emulate, `patience` how long an emulated kernel may run without
    progress, and `schedule` the seed of an emulator whose streams defer their work. With `sanitize`, or
    `PREHEAT_EMULATOR_SANITIZE`, an emulated kernel stops at a value that CUDA leaves undefined.
    Emulators with different settings are different devices with different names: `"emulator:0[sm_100]"`
    has `arch="sm_100"`, and `which` accepts that name.

    `cache_dir` is the directory of the cache, instead of the one that the environment sets.
    """
    for setting, wanted in (("sanitize", sanitize), ("jit", jit), ("blocking", blocking)):
        if not isinstance(wanted, bool | None):
            raise InputError(f"{setting} must be True or False, not {wanted!r}")
    config = Config.from_env()
    given = {"arch": arch, "patience": patience, "schedule": schedule, "sanitize": sanitize}
    settings = {setting: value for setting, value in given.items() if value is not None}
    with _opening:
        description = registry.find(config.device if which is None else which, settings, config)
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
