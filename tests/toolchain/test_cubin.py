"""Cubins: kernels, parameters and architecture are those of the program; damaged bytes are refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preheat.build.builder import Builder
from preheat.errors import InputError
from preheat.model.artifact import Artifact
from preheat.model.program import Program
from preheat.toolchain.binaries.cubin import Cubin, read_arch, read_cubin, read_resources

SOURCE = """
struct Pair { double a; char b; };
struct Huge { char bytes[20000]; };
enum class Mode { off, on };
template<class T> __global__ void fill(T *a, T value) { *a = value; }
__constant__ int table[4];
__global__ void nothing() {}
__global__ void mixed(char a, double b, Pair s, const __grid_constant__ Pair t, float *p, short h,
                      Mode m, float2 v, bool c, const int &r) {
    p[0] = a + b + s.a + t.b + h + table[1] + (int)m + v.x + c + r;
}
namespace inner { __global__ void hidden(unsigned long long n, int *p) { *p = n; } }
extern "C" __global__ void plain(int *a, int n, float f, char c) { *a = n + f + c; }
extern "C" __global__ void huge(Huge h, int n, int *p) { p[0] = h.bytes[n]; }
extern "C" __global__ void shared(int *p, int n) {
    __shared__ int row[300];
    volatile int own[64];
    for (int i = 0; i < 64; i++) own[i] = p[i];
    row[threadIdx.x] = own[n] + own[(7 * n) % 64];
    __syncthreads();
    p[threadIdx.x] = row[299 - threadIdx.x];
}
"""
PROGRAM = Program.of(SOURCE, label="kernels.cu", names=["fill<float>"])
ARCHS = ("sm_75", "sm_90", "sm_90a", "sm_100f", "sm_120")


def built(builder: Builder, arch: str) -> Artifact:
    return builder.build(PROGRAM, arch)


class Sample:
    """A cubin whose text is short in a report of hypothesis."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __repr__(self) -> str:
        return "a cubin"


@pytest.fixture(scope="module")
def sample(cubin: bytes) -> Sample:
    return Sample(cubin)


@pytest.fixture(scope="module")
def cubin(shared_builder: Builder) -> bytes:
    """Return a cubin with every kind of parameter."""
    return built(shared_builder, "sm_90").cubin


@pytest.mark.parametrize("arch", ARCHS)
def test_a_cubin_says_what_the_ptx_of_its_program_says(shared_builder: Builder, arch: str) -> None:
    artifact = built(shared_builder, arch)
    found = read_cubin(artifact.cubin, "it")
    assert str(found.arch) == arch
    expected = {entry.name: entry for entry in artifact.entries}
    assert {entry.name for entry in found.entries} == {*expected}
    assert len(expected) == 7
    assert read_arch(artifact.cubin, "it") == found.arch
    for entry in found.entries:
        other = expected[entry.name]
        assert entry.cpp == other.cpp
        assert [each[:2] for each in entry.parameters] == [each[:2] for each in other.parameters]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_cubin_says_which_resources_its_kernels_use(shared_builder: Builder, arch: str) -> None:
    artifact = built(shared_builder, arch)
    found = read_resources(artifact.cubin, "it")
    for entry in artifact.entries:
        assert entry.resources is not None  # The compiler's log says the same, and more.
        assert found[entry.name][:3] == entry.resources[:3]
    assert found["shared"].shared == 1200
    assert found["shared"].stack >= 256


def test_the_types_of_cpp_kernels_are_known(cubin: bytes) -> None:
    entries = {entry.title: entry for entry in read_cubin(cubin, "it").entries}
    assert str(entries["mixed"]) == (
        "mixed(char, double, Pair, Pair, float*, short, Mode, float2, bool, int const&)"
    )
    assert str(entries["fill<float>"]) == "fill<float>(float*, float)"
    assert str(entries["inner::hidden"]) == "inner::hidden(unsigned long long, int*)"
    assert str(entries["nothing"]) == "nothing()"
    assert str(entries["plain"]) == "plain(b64, b32, b32, u8)"
    assert str(entries["huge"]) == "huge(20000 bytes, b32, b64)"


def test_cubins_of_cuda_12_have_another_header(cubin: bytes) -> None:
    old = bytearray(cubin)
    old[7:9] = 0x33, 7
    for flags, arch in ((0x5A055A, "sm_90"), (0x5A0D5A, "sm_90a"), (0x4B054B, "sm_75")):
        struct.pack_into("<I", old, 48, flags)
        assert str(read_cubin(bytes(old), "it").arch) == arch


def test_a_note_of_the_tools_counts_only_where_it_agrees(cubin: bytes) -> None:
    changed = bytearray(cubin)
    struct.pack_into("<I", changed, 48, 0x6006402)
    assert str(read_cubin(bytes(changed), "it").arch) == "sm_100"
    struct.pack_into("<I", changed, 48, 0x600640A)  # as CUDA 12.8 marks sm_100a
    assert str(read_cubin(bytes(changed), "it").arch) == "sm_100a"


OTHERS = {
    "a fat binary": b"\x50\xed\x55\xba\x01\x00\x10\x00",
    "the header of a fat binary": b"\xb1\x43\x62\x46\x01\x00\x00\x00",
    "LTO-IR": b"\xed\x43\x4e\x7f\x01",
    "LLVM bitcode": b"BC\xc0\xde5",
    "a library of objects": b"!<arch>\n",
    "PTX": b"//\n// Generated by NVIDIA NVVM Compiler\n\n.version 9.0\n.target sm_90\n",
}


@pytest.mark.parametrize("format", OTHERS)
def test_other_formats_are_named(format: str) -> None:
    with pytest.raises(InputError, match=f"mine is {format}, not a cubin") as refused:
        read_cubin(OTHERS[format], "mine")
    assert refused.value.hint


def test_source_text_as_bytes_has_a_hint() -> None:
    with pytest.raises(InputError, match="mine is not a cubin") as refused:
        read_cubin(b"\n__global__ void k() {}", "mine")
    assert refused.value.hint == "pass source text as a str: source.decode()"


@pytest.mark.parametrize("data", [b"", b"\x7fEL", b"hello", b"\0" * 100])
def test_bytes_of_nothing_known_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="mine is not a cubin: it begins with"):
        read_cubin(data, "mine")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (16, 1, "mine is relocatable, and cannot be loaded"),
        (16, 3, "mine is an ELF file of type 3"),
        (18, 62, "mine is an ELF file for machine 62, not for a GPU"),
        (58, 40, "its sections have descriptions of 40 bytes"),
        (60, 0xFFF0, "65520 sections do not fit"),
        (62, 0xFFF0, "there is no section 65520"),
    ],
)
def test_headers_that_no_cubin_has_are_refused(cubin: bytes, at: int, value: int, message: str) -> None:
    changed = bytearray(cubin)
    struct.pack_into("<H", changed, at, value)
    with pytest.raises(InputError, match=message):
        read_cubin(bytes(changed), "mine")


def test_a_file_of_32_bits_is_refused(cubin: bytes) -> None:
    with pytest.raises(InputError, match="its header is not one of 64 bits"):
        read_cubin(cubin[:4] + b"\x01" + cubin[5:], "mine")


def test_parameters_that_overlap_are_refused(cubin: bytes) -> None:
    # The second parameter of `plain` has offset 8; it is moved into the first.
    record = struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 1, 8, 0x11F000)
    assert cubin.count(record) >= 1
    moved = struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 1, 4, 0x11F000)
    with pytest.raises(InputError, match=r"the parameters of \S+ overlap"):
        read_cubin(cubin.replace(record, moved), "mine")


def test_every_prefix_is_refused_or_has_all_kernels(cubin: bytes) -> None:
    whole = read_cubin(cubin, "mine")
    for length in range(0, len(cubin), 61):
        with pytest.raises(InputError):
            read_cubin(cubin[:length], "mine")
    assert read_cubin(cubin + b"more", "mine") == whole


def outcome(data: bytes) -> Cubin | None:
    """Return what is read; None for an `InputError`. Every other error fails the test."""
    try:
        return read_cubin(data, "mine")
    except InputError:
        return None


@settings(max_examples=150)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=12))
@example(changes=[(2223, 128)])  # The offset of the sections does not fit into 63 bits.
def test_damaged_bytes_never_raise_anything_else(
    sample: Sample, changes: list[tuple[int, int]]
) -> None:
    changed = bytearray(sample.data)
    for at, value in changes:
        # Most of the changes hit the header and the tables, which are what is read.
        places = (at % 64, at % len(changed), len(changed) - 1 - at % 3000)
        changed[places[at % 3]] = value
    found = outcome(bytes(changed))
    for entry in found.entries if found else ():
        end = 0
        for parameter in entry.parameters:
            assert parameter.offset >= end
            end = parameter.offset + parameter.size
        assert end <= 1 << 15


@settings(max_examples=100)
@given(data=st.binary(max_size=400), first=st.sampled_from([b"", b"\x7fELF\x02\x01\x01A\x08"]))
def test_bytes_of_anything_never_raise_anything_else(data: bytes, first: bytes) -> None:
    outcome(first + data)


def test_a_table_of_many_symbols_takes_bounded_time(cubin: bytes) -> None:
    # Many symbols that all name the same kernel, whose text has no end.
    count = 300_000
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", cubin[:16], 2, 190, 1, 0, 0, 64, 0x6005A04, 64, 0, 0, 64, 3, 0
    )
    at = 64 + 3 * 64
    symbols = struct.pack("<IBBHQQ", 1, 2, 0x10, 1, 0, 0) * count
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, at + len(symbols), 8, 0, 0, 1, 0),
        struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, at, len(symbols), 2, 0, 8, 24),
        struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, at + len(symbols), 8, 0, 0, 1, 0),
    ]
    found = read_cubin(header + b"".join(sections) + symbols + b"\0name\0\0\0", "mine")
    assert [entry.name for entry in found.entries] == ["name"]
    with pytest.raises(InputError, match="outside the table of names"):
        read_cubin(header + b"".join(sections) + symbols + b"xxxxxxxx", "mine")
