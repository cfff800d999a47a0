"""Fat binaries are read entry by entry, and any bytes are either one or a `ValueError`."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.audit.images import canonical
from preheat.toolchain.binaries.fatbin import FatbinEntry, compiled_on, parse_fatbin, read_entry
from tests.audit.modules import PTX, cubin, entry, fatbin


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for whole in (data, fatbin(data)):
        try:
            entries = parse_fatbin(whole)
        except ValueError:
            continue
        assert all(isinstance(each, FatbinEntry) for each in entries)
        compiled_on(entries, 90)


ENTRIES = st.lists(
    st.tuples(st.sampled_from([1, 2, 8, 16]), st.integers(50, 130), st.binary(max_size=50))
)


@given(ENTRIES, st.data())
def test_entries_are_read_back_and_no_part_of_them_is(
    wanted: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    whole = fatbin(*(entry(kind, arch, content) for kind, arch, content in wanted))
    found = parse_fatbin(whole)
    assert [each.arch for each in found] == [arch for _, arch, _ in wanted]
    assert [each.kind == "PTX" for each in found] == [kind == 1 for kind, _, _ in wanted]
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError, match="short"):
        parse_fatbin(whole[:cut])


@given(st.binary(max_size=300), st.integers(0, 300), st.binary(max_size=9))
def test_the_canonical_bytes_of_anything_begin_it(data: bytes, at: int, noise: bytes) -> None:
    for image in (data, b"\x7fELF" + data, cubin()[:at] + noise + cubin()[at + len(noise) :]):
        assert (image + b"\0").startswith(canonical(image))


def test_what_follows_machine_code_is_not_a_part_of_it() -> None:
    assert canonical(cubin() + b"padding") == cubin()
    assert canonical(PTX + b"\0\0") == PTX


def test_machine_code_that_lacks_its_last_zero_is_completed() -> None:
    assert cubin().endswith(b"\0")
    assert canonical(cubin()[:-1]) == cubin()
    assert canonical(cubin()[:-2]) == cubin()[:-2]


NVCC = shutil.which("nvcc")
BUILDS = {
    "machine code": (["-gencode", "arch=compute_90,code=sm_90"], [("machine code", 90, False)]),
    "PTX": (["-gencode", "arch=compute_90,code=compute_90"], [("PTX", 90, True)]),
    "both": (
        ["--gpu-architecture=compute_90", "--gpu-code=sm_90,compute_90"],
        [("machine code", 90, False), ("PTX", 90, True)],
    ),
    "LTO-IR": (["-rdc=true", "-gencode", "arch=compute_90,code=lto_90"], [("LTO-IR", 90, True)]),
}  # fmt: skip


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("build", BUILDS)
def test_what_nvcc_makes_is_read(build: str, tmp_path: Path) -> None:
    assert NVCC is not None
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }')
    options, wanted = BUILDS[build]
    subprocess.run([NVCC, *options, "-fatbin", "k.cu", "-o", "k.fatbin"], cwd=tmp_path, check=True)
    found = parse_fatbin((tmp_path / "k.fatbin").read_bytes())
    assert sorted((each.kind, each.arch, each.compressed) for each in found) == sorted(wanted)
    assert compiled_on(found, 90) == (build in ("PTX", "LTO-IR"))
    assert compiled_on(found, 120) == (build != "machine code")  # The driver has nothing to compile.
    assert compiled_on(found, 80) is False


def test_code_of_a_specific_architecture_runs_on_no_other() -> None:
    (found,) = parse_fatbin(fatbin(entry(2, 90, flags=0x100011)))
    assert [found.runs_on(capability) for capability in (90, 91, 100)] == [True, False, False]
    (found,) = parse_fatbin(fatbin(entry(2, 80)))
    assert [found.runs_on(capability) for capability in (75, 80, 86, 90)] == [False, True, True, False]


def lz4(*parts: tuple[bytes, int, int]) -> bytes:
    """Return a block of LZ4: in each part, literal bytes, and the distance and length of a copy."""
    made = b""
    for literals, back, count in parts:
        copied = max(count - 4, 0)
        made += bytes([min(len(literals), 15) << 4 | min(copied, 15)]) + _extended(len(literals))
        made += literals + (struct.pack("<H", back) + _extended(copied) if count else b"")
    return made


def _extended(length: int) -> bytes:
    rest = length - 15
    return b"" if rest < 0 else b"\xff" * (rest // 255) + bytes([rest % 255])


def compressed(body: bytes, size: int, flags: int) -> bytes:
    """Return a fat binary with one compressed entry of PTX."""
    made = bytearray(entry(1, 90, body, flags))
    struct.pack_into("<I", made, 16, len(body))
    struct.pack_into("<Q", made, 56, size)
    return fatbin(bytes(made))


LONG = bytes(range(256)) * 3


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([(b"abc", 0, 0)], b"abc"),
        ([(b"ab", 2, 7), (b"c", 0, 0)], b"ababababac"[:9] + b"c"),  # The copy overlaps itself.
        ([(LONG, 768, 300), (b"", 0, 0)], LONG + LONG[:300]),
        ([(b"x", 1, 600), (b"y", 0, 0)], b"x" * 601 + b"y"),
    ],
)
def test_entries_compressed_by_lz4_are_read(parts: list[tuple[bytes, int, int]], wanted: bytes) -> None:
    whole = compressed(lz4(*parts), len(wanted), 0x2011)
    assert read_entry(whole, parse_fatbin(whole)[0]) == wanted


def test_entries_compressed_by_zstandard_are_read() -> None:
    zstandard = pytest.importorskip("zstandard")
    whole = compressed(zstandard.ZstdCompressor().compress(LONG), len(LONG), 0x8011)
    assert read_entry(whole, parse_fatbin(whole)[0]) == LONG


@given(st.binary(max_size=80), st.integers(0, 1 << 30), st.sampled_from([0x2011, 0x8011]))
def test_damaged_content_is_refused(body: bytes, size: int, flags: int) -> None:
    whole = compressed(body, size, flags)
    try:
        found = read_entry(whole, parse_fatbin(whole)[0])
    except ValueError:
        return
    assert len(found) == size


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("mode", ["none", "speed", "size"])
def test_the_ptx_of_nvcc_is_read(mode: str, tmp_path: Path) -> None:
    assert NVCC is not None
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }')
    options = [f"--compress-mode={mode}", "-gencode", "arch=compute_90,code=compute_90"]
    done = subprocess.run([NVCC, *options, "-fatbin", "k.cu", "-o", "k.fatbin"], cwd=tmp_path)
    if done.returncode:
        pytest.skip("this nvcc does not know the option")
    whole = (tmp_path / "k.fatbin").read_bytes()
    (found,) = parse_fatbin(whole)
    assert b".entry k(" in read_entry(whole, found)
