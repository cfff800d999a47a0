"""Helpers for the tests of clusters: kernels over the shared memory of a cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from preheat.gpu import Gpu
from tests.emulator.support import entry

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
    """Return what a kernel leaves in an output of one word for each thread."""
    out = gpu.zeros(shape, "uint32")
    gpu.kernel(text, "k").launch(out, grid=shape[0], block=shape[1], **options)
    return out.numpy()


MAP = "mapa.shared::cluster.u32 %r10, %r5, %r9;"


NEXT = "add.u32 %r9, %r2, 1; rem.u32 %r9, %r9, %r3;"


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
