"""Clusters of thread blocks: the same on every device, and the emulator's own faults and refusals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.gpu import Gpu
from tests.emulator.clusters import MAP, NEXT, OUT, REMOTE_ARRIVAL, SYNC, Array, kernel, launch
from tests.emulator.support import dim3, entry

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
    """Return what the registers hold, for every block in the order of the grid."""
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
    """Return what each thread wrote."""
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
    grid = (4, 2, 4)
    cluster = (2, 2, 2)
    threads = 32
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
def test_an_address_of_another_block_is_shared_by_the_cluster_only(device: Gpu, space: str) -> None:
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
    """Words go around the ring five times; threads run different code between the steps."""
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
    """Return every device, and the emulator for both dialects of PTX, with cached code."""
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
