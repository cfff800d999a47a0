"""Textures and surfaces of the emulator itself: instructions that CUDA C++ has not, and faults.

The tests of the CPU driver compare fetches, loads and stores with NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from preheat.emulator.surfaces import Surface
from preheat.emulator.texels import Texels
from preheat.emulator.textures import Texture
from preheat.errors import EmulatorFault
from tests.emulator.support import Machine, entry

HANDLE, THREADS = 5, 4
PARAMETERS = ".param .u64 handle, .param .u64 out, .param .u64 values"
LOAD = """
ld.param.u64 %d1, [handle];
ld.param.u64 %d2, [out];
mov.u32 %r1, %tid.x;
mul.wide.u32 %d3, %r1, 4;
add.u64 %d2, %d2, %d3;
mul.lo.u32 %r2, %r1, 4;
cvt.rn.f32.u32 %f1, %r1;
"""
STORE = "st.global.u32 [%d2], %r9;\nret;"
FETCH = "tex.1d.v4.f32.f32 {%f5,_,_,_}, [%d1, {%f1}];\nmov.b32 %r9, %f5;"
READ = "suld.b.1d.b32.trap {%r9}, [%d1, {%r2}];"


def image(values: np.ndarray[Any, Any]) -> Texels:
    """Return the numbers of a row as texels."""
    extents = values.size, 1, 1
    return Texels(values.ctypes.data, values.dtype, 1, extents, values.nbytes, values.nbytes)


def run(
    statements: str, values: np.ndarray[Any, Any], *, kind: Any, valid: bool = True
) -> np.ndarray[Any, Any]:
    """Return what threads store that use a texture or surface of these values."""
    machine = Machine(entry(PARAMETERS, f"{LOAD}{statements}\n{STORE}"))
    machine.device.textures[HANDLE] = kind(image(values))
    out = np.zeros(THREADS, np.uint32)
    lent = values if valid else np.uint64(0)
    machine(1, THREADS, np.uint64(HANDLE), out, lent)
    return out


def texture(texels: Texels) -> Texture:
    return Texture((texels,))


@pytest.mark.parametrize(
    "statement",
    [
        "tex.1d.v4.u32.s32 {%r9,_,_,_}, [%d1, {%r1}];",
        "tex.1d.v4.s32.s32 {%r9,%r3,%r4,%r5}, [%d1, %r1];",
        "tex.base.1d.v4.u32.f32 {%r9,_,_,_}, [%d1, {%f1}];",
        "tex.level.1d.v4.u32.f32 {%r9,_,_,_}, [%d1, {%f1}], %f1;",
        "tex.1d.v4.f32.s32 {%f5,_,_,_}, [%d1, {%r1}];\nmov.b32 %r9, %f5;",
    ],
)
def test_forms_of_a_fetch_return_the_bits_of_numbers(statement: str) -> None:
    values = np.array([7, 1 << 31, 3, 0xFFFF_FFFF], np.uint32)
    assert (run(statement, values, kind=texture) == values).all()


def test_numbers_that_texels_do_not_have_are_zero() -> None:
    values = np.array([1, 2, 3, 4], np.uint32)
    statements = "tex.1d.v4.u32.s32 {%r3,%r4,%r5,%r6}, [%d1, {%r1}];\n" + "".join(
        f"add.u32 %r3, %r3, %r{number};\n" for number in (4, 5, 6)
    )
    assert (run(f"{statements}mov.u32 %r9, %r3;", values, kind=texture) == values).all()


@pytest.mark.parametrize(
    ("statement", "kind", "said"),
    [
        (READ, texture, "0x5 is not the handle of a surface object"),
        (FETCH, Surface, "0x5 is not the handle of a texture object"),
        ("add.u64 %d1, %d1, 1;\n" + FETCH, texture, "0x6 is not the handle of a texture object"),
        (
            "add.u32 %r2, %r2, 4;\n" + READ, Surface,
            "reads 4 bytes at (16) of a surface of 4 x 1 x 1 elements of 4 bytes, outside it; "
            "the first coordinate counts bytes",
        ),
        (
            "add.u32 %r2, %r2, 2;\n" + READ.replace("trap", "zero"), Surface,
            "reads 4 bytes at 2, which is not a multiple of 4: a row of a surface counts bytes",
        ),
        (
            "sub.u32 %r2, %r2, 8;\nsust.b.1d.b32.trap [%d1, {%r2}], {%r2};", Surface,
            "writes 4 bytes at (-8) of a surface of 4 x 1 x 1 elements of 4 bytes",
        ),
    ],
)  # fmt: skip
def test_a_fault_says_what_is_wrong_with_an_access(statement: str, kind: Any, said: str) -> None:
    with pytest.raises(EmulatorFault) as caught:
        run(statement, np.arange(4, dtype=np.uint32), kind=kind)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("statement", "kind", "said"),
    [
        (FETCH, texture, "reads 16 bytes at"),
        (READ, Surface, "reads 16 bytes at"),
        ("sust.b.1d.b32.trap [%d1, {%r2}], {%r2};", Surface, "writes 16 bytes at"),
    ],
)
def test_memory_that_was_freed_is_a_fault(statement: str, kind: Any, said: str) -> None:
    with pytest.raises(EmulatorFault, match=said):
        run(statement, np.arange(4, dtype=np.uint32), kind=kind, valid=False)


def test_a_level_that_is_no_number_is_the_first_one() -> None:
    values = np.array([1.5, 2.5, 3.5, 4.5], np.float32)
    statements = (
        "mov.f32 %f2, 0f7FC00000;\ntex.level.1d.v4.f32.f32 {%f5,_,_,_}, [%d1, {%f1}], %f2;\n"
        "mov.b32 %r9, %f5;"
    )

    def mipmaps(texels: Texels) -> Texture:
        return Texture((texels, image(values[2:])), level_range=(0, 1))

    assert (run(statements, values, kind=mipmaps).view(np.float32) == values).all()


def test_coordinates_that_are_no_numbers_or_far_away_are_clamped() -> None:
    values = np.array([1.5, 2.5, 3.5, 4.5], np.float32)
    where = "selp.f32 %f1, {}, {}, %p1;\n"
    statements = "setp.eq.u32 %p1, %r1, 0;\n" + where.format("0f7FC00000", "0fFF800000") + FETCH
    assert (run(statements, values, kind=texture).view(np.float32) == 1.5).all()
    statements = "setp.eq.u32 %p1, %r1, 0;\n" + where.format("0f7F800000", "0f7F7FFFFF") + FETCH
    assert (run(statements, values, kind=texture).view(np.float32) == 4.5).all()
