"""The short way in: compile with the settings of the environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence

from preheat.arch import Arch
from preheat.artifact import Artifact
from preheat.builder import Builder
from preheat.program import Program

__all__ = ["compile", "default_builder"]


@functools.cache
def default_builder() -> Builder:
    """The process's own builder, opened from the environment when first asked for."""
    return Builder.open()


def compile(
    source: str | Program,
    arch: Arch | str,
    *,
    label: str | None = None,
    options: Sequence[str] = (),
    include: Iterable[str | os.PathLike[str]] = (),
    headers: Mapping[str, str] | None = None,
    names: Iterable[str] = (),
) -> Artifact:
    """Machine code for `source` (CUDA C++ or PTX text, or a `Program`), compiled at most once, ever.

    `names` are needed for template instances alone, such as `"tk<float>"`; `headers` are in memory,
    by name; `include` are directories. Raises `CompileError` with the compiler's log.
    """
    if not isinstance(source, Program):
        source = Program.of(
            source, label=label, options=options, include=include, headers=headers, names=names
        )
    return default_builder().build(source, arch)
