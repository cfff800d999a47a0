"""The linker of the driver. Its result is the merged PTX of its inputs, which loads as a cubin does."""

from __future__ import annotations

import ctypes
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from preheat.driver.calls import CallError, entry, say
from preheat.driver.contexts import Context
from preheat.driver.raw import put, read, text
from preheat.driver.status import INVALID_PTX, INVALID_VALUE, NOT_SUPPORTED
from preheat.errors import InputError
from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.driver.driver import Driver
    from preheat.model import ptx
    from preheat.toolchain import ptx_merge
else:  # The first link needs them.
    ptx = LazyModule("preheat.model.ptx")
    ptx_merge = LazyModule("preheat.toolchain.ptx_merge")

__all__: list[str] = []

#: The kinds of inputs, by number.
_CUBIN, _PTX, _FATBIN, _OBJECT = range(4)
_KINDS = (_CUBIN, _PTX, _FATBIN, _OBJECT)


class Link:
    """A link that is under way. Its result is valid as long as it."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.parts: list[ptx_merge.PtxPart] = []
        self.result: ctypes.Array[ctypes.c_char] | None = None

    def add(self, driver: Driver, name: str, kind: int, data: bytes) -> None:
        """Add an input."""
        if kind not in _KINDS:
            raise CallError(NOT_SUPPORTED)
        found = driver.images.link_text(data, self.context.gpu.emulator.arch)
        label = name or f"part {len(self.parts) + 1}"
        try:
            self.parts.append(ptx_merge.PtxPart.of(label, found))
        except ptx.SyntaxFault as bad:
            say(f"invalid PTX in {label}, line {bad.line}: {bad}")
            raise CallError(INVALID_PTX) from None

    def complete(self) -> None:
        """Merge the inputs. No function or variable may be defined twice, unless it is weak."""
        strong = Counter(
            name
            for part in self.parts
            for name, linkage in ptx_merge.definitions(part)
            if linkage == "visible"
        )
        twice = [name for name, count in strong.items() if count > 1]
        if twice:
            say(f"the inputs of a link define more than once: {', '.join(twice)}")
            raise CallError(INVALID_PTX)
        try:
            merged = ptx_merge.merge(self.parts) if len(self.parts) > 1 else self.parts[0].text
        except (ptx.SyntaxFault, InputError) as bad:
            say(f"the inputs of a link do not fit: {bad}")
            raise CallError(INVALID_PTX) from None
        self.result = ctypes.create_string_buffer(merged.encode())


def _link(driver: Driver, handle: int) -> Link:
    return driver.handles.get(handle, Link)


@entry("cuLinkCreate", 6050)
def _create(driver: Driver, count: int, options: int, values: int, out: int) -> None:
    del count, options, values  # They concern the compiler of the driver.
    put(out, driver.handles.add(Link(driver.current())))


@entry("cuLinkAddData", 6050)
def _add_data(
    driver: Driver, handle: int, kind: int, data: int, size: int, name: int, *options: int
) -> None:
    del options
    if not data or not size:
        raise CallError(INVALID_VALUE)
    _link(driver, handle).add(driver, text(name) if name else "", kind, read(data, size))


@entry("cuLinkAddFile", 6050)
def _add_file(driver: Driver, handle: int, kind: int, path: int, *options: int) -> None:
    del options
    file = Path(text(path))
    _link(driver, handle).add(driver, file.name, kind, driver.images.file_bytes(str(file)))


@entry("cuLinkComplete")
def _complete(driver: Driver, handle: int, out: int, size: int) -> None:
    made = _link(driver, handle)
    if not made.parts:
        raise CallError(INVALID_VALUE)
    made.complete()
    assert made.result is not None
    put(out, ctypes.addressof(made.result))
    put(size, len(made.result))


@entry("cuLinkDestroy")
def _destroy(driver: Driver, handle: int) -> None:
    _link(driver, handle)
    driver.handles.remove(handle)
