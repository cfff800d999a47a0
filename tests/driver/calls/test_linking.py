"""The linker of the driver."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from tests.driver.calls.cuda import Program, compiled, cu, ok, status

pytestmark = pytest.mark.cpu_driver

KINDS = cu.CUjitInputType
PTX, CUBIN = KINDS.CU_JIT_INPUT_PTX, KINDS.CU_JIT_INPUT_CUBIN
CALLER = b"""
extern __device__ int twice_of(int);
extern "C" __global__ void apply(int* x, int n) {
    if (threadIdx.x < n) x[threadIdx.x] = twice_of(x[threadIdx.x]);
}
"""
CALLEE = b"__device__ int twice_of(int x) { return 2 * x; }"


def link(*inputs: tuple[Any, bytes]) -> bytes:
    """Return the result of a link."""
    state = ok(cu.cuLinkCreate(0, [], []))
    for kind, data in inputs:
        ok(cu.cuLinkAddData(state, kind, data, len(data), b"part", 0, [], []))
    address, size = ok(cu.cuLinkComplete(state))
    found = ctypes.string_at(address, size)
    ok(cu.cuLinkDestroy(state))
    return found


@pytest.mark.parametrize("kind", [PTX, CUBIN])
def test_functions_of_another_part_are_called(program: Program, kind: Any) -> None:
    name = "PTX" if kind == PTX else "CUBIN"
    parts = [(kind, compiled("sm_90", name, source, "-rdc=true")) for source in (CALLER, CALLEE)]
    module = ok(cu.cuModuleLoadData(link(*parts)))
    function, address = ok(cu.cuModuleGetFunction(module, b"apply")), program.memory([3, 4])
    given = ((address, 2), (None, ctypes.c_int))
    ok(cu.cuLaunchKernel(function, 1, 1, 1, 2, 1, 1, 0, 0, given, 0))
    assert program.values(address, 2) == [6, 8]
    ok(cu.cuMemFree(address))
    ok(cu.cuModuleUnload(module))


def test_a_part_is_read_from_a_file(program: Program, tmp_path: Path) -> None:
    del program
    file = tmp_path / "k.ptx"
    file.write_bytes(compiled(kind="PTX"))
    state = ok(cu.cuLinkCreate(0, [], []))
    ok(cu.cuLinkAddFile(state, PTX, str(file).encode(), 0, [], []))
    assert status(cu.cuLinkAddFile(state, PTX, str(tmp_path / "absent").encode(), 0, [], [])) == 301
    assert ok(cu.cuLinkComplete(state))[1] > 100
    ok(cu.cuLinkDestroy(state))
    assert status(cu.cuLinkComplete(state)) == 400


def test_parts_that_define_the_same_function_are_refused(
    program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    del program
    state = ok(cu.cuLinkCreate(0, [], []))
    for source in (CALLER, CALLEE, CALLEE.replace(b"2 * x", b"3 * x")):
        data = compiled("sm_90", "PTX", source, "-rdc=true")
        ok(cu.cuLinkAddData(state, PTX, data, len(data), b"part", 0, [], []))
    assert status(cu.cuLinkComplete(state)) == 218
    assert "twice_of" in capsys.readouterr().err
    ok(cu.cuLinkDestroy(state))
