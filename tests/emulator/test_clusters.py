"""Clusters of thread blocks: the same on every device, and the emulator's own faults and refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.errors import EmulatorFault, LaunchError
from preheat.gpu import Gpu
from tests.emulator.support import Machine, dim3, entry

Array = np.ndarray[Any, Any]

# In every kernel %r1 is the thread, %r2 the rank of the block, %r3 how many blocks the cluster has, %r4
# the block, %r6 four times the thread. %r5 is the shared address of the thread's own word, %d5 the same
# in 64 bits, %d6 its generic address. %d1 is the output, %d2 the thread's own word there.
HEAD = """
.shared .align 16 .b8 cells[512];
ld.param.u64 %d1, [out];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %cluster_ctarank;
mov.u32 %r3, %cluster_nctarank;
mov.u32 %r4, %ctaid.x;
shl.b32 %r6, %r1, 2;
mov.u32 %r5, cells;
add.u32 %r5, %r5, %r6;
cvt.u64.u32 %d5, %r5;
cvta.shared.u64 %d6, %d5;
mov.u32 %r7, %ntid.x;
mad.lo.u32 %r8, %r4, %r7, %r1;
mul.wide.u32 %d2, %r8, 4;
add.u64 %d2, %d1, %d2;
"""
SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
OUT = "st.global.u32 [%d2], %r20;\n"


def kernel(body: str, directives: str = "") -> str:
    return entry(".param .u64 out", f"{HEAD}{body}\nret;", directives=directives)


def launch(gpu: Gpu, text: str, shape: tuple[int, int], **options: Any) -> Array:
    """What a kernel leaves in an output of one word for each thread."""
    out = gpu.zeros(shape, "uint32")
    gpu.kernel(text, "k").launch(out, grid=shape[0], block=shape[1], **options)
    return out.numpy()


# Registers

AXES = "xyz"
NAMES = [
    *(f"%{name}.{axis}" for name in ("ctaid", "clusterid", "nclusterid", "cluster_ctaid",
                                     "cluster_nctaid") for axis in AXES),
    "%cluster_ctarank", "%cluster_nctarank",
]  # fmt: skip
READS = "".join(
    f"mov.u32 %r1, {name}; st.global.u32 [%d1+{4 * i}], %r1;\n" for i, name in enumerate(NAMES)
)
REGISTERS = f"""
ld.param.u64 %d1, [out];
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %ctaid.z;
mov.u32 %r4, %nctaid.x; mov.u32 %r5, %nctaid.y;
mad.lo.u32 %r3, %r3, %r5, %r2; mad.lo.u32 %r3, %r3, %r4, %r1;
mul.lo.u32 %r3, %r3, {4 * len(NAMES) + 4};
cvt.u64.u32 %d2, %r3; add.u64 %d1, %d1, %d2;
{READS}
mov.pred %p1, %is_explicit_cluster; selp.u32 %r1, 1, 0, %p1;
st.global.u32 [%d1+{4 * len(NAMES)}], %r1;
ret;
"""


def registers(grid: tuple[int, ...], cluster: tuple[int, ...] | None) -> Array:
    """What the registers hold, for every block in the order of the grid."""
    size, count = dim3(cluster or 1), dim3(grid)
    rows = []
    for z, y, x in product(*(range(extent) for extent in reversed(count))):
        block = (x, y, z)
        inside = [at % extent for at, extent in zip(block, size, strict=True)]
        rank = inside[0] + size[0] * (inside[1] + size[1] * inside[2])
        of_cluster = [at // extent for at, extent in zip(block, size, strict=True)]
        clusters = [whole // extent for whole, extent in zip(count, size, strict=True)]
        rows.append([*block, *of_cluster, *clusters, *inside, *size, rank, np.prod(size),
                     cluster is not None])  # fmt: skip
    return np.array(rows, np.uint32)


@pytest.mark.parametrize("fixed", [False, True], ids=["launch", "directive"])
@pytest.mark.parametrize(
    ("grid", "cluster"),
    [
        ((6,), (2,)),
        ((6,), (3,)),
        ((5,), (1,)),
        ((16,), (16,)),
        ((4, 6), (2, 2)),
        ((3, 4), (1, 4)),
        ((4, 6, 4), (2, 1, 2)),
        ((2, 6, 4), (1, 3, 2)),
        ((4, 2, 6), (2, 2, 2)),
        ((3, 2), None),
    ],
)
def test_registers_tell_the_place_in_the_cluster_and_in_the_grid(
    device: Gpu, grid: tuple[int, ...], cluster: tuple[int, ...] | None, fixed: bool
) -> None:
    directive = f".explicitcluster .reqnctapercluster {', '.join(map(str, cluster or ()))}"
    text = entry(".param .u64 out", REGISTERS, directives=directive if fixed and cluster else "")
    out = device.zeros((int(np.prod(grid)), len(NAMES) + 1), "uint32")
    device.kernel(text, "k").launch(out, grid=grid, block=3, cluster=None if fixed else cluster)
    np.testing.assert_array_equal(out.numpy(), registers(grid, cluster))


# Reading from other blocks. Every block writes its words, then adds up what it finds in each block of
# its cluster: %r9 is the rank that it reads from, %r20 the sum.

ADD = "add.u32 %r20, %r20, %r11;"
MAP = "mapa.shared::cluster.u32 %r10, %r5, %r9;"
FOURS = "and.b32 %r12, %r5, 0xFFFFFFF0; mapa.shared::cluster.u32 %r10, %r12, %r9;"
LOADS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "u32": (f"{MAP} ld.shared::cluster.u32 %r11, [%r10]; {ADD}", lambda v: v),
    "f32": (
        f"{MAP} ld.shared::cluster.f32 %f1, [%r10]; mov.b32 %r11, %f1; {ADD}",
        lambda v: v,
    ),
    "acquire": (f"{MAP} ld.acquire.cluster.shared::cluster.b32 %r11, [%r10]; {ADD}", lambda v: v),
    "offset": (
        f"{MAP} add.u32 %r10, %r10, 64; ld.shared::cluster.u32 %r11, [%r10+-64]; {ADD}",
        lambda v: v,
    ),
    "u16": (
        f"{MAP} ld.shared::cluster.u16 %h1, [%r10+2]; cvt.u32.u16 %r11, %h1; {ADD}",
        lambda v: v >> 16,
    ),
    "v2": (
        "and.b32 %r12, %r5, 0xFFFFFFF8; mapa.shared::cluster.u32 %r10, %r12, %r9;"
        f"ld.shared::cluster.v2.f32 {{%f1, %f2}}, [%r10]; mov.b32 %r11, %f1; {ADD}"
        f"mov.b32 %r11, %f2; shl.b32 %r11, %r11, 1; {ADD}",
        lambda v: np.repeat(v[0::2] + 2 * v[1::2], 2),
    ),
    "v4": (
        f"{FOURS} ld.shared::cluster.v4.b32 {{%r11, %r13, %r14, %r15}}, [%r10]; {ADD}"
        "sub.u32 %r13, %r13, %r14; mad.lo.u32 %r20, %r15, 5, %r20; add.u32 %r20, %r20, %r13;",
        lambda v: np.repeat(v[0::4] + v[1::4] - v[2::4] + 5 * v[3::4], 4),
    ),
    "64 bits": (
        f"mapa.shared::cluster.u64 %d7, %d5, %r9; ld.shared::cluster.u32 %r11, [%d7]; {ADD}",
        lambda v: v,
    ),
    "a variable": (
        "mapa.shared::cluster.u32 %r10, cells, %r9; add.u32 %r10, %r10, %r6;"
        f"ld.shared::cluster.u32 %r11, [%r10]; {ADD}",
        lambda v: v,
    ),
    "a variable and an offset, the same for all threads": (
        f"mapa.shared::cluster.u32 %r10, cells+8, %r9; ld.shared::cluster.u32 %r11, [%r10]; {ADD}",
        lambda v: np.repeat(v[2], len(v)),
    ),
    "generic": (f"mapa.u64 %d7, %d6, %r9; ld.u32 %r11, [%d7]; {ADD}", lambda v: v),
    "window to generic": (
        f"{MAP} cvt.u64.u32 %d7, %r10; cvta.shared::cluster.u64 %d7, %d7; ld.u32 %r11, [%d7]; {ADD}",
        lambda v: v,
    ),
    "generic to window": (
        "mapa.u64 %d7, %d6, %r9; cvta.to.shared::cluster.u64 %d7, %d7;"
        f"ld.shared::cluster.u32 %r11, [%d7]; {ADD}",
        lambda v: v,
    ),
    "mapped twice": (
        f"mapa.shared::cluster.u32 %r10, %r5, %r2; mapa.shared::cluster.u32 %r10, %r10, %r9;"
        f"ld.shared::cluster.u32 %r11, [%r10]; {ADD}",
        lambda v: v,
    ),
    "atom": (f"{MAP} atom.shared::cluster.add.u32 %r11, [%r10], 0; {ADD}", lambda v: v),
    "atom generic": (f"mapa.u64 %d7, %d6, %r9; atom.or.b32 %r11, [%d7], 0; {ADD}", lambda v: v),
}


def summing(load: str) -> str:
    return kernel(f"""
    mad.lo.u32 %r20, %r8, 0x10003, 7;
    st.shared.u32 [%r5], %r20;
    {SYNC}
    mov.u32 %r20, 0;
    mov.u32 %r9, 0;
    LOOP: {load}
    add.u32 %r9, %r9, 1;
    setp.lt.u32 %p1, %r9, %r3;
    @%p1 bra LOOP;
    {OUT}
    {SYNC}
    """)


def written(blocks: int, threads: int) -> Array:
    """What each thread wrote."""
    return (np.arange(blocks * threads, dtype=np.uint32) * 0x10003 + 7).reshape(blocks, threads)


@pytest.mark.parametrize("form", LOADS)
def test_a_block_reads_the_shared_memory_of_every_block_of_its_cluster(device: Gpu, form: str) -> None:
    load, seen = LOADS[form]
    found = launch(device, summing(load), (12, 64), cluster=4)
    one = np.array([seen(row) for row in written(12, 64)]).reshape(3, 4, 64).sum(1, np.uint32)
    np.testing.assert_array_equal(found, np.repeat(one, 4, 0))


@pytest.mark.parametrize(
    ("blocks", "threads", "cluster"),
    [(1, 32, 1), (3, 128, 1), (2, 1, 2), (8, 37, 8), (16, 128, 16), (640, 96, 4)],
)
def test_clusters_of_one_launch_are_apart(device: Gpu, blocks: int, threads: int, cluster: int) -> None:
    """The last has more blocks than a wave of the emulator holds."""
    found = launch(device, summing(LOADS["u32"][0]), (blocks, threads), cluster=cluster)
    each = written(blocks, threads).reshape(-1, cluster, threads).sum(1, np.uint32)
    np.testing.assert_array_equal(found, np.repeat(each, cluster, 0))


def test_blocks_of_a_cluster_over_three_axes_are_those_that_the_registers_name(device: Gpu) -> None:
    grid, cluster, threads = (4, 2, 4), (2, 2, 2), 32
    text = summing(LOADS["generic"][0]).replace(
        "mov.u32 %r4, %ctaid.x;",
        "mov.u32 %r4, %ctaid.x; mov.u32 %r9, %ctaid.y; mad.lo.u32 %r4, %r9, 4, %r4;"
        "mov.u32 %r9, %ctaid.z; mad.lo.u32 %r4, %r9, 8, %r4;",
    )
    out = device.zeros((32, threads), "uint32")
    device.kernel(text, "k").launch(out, grid=grid, block=threads, cluster=cluster)
    values = written(32, threads).reshape(2, 2, 1, 2, 2, 2, threads)  # z, in z, y, in y, x, in x
    sums = np.broadcast_to(values.sum((1, 3, 5), np.uint32, keepdims=True), values.shape)
    np.testing.assert_array_equal(out.numpy(), sums.reshape(32, threads))


# Writing into other blocks. Every block writes into the next one; then each block reads its own words.

NEXT = "add.u32 %r9, %r2, 1; rem.u32 %r9, %r9, %r3;"
STORES = {
    "u32": f"{MAP} st.shared::cluster.u32 [%r10], %r20;",
    "f32": f"{MAP} mov.b32 %f1, %r20; st.shared::cluster.f32 [%r10], %f1;",
    "release": f"{MAP} st.release.cluster.shared::cluster.b32 [%r10], %r20;",
    "generic": "mapa.u64 %d7, %d6, %r9; st.u32 [%d7], %r20;",
    "64 bits": "mapa.shared::cluster.u64 %d7, %d5, %r9; st.shared::cluster.u32 [%d7], %r20;",
    "bytes": f"""{MAP}
        cvt.u16.u32 %h1, %r20; st.shared::cluster.u16 [%r10], %h1;
        shr.u32 %r11, %r20, 16; cvt.u16.u32 %h1, %r11; st.shared::cluster.u8 [%r10+2], %h1;
        shr.u16 %h1, %h1, 8; st.shared::cluster.u8 [%r10+3], %h1;""",
    "v4 of one thread in four": f"""{FOURS}
        and.b32 %r11, %r1, 3; setp.eq.u32 %p1, %r11, 0;
        add.u32 %r12, %r20, 0x10003; add.u32 %r13, %r12, 0x10003; add.u32 %r14, %r13, 0x10003;
        @%p1 st.shared::cluster.v4.u32 [%r10], {{%r20, %r12, %r13, %r14}};""",
    "exchange": f"{MAP} atom.shared::cluster.exch.b32 %r11, [%r10], %r20;",
    "red": f"{MAP} red.shared::cluster.add.u32 [%r10], %r20;",
    "red generic": "mapa.u64 %d7, %d6, %r9; red.add.u32 [%d7], %r20;",
    "red at cluster scope": f"{MAP} red.relaxed.cluster.shared::cluster.or.b32 [%r10], %r20;",
    "compare and swap": f"{MAP} atom.shared::cluster.cas.b32 %r11, [%r10], 0, %r20;",
}


@pytest.mark.parametrize("form", STORES)
def test_a_block_writes_into_the_next_block_of_its_cluster(device: Gpu, form: str) -> None:
    text = kernel(f"""
    st.shared.u32 [%r5], 0;
    {SYNC}
    mad.lo.u32 %r20, %r8, 0x10003, 7;
    {NEXT}
    {STORES[form]}
    {SYNC}
    ld.shared.u32 %r20, [%r5];
    {OUT}
    """)
    found = launch(device, text, (12, 64), cluster=4)
    turned = np.roll(written(12, 64).reshape(3, 4, 64), 1, axis=1)
    np.testing.assert_array_equal(found, turned.reshape(12, 64))


# The block of an address: in each kernel %r9 is the rank that an address is mapped to.

WHOSE = {
    "window": (f"{MAP} getctarank.shared::cluster.u32 %r20, %r10;", "mapped"),
    "64 bits": (
        "mapa.shared::cluster.u64 %d7, %d5, %r9; getctarank.shared::cluster.u64 %r20, %d7;",
        "mapped",
    ),
    "generic": ("mapa.u64 %d7, %d6, %r9; getctarank.u64 %r20, %d7;", "mapped"),
    "own": ("getctarank.shared::cluster.u32 %r20, %r5;", "own"),
    "own variable": ("getctarank.shared::cluster.u32 %r20, cells;", "own"),
    "own generic": ("getctarank.u64 %r20, %d6;", "own"),
}


@pytest.mark.parametrize("form", WHOSE)
def test_an_address_tells_the_rank_of_its_block(device: Gpu, form: str) -> None:
    code, whose = WHOSE[form]
    found = launch(device, kernel(f"{NEXT} {code} {OUT} {SYNC}"), (8, 32), cluster=4)
    ranks = (np.arange(8) + (whose == "mapped")) % 4
    np.testing.assert_array_equal(found, np.repeat(ranks[:, None], 32, 1))


SPACES = {"shared": 1, "shared::cta": 1, "shared::cluster": 7, "global": 0, "local": 0}


@pytest.mark.parametrize("space", SPACES)
def test_an_address_of_another_block_is_shared_by_the_cluster_alone(device: Gpu, space: str) -> None:
    """A bit each: its own address, that of the next block, its own address mapped to its own rank."""
    text = kernel(f"""
    {NEXT}
    mapa.u64 %d7, %d6, %r9; mapa.u64 %d8, %d6, %r2;
    mov.u32 %r20, 0;
    isspacep.{space} %p1, %d6; @%p1 or.b32 %r20, %r20, 1;
    isspacep.{space} %p1, %d7; @%p1 or.b32 %r20, %r20, 2;
    isspacep.{space} %p1, %d8; @%p1 or.b32 %r20, %r20, 4;
    {OUT} {SYNC}
    """)
    expected = SPACES[space] | (4 if SPACES[space] else 0)
    assert (launch(device, text, (4, 32), cluster=2) == expected).all()


@pytest.mark.parametrize(
    "load",
    [
        "ld.shared::cluster.u32 %r20, [%r5];",
        "ld.u32 %r20, [%d6];",
        f"mov.u32 %r9, %r2; {MAP} ld.shared::cta.u32 %r20, [%r10];",
        "mapa.u64 %d7, %d6, %r2; ld.u32 %r20, [%d7];",
    ],
)
def test_an_address_of_its_own_block_means_its_own_block(device: Gpu, load: str) -> None:
    text = kernel(f"st.shared.u32 [%r5], %r8; {SYNC} {load} {OUT} {SYNC}")
    found = launch(device, text, (6, 32), cluster=2)
    np.testing.assert_array_equal(found, np.arange(192).reshape(6, 32))


# The barrier

ARRIVALS = ["", ".release", ".relaxed", ".aligned", ".release.aligned", ".relaxed.aligned"]
WAITS = ["", ".acquire", ".aligned", ".acquire.aligned"]


@pytest.mark.parametrize(("arrive", "wait"), [(a, WAITS[i % 4]) for i, a in enumerate(ARRIVALS)])
def test_threads_work_between_arriving_and_waiting(device: Gpu, arrive: str, wait: str) -> None:
    """Words go around the ring five times; what each thread does in between is its own affair."""
    text = kernel(f"""
    mov.u32 %r20, %r8; mov.u32 %r18, 0; mov.u32 %r19, 0;
    {NEXT} {MAP}
    barrier.cluster.arrive; barrier.cluster.wait;
    LOOP: shl.b32 %r12, %r18, 31; shr.u32 %r12, %r12, 23;
    add.u32 %r13, %r10, %r12; add.u32 %r14, %r5, %r12;
    st.shared::cluster.u32 [%r13], %r20;
    fence.acq_rel.cluster;
    barrier.cluster.arrive{arrive};
    add.u32 %r19, %r19, %r18;
    barrier.cluster.wait{wait};
    fence.acq_rel.cluster;
    ld.shared.u32 %r20, [%r14];
    add.u32 %r18, %r18, 1;
    setp.lt.u32 %p1, %r18, 5;
    @%p1 bra LOOP;
    add.u32 %r20, %r20, %r19;
    {OUT}
    """)
    found = launch(device, text, (16, 64), cluster=8)
    turned = np.roll(np.arange(16 * 64).reshape(2, 8, 64), 5, axis=1).reshape(16, 64)
    np.testing.assert_array_equal(found, turned + 10)


def test_blocks_arrive_and_wait_at_different_instructions(device: Gpu) -> None:
    text = kernel(f"""
    st.shared.u32 [%r5], %r8;
    and.b32 %r12, %r2, 1; setp.eq.u32 %p1, %r12, 0;
    shr.u32 %r13, %r1, 5; setp.eq.u32 %p2, %r13, 1;
    @%p1 bra EVEN;
    @%p2 bra LATE;
    {SYNC} bra JOIN;
    LATE: barrier.cluster.arrive; mov.u32 %r14, 1; barrier.cluster.wait; bra JOIN;
    EVEN: {SYNC}
    JOIN: {NEXT} {MAP} ld.shared::cluster.u32 %r20, [%r10];
    {OUT} {SYNC}
    """)
    found = launch(device, text, (4, 64), cluster=2)
    np.testing.assert_array_equal(found, np.arange(256).reshape(4, 64)[[1, 0, 3, 2]])


def test_threads_that_have_exited_are_not_waited_for(device: Gpu) -> None:
    """A whole block, a warp of another, and a thread of a third end before they arrive."""
    text = kernel(f"""
    mov.u32 %r20, 1;
    setp.eq.u32 %p1, %r2, 1; @%p1 bra END;
    setp.eq.u32 %p1, %r2, 2; setp.lt.and.u32 %p2, %r1, 32, %p1; @%p2 bra END;
    setp.eq.u32 %p1, %r2, 3; setp.eq.and.u32 %p2, %r1, 5, %p1; @%p2 bra END;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r20, 2;
    setp.eq.u32 %p1, %r2, 0; setp.lt.and.u32 %p2, %r1, 32, %p1; @%p2 bra END;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r20, 3;
    END: {OUT}
    """)
    expected = np.full((2, 4, 64), 3)
    expected[:, 1] = expected[:, 2, :32] = expected[:, 3, 5] = 1
    expected[:, 0, :32] = 2
    found = launch(device, text, (8, 64), cluster=4)
    np.testing.assert_array_equal(found, expected.reshape(8, 64))


def test_a_block_without_a_cluster_is_a_cluster_of_its_own(device: Gpu) -> None:
    found = launch(device, summing(LOADS["generic"][0]), (5, 64))
    np.testing.assert_array_equal(found, written(5, 64))


MBARRIERS = """
.shared .align 8 .b8 bar[8];
.shared .align 16 .b8 source[128];
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [bar], 33;
@%p1 fence.mbarrier_init.release.cluster;
mov.u32 %r11, source; add.u32 %r11, %r11, %r6; st.shared.u32 [%r11], %r8;
fence.proxy.async;
"""
REMOTE_ARRIVAL = f"""
{MBARRIERS}
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 128;
{SYNC}
{NEXT}
mapa.shared::cluster.u32 %r12, bar, %r9;
mapa.shared::cluster.u32 %r13, cells, %r9;
mov.u32 %r14, source;
@%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r13], [%r14], 128, [%r12];
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r12];
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [bar], 0;
@!%p2 bra WAIT;
ld.shared.u32 %r20, [%r5];
{OUT} {SYNC}
"""


def test_threads_and_copies_arrive_on_an_mbarrier_of_the_next_block(device: Gpu) -> None:
    found = launch(device, kernel(REMOTE_ARRIVAL), (8, 32), cluster=4)
    turned = np.roll(np.arange(256).reshape(2, 4, 32), 1, axis=1)
    np.testing.assert_array_equal(found, turned.reshape(8, 32))


# CUDA C++

BY_HAND = """
__device__ float across(float value) {  // the sum over a block, in every thread of it
    __shared__ float parts[32];
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < blockDim.x / 32; i++) sum += parts[i];
    __syncthreads();
    return sum;
}

template <class T, int LANES, int C>
__global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(LANES, 1024 / LANES)
by_hand(const T* x, T* y, int n) {
    __shared__ float2 parts;
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    const T* row = x + blockIdx.x / C * n;
    float sum = 0, square = 0;
    for (int i = rank * LANES + threadIdx.x; i < n; i += C * LANES) {
        sum += float(row[i]);
        square += float(row[i]) * float(row[i]);
    }
    sum = across(sum), square = across(square);
    if (threadIdx.x == 0) parts = make_float2(sum, square);
    asm volatile("barrier.cluster.arrive.release.aligned;\\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
    sum = square = 0;
    unsigned own = __cvta_generic_to_shared(&parts);
    for (unsigned r = 0; r < size; r++) {
        unsigned at;
        float a, b;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(own), "r"(r));
        asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(at));
        sum += a, square += b;
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    for (int i = rank * LANES + threadIdx.x; i < n; i += C * LANES)
        y[blockIdx.x / C * n + i] = float(row[i]) * sum + square;
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

"""
SOURCE = """
#include <cooperative_groups.h>
#include <cuda/ptx>
namespace cg = cooperative_groups;

extern "C" __global__ void histogram(const int* x, int n, int* out) {
    extern __shared__ int bins[];
    cg::cluster_group cluster = cg::this_cluster();
    for (int i = threadIdx.x; i < 64; i += blockDim.x) bins[i] = 0;
    cluster.sync();
    for (int i = cluster.thread_rank(); i < n; i += cluster.num_threads()) {
        int* owner = cluster.map_shared_rank(bins, x[i] / 64);
        atomicAdd(owner + x[i] % 64, 1);
    }
    cluster.sync();
    int row = cg::this_grid().cluster_rank() * cluster.num_blocks() + cluster.block_rank();
    for (int i = threadIdx.x; i < 64; i += blockDim.x) out[row * 64 + i] = bins[i];
}

extern "C" __global__ void asked(unsigned* out) {
    __shared__ int word;
    cg::cluster_group cluster = cg::this_cluster();
    auto token = cluster.barrier_arrive();
    cg::grid_group grid = cg::this_grid();
    unsigned rank = cluster.block_rank(), last = cluster.num_blocks() - 1;
    unsigned block = grid.block_rank();
    int* other = cluster.map_shared_rank(&word, last - rank);
    unsigned row[] = {rank, cluster.num_blocks(), cluster.query_shared_rank(other),
                      cluster.query_shared_rank(&word),
                      cluster.block_index().x, cluster.block_index().y,
                      cluster.dim_blocks().x, cluster.dim_blocks().y, cluster.num_threads(),
                      unsigned(grid.cluster_rank()), unsigned(grid.num_clusters()),
                      grid.cluster_index().x, grid.cluster_index().y, grid.dim_clusters().y,
                      __isClusterShared(other), __clusterDimIsSpecified(),
                      cuda::ptx::getctarank(cuda::ptx::space_cluster, other)};
    for (int i = 0; i < 17; i++) out[block * 17 + i] = row[i];
    cluster.barrier_wait(std::move(token));
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) ping(int* out) {
    using namespace cuda::ptx;
    __shared__ alignas(8) uint64_t bar;
    __shared__ int word;
    unsigned rank = get_sreg_cluster_ctarank();
    if (threadIdx.x == 0) mbarrier_init(&bar, 1);
    fence_mbarrier_init(sem_release, scope_cluster);
    barrier_cluster_arrive(sem_relaxed);
    barrier_cluster_wait(sem_acquire);
    int* there = cg::this_cluster().map_shared_rank(&word, rank ^ 1);
    uint64_t* remote = cg::this_cluster().map_shared_rank(&bar, rank ^ 1);
    if (threadIdx.x == 0) {
        *there = 100 + blockIdx.x;
        mbarrier_arrive(sem_release, scope_cluster, space_cluster, remote);
    }
    while (!mbarrier_try_wait_parity(sem_acquire, scope_cluster, &bar, 0)) {}
    out[blockIdx.x * blockDim.x + threadIdx.x] = word;
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

extern "C" __global__ void meeting(int* x, int* out) {
    x[blockIdx.x] = cg::this_cluster().block_rank();
    cg::this_grid().sync();
    int sum = 0;
    for (int i = 0; i < gridDim.x; i++) sum += x[i];
    out[blockIdx.x] = sum;
}
"""


@pytest.fixture(params=["sm_90", "sm_100", pytest.param("cuda", marks=pytest.mark.gpu)])
def compiled(request: pytest.FixtureRequest, open_device: Callable[..., Gpu], compiler: Builder) -> Gpu:
    """Every device, and the emulator for both dialects of PTX, with compiled code that is kept."""
    if request.param == "cuda":
        return open_device("cuda", builder=compiler)
    return open_device("emulator", builder=compiler, arch=request.param)


@pytest.mark.parametrize(("lanes", "cluster"), [(128, 2), (64, 8)])
def test_a_row_is_summed_by_a_cluster(compiled: Gpu, lanes: int, cluster: int) -> None:
    x = np.random.default_rng(1).integers(-4, 5, (5, 700)).astype("float32")
    y = compiled.zeros(x.shape)
    by_hand = compiled.kernel(BY_HAND, f"by_hand<float, {lanes}, {cluster}>")
    by_hand[5 * cluster, lanes](compiled.array(x), y, 700)
    expected = x * x.sum(1, keepdims=True) + (x * x).sum(1, keepdims=True)
    np.testing.assert_array_equal(y.numpy(), expected)  # small integers: exact in any order


def test_a_cluster_counts_in_the_memory_of_all_its_blocks(compiled: Gpu) -> None:
    x = np.random.default_rng(2).integers(0, 256, 5000).astype("int32")
    out = compiled.zeros((2, 256), "int32")
    histogram = compiled.kernel(SOURCE, "histogram")
    histogram.launch(compiled.array(x), 5000, out, grid=8, block=96, cluster=4, shared=256)
    np.testing.assert_array_equal(out.numpy(), np.tile(np.bincount(x, minlength=256), (2, 1)))


def test_a_cluster_group_knows_what_the_registers_say(compiled: Gpu) -> None:
    out = compiled.zeros((24, 17), "uint32")
    compiled.kernel(SOURCE, "asked").launch(out, grid=(4, 6), block=32, cluster=(2, 3))
    rows = []
    for y, x in product(range(6), range(4)):
        rank = y % 3 * 2 + x % 2
        rows.append([rank, 6, 5 - rank, rank, x % 2, y % 3, 2, 3, 192, y // 3 * 2 + x // 2, 4,
                     x // 2, y // 3, 2, 1, 1, 5 - rank])  # fmt: skip
    np.testing.assert_array_equal(out.numpy(), rows)


def test_two_blocks_hand_words_to_each_other_through_mbarriers(compiled: Gpu) -> None:
    out = compiled.zeros((6, 32), "int32")
    compiled.kernel(SOURCE, "ping")[6, 32](out)
    np.testing.assert_array_equal(out.numpy()[:, 0], 100 + np.array([1, 0, 3, 2, 5, 4]))
    assert (out.numpy() == out.numpy()[:, :1]).all()


def test_a_cooperative_grid_of_clusters_meets(
    open_device: Callable[..., Gpu], compiler: Builder
) -> None:
    gpu = open_device("emulator", builder=compiler)
    x, out = gpu.zeros(8, "int32"), gpu.zeros(8, "int32")
    gpu.kernel(SOURCE, "meeting").launch(x, out, grid=8, block=32, cluster=4, cooperative=True)
    assert (out.numpy() == 12).all()


# Launches that cannot be

FIXED = ".explicitcluster .reqnctapercluster 2, 2"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "part of a cluster": (
        FIXED, {"grid": (4, 3)}, "grid (4, 3, 1) is not a multiple of the cluster (2, 2, 1)",
    ),
    "another cluster": (
        FIXED, {"grid": (4, 4), "cluster": 4},
        "cluster (4, 1, 1), but __cluster_dims__ fixes it to (2, 2, 1)",
    ),
    "no cluster": (".explicitcluster", {"grid": 4}, "so every launch needs cluster="),
    "part of a cluster of a launch": ("", {"grid": 6, "cluster": 4}, "not a multiple of the cluster"),
    "17 blocks": ("", {"grid": 17, "cluster": 17}, "a cluster of 17 blocks; the device allows 16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_launch_with_a_cluster_that_cannot_be_is_refused(device: Gpu, case: str) -> None:
    directives, options, message = REFUSED[case]
    refused = device.kernel(kernel(OUT, directives), "k")
    with pytest.raises(LaunchError) as caught:
        refused.launch(device.zeros(1024, "uint32"), block=32, **options)
    assert message in str(caught.value)


ALLOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "the cluster that is fixed": (FIXED, {"cluster": (2, 2)}),
    "a cluster where one is needed": (".explicitcluster", {"cluster": (1, 2)}),
    "as many blocks as are allowed": (".maxclusterrank 4", {"cluster": 4}),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_a_launch_may_say_what_the_kernel_says(device: Gpu, case: str) -> None:
    directives, options = ALLOWED[case]
    made = device.kernel(kernel(f"mov.u32 %r20, %r3; {OUT}", directives), "k")
    out = device.zeros((4, 32), "uint32")
    made.launch(out, grid=(4, 4), block=32, **options)
    assert (out.numpy() == np.prod(options["cluster"])).all()


def test_the_attributes_of_a_kernel_have_its_cluster(device: Gpu) -> None:
    texts = (kernel(OUT, FIXED), kernel(OUT, ".explicitcluster"), kernel(OUT))
    kernels = [device.kernel(text, "k") for text in texts]
    assert [made.attributes.cluster for made in kernels] == [(2, 2, 1), (0, 0, 0), None]
    assert all(made.occupancy(64).blocks > 0 for made in kernels)
    assert all(made.max_potential_block_size(limit=64).block == 64 for made in kernels)


@pytest.mark.parametrize(
    ("directives", "message"),
    [
        (".maxclusterrank 4", "a cluster of 8 blocks; the most of k is 4"),
        (
            ".blocksareclusters .reqntid 32, 1, 1 .reqnctapercluster 8, 1, 1",
            "does not support __block_",
        ),
    ],
)
def test_the_emulator_refuses_clusters_that_the_kernel_excludes(directives: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Machine(kernel(OUT, directives))(8, 32, np.zeros(256, np.uint32), cluster=8)


def test_there_are_no_clusters_below_sm_90(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator", arch="sm_80")
    text = ".version 8.5\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }"
    with pytest.raises(LaunchError, match="a cluster of 2 blocks; the device allows 0"):
        gpu.kernel(text, "k").launch(grid=2, block=1, cluster=2)


# Faults

BEYOND = "mov.u32 %r9, {}; {} ld.shared::cluster.u32 %r20, [%r10];"
FAULTS = {
    "a block that has exited": (
        f"setp.eq.u32 %p1, %r2, 3; @%p1 bra END; {SYNC} mov.u32 %r9, 3; {MAP}"
        "ld.shared::cluster.u32 %r20, [%r10]; END:",
        "reads 4 bytes at shared address 0x0 of block 3 of its cluster, which has exited",
    ),
    "a write to a block that has exited": (
        f"setp.eq.u32 %p1, %r2, 0; @%p1 bra END; {SYNC} mov.u32 %r9, 0;"
        "mapa.u64 %d7, %d6, %r9; st.u64 [%d7+8], %d1; END:",
        "writes 8 bytes at shared address 0x8 of block 0 of its cluster, which has exited",
    ),
    "one rank too many": (
        BEYOND.format(4, MAP),
        "reads 4 bytes at shared address 0x0 of block 4 of its cluster, which has 4 blocks",
    ),
    "a rank below zero": (BEYOND.format(-1, MAP), "of block 126 or above of its cluster, which has 4"),
    "a generic address of no block": (
        "mov.u32 %r9, 9; mapa.u64 %d7, %d6, %r9; red.add.u32 [%d7], 1;",
        "writes 4 bytes at shared address 0x0 of block 9 of its cluster, which has 4 blocks",
    ),
    "past the end of another block": (
        BEYOND.format(1, MAP).replace("[%r10]", "[%r10+512]"),
        "reads 4 bytes at shared address 0x200 of block 1 of its cluster; there are 512 bytes of it",
    ),
    "before the beginning of another block": (
        "mov.u32 %r9, 2; mapa.shared::cluster.u32 %r10, cells, %r9;"
        "st.shared::cluster.u32 [%r10+-4], 1;",
        "writes 4 bytes at shared address -0x4 of block 2 of its cluster; there are 512 bytes of it",
    ),
    "not aligned": (
        BEYOND.format(1, MAP).replace("[%r10]", "[%r10+2]"), "which is not a multiple of 4",
    ),
    "an instruction for its own block": (
        f"mov.u32 %r9, 2; {MAP} ld.shared.u32 %r20, [%r10];",
        "address 0x0 of block 2 of its cluster, and the instruction reaches its own block alone",
    ),
    "a shared address of nothing": (
        "mov.u32 %r10, 0x50000000; ld.shared.u32 %r20, [%r10];",
        "4 bytes at shared address 0x50000000; there are 512",
    ),
    "a global address mapped": (
        "mapa.u64 %d7, %d1, %r2;", "as an address of shared memory, where it is not",
    ),
    "the rank of a global address": (
        "getctarank.u64 %r20, %d1;", "as an address of shared memory, where it is not",
    ),
    "two arrivals": (
        "setp.eq.u32 %p1, %r2, 2; @%p1 barrier.cluster.arrive; barrier.cluster.arrive;",
        "arrives twice in one phase of the barrier of its cluster",
    ),
    "a wait without an arrival": (
        "barrier.cluster.wait;", "waits at the barrier of its cluster without having arrived",
    ),
    "two waits for one arrival": (
        f"{SYNC} barrier.cluster.wait;", "waits at the barrier of its cluster without having arrived",
    ),
    "an mbarrier of another block that is not initialised": (
        "mov.u32 %r9, 1; mapa.shared::cluster.u32 %r10, cells, %r9;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];",
        "uses an mbarrier at shared address 0x0 of block 1 of its cluster that is not initialised",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_what_a_cluster_must_not_do_is_a_fault(case: str) -> None:
    body, message = FAULTS[case]
    with pytest.raises(EmulatorFault) as caught:
        Machine(kernel(body))(8, 32, np.zeros(256, np.uint32), cluster=4)
    assert message in str(caught.value)


def test_a_fault_names_the_block_of_the_grid(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    text = kernel(f"""
    mov.u32 %r12, %ctaid.y; mov.u32 %r13, %ctaid.z; mad.lo.u32 %r12, %r13, 10, %r12;
    setp.eq.u32 %p1, %r12, 35; setp.eq.and.u32 %p2, %r4, 1, %p1; setp.eq.and.u32 %p3, %r1, 7, %p2;
    mov.u32 %r9, %r2; @%p3 mov.u32 %r9, 8;
    {MAP}
    st.shared::cluster.u32 [%r10], %r1;
    """)
    with pytest.raises(EmulatorFault) as caught:
        gpu.kernel(text, "k").launch(gpu.zeros(1, "uint32"), grid=(4, 6, 4), block=8, cluster=(2, 3, 1))
    fault = caught.value
    assert (fault.block, fault.thread) == ((1, 5, 3), (7, 0, 0))
    assert fault.line == next(
        i for i, line in enumerate(text.split("\n"), 1) if "st.shared::cluster" in line
    )


# What a sanitized emulator finds

UNWRITTEN: dict[str, tuple[str, str | None]] = {
    "a read of what nothing has written": (
        f"{SYNC} {NEXT} {MAP} ld.shared::cluster.u32 %r20, [%r10];",
        "reads 4 bytes at shared address 0x0 of block 1 of its cluster, 4 of which nothing has written",
    ),
    "a generic read of what one block has not written": (
        f"setp.ne.u32 %p1, %r2, 2; @%p1 st.shared.u32 [%r5], %r1; {SYNC}"
        f"{NEXT} mapa.u64 %d7, %d6, %r9; ld.u32 %r20, [%d7];",
        "reads 4 bytes at shared address 0x0 of block 2 of its cluster, 4 of which nothing has written",
    ),
    "an atomic on nothing": (
        f"{SYNC} {NEXT} {MAP} red.shared::cluster.add.u32 [%r10+4], 1;",
        "reads 4 bytes at shared address 0x4 of block 1 of its cluster, 4 of which nothing has written",
    ),
    "a read of what its own block has written": (
        f"st.shared.u32 [%r5], %r1; {SYNC} {NEXT} {MAP} ld.shared::cluster.u32 %r20, [%r10];", None,
    ),
    "a read of what another block has written": (
        f"{NEXT} {MAP} st.shared::cluster.u32 [%r10], %r1; {SYNC} ld.shared.u32 %r20, [%r5];", None,
    ),
    "mbarriers and copies": (REMOTE_ARRIVAL, None),
    "a copy of what nothing has written": (
        REMOTE_ARRIVAL.replace("mov.u32 %r14, source", "mov.u32 %r14, cells+128"),
        "copies 128 bytes of shared memory, 128 of which nothing has written",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNWRITTEN)
def test_memory_of_other_blocks_that_nothing_has_written_is_found(case: str) -> None:
    body, message = UNWRITTEN[case]
    text, out = kernel(f"{body} {SYNC}"), np.zeros(256, np.uint32)
    Machine(text)(8, 32, out, cluster=4)
    sanitized = Machine(text, sanitize=True)
    if message is None:
        sanitized(8, 32, out, cluster=4)
        return
    with pytest.raises(EmulatorFault) as caught:
        sanitized(8, 32, out, cluster=4)
    assert message in str(caught.value)


# Waiting for ever

SPIN = "LOOP: ld.volatile.global.u32 %r11, [%d1]; setp.eq.u32 %p2, %r11, 0; @%p2 bra LOOP;"
DEADLOCKS = {
    "at a barrier of the block": (
        "bar.sync 1, 64;", "waits at barrier 1 for threads of its block that never come",
    ),
    "at a barrier that the others of its block pass": (
        "setp.lt.u32 %p2, %r1, 16; @%p2 bar.sync 2; @!%p2 bar.sync 3;",
        "waits at barrier 2 for threads of its block that never come",
    ),
    "at an mbarrier": (
        "mbarrier.init.shared.b64 [cells], 2;"
        "LOOP: mbarrier.try_wait.parity.shared.b64 %p2, [cells], 0; @!%p2 bra LOOP;",
        "waits at an mbarrier for arrivals or bytes that never come",
    ),
    "in a loop": (SPIN, "no progress: 50,000 basic blocks ran"),
    "after it arrived": (f"barrier.cluster.arrive; {SPIN}", "no progress: 50,000 basic blocks ran"),
}  # fmt: skip


@pytest.mark.parametrize("case", DEADLOCKS)
def test_a_cluster_that_waits_for_ever_is_stopped(case: str) -> None:
    """Block 1 waits for something else, so that block 0 waits in vain at the barrier of the cluster."""
    elsewhere, message = DEADLOCKS[case]
    text = kernel(f"setp.eq.u32 %p1, %r2, 0; @%p1 bra SYNC; {elsewhere} SYNC: {SYNC} {SYNC}")
    started = time.perf_counter()
    with pytest.raises(EmulatorFault) as caught:
        Machine(text, patience=50_000)(2, 32, np.zeros(64, np.uint32), cluster=2)
    assert message in str(caught.value)
    assert caught.value.block == (1, 0, 0)
    assert time.perf_counter() - started < 20
