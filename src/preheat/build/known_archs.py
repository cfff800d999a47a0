"""Architectures that exist: the ones that preheat lists, and the ones that a newer compiler knows."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

from preheat.build.builder import Builder
from preheat.errors import InputError
from preheat.model.arch import LISTED_ARCHS, Arch
from preheat.model.config import Config

__all__ = ["require_known"]


def require_known(
    archs: Iterable[Arch], builder: Builder | None = None, config: Config | None = None
) -> None:
    """Raise `InputError` for an architecture that no GPU has.

    An architecture that preheat does not list is valid if NVRTC supports it, because NVRTC may be newer
    than preheat. It is the NVRTC of `builder`, or of a builder that is opened with `config`.
    """
    unlisted = [arch for arch in archs if arch.plain not in LISTED_ARCHS]
    if not unlisted:
        return
    if builder is None:
        with closing(Builder.open(config)) as opened:
            compiled_for = opened.toolchain.located.archs
    else:
        compiled_for = builder.toolchain.located.archs
    known = LISTED_ARCHS | {Arch.parse(str(number)) for number in compiled_for}
    for arch in unlisted:
        if arch.plain not in known:
            raise InputError(
                f"{arch} is not a known GPU architecture",
                hint=f"known architectures: {', '.join(map(str, sorted(known)))}",
            )
