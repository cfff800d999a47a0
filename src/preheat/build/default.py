"""The default builder, and `preheat.compile`, both configured by the environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.build.builder import Builder
from preheat.errors import PreheatError
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.config import Config
from preheat.model.program import Program
from preheat.model.tracebacks import shorten_traceback
from preheat.process.callsite import call_site
from preheat.process.lazy import LazyModule
from preheat.process.locks import Lock

if TYPE_CHECKING:
    from preheat.build import batch
    from preheat.model import foreign, linked_program
    from preheat.model.foreign import ForeignEntry, ForeignRequest
    from preheat.model.linked_program import BinaryPart
else:  # Most processes only look programs up, one at a time.
    batch = LazyModule("preheat.build.batch")
    foreign = LazyModule("preheat.model.foreign")
    linked_program = LazyModule("preheat.model.linked_program")

__all__ = [
    "compile",
    "compile_all",
    "default_builder",
    "get_entry",
    "link",
    "obtain_entry",
    "put_entry",
]


_opening = Lock()


def default_builder(cache_dir: str | os.PathLike[str] | None = None) -> Builder:
    """Return the builder of the process, which the first call opens from the environment.

    Args:
        cache_dir: The directory of the cache. Each directory has its own builder.

    Examples:
        >>> preheat.default_builder() is preheat.default_builder()
        True
    """
    where = None if cache_dir is None else Config.from_env(cache_dir=cache_dir).cache_dirs[0]
    if where == Config.from_env().cache_dirs[0]:
        where = None
    with _opening:  # `functools.cache` alone would let two threads open one each.
        return _builder(where)


@functools.cache
def _builder(cache_dir: Path | None) -> Builder:
    return Builder.open(Config.from_env(cache_dir=cache_dir))


def compile(
    source: str | os.PathLike[str] | Program,
    arch: Arch | str,
    *,
    label: str | None = None,
    options: Sequence[str] | None = (),
    include: Iterable[str | os.PathLike[str]] | None = (),
    headers: Mapping[str, str] | None = None,
    names: Iterable[str] | None = (),
    cache_dir: str | os.PathLike[str] | None = None,
) -> Artifact:
    """Return machine code for `source`, from the cache or else from the compiler.

    Args:
        source: A path, a one-line string that ends in `.cu` or `.ptx` and names a file, CUDA C++ or PTX
            text, or a `Program`.
        arch: The architecture to compile for, such as `"sm_90"`.
        label: The name of the program in messages and keys, such as `"saxpy.cu"`.
        options: Options of the compiler, such as `["-use_fast_math"]`.
        include: Directories with header files.
        headers: Texts of header files by name. They are found before any file.
        names: Name expressions of template instances, such as `["tk<float>"]`. Plain kernels need none.
        cache_dir: The directory of the cache, instead of the one that the environment sets.

    Raises:
        CompileError: The compiler rejects the program. The error has its log.
        SealedError: The program is not stored, and this process is sealed.

    Examples:
        >>> artifact = preheat.compile(SAXPY, "sm_90", label="saxpy.cu")
        >>> artifact.entries[0].name, len(artifact.cubin) > 0
        ('saxpy', True)
        >>> preheat.compile("saxpy.cu", "sm_90").label
        'saxpy.cu'
    """
    try:
        program = Program.read(
            source, label=label, options=options, include=include, headers=headers, names=names
        )
        return default_builder(cache_dir).build(program, arch)
    except PreheatError as error:
        shorten_traceback(error)
        raise


def link(
    parts: Iterable[str | bytes | os.PathLike[str] | Program | BinaryPart],
    arch: Arch | str,
    *,
    lto: bool = False,
    options: Sequence[str] | None = (),
    label: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Artifact:
    """Return machine code for several parts that are linked, from the cache or else from the linker.

    Parts of CUDA C++ are compiled first, and are cached as well. To launch the kernels of the result,
    use `gpu.kernel(LinkedProgram.of(parts), name)`.

    Args:
        parts: CUDA C++ or PTX texts, paths of sources or of compiled files, bytes of compiled files,
            `Program` and `BinaryPart` objects. A part that needs options of its compiler is a
            `Program`.
        arch: The architecture to link for.
        lto: Let the linker optimise the parts as a whole.
        options: Options of nvJitLink.
        label: The name of the result.
        cache_dir: See `compile`.

    Raises:
        LinkError: Symbols are undefined, or defined twice. The error lists them.
        CompileError: The compiler rejects a part.

    Examples:
        >>> DOUBLE = "__device__ int twice(int n) { return 2 * n; }"
        >>> KERNEL = '__device__ int twice(int); extern "C" __global__ void k(int* x) {*x = twice(7);}'
        >>> preheat.link([DOUBLE, KERNEL], "sm_90").entries[0].name
        'k'
    """
    try:
        program = linked_program.LinkedProgram.of(parts, label=label, lto=lto, options=options)
        return default_builder(cache_dir).build(program, arch)
    except PreheatError as error:
        shorten_traceback(error)
        raise


def compile_all(
    requests: Iterable[tuple[str | os.PathLike[str] | Program, Arch | str]],
    *,
    options: Sequence[str] | None = (),
    include: Iterable[str | os.PathLike[str]] | None = (),
    headers: Mapping[str, str] | None = None,
    names: Iterable[str] | None = (),
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[Artifact]:
    """Return machine code for many programs, in order. Programs that no cache has compile in parallel.

    All requests are checked and looked up first. Each program is compiled once, and programs that other
    processes are compiling come last. If this takes more than two seconds, a terminal shows a progress
    bar.

    Args:
        requests: Pairs of a source and an architecture, as for `compile`.
        options: See `compile`. This argument and the following ones apply to all requests. A `Program`
            as source has its own.
        include: See `compile`.
        headers: See `compile`.
        names: See `compile`.
        cache_dir: See `compile`.

    Raises:
        PreheatError: The first error. Its attribute `others` and a note have the other errors. The
            programs that could be compiled are in the cache.

    Examples:
        >>> found = preheat.compile_all([(SAXPY, "sm_80"), (SAXPY, "sm_90")])
        >>> [str(artifact.arch) for artifact in found]
        ['sm_80', 'sm_90']
    """
    try:
        wanted = [
            (
                Program.read(source, options=options, include=include, headers=headers, names=names),
                Arch.parse(arch),
            )
            for source, arch in batch.list_pairs(
                requests, "an architecture", 'compile_all([(source, "sm_90")])'
            )
        ]
        return batch.build_all(default_builder(cache_dir), wanted)
    except PreheatError as error:
        shorten_traceback(error)
        raise


def get_entry(
    kind: str,
    key: str,
    *,
    arch: Arch | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ForeignEntry | None:
    """Return the files that were stored under `kind`, `key` and `arch`, or None.

    Bundles and caches are searched, and what they return is verified.

    Args:
        kind: The name of a library or a use, such as `"mylib"`.
        key: The key of the entry in that library.
        arch: The architecture that it was stored for, if any.
        cache_dir: See `compile`.

    Examples:
        >>> entry = preheat.put_entry("mylib", "v1", {"notes.txt": b"by hand"})
        >>> preheat.get_entry("mylib", "v1").files["notes.txt"]
        b'by hand'
        >>> preheat.get_entry("mylib", "v2") is None
        True
    """
    return default_builder(cache_dir).foreign.get(_foreign_request(kind, key, arch=arch))


def put_entry(
    kind: str,
    key: str,
    files: Mapping[str, bytes],
    *,
    label: str = "",
    arch: Arch | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ForeignEntry:
    """Store files of your own under `kind`, `key` and `arch`, and return the entry.

    An entry of the same kind, key and architecture is replaced. Limits and eviction are those of the
    cache.

    Args:
        kind: A short name such as `"mylib"`.
        key: The identity of the content. It holds everything that determines the files.
        files: Contents by name.
        label: A name that `preheat cache ls` shows.
        arch: The architecture of the files, if they depend on one. It is a part of the identity: the
            same key has one entry for each architecture, and one without.
        cache_dir: See `compile`.

    Raises:
        InputError: The kind, the key or the name of a file is invalid.

    Examples:
        >>> preheat.put_entry("mylib", "table-v1", {"table": bytes(16)}, label="table").size
        16
        >>> for arch in ("sm_80", "sm_90"):
        ...     entry = preheat.put_entry("mylib", "kernel-v1", {"cubin": arch.encode()}, arch=arch)
        >>> preheat.get_entry("mylib", "kernel-v1", arch="sm_80").files["cubin"]
        b'sm_80'
    """
    request = _foreign_request(kind, key, label, arch)
    entry = foreign.ForeignEntry(kind, key, files, request.variant, label, request.arch)
    default_builder(cache_dir).foreign.put(entry)
    return entry


def obtain_entry(
    kind: str,
    key: str,
    make: Callable[[], Mapping[str, bytes]],
    *,
    label: str = "",
    arch: Arch | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ForeignEntry:
    """Return the files stored under `kind`, `key` and `arch`, or else store what `make` returns.

    Of all threads and processes that share the cache, one calls `make`, and the others wait for it. A
    sealed process never calls it. A recording keeps the entry, and a bake copies it into the bundle.

    Args:
        kind: See `put_entry`.
        key: See `put_entry`.
        make: A function that returns contents by name.
        label: See `put_entry`.
        arch: See `put_entry`.
        cache_dir: See `compile`.

    Raises:
        SealedError: There is no such entry, and this process is sealed.

    Examples:
        >>> def make():
        ...     return {"kernel.cubin": b"..."}  # the slow part
        >>> entry = preheat.obtain_entry("mylib", "kernel-v1", make)
        >>> entry.files["kernel.cubin"]
        b'...'
    """
    try:
        builder = default_builder(cache_dir)
        entry = builder.foreign.obtain(_foreign_request(kind, key, label, arch), make)
        if builder.events.has_sink("foreign_request"):
            builder.events.emit("foreign_request", entry=entry, row=None, site=call_site())
        return entry
    except PreheatError as error:
        shorten_traceback(error)
        raise


def _foreign_request(
    kind: str, key: str, label: str = "", arch: Arch | str | None = None
) -> ForeignRequest:
    target = None if arch is None else Arch.parse(arch)
    return foreign.ForeignRequest(kind, key, "" if target is None else str(target), label, target)
