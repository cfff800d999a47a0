"""A sanitized emulator stops at values that CUDA leaves undefined, and at nothing else."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import preheat
from preheat.emulator import access, emit, sanitize
from preheat.emulator.image import image
from preheat.errors import EmulatorFault, InputError
from tests.emulator.support import Machine, entry

# Shared memory: each case is a body, and the fault that it ends with, if it does. `%r1` is the thread's
# number, `%r4` the address of its own word, `%d1` the output, `%d2` the generic address of `cells`.

HEAD = """
    .shared .align 16 .b8 cells[256];
    ld.param.u64 %d1, [out];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    mov.u32 %r3, cells;
    add.u32 %r4, %r3, %r2;
    mov.u64 %d3, cells;
    cvta.shared.u64 %d2, %d3;
"""
READ = "reads {} bytes at shared address {:#x}, {} of which nothing has written"
SHARED: dict[str, tuple[str, str | None]] = {
    "a read of nothing": ("ld.shared.u32 %r5, [%r4];", READ.format(4, 0, 4)),
    "a read of what was written": ("st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4];", None),
    "a read next to it": (
        "st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4+4];", READ.format(4, 128, 4),
    ),
    "a read of one byte too many": (
        "st.shared.u16 [%r4], %h1; st.shared.u8 [%r4+2], %h1; ld.shared.u32 %r5, [%r4];",
        READ.format(4, 0, 1),
    ),
    "bytes that make a word": (
        "st.shared.u16 [%r4+2], %h1; st.shared.u8 [%r4+1], %h1; st.shared.u8 [%r4], %h1;"
        "ld.shared.u32 %r5, [%r4];",
        None,
    ),
    "a word that makes bytes": ("st.shared.f32 [%r4], %f1; ld.shared.u8 %h2, [%r4+3];", None),
    "an atomic on nothing": ("atom.shared.add.u32 %r5, [cells], 1;", READ.format(4, 0, 4)),
    "a reduction on nothing": ("red.shared.add.u32 [cells+8], 1;", READ.format(4, 8, 4)),
    "an atomic on what was written": (
        "st.shared.u32 [cells], 0; atom.shared.add.u32 %r5, [cells], 1; ld.shared.u32 %r6, [cells];",
        None,
    ),
    "an exchange that is a store": (
        "atom.shared.exch.b32 %r5, [%r4], 1; ld.shared.u32 %r5, [%r4];",
        None,
    ),
    "an exchange that is read": (
        "atom.shared.exch.b32 %r5, [%r4], 1; st.global.u32 [%d1], %r5;",
        READ.format(4, 0, 4),
    ),
    "a vector": (
        "mul.lo.u32 %r6, %r1, 8; add.u32 %r6, %r6, %r3;"
        "st.shared.v2.u32 [%r6], {%r1, %r1}; ld.shared.v2.u32 {%r7, %r8}, [%r6];",
        None,
    ),
    "half a vector": (
        "st.shared.u32 [cells], 1; ld.shared.v2.u32 {%r7, %r8}, [cells];", READ.format(4, 4, 4),
    ),
    "a copy": ("cp.async.ca.shared.global [%r4], [%d1], 4; ld.shared.u32 %r5, [%r4];", None),
    "a copy of nothing, which writes zeros": (
        "cp.async.ca.shared.global [%r4], [%d1], 4, 0; ld.shared.u32 %r5, [%r4];", None,
    ),
    "a barrier in memory": (
        "mbarrier.init.shared.b64 [cells], 1; ld.shared.u64 %d4, [cells];", None,
    ),
    "beside a barrier in memory": (
        "mbarrier.init.shared.b64 [cells], 1; ld.shared.u32 %r5, [cells+8];", READ.format(4, 8, 4),
    ),
    "a copy out of memory that was not written": (
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [cells], 16;",
        "copies 16 bytes of shared memory, 16 of which nothing has written",
    ),
    "generic addresses": (
        "st.u32 [%d2], %r1; ld.u32 %r5, [%d2]; ld.u32 %r6, [%d2+4];", READ.format(4, 4, 4),
    ),
    "some threads in global memory": (
        "and.b32 %r5, %r1, 1; setp.eq.u32 %p1, %r5, 0; selp.u64 %d4, %d1, %d2, %p1; ld.u32 %r6, [%d4];",
        READ.format(4, 0, 4),
    ),
    "an odd base and an offset": (
        "add.u32 %r5, %r4, 2; st.shared.u32 [%r5+2], %r1; ld.shared.u32 %r6, [%r5+2];"
        "ld.shared.u32 %r6, [%r5+6];",
        READ.format(4, 132, 4),
    ),
}  # fmt: skip


def kernel(case: str) -> str:
    return entry(".param .u64 out", f"{HEAD}{SHARED[case][0]}\n ret;")


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("case", SHARED)
def test_shared_memory_is_read_only_where_it_was_written(case: str, blocks: int) -> None:
    said = SHARED[case][1]
    out = np.zeros(64, np.int32)
    if said is None:
        Machine(kernel(case), sanitize=True)(blocks, 32, out)
    else:
        with pytest.raises(EmulatorFault) as caught:
            Machine(kernel(case), sanitize=True)(blocks, 32, out)
        assert said in str(caught.value)
        assert caught.value.block == (0, 0, 0)
        assert "__syncthreads()" in str(caught.value.hint)
    Machine(kernel(case))(blocks, 32, out)  # Without checks the kernel continues.


def test_the_thread_that_reads_too_far_is_named() -> None:
    for case, thread in (("a read next to it", 31), ("some threads in global memory", 1)):
        with pytest.raises(EmulatorFault) as caught:
            Machine(kernel(case), sanitize=True)(1, 32, np.zeros(64, np.int32))
        assert caught.value.thread == (thread, 0, 0)


def test_dynamic_memory_is_watched_too_and_blocks_have_their_own() -> None:
    body = """
    ld.param.u64 %d1, [out];
    mov.u32 %r1, %ctaid.x;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 st.shared.u32 [more+4], 7;
    bar.sync 0;
    ld.shared.u32 %r2, [more+4];
    ret;"""
    text = entry(".param .u64 out", body, outside=".extern .shared .align 4 .b8 more[];")
    machine = Machine(text, sanitize=True)
    out = np.zeros(1, np.int32)
    machine(1, 32, out, shared=8)
    with pytest.raises(EmulatorFault, match="4 of which nothing has written") as caught:
        machine(2, 32, out, shared=8)
    assert caught.value.block == (1, 0, 0)


def test_every_function_that_touches_memory_has_its_check() -> None:
    """A function of generated code that takes addresses reads or writes memory there."""
    touching = {
        name
        for name, function in emit.NAMESPACE.items()
        if inspect.isfunction(function)
        and {"Addresses", "AddressOperand"}
        & {p.annotation for p in inspect.signature(function).parameters.values()}
    }
    assert touching
    assert touching <= sanitize.NAMESPACE.keys()
    assert {"load", "store", "atomic", "copy_each", "copy_bulk"} <= touching


def test_without_sanitize_no_check_is_generated() -> None:
    text = entry(".param .u64 out", f"{HEAD} shfl.sync.down.b32 %r5, %r1, 1, 31, -1; ret;")
    for on in (False, True):  # a block is compiled when it first runs
        Machine(text, sanitize=on)(1, 32, np.zeros(64, np.int32))
    plain, checked = (
        [block.run for block in image(text, sanitize=on).code("k").blocks.values()]
        for on in (False, True)
    )
    assert not any("check_shuffle" in run.__code__.co_names for run in plain)
    assert any("check_shuffle" in run.__code__.co_names for run in checked)
    assert plain[0].__globals__["load"] is access.load
    assert checked[0].__globals__["load"] is not access.load


# Warps


def warp(body: str) -> str:
    """Return a kernel whose threads leave `%r9` in `out`; threads from `%r8` on exit first."""
    return entry(
        ".param .u64 out, .param .u32 end",
        f"""
    ld.param.u64 %d1, [out];
    ld.param.u32 %r8, [end];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d1, %d1, %d2;
    setp.ge.u32 %p1, %r1, %r8;
    @%p1 exit;
    {body}
    st.global.u32 [%d1], %r9;
    ret;""",
    )


DOWN = "shfl.sync.down.b32 %r9, %r1, 4, 31, {};"
FROM, SELF = (
    "shuffles from lane {} of its warp, {}",
    "is lane {} of its warp, which its own mask {} leaves",
)
SHUFFLES: dict[str, tuple[str, int, int, str | None]] = {  # body, threads, `end`, what is said
    "a whole warp": (DOWN.format("-1"), 32, 32, None),
    "an exited lane": (DOWN.format("-1"), 32, 24, FROM.format(24, "which has exited")),
    "no such lane": (DOWN.format("-1"), 20, 32, FROM.format(20, "and a block of 20 threads has none")),
    "outside the mask": (
        DOWN.format("0xffff"), 16, 32, FROM.format(16, "which its mask 0x0000ffff leaves out"),
    ),
    "itself outside": (DOWN.format("0xfffffffe"), 32, 32, SELF.format(0, "0xfffffffe")),
    "out of range": ("shfl.sync.down.b32 %r9, %r1, 4, 0x101f, 0xffff;", 16, 32, None),
    "each itself": ("shfl.sync.idx.b32 %r9, %r1, %r1, 31, -1;", 20, 32, None),
    "by a register": (
        "shfl.sync.idx.b32 %r9, %r1, %r8, 31, -1;", 32, 7, FROM.format(7, "which has exited"),
    ),
    "a vote": ("vote.sync.ballot.b32 %r9, %p1, 0xff;", 32, 32, SELF.format(8, "0x000000ff")),
    "a match": ("match.any.sync.b32 %r9, %r1, 0xff;", 32, 32, SELF.format(8, "0x000000ff")),
    "a reduction": ("redux.sync.add.u32 %r9, %r1, 0xff;", 32, 32, SELF.format(8, "0x000000ff")),
    "a vote of all": ("vote.sync.ballot.b32 %r9, %p1, 0xff;", 8, 32, None),
}  # fmt: skip


@pytest.mark.parametrize("case", SHUFFLES)
def test_lanes_that_take_no_part_are_not_used(case: str) -> None:
    body, block, end, said = SHUFFLES[case]
    out = np.full(32, -1, np.int32)
    if said is None:
        Machine(warp(body), sanitize=True)(1, block, out, np.uint32(end))
    else:
        with pytest.raises(EmulatorFault) as caught:
            Machine(warp(body), sanitize=True)(1, block, out, np.uint32(end))
        assert said in str(caught.value)


# Settings


def test_a_device_is_sanitized_by_argument_or_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def sanitized(**given: Any) -> bool:
        with preheat.device("emulator:6", **given) as gpu:
            found: Any = gpu._device
            return bool(found.sanitize)

    assert [sanitized(), sanitized(sanitize=True)] == [False, True]
    monkeypatch.setenv("PREHEAT_EMULATOR_SANITIZE", "1")
    assert [sanitized(), sanitized(sanitize=False)] == [True, False]
    with pytest.raises(InputError, match="sanitize belongs to the emulator") as caught:
        preheat.device("cuda", sanitize=True)
    assert "compute-sanitizer" in str(caught.value.hint)
