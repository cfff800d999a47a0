"""The facade that `preheat.device()` returns: kernels, modules, arrays, streams of one device."""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

from preheat import fork
from preheat.arch import Arch, mismatch
from preheat.artifact import Artifact, check_name, without_types
from preheat.build.builder import Builder
from preheat.build.reload import Files
from preheat.config import Config, SealMode
from preheat.default import default_builder
from preheat.devices import base
from preheat.devices.base import ON_GPU, ON_HOST
from preheat.dtypes import dtype_of
from preheat.errors import (
    DeviceError,
    InputError,
    InvalidCodeError,
    NoGpuError,
    PreheatError,
    SealedError,
    TargetError,
    brief,
    did_you_mean,
)
from preheat.events import Events, JsonLines
from preheat.graph.graph import RESERVED, Graph
from preheat.graph.graphed import Graphed, shown
from preheat.graph.pool import Pool
from preheat.graph.profile import EVERY, OFF, Profile, RowSink, Switches, to_stderr
from preheat.graph.slots import WARM, Graphs, text_of
from preheat.graph.warmers import Warmers
from preheat.locks import Lock
from preheat.program import Program, file_of, header_rows, several
from preheat.runtime.array import Array, Scalar
from preheat.runtime.code import Code
from preheat.runtime.context import Context
from preheat.runtime.fill import FILL, KernelFill
from preheat.runtime.host import host_array, shape_of
from preheat.runtime.kernel import Kernel, Module
from preheat.runtime.launch import Gathered, ordered
from preheat.runtime.memory import Buffer
from preheat.runtime.operands import Kind, kind_of
from preheat.runtime.stream import Event, Stream, raw_stream, record
from preheat.runtime.window import LOAD, RECORD, RESET, UNLOAD
from preheat.singleflight import SingleFlight
from preheat.tracebacks import shorten

if TYPE_CHECKING:
    from preheat.ahead.report import WarmReport
    from preheat.graph.warmup import WarmSource

__all__ = ["Gpu", "device"]

Source = str | Path | Program
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_LISTS = ("options", "include", "names")


class _Entry(NamedTuple, Generic[T]):
    """A module or kernel in the memo, and the files it was made from, where there are any."""

    value: T
    files: Files | None = None

    @property
    def current(self) -> bool:
        """Whether it is still what its files say."""
        return self.files is None or not self.files.changed()


class _Life:
    """What one life of a device has loaded: a load that outlives it ends up in the old one.

    `modules` and `kernels` are kept by what was asked for; all that live are in `loaded`, by artifact.
    """

    def __init__(self, gpu: Gpu, device: base.Device, events: Events) -> None:
        self.context = Context(device, events)
        if device.dlpack[0] == ON_GPU:
            load = partial(_fill_kernel, weakref.ref(gpu))
            self.context.kernel_fill = KernelFill(self.context, load)
        self.modules: dict[object, _Entry[Module]] = {}
        self.kernels: dict[object, _Entry[Kernel]] = {}
        self.loaded: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()
        self.asking: SingleFlight[_Entry[Module]] = SingleFlight(events)  # by what was asked for
        self.loading: SingleFlight[Module] = SingleFlight(events)  # by artifact

    def end(self) -> None:
        """Keep nothing of it: its context has ended."""
        self.kernels.clear()
        self.modules.clear()


def _fill_kernel(gpu: weakref.ref[Gpu]) -> Kernel | None:
    """The kernel for large fills; None where it is not stored and the process is sealed."""
    alive, program = gpu(), Program.of(FILL, label="preheat-fill.cu")
    if alive is None:
        return None
    if alive.builder.sealed is not SealMode.OFF and alive.builder.find(program, alive.arch) is None:
        return None
    return alive.kernel(program, "preheat_fill8")


class Gpu:
    """One device and what lives on it. Safe from any thread.

    `jit` lets a GPU that is newer than the compiler run PTX through its driver; `blocking` waits
    after every launch, so that an error names the kernel that caused it; `reload` builds a program
    again when a file it was made from has changed.
    """

    def __init__(
        self,
        device: base.Device,
        builder: Builder,
        *,
        jit: bool = False,
        blocking: bool = False,
        reload: bool = True,
        switches: Switches = OFF,
    ) -> None:
        self._switches = switches
        self.builder, self.jit, self.blocking, self.reload = builder, jit, blocking, reload
        self._device = device
        self._life = _Life(self, device, builder.events)
        self._warmers = Warmers()
        self._closed = False
        fork.register(self)

    @property
    def _context(self) -> Context:
        return self._life.context

    # What it is

    @property
    def name(self) -> str:
        """`cuda:0`, `emulator:1`."""
        return self._device.name

    @property
    def model(self) -> str:
        """What the device calls itself."""
        return self._device.model

    @property
    def arch(self) -> Arch:
        """The architecture the device reports."""
        return self._device.arch

    @property
    def limits(self) -> base.Limits:
        """What a launch may ask for."""
        return self._device.limits

    def memory(self) -> base.MemoryInfo:
        """Bytes of device memory, free and in all."""
        self._context.require()
        return self._device.memory()

    def __repr__(self) -> str:
        return f"<Gpu {self.name}: {self.model}, {self.arch}>"

    # Kernels

    def kernel(self, source: Source, name: str, **program: Any) -> Kernel:
        """The kernel `name` of `source`, compiled at most once, ever, and loaded once.

        `source` is CUDA C++ or PTX text, the path of a `.cu` or `.ptx` file, or a `Program`. `name` may
        be `extern "C"` or not, or a template instance such as `"tk<float>"`; parameter types behind it
        choose an overload: `"f(float*)"`. Everything else is as for `module`. Asking again gives the
        same kernel, unless a file was edited: then the new code is compiled and loaded, and a kernel
        that is held goes on with the old one. The source file is compared at each call, its headers
        at most once a second.
        """
        check_name("a kernel", name)
        source = _whole_path(source)
        if program:
            program |= {what: several(what, program[what]) for what in _LISTS if what in program}
        key = (source, name, _start(program), *_frozen(program)) if program else (source, name)
        life = self._life
        found = life.kernels.get(key)
        if found is not None:
            if found.current:
                return found.value
            life.kernels.pop(key, None)
        instance = without_types(name)
        if "<" in instance and not isinstance(source, Program):
            program = {**program, "names": (instance, *program.get("names", ()))}
        try:
            module, files = self._module(source, **program)
            made = _Entry(module[name], files)
            kept = life.kernels.setdefault(key, made)
            if not kept.current:  # another thread put it there, before the last edit
                kept = life.kernels[key] = made
            return kept.value
        except SealedError as error:
            raise error.naming(name) from None
        except PreheatError as error:
            shorten(error)
            raise

    def module(
        self,
        source: Source,
        *,
        label: str | None = None,
        options: Sequence[str] | None = (),
        include: Iterable[str | os.PathLike[str]] | None = (),
        headers: Mapping[str, str] | None = None,
        names: Iterable[str] | None = (),
        arch: Arch | str | None = None,
        strict: bool = False,
    ) -> Module:
        """A whole program, loaded: `module["kernel"]`, `module.symbol("table")`.

        `arch` compiles for another architecture than the device reports (`sm_90a` on an sm_90 device);
        `strict` takes code made for exactly that one. A file or header that was edited is compiled
        again; modules and kernels that are in use keep the code they have.
        """
        try:
            return self._module(
                source, label=label, options=options, include=include, headers=headers,
                names=names, arch=arch, strict=strict,
            ).value  # fmt: skip
        except PreheatError as error:
            shorten(error)
            raise

    def _module(
        self,
        source: Source,
        *,
        label: str | None = None,
        options: Sequence[str] | None = (),
        include: Iterable[str | os.PathLike[str]] | None = (),
        headers: Mapping[str, str] | None = None,
        names: Iterable[str] | None = (),
        arch: Arch | str | None = None,
        strict: bool = False,
    ) -> _Entry[Module]:
        """The module of a program and the files it was made from."""
        options, include, names = map(several, _LISTS, (options, include, names))
        frozen = header_rows(headers)
        source, target = _whole_path(source), None if arch is None else Arch.parse(arch)
        start = _start({"options": options, "include": include})
        key = (source, label, options, include, start, frozen, names, target, strict)
        life = self._life
        found = life.modules.get(key)
        if found is not None and found.current:
            return found
        life.context.require()
        more = {"label": label, "options": options, "include": include, "names": names}
        read = partial(Program.read, source, headers=headers, **more)
        if life.context.captures():
            files, program = self._files(source), read()
            ready = self._ready(life, program, target, strict=strict)
            if ready is not None:
                return self._remember(life, key, ready, program, files)
        life.context.forbid(LOAD)

        def load() -> _Entry[Module]:
            kept = life.modules.get(key)
            if kept is not None and kept.current:  # the thread before us made it
                return kept
            files, program = self._files(source), read()
            code = self._code(program, target, strict=strict)
            return self._remember(life, key, self._loaded(life, code), program, files)

        kept = life.asking.run(key, load, title=f"load on {self.name}")
        if kept.current:
            return kept
        # A file was edited while another thread was building it.
        return life.asking.run(key, load, title=f"load on {self.name}")

    def _files(self, source: Source) -> Files | None:
        """What decides whether the program of `source` has to be built again; None for nothing."""
        if not self.reload or self.builder.sealed is SealMode.ERROR:
            return None
        return Files(self.builder, file_of(source))

    def _remember(
        self, life: _Life, key: object, module: Module, program: Program, files: Files | None
    ) -> _Entry[Module]:
        """Put a module into the memo, until a file changes that it was made from."""
        if files is not None:
            files = files.track(program, module.artifact)
        kept = life.modules[key] = _Entry(module, files)
        return kept

    def _ready(
        self, life: _Life, program: Program, target: Arch | None, *, strict: bool
    ) -> Module | None:
        """The module of a program that nobody has asked for yet, where a warm-up has loaded it."""
        exact = strict or target is not None
        artifact = self.builder.find(program, target or self.arch, exact=exact)
        found = None if artifact is None else life.loaded.get(artifact.digest)
        return None if found is None or found.artifact != artifact else found

    def _code(self, program: Program, target: Arch | None, *, strict: bool = False) -> Code:
        ladder, target = target is None, target or self.arch
        artifact, jit = self._artifact(program, target, strict=strict, ladder=ladder)
        return Code(artifact, program, jit)

    def _loaded(self, life: _Life, code: Code) -> Module:
        """The module of an artifact: one for all that ask for equal ones, by whatever program."""
        artifact = code.artifact

        def load() -> Module:
            found = life.loaded.get(artifact.digest)
            # Older bundles hold code under a digest that does not tell it apart: that of a program that
            # reads the clock, say.
            if found is None or found.artifact != artifact:
                found = life.loaded[artifact.digest] = self._load(life.context, code)
            return found

        return life.loading.run(artifact, load, title=f"load on {self.name}")

    def _kept(self, life: _Life, code: Code) -> Module:
        """The same, in the device's memo, although no program has asked for it."""
        module = self._loaded(life, code)
        life.modules[code.artifact.digest] = _Entry(module)
        return module

    def _load(self, context: Context, code: Code) -> Module:
        started, (artifact, program, jit) = time.perf_counter(), code
        try:
            raw = self._device.load(artifact, jit=jit, lines=self._lines(code))
        except InvalidCodeError as error:
            if jit or program is None:
                raise
            artifact = self.builder.rebuild(program, artifact.arch, reason=str(error))
            raw = self._device.load(artifact, lines=self._lines(Code(artifact, program)))
        seconds = time.perf_counter() - started
        self.builder.events.emit(
            "load", device=self.name, program=artifact.label, key=artifact.digest, seconds=seconds
        )
        return Module(context, artifact, raw, blocking=self.blocking)

    def _lines(self, code: Code) -> base.FindLines:
        """How a device finds the source lines of what it loads."""
        return partial(self.builder.lines, code.program, code.artifact)

    def _artifact(
        self, program: Program, target: Arch, *, strict: bool, ladder: bool
    ) -> tuple[Artifact, bool]:
        """Code for this device, and whether its driver has to compile it."""
        if strict and program.language == "ptx":
            from preheat.toolchain import lint

            target = Arch.parse(lint.check(program.source, program.label).target[0])
        why = mismatch(target, self.arch, strict=strict)
        if why is not None:
            raise TargetError(program.label, str(target), f"{self.name} ({self.arch})", why)
        found = self.builder.find(program, target, exact=strict or not ladder)
        if found is not None:
            return found, False
        self.builder.require_open(program, target)
        newest = self.builder.toolchain.newest(target)
        if newest == target or program.language == "ptx":
            return self.builder.build(program, target), False
        if newest is None or not self.jit:
            known = self.builder.toolchain.version(program.language)
            raise DeviceError(
                f"{self.name} is {target}, which {known} cannot compile for",
                hint="update the compiler: pip install -U 'preheat[cu13]'; or let the driver compile "
                "PTX at every start: PREHEAT_JIT=1",
            )
        return self.builder.build(program, newest), True

    def warm(self, *sources: WarmSource, jobs: int | None = None) -> WarmReport:
        """Have everything ready: code compiled and loaded, kernels resolved, graphs captured.

        A source is a manifest or a bundle, or the path of one. Of a manifest, what is not stored is
        compiled, `jobs` at once (one a processor); a bundle is mounted, and each program loaded for the
        architecture that runs best here. Graph keys are captured through warmers: see `Graphs.warmer`
        and `Graphed.warmer`. It tries everything, then raises `WarmError` with all that failed. Again
        is quick: it does what is missing.
        """
        from preheat.graph.warmup import WarmUp  # costs milliseconds that others need not spend

        life = self._life
        life.context.require()
        life.context.forbid(LOAD)
        life.context.forbid(WARM)
        up = WarmUp(
            self.builder, life.context, self._warmers, life.loaded,
            code=self._code, load=partial(self._kept, life),
        )  # fmt: skip
        try:
            return up.run(sources, jobs)
        except PreheatError as error:
            shorten(error)
            raise

    # Memory

    def array(self, data: object, dtype: object = None, *, stream: object = None) -> Array:
        """A copy of `data` on the device: lists, NumPy, or tensors of any library, on host or device.

        bfloat16 and float8 take their raw bits (uint16, uint8); bfloat16 also numbers, rounded.
        """
        kind = kind_of(data)
        if isinstance(data, Array) or (kind is not None and _on_device(data)):
            return self._copied(data, kind, dtype, stream)
        wanted = None if dtype is None else dtype_of(dtype)
        host = host_array(_plain(data), wanted)
        made = self._new(host.shape, wanted or dtype_of(host.dtype), stream)
        return made.write(host)

    def _copied(self, data: Any, kind: Kind | None, dtype: object, stream: object) -> Array:
        """A copy of memory that is on a device already; the two sides must agree in place and type."""
        if isinstance(data, Array):
            data.require("array()")
        home = self._home(stream)
        found = None if kind is None else kind.read(data, home.handle)
        held, place = (data.dtype, data._device.dlpack) if found is None else found[2:4]
        if held is None or (dtype is not None and dtype_of(dtype) is not held):
            hint = "convert it where it is, or on the host: gpu.array(a.numpy(), dtype)"
            what = f"{type(data).__name__} of {data.dtype}"
            raise InputError(f"{what} cannot be copied as {dtype}", hint=hint)
        if place != self._device.dlpack or (found is None and data.buffer.context is not self._context):
            what = repr(data) if found is None else type(data).__name__
            raise InputError(f"{what} is on another device than {self.name}")
        if found is not None and not found.contiguous:
            raise InputError(f"{type(data).__name__} of shape {tuple(data.shape)} is not contiguous")
        made = self._new(tuple(data.shape), held, stream)
        if found is None or kind is None:
            return made.copy_from(data)
        gathered = Gathered(uses={made.uses: True}, held=[found.owner])
        if kind.source is not None and kind.source.place == place[0]:
            gathered.others[kind.source.current(place[1])] = kind.library
        if found.ready is not None:
            gathered.others[found.ready] = kind.library
        with ordered(self._context, gathered, home):
            self._device.copy(made.address, found.address, made.nbytes, home)
        return made

    def empty(self, shape: object, dtype: object = "float32", *, stream: object = None) -> Array:
        """A new array, holding nothing in particular."""
        return self._new(shape_of(shape), dtype_of(dtype), stream)

    def zeros(self, shape: object, dtype: object = "float32", *, stream: object = None) -> Array:
        """A new array of zeros."""
        return self.empty(shape, dtype, stream=stream).fill(0)

    def scalar(self, dtype: object, value: complex = 0, *, name: str | None = None) -> Scalar:
        """One value on the device, at an address that never changes; a graph sets it by `name`."""
        if name is not None and not isinstance(name, str):
            raise InputError(f"the name of a scalar is text, not {brief(name)}")
        if name in RESERVED:
            raise InputError(
                f"a scalar cannot be called {name!r}: graph.replay({name}=…) means something else"
            )
        kind = dtype_of(dtype)
        made = Scalar(Buffer(self._context, kind.size, self._context.stream), kind, name)
        made.set(value)
        return made

    def _new(self, shape: tuple[int, ...], dtype: Any, stream: object) -> Array:
        home, allocator = self._home(stream), self._context.allocator()
        if allocator is not None:
            return allocator.empty(shape, dtype)
        return Array.new(self._context, shape, dtype, home)

    def _home(self, stream: object) -> base.Stream:
        """The stream of ours that memory belongs to; another library's may be gone before it is."""
        self._context.require()
        raw = self._context.stream if stream is None else raw_stream(self._context, stream)
        return raw if self._context.order.owns(raw) else self._context.stream

    # Streams

    def stream(self, *, priority: int = 0) -> Stream:
        """A stream beside the device's own; lower `priority` numbers go first."""
        if not isinstance(priority, int):
            raise InputError(f"the priority of a stream is an integer, not {brief(priority)}")
        return Stream(self._context, priority)

    def record(self, *, timing: bool = False) -> Event:
        """An event after everything submitted to the device's own stream."""
        self._context.require()
        self._context.forbid(RECORD)
        return record(self._context, self._context.stream, timing=timing)

    def synchronize(self) -> None:
        """Wait for all work on the device; an error of that work comes out here."""
        self._context.synchronize()

    # Graphs

    def capture(
        self,
        *,
        stream: object = None,
        mode: str = "thread_local",
        name: str | None = None,
        pool: Pool | None = None,
        free_on_launch: bool = False,
    ) -> Graph:
        """A graph to capture into: `with gpu.capture() as graph: …`, then `graph.replay()`.

        Work of this thread becomes part of it, also that of torch and CuPy, which are sent to a stream
        of the capture's own meanwhile. `stream` is where replays go unless they say otherwise. `mode`
        says which calls are refused beside: those of this thread ("thread_local"), of all threads
        ("global"), or only what concerns the capture itself ("relaxed"). `name` is what errors call it.
        New arrays of the body come from `pool`; a sealed one is refused when the capture begins. With
        `free_on_launch` each replay first frees the memory that other libraries allocated in the graph
        and did not free there; without it such a graph is replayed again only after they freed it.
        """
        return Graph(
            self._context, stream=stream, mode=mode, name=name, pool=self._own_pool(pool),
            free_on_launch=free_on_launch, switches=self._switches,
        )  # fmt: skip

    def _own_pool(self, pool: Pool | None) -> Pool | None:
        """A pool as given; an `InputError` where captures of this device cannot allocate from it."""
        if pool is not None and not isinstance(pool, Pool):
            raise InputError(f"pool={pool!r} is not a pool of memory", hint="pool=gpu.pool()")
        if pool is not None and pool._context is not self._context:
            raise InputError(
                f"{pool!r} is of another device than {self.name}, or from before its reset",
                hint="make one on this device: gpu.pool()",
            )
        return pool

    def pool(self, size: int | None = None) -> Pool:
        """Memory for captures: `size` bytes now, or later what `pool.measure(body)` finds needed."""
        return Pool(self._context, size)

    def graphs(self, capacity: int = 64, *, name: str | None = None, checked: bool = False) -> Graphs:
        """Slots for graphs by key: `graphs.run(key, body)`; the least recently used one goes first.

        Under a `name`, keys are recorded and can be warmed: see `Graphs.warmer`. `checked` captures
        every call anew to find what was baked for another one: slow, for tests.
        """
        return self._graphs(capacity, name=name, checked=checked, shown=text_of)

    def _graphs(self, capacity: int, **more: Any) -> Graphs:
        return Graphs(lambda: self._context, self.capture, capacity, warmers=self._warmers, **more)

    @overload
    def graphed(self, function: Callable[P, R], /) -> Graphed[P, R]: ...
    @overload
    def graphed(
        self,
        function: None = None,
        /,
        *,
        key: Callable[..., Hashable] | None = None,
        capacity: int = 64,
        name: str | None = None,
        copy: bool = False,
        copy_inputs: bool = False,
        checked: bool = False,
    ) -> Callable[[Callable[P, R]], Graphed[P, R]]: ...
    def graphed(
        self,
        function: Any = None,
        /,
        *,
        key: Callable[..., Hashable] | None = None,
        capacity: int = 64,
        name: str | None = None,
        copy: bool = False,
        copy_inputs: bool = False,
        checked: bool = False,
    ) -> Any:
        """Let calls of a function be captured the second time and replayed from then on.

            @gpu.graphed(key=lambda batch: batch.shape)
            def step(batch): …

        Calls share a graph when `key` gives the same for their arguments, or without it when all values
        are the same; and always only when their arrays are the same memory, those in tuples, lists,
        dicts and dataclasses included; any other object must be the same one. With `copy_inputs`
        arrays only have to be laid out alike: the graph has arrays of its own, to which each call's are
        copied first, so a function that writes into its arguments is refused. `copy` returns copies
        instead of the graph's own results, which the next call changes. For a method, the instance
        is the owner of its graphs and no part of the key: replacing an array that it holds is not seen.

        What `key` gives is recorded, and can be warmed, under `name`; a warmer gives it that of the
        function where it has none: see `Graphed.warmer`.
        """
        more: dict[str, Any] = {"key": key, "copy": copy, "copy_inputs": copy_inputs}

        def graphed(function: Callable[P, R]) -> Graphed[P, R]:
            graphs = self._graphs(capacity, name=name, checked=checked, shown=shown)
            return Graphed(function, graphs, **more)

        return graphed if function is None else graphed(function)

    def profile(self, *sinks: str | os.PathLike[str] | RowSink | None, every: int = EVERY) -> None:
        """Sample what replays cost on the host, for graphs captured from now on.

        Each sink gets every row: at the end of a file as JSON lines, as the argument of a callable or,
        for None, on the standard error, which is also where rows go without a sink. A sink that raises
        is reported to the log and gets no more of them. Every graph's first replay is sampled, then
        every `every`th.
        """
        profile = Profile(*map(_row_sink, sinks or (None,)), every=every)
        self._switches = self._switches._replace(profile=profile)

    # Life

    def trim(self) -> int:
        """Unload every module that nobody but this device's memo holds; returns how many went."""
        life = self._life
        life.context.require()
        life.context.forbid(UNLOAD)
        count = len({module for module, _ in life.modules.values()})
        _drop_unused(life.kernels)
        _drop_unused(life.modules)
        life.context.drain(modules=True)
        self._device.trim()
        return count - len({module for module, _ in life.modules.values()})

    def reset(self) -> None:
        """Begin anew after a fault: every array, kernel and stream of this device is gone."""
        if not self._context.recovers:
            self._context.require()
        self._context.forbid(RESET)
        self._context.reset()
        self._life.end()
        self._device.reset()
        self._life = _Life(self, self._device, self.builder.events)

    def close(self) -> None:
        """Give the device back. Nothing of it can be used again; twice is fine."""
        if self._closed:
            return
        self._context.forbid(RESET)
        self._closed = True
        if self._context.lost is None:
            self._context.close()
            self._device.close()
        self._context.closed()
        self._life.end()
        with _opening:
            for key in [key for key, gpu in _open.items() if gpu is self]:
                del _open[key]

    def after_fork(self) -> None:
        """Start without the loads that other threads of the parent were in."""
        self._life.asking = SingleFlight(self.builder.events)
        self._life.loading = SingleFlight(self.builder.events)

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _drop_unused(memo: dict[object, _Entry[T]]) -> None:
    """Remove what nobody but `memo` holds."""
    held = {key: (weakref.ref(value), files) for key, (value, files) in memo.items()}
    memo.clear()
    for key, (value, files) in held.items():
        if (alive := value()) is not None:
            memo[key] = _Entry(alive, files)


def _row_sink(given: Any) -> RowSink:
    """What writes rows of a profile where they are to go."""
    if given is None:
        return to_stderr
    if callable(given):
        sink: RowSink = given
        return sink
    if not isinstance(given, str | os.PathLike):
        hint = 'gpu.profile("replays.jsonl", rows.append)'
        raise InputError(f"{given!r} is neither a file nor a callable that takes rows", hint=hint)
    return partial(JsonLines(Path(given)), "replay")


def _whole_path(source: Source) -> Source:
    """A file by its whole path, so that a later chdir means another file; anything else as it is."""
    if not isinstance(source, str | os.PathLike | Program):
        raise InputError(f"source must be a path, source text or a Program, not {brief(source)}")
    path = file_of(source)
    return source if path is None else Path(os.path.abspath(path))


def _start(program: Mapping[str, Any]) -> str:
    """Where relative include directories start, so that after a chdir they are other directories."""
    fixed = all(os.path.isabs(directory) for directory in program.get("include", ()))
    options = program.get("options", ())
    moved = any(str(option).startswith(("-I", "--include-path")) for option in options)
    return "" if fixed and not moved else os.getcwd()


def _frozen(program: Mapping[str, Any]) -> tuple[object, ...]:
    """Keyword arguments of `module` as something that can be looked up."""
    return tuple(
        (name, header_rows(value) if name == "headers" else value)
        for name, value in sorted(program.items())
    )


def _on_device(tensor: Any) -> bool:
    if hasattr(tensor, "__dlpack_device__"):
        return bool(tensor.__dlpack_device__()[0] != ON_HOST)
    return hasattr(tensor, "__cuda_array_interface__")


def _plain(data: object) -> object:
    """A torch tensor without its gradient, which NumPy refuses to read."""
    return data.detach() if hasattr(data, "detach") else data


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
    """The device to work on: the GPU unless something else is asked for.

    `which` is `"cuda"`, `"cuda:1"` or 1, `"emulator"`, `"emulator:1"`, or `"auto"` for the GPU
    where there is one and the emulator where there is none; `PREHEAT_DEVICE` where it is not given.
    `arch` is the architecture to emulate, `patience` how long an emulated kernel may go on, and
    `schedule` the seed of an emulator whose streams execute their work late. With `sanitize`, or
    `PREHEAT_EMULATOR_SANITIZE`, an emulated kernel stops at a value that CUDA leaves undefined.
    Emulators that differ in these are different devices, and their names tell: `"emulator:0[sm_100]"`
    is one with `arch="sm_100"`, and is taken for `which` as well. `cache_dir` is where the cache of
    its programs is, instead of where the environment says. Asking again gives the same device.
    """
    for setting, wanted in (("sanitize", sanitize), ("jit", jit), ("blocking", blocking)):
        if not isinstance(wanted, bool | None):
            raise InputError(f"{setting} must be True or False, not {wanted!r}")
    config = Config.from_env()
    kind, index, settings = _parsed(config.device if which is None else which)
    given = {"arch": arch, "patience": patience, "schedule": schedule, "sanitize": sanitize}
    settings |= {setting: value for setting, value in given.items() if value is not None}
    with _opening:
        if kind == "auto":
            kind = _whichever()
        if kind == "emulator":
            settings.setdefault("sanitize", config.emulator_sanitize)
        name, make = _offer(kind, index, settings)
        if name not in _open:
            made, builder = make(), default_builder(cache_dir)
            _open[name] = Gpu(
                made,
                builder,
                jit=config.jit if jit is None else jit,
                blocking=config.blocking if blocking is None else blocking,
                reload=config.reload,
                switches=_switches(config, builder.events),
            )
        gpu = _open[name]
    for name, wanted in (("jit", jit), ("blocking", blocking)):
        if wanted is not None and getattr(gpu, name) != wanted:
            raise InputError(f"{gpu.name} is open already, with {name}={not wanted}", hint=_SAME)
    if cache_dir is not None and gpu.builder is not default_builder(cache_dir):
        raise InputError(f"{gpu.name} is open already, with another cache directory", hint=_SAME)
    return gpu


def _switches(config: Config, events: Events) -> Switches:
    """What the environment asks of graphs; a profile goes where events go."""
    write = to_stderr if config.events is None else lambda row: events.emit("replay", **row)
    profile = Profile(write) if config.graph_profile else None
    return Switches(profile, config.graph_upload, config.graph_sync)


def _parsed(which: str | int) -> tuple[str, int, dict[str, Any]]:
    """A device's name as its kind, its number, and the settings in brackets."""
    if isinstance(which, int) and not isinstance(which, bool):
        return "cuda", which, {}
    found = _NAME.fullmatch(str(which).strip())
    if found is None:
        hint = did_you_mean(str(which).partition(":")[0].strip(), ("cuda", "emulator", "auto"))
        raise InputError(
            f"{which!r} is not a device", hint=hint or "use cuda, cuda:1, emulator, emulator:1 or auto"
        )
    settings: dict[str, Any] = {}
    for part in filter(None, (found["settings"] or "").split(",")):
        setting, equals, value = part.partition("=")
        if setting.startswith("sm_"):
            settings["arch"] = setting
        else:
            settings[setting] = int(value) if equals else True
    return found["kind"] or "auto", int(found["number"] or 0), settings


_NAME = re.compile(
    r"(auto|(?P<kind>cuda|emulator)(:(?P<number>\d+))?)"
    r"(\[(?P<settings>((sm_\w+|patience=\d+|schedule=-?\d+|sanitize)(,|(?=\])))*)\])?"
)


def _offer(kind: str, index: int, settings: Mapping[str, Any]) -> tuple[str, Callable[[], base.Device]]:
    """The name of a device, and what makes it."""
    if kind == "emulator":
        from preheat.devices.emulator.device import EmulatorDevice, name_of

        return name_of(index, **settings), partial(EmulatorDevice, index, **settings)
    if settings.get("sanitize"):
        raise InputError(
            "sanitize belongs to the emulator", hint="on a GPU, run the program in compute-sanitizer"
        )
    if set(settings) - {"sanitize"}:
        raise InputError("arch, patience and schedule belong to the emulator: a GPU has its own")
    from preheat.devices.cuda.device import CudaDevice

    return f"cuda:{index}", partial(CudaDevice, index)


def _whichever() -> str:
    from preheat.devices.cuda.device import count

    try:
        return "cuda" if count() else "emulator"
    except NoGpuError:
        return "emulator"
