"""nvJitLink as an assembler and as a linker, without a GPU. Runs in the worker process only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from cuda.bindings import nvjitlink

__all__ = ["Assembled", "Input", "assemble", "link"]

_LTO = "ltoir"


class Input(NamedTuple):
    """One input of nvJitLink: its kind, its name in messages, and its bytes."""

    kind: str  # In lower case: "ptx", "cubin", "ltoir", "fatbin", "object", "library".
    name: str
    data: bytes


class Assembled(NamedTuple):
    """The result of nvJitLink. `cubin` is empty if it failed.

    `ptx` is made from the inputs with LTO-IR, linked. It is empty if there are none.
    """

    status: str
    log: str
    cubin: bytes = b""
    ptx: bytes = b""


def assemble(ptx: bytes, name: str, options: Sequence[str]) -> Assembled:
    """Assemble one PTX text."""
    return _complete([Input("ptx", name, ptx)], options, _cubin)


def link(inputs: Sequence[Input], options: Sequence[str]) -> Assembled:
    """Link inputs to one cubin."""
    optimised = [each for each in inputs if each.kind == _LTO]
    with _capture_output() as printed:
        done = _complete(inputs, [*options, "-lto"] if optimised else options, _cubin)
    # nvJitLink prints some errors, such as symbols that are defined twice, and succeeds.
    if text := printed():
        done = done._replace(log=f"{done.log}\n{text}".strip())
    if not optimised:
        return done
    to_ptx = [*(option for option in options if not option.startswith("-Xptxas")), "-lto", "-ptx"]
    shown = _complete(inputs, to_ptx, _ptx)
    if shown.status != "SUCCESS":  # An input has no LTO-IR.
        shown = _complete(optimised, to_ptx, _ptx)
    return done._replace(ptx=shown.ptx)


def _complete(
    inputs: Sequence[Input], options: Sequence[str], result: Callable[[Any], dict[str, bytes]]
) -> Assembled:
    """Give inputs to nvJitLink, and return what `result` gets from the link."""
    try:
        handle = nvjitlink.create(len(options), list(options))
    except nvjitlink.nvJitLinkError as error:
        return Assembled(_name(error), f"nvJitLink does not accept the options {' '.join(options)}")
    try:
        for kind, name, data in inputs:
            number = getattr(nvjitlink.InputType, kind.upper())
            nvjitlink.add_data(handle, number, data, len(data), name)
        nvjitlink.complete(handle)
        made = result(handle)
        log = _log(handle, nvjitlink.get_info_log_size, nvjitlink.get_info_log)
        return Assembled("SUCCESS", log, **made)
    except nvjitlink.nvJitLinkError as error:
        log = _log(handle, nvjitlink.get_error_log_size, nvjitlink.get_error_log)
        return Assembled(_name(error), log)
    finally:
        nvjitlink.destroy(handle)


def _cubin(handle: Any) -> dict[str, bytes]:
    cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
    nvjitlink.get_linked_cubin(handle, cubin)
    return {"cubin": bytes(cubin)}


def _ptx(handle: Any) -> dict[str, bytes]:
    text = bytearray(nvjitlink.get_linked_ptx_size(handle))
    nvjitlink.get_linked_ptx(handle, text)
    return {"ptx": bytes(text).rstrip(b"\0")}


@contextmanager
def _capture_output() -> Iterator[Callable[[], str]]:
    """Collect what native code writes to stdout and stderr. The result returns it after the block."""
    file = os.memfd_create("preheat-output", os.MFD_CLOEXEC)
    streams = [1, 2]
    saved = [os.dup(stream) for stream in streams]
    text: list[str] = []
    try:
        for stream in streams:
            os.dup2(file, stream)
        yield lambda: "".join(text)
    finally:
        ctypes.CDLL(None).fflush(None)
        for stream, copy in zip(streams, saved, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.lseek(file, 0, os.SEEK_SET)
        with os.fdopen(file, "rb") as reader:
            text.append(reader.read().decode("utf-8", "replace"))


def _name(error: Any) -> str:
    return str(nvjitlink.Result(error.status).name)


def _log(link: Any, size_of: Callable[[Any], int], get: Callable[[Any, bytearray], None]) -> str:
    text = bytearray(size_of(link))
    get(link, text)
    return bytes(text).replace(b"\0", b"").decode("utf-8", "replace")
