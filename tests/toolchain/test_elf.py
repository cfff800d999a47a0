"""The identity of a library, which is read from its ELF file."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from preheat.toolchain.binaries.elf import build_id
from preheat.toolchain.compiler import Toolchain


def note(name: bytes, kind: int, payload: bytes) -> bytes:
    def padded(part: bytes) -> bytes:
        return part + bytes(-len(part) % 4)

    return struct.pack("<III", len(name), len(payload), kind) + padded(name) + padded(payload)


def elf(*segments: tuple[int, bytes]) -> bytes:
    """Return a 64-bit little-endian ELF file of segments, each with its type."""
    head, size = 64, 56
    table, body = b"", b""
    for kind, payload in segments:
        at = head + size * len(segments) + len(body)
        table += struct.pack("<IIQQQQQQ", kind, 4, at, 0, 0, len(payload), len(payload), 4)
        body += payload
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    return (
        ident
        + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, head, 0, 0, head, size, len(segments), 0, 0, 0)
        + table
        + body
    )


GNU, OTHER = note(b"GNU\0", 3, bytes(range(20))), note(b"GNU\0", 1, b"abcd")
LOAD, NOTE = 1, 4


@pytest.mark.parametrize(
    "segments",
    [
        [(NOTE, GNU)],
        [(LOAD, b"code"), (NOTE, GNU)],
        [(NOTE, OTHER + GNU)],
        [(NOTE, OTHER), (LOAD, b"code"), (NOTE, note(b"stapsdt\0", 3, b"no") + GNU)],
        [(NOTE, note(b"odd", 7, b"12345") + GNU)],
    ],
)
def test_the_build_id_is_found_among_other_notes(
    tmp_path: Path, segments: list[tuple[int, bytes]]
) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(elf(*segments))
    assert build_id(path) == bytes(range(20)).hex()


@pytest.mark.parametrize(
    "content",
    [b"", b"not an ELF file", elf(), elf((LOAD, GNU)), elf((NOTE, OTHER)), b"\x7fELF\x01\x01 32 bit"],
)
def test_a_file_without_a_build_id_is_known_by_its_content(tmp_path: Path, content: bytes) -> None:
    one, two, other = (tmp_path / name for name in ("one.so", "two.so", "other.so"))
    for path in (one, two):
        path.write_bytes(content)
    other.write_bytes(content + b"!")
    assert build_id(one).startswith("sha256-")
    assert build_id(one) == build_id(two)
    assert build_id(one) != build_id(other)


def test_a_build_id_says_nothing_of_the_rest_of_the_file(tmp_path: Path) -> None:
    one, two = tmp_path / "one.so", tmp_path / "two.so"
    one.write_bytes(elf((NOTE, GNU), (LOAD, b"1")))
    two.write_bytes(elf((NOTE, GNU), (LOAD, b"2")))
    assert build_id(one) == build_id(two)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        build_id(tmp_path / "gone.so")


def test_the_compilers_have_build_ids_and_readelf_agrees(toolchain: Toolchain) -> None:
    for library in toolchain.located.libraries.values():
        found = build_id(Path(library.path))
        assert len(found) == 40
        assert library.build.split("+")[0] == found
        try:
            reported = subprocess.run(["readelf", "-n", library.path], capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no readelf to ask for a second opinion")
        assert f"Build ID: {found}" in reported.stdout


def test_nvrtc_is_known_by_both_of_its_libraries(toolchain: Toolchain) -> None:
    library = toolchain.located.library("nvrtc")
    own, builtins = map(Path, library.files)
    assert builtins.name.startswith("libnvrtc-builtins.so.")
    assert library.build == f"{build_id(own)}+{build_id(builtins)}"
