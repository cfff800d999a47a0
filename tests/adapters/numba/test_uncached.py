"""A kernel that no key describes is compiled, and not stored. The event says why."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("numba_cuda", reason="Numba-CUDA is installed by `make test-adapters`")

from tests.adapters.numba.world import PRELUDE, World


def reasons(world: World, code: str) -> list[str]:
    """Return why kernels were not stored by each of two processes, which must agree."""
    first, second = (world.run(code).told["uncached"] for _ in range(2))
    assert first == second
    found: list[str] = first
    return found


MODULE = """
import types
settings = types.ModuleType("settings")
settings.FACTOR = 2.0
@cuda.jit
def scaled(x):
    x[0] = settings.FACTOR
scaled[1, 1](x)
"""
OVERLOAD = """
from numba.cuda import types
from numba.cuda.extending import overload

def doubled(x): pass

@overload(doubled, target="cuda")
def implement(x):
    def implementation(x):
        return x * 2
    return implementation

@cuda.jit
def calls(x):
    x[0] = doubled(x[0])
calls[1, 1](x)

@cuda.jit
def calls_again(x):
    x[1] = doubled(x[1])
calls_again[1, 1](x)
"""
DEVICE_ARRAY = """
@cuda.jit
def captures(y):
    y[0] = x[0]
try: captures[1, 1](x)
except Exception as error: print(type(error).__name__)
"""
LINKED = """
import sys
with open("add.cu", "w") as file:
    file.write(sys.argv[1] if len(sys.argv) > 1 else TEXT)
add_one = cuda.declare_device("add_one", "float32(float32)")
@cuda.jit(link=["add.cu"])
def linked(x):
    x[0] = add_one(x[0])
linked[1, 1](x)
"""
TEXT = "TEXT = 'extern \"C\" __device__ int add_one(float *r, float x) { *r = x + %d; return 0; }'\n"


def test_a_module_of_the_program_is_followed_to_the_value(world: World) -> None:
    assert reasons(world, MODULE) == []
    assert world.run(MODULE).compiles == 0
    assert world.run(MODULE.replace("2.0", "3.0")).compiles == 1


def test_an_implementation_that_no_name_leads_to_is_found_out(world: World) -> None:
    """The second kernel uses code that was compiled for the first one."""
    told = reasons(world, OVERLOAD)
    assert len(told) == 2
    for reason in told:
        assert "implement.<locals>.implementation, which none of its names refers to" in reason


def test_an_array_of_the_device_as_a_global_is_not_stored(world: World) -> None:
    """Its address would be part of the code. Older versions of Numba-CUDA reject such a kernel."""
    ran = world.run(DEVICE_ARRAY)
    if not ran.out.splitlines()[0].endswith("Error"):
        (reason,) = ran.told["uncached"]
        assert reason.startswith("captures uses x, which is a numba.")
    assert not any(name.startswith("puts.") for name in ran.stats)


def test_a_linked_source_is_part_of_the_key(world: World) -> None:
    code = TEXT % 1 + LINKED
    assert reasons(world, code) == []
    stored = world.run(code)
    assert (stored.compiles, stored.hits) == (0, 1)
    assert stored.result[0] == 2
    assert world.run(TEXT % 2 + LINKED).compiles == 1


def test_a_linked_source_with_directives_is_not_stored(world: World) -> None:
    code = "TEXT = " + repr("#include <cuda_fp16.h>\n") + " + " + (TEXT % 1).removeprefix("TEXT = ")
    (reason,) = reasons(world, code + LINKED)
    assert reason == "it links add.cu, which has directives of the preprocessor"


def test_files_of_a_declaration_are_not_stored(world: World) -> None:
    moved = LINKED.replace('"float32(float32)")', '"float32(float32)", link="add.cu")')
    (reason,) = reasons(world, TEXT % 1 + moved.replace('(link=["add.cu"])', ""))
    assert "add_one" in reason or "add.cu" in reason


def test_a_sealed_process_refuses_what_no_key_describes(world: World) -> None:
    ran = world.attempt(OVERLOAD, PREHEAT_SEALED="1")
    assert ran.code == 1
    line = PRELUDE.count("\n") + OVERLOAD[: OVERLOAD.index("calls[1, 1]")].count("\n") + 1
    assert re.search(rf"SealedError: program_\d+\.py:{line}: numba program_\d+:calls ", ran.err)
