"""PTX travels in a section of a cubin, which every reader of cubins skips."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.audit.images import canonical
from preheat.toolchain.binaries.ptx_section import (
    SECTION_TYPE,
    attach_ptx,
    attached_ptx,
    detach_ptx,
    has_attached_ptx,
)
from tests.audit.modules import PTX, cubin


def many_sections(count: int) -> bytes:
    """Return an ELF file whose header has no room for the number of its sections."""
    head = bytearray(cubin()[:64])
    struct.pack_into("<Q", head, 40, 64)
    struct.pack_into("<H", head, 60, 0)
    first = struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, count, 0, 0, 0, 0)
    other = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 64, 0, 0, 0, 1, 0)
    return bytes(head) + first + other * (count - 1)


@pytest.mark.parametrize("code", [cubin(), cubin(b"c" * 13), many_sections(0xFF00)])
def test_what_is_attached_is_read_back_and_leaves_nothing_behind(code: bytes) -> None:
    made = attach_ptx(code, PTX)
    assert attached_ptx(made) == [PTX]
    assert (has_attached_ptx(b"pickled" + made), has_attached_ptx(code)) == (True, False)
    assert detach_ptx(made) == code
    assert canonical(made + b"more memory") == made  # Its last byte is the end of its last section.


def test_the_number_of_sections_may_outgrow_the_header() -> None:
    code = bytearray(many_sections(0xFEFF))
    struct.pack_into("<H", code, 60, 0xFEFF)
    struct.pack_into("<Q", code, 64 + 32, 0)
    made = attach_ptx(bytes(code), PTX)
    assert struct.unpack_from("<H", made, 60) == (0,)
    assert attached_ptx(made) == [PTX]
    assert detach_ptx(made) == code


def test_a_second_text_replaces_the_first() -> None:
    assert attach_ptx(attach_ptx(cubin(), b"first"), PTX) == attach_ptx(cubin(), PTX)


def test_several_texts_are_told_apart() -> None:
    assert attached_ptx(attach_ptx(cubin(), b"one\0\0two\0 \n")) == [b"one", b"two"]


def test_a_cubin_without_the_section_has_no_ptx() -> None:
    assert attached_ptx(cubin()) == []
    assert detach_ptx(cubin()) == cubin()


@pytest.mark.parametrize("other", [b"", PTX, b"\x7fELF", cubin()[:70]])
def test_nothing_is_attached_to_what_is_no_cubin(other: bytes) -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        attach_ptx(other, PTX)
    assert attached_ptx(other) == []
    assert detach_ptx(other) == other


def test_a_text_outside_of_the_file_is_refused() -> None:
    made = bytearray(attach_ptx(cubin(), PTX))
    struct.pack_into("<Q", made, len(made) - 64 + 32, 1 << 40)
    with pytest.raises(ValueError, match="ends at byte"):
        attached_ptx(bytes(made))


@given(st.binary(max_size=200), st.integers(0, 400), st.binary(max_size=16))
def test_any_bytes_are_read_or_refused(ptx: bytes, at: int, noise: bytes) -> None:
    made = attach_ptx(cubin(), ptx)
    damaged = made[:at] + noise + made[at + len(noise) :]
    detach_ptx(damaged)
    with suppress(ValueError):
        attached_ptx(damaged)


def test_the_type_of_the_section_is_one_that_programs_may_define() -> None:
    assert 0x80000000 <= SECTION_TYPE <= 0xFFFFFFFF
