"""nvJitLink as an assembler: PTX to cubin without a GPU. Runs in the worker process only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cuda.bindings import nvjitlink

__all__ = ["Assembled", "assemble"]


class Assembled(NamedTuple):
    """The result of nvJitLink. `cubin` is empty if it failed."""

    status: str
    log: str
    cubin: bytes = b""


def assemble(ptx: bytes, name: str, options: Sequence[str]) -> Assembled:
    """Assemble one PTX text."""
    try:
        link = nvjitlink.create(len(options), list(options))
    except nvjitlink.nvJitLinkError as error:
        return Assembled(_name(error), f"nvJitLink does not accept the options {' '.join(options)}")
    try:
        nvjitlink.add_data(link, nvjitlink.InputType.PTX, ptx, len(ptx), name)
        nvjitlink.complete(link)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(link))
        nvjitlink.get_linked_cubin(link, cubin)
        log = _log(link, nvjitlink.get_info_log_size, nvjitlink.get_info_log)
        return Assembled("SUCCESS", log, bytes(cubin))
    except nvjitlink.nvJitLinkError as error:
        log = _log(link, nvjitlink.get_error_log_size, nvjitlink.get_error_log)
        return Assembled(_name(error), log)
    finally:
        nvjitlink.destroy(link)


def _name(error: Any) -> str:
    return str(nvjitlink.Result(error.status).name)


def _log(link: Any, size_of: Callable[[Any], int], get: Callable[[Any, bytearray], None]) -> str:
    text = bytearray(size_of(link))
    get(link, text)
    return bytes(text).replace(b"\0", b"").decode("utf-8", "replace")
