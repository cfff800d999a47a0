"""The default builder, and `preheat.compile`, both configured by the environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from preheat.arch import Arch
from preheat.artifact import Artifact
from preheat.build.builder import Builder
from preheat.config import Config
from preheat.errors import PreheatError
from preheat.locks import Lock, no_fork
from preheat.program import Program
from preheat.tracebacks import shorten_traceback

__all__ = ["compile", "compile_all", "default_builder"]


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
