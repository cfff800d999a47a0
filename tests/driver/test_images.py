"""An image that a program loads is read as PTX, or refused with the status of a GPU and a reason."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.devices.base import Geometry
from preheat.driver.images import ImageError, Images, image_bytes
from preheat.emulator.device import EmulatorDevice
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.program import Program
from preheat.toolchain.binaries.ptx_section import attach_ptx
from tests.audit.modules import PTX, entry, fatbin

SM_90 = Arch(9, 0)
INVALID_IMAGE, NO_BINARY, INVALID_PTX, NOT_FOUND, NOT_SUPPORTED = 200, 209, 218, 301, 801
PROGRAM = Program.of('extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }', label="k.cu")
OTHER = PTX + b"\n.visible .entry other() { ret; }\n"


class Memory:
    """Bytes in the memory of a program, followed by others that are no part of the image."""

    def __init__(self, data: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(data + b"\0" + b"\xcc" * 64)
        self.address = ctypes.addressof(self._buffer)


@pytest.fixture(scope="module")
def cubin(shared_builder: Builder) -> bytes:
    return shared_builder.build(PROGRAM, "sm_90").cubin


def loaded(data: bytes, arch: Arch = SM_90) -> Artifact:
    """Return what is read from an image in memory."""
    memory = Memory(data)
    return Images().read(memory.address, arch)


def refused(data: bytes, arch: Arch = SM_90) -> tuple[int, str]:
    """Return the status and the reason for an image."""
    with pytest.raises(ImageError) as error:
        loaded(data, arch)
    return error.value.status, error.value.reason


def test_ptx_is_read_up_to_its_zero_byte() -> None:
    found = loaded(OTHER)
    assert found.ptx == OTHER
    assert [each.name for each in found.entries] == ["other"]


def test_a_cubin_is_read_with_its_ptx_and_what_its_kernels_use(
    cubin: bytes, shared_builder: Builder
) -> None:
    built = shared_builder.build(PROGRAM, "sm_90")
    found = loaded(attach_ptx(cubin, built.ptx))
    assert found.ptx.rstrip(b"\0") == built.ptx.rstrip(b"\0")
    (kernel,) = found.entries
    (expected,) = built.entries
    assert kernel.resources is not None
    assert expected.resources is not None
    assert kernel.resources.registers == expected.resources.registers > 0


def test_equal_images_are_one_module(cubin: bytes) -> None:
    first, second = (Memory(attach_ptx(cubin, PTX)) for _ in range(2))
    assert Images().read(first.address, SM_90) is Images().read(second.address, SM_90)


def test_the_parts_of_a_linked_cubin_are_merged(cubin: bytes) -> None:
    parts = b"\0".join([OTHER, OTHER.replace(b"other", b"more")]) + b"\0"
    found = loaded(attach_ptx(cubin, parts))
    assert {each.name for each in found.entries} == {"other", "more"}


def test_machine_code_without_ptx_is_not_supported(
    cubin: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    status, reason = refused(cubin)
    assert status == NOT_SUPPORTED
    assert "cubin without PTX" in reason
    assert reason in capsys.readouterr().err  # The status alone does not tell why.


@pytest.mark.parametrize(
    ("device", "status"), [("sm_80", NO_BINARY), ("sm_100", NO_BINARY), ("sm_90", 0)]
)
def test_a_cubin_of_another_architecture_is_refused(cubin: bytes, device: str, status: int) -> None:
    image = attach_ptx(cubin, PTX)
    if status:
        assert refused(image, Arch.parse(device))[0] == status
    else:
        assert loaded(image, Arch.parse(device)).ptx == PTX


def test_a_cubin_runs_on_a_newer_device_of_its_major_version(shared_builder: Builder) -> None:
    image = attach_ptx(shared_builder.build(PROGRAM, "sm_80").cubin, PTX)
    assert loaded(image, Arch(8, 6)).ptx == PTX
    image = attach_ptx(shared_builder.build(PROGRAM, "sm_90a").cubin, PTX)
    assert loaded(image).ptx == PTX


def test_the_newest_ptx_that_a_device_can_compile_is_taken_from_a_fat_binary() -> None:
    texts = {arch: OTHER.replace(b"other", b"for_%d" % arch) for arch in (70, 80, 100)}
    whole = fatbin(*(entry(1, arch, text) for arch, text in texts.items()))
    (found,) = loaded(whole).entries
    assert found.name == "for_80"
    assert refused(whole, Arch(6, 0)) == (
        NO_BINARY,
        "a fat binary has no PTX for sm_60: it has PTX for sm_70, PTX for sm_80, PTX for sm_100",
    )


def test_ptx_of_a_specific_architecture_is_for_that_one_alone() -> None:
    whole = fatbin(entry(1, 90, OTHER, flags=0x100011))
    assert loaded(whole).entries
    assert refused(whole, Arch(10, 0))[0] == NO_BINARY


def test_machine_code_of_a_fat_binary_comes_with_its_ptx(cubin: bytes) -> None:
    whole = fatbin(entry(2, 90, attach_ptx(cubin, OTHER)), entry(1, 90, PTX))
    (found,) = loaded(whole).entries
    assert found.name == "other"
    assert refused(fatbin(entry(2, 90, cubin)))[0] == NOT_SUPPORTED
    assert refused(fatbin(entry(2, 80, cubin)))[0] == NO_BINARY


def test_a_fat_binary_is_found_through_its_wrapper() -> None:
    inner = Memory(fatbin(entry(1, 90, OTHER)))
    wrapper = struct.pack("<IIQQ", 0x466243B1, 1, inner.address, 0)
    assert loaded(wrapper).entries


@pytest.mark.parametrize(("library", "opened"), [("libcublas.so.13", False), ("libmine.so", True)])
def test_images_in_libraries_of_nvidia_are_not_opened(
    library: str, opened: bool, tmp_path: Path
) -> None:
    file = tmp_path / library
    file.write_bytes(fatbin(entry(1, 90, OTHER)))
    with file.open("r+b") as mapped, mmap.mmap(mapped.fileno(), 0) as memory:
        inside = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(inside)
        if opened:
            assert Images().read(address, SM_90).entries
        else:
            with pytest.raises(ImageError, match=str(NOT_SUPPORTED)) as error:
                Images().read(address, SM_90)
            assert library in error.value.reason
        del inside


def cut(cubin: bytes) -> bytes:
    return cubin[:60]


def relocatable(cubin: bytes) -> bytes:
    return cubin[:16] + struct.pack("<H", 1) + cubin[18:]


@pytest.mark.parametrize("damage", [cut, relocatable])
def test_damaged_and_unlinked_cubins_are_invalid(
    cubin: bytes, damage: Callable[[bytes], bytes]
) -> None:
    assert refused(damage(attach_ptx(cubin, PTX)))[0] == INVALID_IMAGE


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", INVALID_IMAGE),
        (b"not a module", INVALID_IMAGE),
        (b".version 8.0\n.entry (", INVALID_PTX),
        (b".version 8.0\n.target sm_90\n// \xff\xfe\n", INVALID_PTX),
        (fatbin(b"\1"), NO_BINARY),
        (fatbin(entry(1, 90, OTHER, flags=0x2011)), INVALID_IMAGE),
    ],
)
def test_what_is_no_module_is_refused(data: bytes, status: int) -> None:
    assert refused(data)[0] == status


def test_a_file_is_read_like_memory(tmp_path: Path) -> None:
    file = tmp_path / "k.ptx"
    file.write_bytes(OTHER)
    assert Images().read_file(str(file), SM_90).ptx == OTHER
    with pytest.raises(Exception, match=str(NOT_FOUND)):
        Images().read_file(str(tmp_path / "absent"), SM_90)


def test_the_bytes_of_an_image_end_where_its_headers_say(cubin: bytes) -> None:
    for image in (attach_ptx(cubin, PTX), fatbin(entry(1, 90, OTHER)), OTHER):
        memory = Memory(image)
        assert image_bytes(memory.address) == image


def test_a_linker_takes_the_ptx_of_objects(cubin: bytes) -> None:
    unlinked = relocatable(attach_ptx(cubin, OTHER))
    assert Images().link_text(unlinked, SM_90) == OTHER.decode()
    assert Images().link_text(OTHER + b"\0", SM_90) == OTHER.decode()
    with pytest.raises(ImageError) as error:
        Images().link_text(relocatable(cubin), SM_90)
    assert error.value.status == NOT_SUPPORTED


def test_the_ptx_of_a_cubin_computes_what_its_program_says(
    cubin: bytes, shared_builder: Builder
) -> None:

    device = EmulatorDevice(0, SM_90)
    built = shared_builder.build(PROGRAM, "sm_90")
    module = device.load(loaded(attach_ptx(cubin, built.ptx)))
    stream = device.stream()
    values = np.arange(4, dtype=np.float32)
    address = device.allocate(16, stream)
    ctypes.memmove(address, values.ctypes.data, 16)
    argument = ctypes.c_uint64(address)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    submit = module.function("k").prepare(Geometry((1, 1, 1), (4, 1, 1), 0), stream)
    submit(ctypes.addressof(pointers), 0)
    assert np.ctypeslib.as_array((ctypes.c_float * 4).from_address(address)).tolist() == [1, 2, 3, 4]


def test_a_kernel_is_named_without_the_tags_of_numba() -> None:
    """They have a hundred characters, and say nothing to the reader of a fault."""
    name = b"_ZN8__main__3addB2v1B8cw51cXTLE5ArrayIfLi1EE"
    (kernel,) = loaded(PTX + b"\n.visible .entry " + name + b"() { ret; }\n").entries
    assert kernel.title == "__main__::add"
