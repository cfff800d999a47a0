"""Memory that kernels allocate themselves."""

from __future__ import annotations

import numpy as np
import pytest

from preheat.errors import EmulatorFault
from preheat.gpu import Gpu
from tests.emulator.support import Machine, entry

SOURCE = """
struct Node { int value; Node* next; };
extern "C" __global__ void push(Node** lists, int n) {
    Node* list = nullptr;
    for (int i = 0; i < n; i++) list = new Node{int(threadIdx.x) * 100 + i, list};
    lists[threadIdx.x] = list;
}
extern "C" __global__ void pop(Node** lists, int* sums) {
    int sum = 0;
    for (Node* node = lists[threadIdx.x]; node;) {
        Node* next = node->next; sum += node->value; delete node; node = next;
    }
    sums[threadIdx.x] = sum;
    free(nullptr);
}
extern "C" __global__ void fill(int* counts) {
    void* found[16];
    for (int round = 0; round < 2; round++) {
        int n = 0;
        while (n < 16 && (found[n] = malloc(1 << 20))) n++;
        counts[round] = n;
        while (n) free(found[--n]);
    }
    counts[2] = malloc(size_t(1) << 40) == nullptr;
    char* few = (char*)malloc(5);
    counts[3] = (size_t)few % 16;
    free(few);
}
"""


def test_what_a_kernel_allocates_outlives_it_until_it_is_freed(device: Gpu) -> None:
    lists, sums = device.zeros(40, "uint64"), device.zeros(40, "int32")
    device.kernel(SOURCE, "push")[1, 40](lists, 5)
    device.kernel(SOURCE, "pop")[1, 40](lists, sums)
    assert sums.numpy().tolist() == [500 * thread + 10 for thread in range(40)]


def test_malloc_returns_null_once_the_heap_is_used_up(device: Gpu) -> None:
    counts = device.zeros(4, "int32")
    device.kernel(SOURCE, "fill")[1, 1](counts)
    first, second, too_large, alignment = counts.numpy().tolist()
    assert 1 < first <= 8
    assert (second, too_large, alignment) == (first, 1, 0)


HEAP = """
.extern .func (.param .b64 address) malloc(.param .b64 size);
.extern .func free(.param .b64 address);
"""
BODY = """
.param .b64 size; .param .b64 address; .param .b64 given;
st.param.b64 [size], 20; call (address), malloc, (size); ld.param.b64 %d1, [address];
"""


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (
            "st.param.b64 [given], %d1; call free, (given); call free, (given);",
            "which is freed already",
        ),
        ("add.s64 %d1, %d1, 8; st.param.b64 [given], %d1; call free, (given);", "no malloc returned"),
        ("st.param.b64 [given], 64; call free, (given);", "frees 0x40, which no malloc returned"),
        (
            "st.param.b64 [given], %d1; call free, (given); st.u32 [%d1], 1;",
            "in a freed 20-byte buffer",
        ),
        ("st.u32 [%d1+20], 1;", "0 bytes past the end of the 20-byte buffer"),
        ("ld.u64 %d2, [%d1+16];", "across the end of the 20-byte buffer"),
    ],
)
def test_a_heap_that_is_used_wrongly_is_a_fault(misuse: str, said: str) -> None:
    text = entry("", f"{BODY}\n{misuse}\nret;", outside=HEAP)
    with pytest.raises(EmulatorFault, match=said) as caught:
        Machine(text)(1, 1)
    assert caught.value.line == text.split("\n").index(misuse) + 1


def test_fresh_memory_of_the_heap_holds_what_nothing_wrote() -> None:
    body = f"{BODY} ld.param.u64 %d3, [out]; ld.u64 %d2, [%d1+8]; st.global.u64 [%d3], %d2; ret;"
    out = np.zeros(1, np.uint64)
    Machine(entry(".param .u64 out", body, outside=HEAP))(1, 1, out)
    assert out[0] == 0xCDCDCDCDCDCDCDCD
