"""The default builder, and `preheat.compile`, both configured by the environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.arch import Arch
from preheat.artifact import Artifact
from preheat.build.builder import Builder
from preheat.config import Config
from preheat.errors import PreheatError
from preheat.locks import Lock, no_fork
from preheat.program import Program
from preheat.tracebacks import shorten_traceback

if TYPE_CHECKING:  # Imported when an entry of another library is first asked for.
    from preheat.foreign import ForeignEntry, ForeignRequest
    from preheat.linked_program import BinaryPart

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

    With `cache_dir`, return the builder that has its cache in that directory.
    """
    where = None if cache_dir is None else Config.from_env(cache_dir=cache_dir).cache_dirs[0]
    if where == Config.from_env().cache_dirs[0]:
        where = None
    with _opening:  # `functools.cache` alone would let two threads open one each.
        return _builder(where)


@functools.cache
def _builder(cache_dir: Path | None) -> Builder:
    config = Config.from_env(cache_dir=cache_dir)
    builder = Builder.open(config)
    if config.record is not None:
        with no_fork:
            from preheat.ahead.recorder import Recorder

        Recorder.attach(builder, config.record)
    return builder


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

    `source` is a path, a one-line string that ends in `.cu` or `.ptx` and names a file, CUDA C++ or PTX
    text, or a `Program`. `names` are needed only for template instances, such as `"tk<float>"`.
    `headers` maps names to texts in memory; `include` lists directories. `cache_dir` is the directory
    of the cache, which the environment sets by default.

    Raises `CompileError` with the log of the compiler.
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

    A part is CUDA C++ or PTX text, the path of a source or of a compiled file, the bytes of a compiled
    file, a `Program` or a `BinaryPart`. Parts of CUDA C++ are compiled first, and are cached as well.
    With `lto`, the linker optimises them as a whole. `options` are those of nvJitLink; a part that
    needs options of its compiler is a `Program`. `label` names the result. To launch its kernels, use
    `gpu.kernel(LinkedProgram.of(parts), name)`.

    Raises `LinkError` with the symbols that are undefined, or defined twice, and `CompileError`.
    """
    with no_fork:
        from preheat.linked_program import LinkedProgram

    try:
        program = LinkedProgram.of(parts, label=label, lto=lto, options=options)
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
    """Return machine code for many programs, in order: `compile_all([(source, "sm_90"), …])`.

    A request is a source and an architecture, as for `compile`. The other arguments are those of
    `compile`, and hold for all requests; a `Program` as source has its own. Everything is checked and
    looked up first. What no cache has is compiled on all processors, each program once, and programs
    that other processes are compiling come last. When it takes over two seconds, a terminal shows a
    progress bar. If programs are wrong, the first error is raised, with the others in its `others` and
    in a note; the programs that could be compiled are in the cache.
    """
    with no_fork:
        from preheat.build.together import build_all, pairs  # Takes a millisecond.

    try:
        wanted = [
            (
                Program.read(source, options=options, include=include, headers=headers, names=names),
                Arch.parse(arch),
            )
            for source, arch in pairs(requests, "an architecture", 'compile_all([(source, "sm_90")])')
        ]
        return build_all(default_builder(cache_dir), wanted)
    except PreheatError as error:
        shorten_traceback(error)
        raise


def get_entry(
    kind: str, key: str, *, cache_dir: str | os.PathLike[str] | None = None
) -> ForeignEntry | None:
    """Return the files that were stored under `kind` and `key`, or None.

    Bundles and caches are asked, and what they return was verified. `cache_dir` means the same as for
    `compile`.
    """
    return default_builder(cache_dir).foreign.get(_foreign_request(kind, key))


def put_entry(
    kind: str,
    key: str,
    files: Mapping[str, bytes],
    *,
    label: str = "",
    arch: Arch | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ForeignEntry:
    """Store files of your own under `kind` and `key`, and return the entry.

    `kind` is a short name such as "mylib", and `key` identifies the content: it holds everything that
    determines the files. An entry of the same kind and key is replaced. `label` and `arch` are shown by
    `preheat cache ls`. Limits and eviction are those of the cache.
    """
    with no_fork:
        from preheat.foreign import ForeignEntry

    target = None if arch is None else Arch.parse(arch)
    entry = ForeignEntry(kind, key, files, label=label, arch=target)
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
    """Return the files stored under `kind` and `key`; store what `make` returns when there are none.

    Of all threads and processes that share the cache, one calls `make` and the others wait for it.
    A sealed process never calls it: an entry that is missing is a `SealedError`.
    """
    try:
        request = _foreign_request(kind, key, label, arch)
        return default_builder(cache_dir).foreign.obtain(request, make)
    except PreheatError as error:
        shorten_traceback(error)
        raise


def _foreign_request(
    kind: str, key: str, label: str = "", arch: Arch | str | None = None
) -> ForeignRequest:
    with no_fork:
        from preheat.foreign import ForeignRequest

    target = None if arch is None else Arch.parse(arch)
    return ForeignRequest(kind, key, label=label, arch=target)
