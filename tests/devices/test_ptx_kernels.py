"""Kernels of PTX text: which requests share a kernel, and what a request that fails leaves behind."""

from __future__ import annotations

import numpy as np
import pytest

from preheat.devices.kernel import Kernel
from preheat.errors import UnknownEntryError
from preheat.gpu import Gpu
from tests.conftest import SAXPY
from tests.faulty import FaultyGpu

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def entry(name: str, operation: str) -> str:
    """Return an entry that replaces each of `n` integers by the result of an operation."""
    return f"""
.visible .entry {name}(.param .u64 to, .param .u32 n)
{{
    .reg .pred %p;
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    setp.ge.u32 %p, %r2, %r1;
    @%p bra END;
    cvta.to.global.u64 %rd2, %rd1;
    mad.wide.u32 %rd3, %r2, 4, %rd2;
    ld.global.b32 %r3, [%rd3];
    {operation} %r3, %r3;
    st.global.b32 [%rd3], %r3;
END:
    ret;
}}
"""


NEGATE = HEAD + entry("change", "neg.s32")
INVERT = HEAD + entry("change", "not.b32")
BOTH = HEAD + entry("negate", "neg.s32") + entry("invert", "not.b32")


def changed(gpu: Gpu, kernel: Kernel) -> list[int]:
    x = gpu.array(np.array([3, -4, 5], np.int32))
    kernel[1, 32](x, 3)
    return [int(each) for each in x.numpy()]


@pytest.mark.parametrize(("source", "name"), [(NEGATE, "change"), (SAXPY, "saxpy")])
def test_equal_text_is_the_same_kernel_whichever_object_holds_it(
    source: str, name: str, device: Gpu
) -> None:
    copy = "".join(list(source))
    assert copy is not source
    kernel = device.kernel(source, name)
    compiles = device.builder.stats()["process"]["compiles"]
    assert device.kernel(copy, name) is kernel
    assert device.builder.stats()["process"]["compiles"] == compiles


def test_another_body_under_the_same_name_is_another_kernel(device: Gpu) -> None:
    negate, invert = device.kernel(NEGATE, "change"), device.kernel(INVERT, "change")
    assert negate is not invert
    for _ in range(4):  # The last launches are fast.
        assert changed(device, negate) == [-3, 4, -5]
        assert changed(device, invert) == [~3, 3, ~5]


def test_entries_of_one_text_share_one_module(faulty: FaultyGpu) -> None:
    with faulty.count_calls("load") as calls:
        negate, invert = faulty.gpu.kernel(BOTH, "negate"), faulty.gpu.kernel(BOTH, "invert")
    assert calls == {"load": 1}
    assert negate.module is invert.module
    assert changed(faulty.gpu, negate) == [-3, 4, -5]
    assert changed(faulty.gpu, invert) == [~3, 3, ~5]


def test_an_entry_that_is_asked_for_in_vain_leaves_no_kernel_and_costs_one_compile(
    faulty: FaultyGpu,
) -> None:
    source = HEAD + entry("asked", "abs.s32")
    before = faulty.gpu.builder.stats()["process"]["compiles"]
    for _ in range(3):
        with pytest.raises(UnknownEntryError, match="no kernel 'aksed'; it has: asked") as caught:
            faulty.gpu.kernel(source, "aksed")
        assert caught.value.hint == "did you mean 'asked'?"
    assert changed(faulty.gpu, faulty.gpu.kernel(source, "asked")) == [3, 4, 5]
    assert faulty.gpu.builder.stats()["process"]["compiles"] - before <= 1


def test_trimming_unloads_each_text_that_nobody_holds(device: Gpu) -> None:
    for value in range(20):
        device.kernel(HEAD + entry(f"number_{value}", "not.b32"), f"number_{value}")
    assert device.trim() == 20
    assert device.trim() == 0
