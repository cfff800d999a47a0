"""Modules, libraries, kernels and their launches."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from tests.driver.calls.cuda import Program, compiled, cu, ok, status

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE, INVALID_IMAGE, NO_BINARY, INVALID_HANDLE, NOT_FOUND, TOO_LARGE = (
    1,
    200,
    209,
    400,
    500,
    720,
)
ATTRIBUTES = cu.CUfunction_attribute


def attribute(function: Any, name: str) -> int:
    """Return an attribute of a kernel."""
    return int(ok(cu.cuFuncGetAttribute(getattr(ATTRIBUTES, f"CU_FUNC_ATTRIBUTE_{name}"), function)))


@pytest.mark.parametrize("kind", ["CUBIN", "PTX"])
def test_a_module_has_its_kernels_and_variables(program: Program, kind: str) -> None:
    module = ok(cu.cuModuleLoadData(compiled(kind=kind)))
    count = ok(cu.cuModuleGetFunctionCount(module))
    functions = ok(cu.cuModuleEnumerateFunctions(count, module))
    assert {ok(cu.cuFuncGetName(each)).decode() for each in functions} == {"add", "twice", "count"}
    address, size = ok(cu.cuModuleGetGlobal(module, b"variable"))
    assert (program.values(address, 1), size) == ([7], 4)
    assert status(cu.cuModuleGetFunction(module, b"absent")) == NOT_FOUND
    assert status(cu.cuModuleGetGlobal(module, b"absent")) == NOT_FOUND
    ok(cu.cuModuleUnload(module))
    assert status(cu.cuModuleGetFunction(module, b"add")) == INVALID_HANDLE
    assert status(cu.cuFuncGetName(functions[0])) == INVALID_HANDLE


def test_a_module_is_loaded_from_a_file(program: Program, tmp_path: Path) -> None:
    del program
    file = tmp_path / "k.cubin"
    file.write_bytes(compiled())
    module = ok(cu.cuModuleLoad(str(file).encode()))
    assert ok(cu.cuModuleGetFunctionCount(module)) == 3
    ok(cu.cuModuleUnload(module))
    assert status(cu.cuModuleLoad(str(tmp_path / "absent").encode())) == 301


def test_code_that_cannot_run_is_refused(program: Program) -> None:
    del program
    assert (
        status(cu.cuModuleLoadData(compiled("sm_80").replace(b"\x7fELF", b"no ELF"))) == INVALID_IMAGE
    )
    assert status(cu.cuModuleLoadData(compiled("sm_100"))) == NO_BINARY


def test_the_kernels_of_a_library_work_in_each_context(program: Program) -> None:
    library = ok(cu.cuLibraryLoadData(compiled(), [], [], 0, [], [], 0))
    kernel = ok(cu.cuLibraryGetKernel(library, b"count"))
    assert int(ok(cu.cuKernelGetLibrary(kernel))) == int(library)
    assert ok(cu.cuKernelGetName(kernel)) == b"count"
    for _ in range(2):
        context = ok(cu.cuCtxCreate(None, 0, program.device))
        address = program.memory([0])
        function = ok(cu.cuKernelGetFunction(kernel))
        ok(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((address,), (None,)), 0))
        assert program.values(address, 1) == [7]  # A variable has a value in each context.
        ok(cu.cuCtxDestroy(context))
    ok(cu.cuLibraryUnload(library))
    assert status(cu.cuLibraryGetKernel(library, b"count")) == INVALID_HANDLE


def test_a_kernel_says_what_it_uses(program: Program) -> None:
    function = program.function("add")
    assert attribute(function, "BINARY_VERSION") == attribute(function, "PTX_VERSION") == 90
    assert attribute(function, "NUM_REGS") > 0
    assert [ok(cu.cuFuncGetParamInfo(function, at)) for at in range(3)] == [(0, 8), (8, 4), (12, 4)]
    assert status(cu.cuFuncGetParamInfo(function, 3)) == INVALID_VALUE
    ok(cu.cuCtxPopCurrent())
    assert status(cu.cuFuncGetParamInfo(function, 0)) == 201
    ok(cu.cuCtxPushCurrent(program.context))
    blocks = ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 1024, 0))
    assert blocks == 2
    grid, block = ok(cu.cuOccupancyMaxPotentialBlockSize(function, None, 0, 0))
    assert grid * block == 132 * 2048
    # Without an opt-in, a block has at most 48 KiB, however much is free.
    assert ok(cu.cuOccupancyAvailableDynamicSMemPerBlock(function, 1, 32)) == 48 << 10


def test_ptx_for_an_architecture_that_is_older_than_every_gpu_runs(program: Program) -> None:
    del program
    text = b".version 3.2\n.target sm_20\n.address_size 64\n.visible .entry k() { ret; }\n"
    function = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(text)), b"k"))
    assert attribute(function, "PTX_VERSION") == 20
    ok(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))


def test_more_shared_memory_needs_an_opt_in(program: Program) -> None:
    address = program.memory([0])
    large = 100_000
    assert status(program.launch("add", address, 1, 1, shared=large)) == INVALID_VALUE
    which = ATTRIBUTES.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert status(cu.cuFuncSetAttribute(program.function("add"), which, 1 << 20)) == INVALID_VALUE
    ok(cu.cuFuncSetAttribute(program.function("add"), which, large))
    ok(program.launch("add", address, 1, 1, shared=large))
    assert program.values(address, 1) == [1]
    ok(cu.cuMemFree(address))


SIZES = b"""
extern "C" __global__ void sizes(int4* x) {
    extern __shared__ int4 shared[];
    int size;
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));
    shared[1] = make_int4(size, 0, 0, 0);
    *x = shared[1];
}
"""


def test_shared_memory_is_allocated_in_units_that_compilers_rely_on(program: Program) -> None:
    """A vector may cross the end of the memory that a launch asked for; the kernel sees that size."""
    module = ok(cu.cuModuleLoadData(compiled(source=SIZES)))
    function = ok(cu.cuModuleGetFunction(module, b"sizes"))
    address = program.memory([0] * 4)
    ok(cu.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 28, 0, ((int(address),), (ctypes.c_void_p,)), 0))
    assert program.values(address, 1) == [28]
    ok(cu.cuMemFree(address))
    ok(cu.cuModuleUnload(module))


def test_the_range_of_a_profiler_changes_nothing(program: Program) -> None:
    del program
    ok(cu.cuProfilerStart())
    ok(cu.cuProfilerStop())


@pytest.mark.parametrize(
    ("grid", "block"), [((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (1025, 1, 1)), ((1, 65536, 1), (1, 1, 1))]
)
def test_a_launch_beyond_the_limits_is_refused(
    program: Program, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    function = program.function("count")
    address = program.memory([0])
    given = ((address,), (None,))
    assert status(cu.cuLaunchKernel(function, *grid, *block, 0, 0, given, 0)) == INVALID_VALUE
    ok(cu.cuMemFree(address))


def test_a_launch_with_a_configuration_runs(program: Program) -> None:
    address = program.memory([1] * 64)
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = 2, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    given = ((address, 64), (None, ctypes.c_int))
    ok(cu.cuLaunchKernelEx(config, program.function("twice"), given, 0))
    assert program.values(address, 64) == [2] * 64
    ok(cu.cuMemFree(address))


def test_a_cooperative_grid_has_to_be_resident(program: Program) -> None:
    function, address = program.function("count"), program.memory([0])
    given = ((address,), (None,))
    assert (
        status(cu.cuLaunchCooperativeKernel(function, 132 * 2 + 1, 1, 1, 1024, 1, 1, 0, 0, given))
        == TOO_LARGE
    )
    ok(cu.cuLaunchCooperativeKernel(function, 2, 1, 1, 32, 1, 1, 0, 0, given))
    ok(cu.cuMemFree(address))
