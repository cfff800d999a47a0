"""Modules that a program loads, as the PTX that the emulator executes.

A program passes the address of PTX, of a cubin, or of a fat binary with either. A cubin has its PTX in
a section (`toolchain/binaries/ptx_section.py`), if a compiler made it that this program ran. Machine
code alone is not supported, and neither is any image inside a library of NVIDIA.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from preheat.devices.base import FindLines
from preheat.driver.calls import CallError, say
from preheat.driver.status import (
    FILE_NOT_FOUND,
    INVALID_IMAGE,
    INVALID_PTX,
    NO_BINARY_FOR_GPU,
    NOT_SUPPORTED,
)
from preheat.errors import InputError
from preheat.model import ptx
from preheat.model.arch import Arch, mismatch
from preheat.model.artifact import Artifact, Resources
from preheat.toolchain.binaries import fatbin
from preheat.toolchain.binaries.cubin import read_arch, read_resources
from preheat.toolchain.binaries.demangle import demangle
from preheat.toolchain.binaries.elf import ELF, elf_size
from preheat.toolchain.binaries.fatbin import FatbinEntry, parse_fatbin, read_entry
from preheat.toolchain.binaries.ptx_section import attach_ptx, attached_ptx
from preheat.toolchain.ptx_merge import PtxPart, merge
from preheat.toolchain.signature import entry_points

__all__ = ["ImageError", "Images", "image_bytes"]

T = TypeVar("T")

_MAX_BYTES = 1 << 30  # of a module
_MAX_KNOWN = 512
_PAGE = 1 << 16
_TAG = re.compile(r"\[abi:\w+\]")  # Numba keeps apart by tags what C++ keeps apart by types.
_WRAPPER = fatbin.WRAPPER_MAGIC.to_bytes(4, "little")
_FATBIN = fatbin.MAGIC.to_bytes(4, "little")
_WITHOUT_PTX = (
    "a cubin without PTX was loaded: only compilers that run in the program, under 'preheat emulate', "
    "add the PTX that the emulator executes"
)
_NVIDIA = re.compile(r"lib(nv|npp|nccl|cu(blas|dnn|fft|rand|solver|sparse|tensor|dart|pti|file|dss))")


class ImageError(CallError):
    """An image cannot be loaded. The program sees the status, and the user also the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status)
        self.reason = reason


class Images:
    """Reads images, and knows the PTX of code that has none of its own, by the bytes that are loaded.

    The compilers of preheat run in processes without the driver, so that their cubins have no PTX, and
    so do bakes of other libraries. Both hand the PTX over before they load the code.

    Equal images give the same artifact. An image that cannot run is an `ImageError`, of which the user
    is told the reason.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Artifact, FindLines | None]] = {}
        self._foreign: dict[str, bytes] = {}  # PTX by the machine code

    def add(self, artifact: Artifact, lines: FindLines | None) -> None:
        """Know an artifact. The oldest ones are forgotten when there are many."""
        for code in (artifact.cubin, artifact.ptx):
            if code and artifact.ptx:
                self._known[_digest(code)] = artifact, lines
        _forget_oldest(self._known)

    def add_foreign(self, cubin: bytes, ptx: bytes) -> None:
        """Know the PTX of machine code of another library."""
        self._foreign[_digest(cubin)] = ptx
        _forget_oldest(self._foreign)

    def read(self, address: int, arch: Arch) -> Artifact:
        """Return the code of the image at an address, for a device of this architecture."""
        data = _tell(lambda: image_bytes(address))
        digest = _digest(data)
        artifact, _ = self._known.get(digest, (None, None))
        if artifact is None:
            if (ptx := self._foreign.get(digest)) is not None:
                data = attach_ptx(data, ptx)
            return _tell(lambda: _artifact(data, arch))
        if data.startswith(ELF):
            _tell(lambda: _require_arch(data, arch))
        return artifact

    def read_file(self, path: str, arch: Arch) -> Artifact:
        """Return the code of the image in a file."""
        data = self.file_bytes(path)
        return _tell(lambda: _artifact(data, arch))

    def file_bytes(self, path: str) -> bytes:
        """Return the bytes of a file; `CallError` if it cannot be read."""
        try:
            return Path(path).read_bytes()
        except OSError as fault:
            raise CallError(FILE_NOT_FOUND) from fault

    def link_text(self, data: bytes, arch: Arch) -> str:
        """Return the PTX of a linker's input: PTX, a cubin that may still need a link, a fat binary."""
        if data.startswith(ELF):
            return _tell(lambda: _attached_text(data))
        return _tell(lambda: _text(data, arch))

    def lines(self, artifact: Artifact) -> FindLines | None:
        """Return what finds the source lines of an artifact."""
        known, lines = self._known.get(_digest(artifact.cubin), (None, None))
        return lines if known is artifact else None


def _forget_oldest(known: dict[str, Any]) -> None:
    while len(known) > _MAX_KNOWN:
        del known[next(iter(known))]


def _digest(code: bytes) -> str:
    return hashlib.sha256(code.rstrip(b"\0") if code[:4] != ELF else code).hexdigest()


def image_bytes(address: int) -> bytes:
    """Return the bytes of the image at an address. How many there are is in its headers.

    The headers may be damaged: what they say is read only as far as there is memory.
    """
    with _Memory() as memory:
        start = memory.read(address, len(ELF))
        if start == _WRAPPER:
            inner = int.from_bytes(memory.read(address + 8, 8), "little")
            return memory.read(inner, _fatbin_size(memory, inner))
        if start == _FATBIN:
            return memory.read(address, _fatbin_size(memory, address))
        if start == ELF:
            try:
                size = elf_size(lambda offset, count: memory.read(address + offset, count))
            except ValueError as bad:
                raise ImageError(INVALID_IMAGE, f"a cubin cannot be read: {bad}") from None
            return memory.read(address, size)
        return memory.text(address)


class _Memory:
    """Reads memory of this process that may not exist, which would otherwise end the process."""

    def __enter__(self) -> _Memory:
        self._file = open("/proc/self/mem", "rb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, address: int, size: int) -> bytes:
        """Return the bytes at an address, fewer where the memory ends."""
        if size > _MAX_BYTES:
            raise ImageError(INVALID_IMAGE, f"a module cannot have {size:,} bytes")
        found = bytearray()
        while len(found) < size:
            try:
                part = os.pread(self._file.fileno(), size - len(found), address + len(found))
            except (OSError, OverflowError):
                break  # There is no memory.
            if not part:
                break
            found += part
        return bytes(found)

    def text(self, address: int) -> bytes:
        """Return the bytes at an address up to the first zero byte."""
        found = bytearray()
        while True:
            count = _PAGE - (address + len(found)) % _PAGE
            part = self.read(address + len(found), count).partition(b"\0")[0]
            found += part
            if len(part) < count:
                return bytes(found)


def _fatbin_size(memory: _Memory, address: int) -> int:
    """Return the size of a fat binary. Raises for one inside a library of NVIDIA."""
    library = _mapped_file(address)
    if _NVIDIA.match(os.path.basename(library)):
        raise ImageError(NOT_SUPPORTED, f"{library} has kernels of its own, which cannot run here")
    header = memory.read(address, fatbin.HEADER_SIZE)
    return fatbin.whole_size(header) if len(header) == fatbin.HEADER_SIZE else len(header)


def _tell(make: Callable[[], T]) -> T:
    """Call a function, and tell the user why it raises an `ImageError`."""
    try:
        return make()
    except ImageError as error:
        say(error.reason)
        raise


def _mapped_file(address: int) -> str:
    """Return the file that an address is mapped from, or an empty text."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            first, _, last = fields[0].partition("-")
            if int(first, 16) <= address < int(last, 16):
                return fields[5].strip() if len(fields) == 6 else ""
    return ""


@functools.lru_cache(maxsize=64)  # A program may load one module in each context.
def _artifact(data: bytes, arch: Arch) -> Artifact:
    text = _text(data, arch)
    try:
        module = ptx.parse(text)
    except ptx.SyntaxFault as bad:
        raise ImageError(INVALID_PTX, f"invalid PTX, line {bad.line}: {bad}") from None
    digest = hashlib.sha256(data).hexdigest()
    spelled = {name: _TAG.sub("", found) for name in module.entries if (found := demangle(name))}
    return Artifact(
        digest=digest, label=f"module {digest[:12]}", arch=arch, toolchain="unknown", parts=(),
        entries=entry_points(module, spelled, {}, _resources(data)), cubin=b"", ptx=text.encode(),
    )  # fmt: skip


def _text(data: bytes, arch: Arch) -> str:
    """Return the PTX of an image that runs on a device of this architecture."""
    if data.startswith(ELF):
        return _text_of_cubin(data, arch)
    if data.startswith(_FATBIN):
        return _text_of_fatbin(data, arch)
    text = data.partition(b"\0")[0]
    if b".version" not in text:
        raise ImageError(INVALID_IMAGE, f"a module is neither PTX nor a cubin: {data[:16]!r}")
    return _decode(text)


def _text_of_cubin(data: bytes, arch: Arch) -> str:
    _require_arch(data, arch)
    return _attached_text(data)


def _require_arch(data: bytes, arch: Arch) -> None:
    """Raise unless the machine code of a cubin runs on this architecture."""
    try:
        made_for = read_arch(data, "a module")
    except InputError as bad:
        raise ImageError(INVALID_IMAGE, str(bad)) from None
    if made_for.major != arch.major or mismatch(made_for, arch):
        raise ImageError(NO_BINARY_FOR_GPU, f"a cubin for {made_for} does not run on {arch}")


def _attached_text(cubin: bytes) -> str:
    """Return the PTX in the section of a cubin, merged if there are several parts."""
    try:
        texts = [_decode(text) for text in attached_ptx(cubin)]
    except ValueError as bad:
        raise ImageError(INVALID_IMAGE, f"a cubin cannot be read: {bad}") from None
    if not texts:
        raise ImageError(NOT_SUPPORTED, _WITHOUT_PTX)
    if len(texts) == 1:
        return texts[0]
    try:
        return merge([PtxPart.of(f"part {number}", text) for number, text in enumerate(texts, 1)])
    except (ptx.SyntaxFault, InputError) as bad:
        raise ImageError(INVALID_PTX, f"the PTX of a linked cubin is invalid: {bad}") from None


def _text_of_fatbin(data: bytes, arch: Arch) -> str:
    """Return the PTX that the driver would compile, or that is beside its machine code."""
    try:
        entries = parse_fatbin(data)
        for entry in entries:
            if entry.runs_on(10 * arch.major + arch.minor):
                code = read_entry(data, entry)
                if attached_ptx(code):
                    return _text_of_cubin(code, arch)
        usable = [entry for entry in entries if entry.kind == "PTX" and _compiles_for(entry, arch)]
        if usable:
            return _decode(read_entry(data, max(usable, key=_arch_number)).partition(b"\0")[0])
    except ValueError as bad:
        raise ImageError(INVALID_IMAGE, f"a fat binary cannot be read: {bad}") from None
    there = ", ".join(f"{entry.kind} for sm_{entry.arch}" for entry in entries) or "nothing"
    runs = any(entry.runs_on(10 * arch.major + arch.minor) for entry in entries)
    raise ImageError(
        NOT_SUPPORTED if runs else NO_BINARY_FOR_GPU,
        f"a fat binary has no PTX for {arch}: it has {there}",
    )


def _compiles_for(entry: FatbinEntry, arch: Arch) -> bool:
    number = 10 * arch.major + arch.minor
    return entry.arch == number if entry.specific else entry.arch <= number


def _arch_number(entry: FatbinEntry) -> int:
    return entry.arch


def _decode(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as bad:
        raise ImageError(INVALID_PTX, f"PTX is not a text: {bad}") from None


def _resources(data: bytes) -> dict[str, Resources]:
    """Return what the kernels of a cubin use. The PTX of other images does not say it."""
    try:
        return read_resources(data, "a module") if data.startswith(ELF) else {}
    except InputError:
        return {}
