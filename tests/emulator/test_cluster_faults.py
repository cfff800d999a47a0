"""Clusters that are refused, and kernels that misuse the memory or the barrier of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.errors import EmulatorFault, LaunchError
from preheat.gpu import Gpu
from tests.emulator.clusters import MAP, NEXT, OUT, REMOTE_ARRIVAL, SYNC, kernel
from tests.emulator.support import Machine

# Launches that are refused


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
    text = kernel(f"{body} {SYNC}")
    out = np.zeros(256, np.uint32)
    Machine(text)(8, 32, out, cluster=4)
    sanitized = Machine(text, sanitize=True)
    if message is None:
        sanitized(8, 32, out, cluster=4)
        return
    with pytest.raises(EmulatorFault) as caught:
        sanitized(8, 32, out, cluster=4)
    assert message in str(caught.value)


# Deadlocks


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
