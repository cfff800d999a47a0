"""Fat binaries are read entry by entry, and any bytes are either one or a `ValueError`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.audit.fatbin import FatbinEntry, compiled_on, parse_fatbin
from preheat.audit.images import canonical
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
