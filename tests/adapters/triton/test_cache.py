"""The cache of Triton on the store: one compile for all processes, verified, and apart by type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is a large package, which `make test-adapters` installs")

from tests.adapters.triton.world import Started, World
from tests.processes import REPORT_WAITS, kill, read_line, write_line

SIX = "for n in range(6): k.fill[(1,)](o, MODE=n + 10)\n"
READY = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\n"


def start(world: World, name: str, code: str) -> Started:
    """Start an application that begins as all of them do."""
    from tests.adapters.triton.world import PRELUDE

    file = world.root / f"{name}.py"
    file.write_text(PRELUDE + code)
    return world.start(str(file))


def test_processes_that_start_together_compile_each_kernel_once(world: World) -> None:
    started = [start(world, f"together{n}", READY + SIX) for n in range(8)]
    for each in started:
        assert read_line(each.process) == "ready"
    for each in started:
        write_line(each.process)
    ran = [each.end().ok() for each in started]
    # Host code is one compile as well.
    host = sum(line.startswith("host code") for line in labels(world))
    assert sum(each.stats.get("compiles", 0) for each in ran) == 6 + host
    assert host >= 1
    assert all(len(each.launches) == 6 for each in ran)


def labels(world: World) -> list[str]:
    """Return the labels of the entries in the cache."""
    listed = world.preheat("cache", "ls", "--json").ok()
    return [row["program"] for row in json.loads(listed.out)]


THREE = """
for n in range(3):
    kernel = k.fill[(1,)](o, MODE=n + 20)
    print(kernel.hash)
"""


def entries(world: World) -> dict[str, Path]:
    """Return the files of compiled kernels in the cache by Triton's key."""
    listed = json.loads(world.preheat("cache", "ls", "--json").ok().out)
    files = {path.stem: path for path in world.cache.rglob("*.heat")}
    return {row["foreign_key"]: files[row["key"]] for row in listed if row["program"] == "kernels:fill"}


def test_a_damaged_entry_is_a_miss_and_a_moved_cache_hits(world: World) -> None:
    place = str(world.root / "materialised")
    first = world.run(THREE, TRITON_CACHE_DIR=place)
    truncated, flipped, intact = sorted(found := entries(world))
    content = found[truncated].read_bytes()
    found[truncated].write_bytes(content[: len(content) // 2])
    content = found[flipped].read_bytes()
    middle = len(content) // 2
    found[flipped].write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    cubin = Path(place, intact, "fill.cubin")
    good = cubin.read_bytes()
    cubin.write_bytes(good[:100])

    second = world.run(THREE, TRITON_CACHE_DIR=place)
    assert second.out.splitlines()[:3] == first.out.splitlines()[:3]
    assert second.stats["compiles"] == 2
    assert second.stats["damaged"] >= 2
    assert cubin.read_bytes() == good  # The store wrote it again.

    world.cache.rename(world.root / "moved")
    third = world.run(THREE, PREHEAT_CACHE_DIR=str(world.root / "moved"))
    assert "compiles" not in third.stats
    assert third.misses == 0
    assert third.compilers == []
    assert third.out.splitlines()[:3] == first.out.splitlines()[:3]


CONSTANTS = """
import re
def moved(kernel):
    return re.findall(r"mov\\.b32\\s+%r\\d+, (\\d+);", kernel.asm["ptx"])
for mode in (1, "1", None, "None"):
    print(repr(mode), moved(k.fill[(1,)](o, MODE=mode)))
for parts in (("x", "y-z"), ("x-y", "z")):
    print(parts, moved(k.first[(1,)](o, PARTS=parts)))
"""


def test_constants_of_different_types_get_different_kernels(world: World) -> None:
    for expected in (6, 0):
        ran = world.run(CONSTANTS)
        lines = ran.out.splitlines()[:-1]
        codes = [line.split("[")[1] for line in lines]
        bits = [str(n) for n in (0x3F800000, 0x40000000, 0x40400000, 0x40800000)]
        for code, value in zip(codes, [*bits, *bits[:2]], strict=True):
            assert value in code, lines
        kernels = [line for line in labels(world) if line.startswith("kernels:")]
        assert len(kernels) == 6
        assert ran.stats.get("compiles", 0) - expected in ((0,) if not expected else (1, 2))


FAILING = """
from triton.compiler.errors import CompilationError
for _ in range(2):
    try:
        k.broken[(1,)](o)
    except CompilationError as error:
        print("undefined_name" in str(error), flush=True)
"""


def test_a_compile_that_fails_gives_up_its_lock(world: World) -> None:
    first = start(world, "first", FAILING + READY)
    assert [read_line(first.process) for _ in range(3)] == ["True", "True", "ready"]
    second = start(world, "second", FAILING).end().ok()
    assert second.out.splitlines()[:2] == ["True", "True"]
    assert "waits" not in second.stats
    write_line(first.process)
    assert "waits" not in first.end().ok().stats


HANGING = """
import sys
from triton.compiler import ASTSource

def make_ir(self, *arguments):
    print("compiles", flush=True)
    sys.stdin.readline()

ASTSource.make_ir = make_ir
k.fill[(1,)](o, MODE=1)
"""


def test_a_compile_whose_process_is_killed_is_made_by_another(world: World) -> None:
    killed = start(world, "killed", HANGING)
    assert read_line(killed.process) == "compiles"
    other = start(world, "other", REPORT_WAITS + "k.fill[(1,)](o, MODE=1)\n")
    assert read_line(other.process).startswith("waits for")
    kill(killed.process)
    ran = other.end().ok()
    assert [name for name, *_ in ran.launches] == ["fill"]
    assert "kernels:fill" in labels(world)


HOOKS = """
from triton import knobs
assert knobs.runtime.jit_cache_hook is None
assert knobs.runtime.jit_post_compile_hook is None
assert knobs.compilation.listener is None
hooked, heard = [], []

def hook(*arguments, **named):
    hooked.append(named["fn"].name)

def listener(*, cache_hit, **_):
    heard.append(cache_hit)

knobs.runtime.jit_cache_hook, knobs.compilation.listener = hook, listener
k.fill[(1,)](o, MODE=1)
assert knobs.runtime.jit_cache_hook is hook
assert knobs.runtime.jit_post_compile_hook is None
assert knobs.compilation.listener is listener
print(hooked, heard)
"""


def test_hooks_of_the_user_are_called_and_stay(world: World) -> None:
    assert world.run(HOOKS).out.splitlines()[0] == "['fill'] [False]"
    assert world.run(HOOKS).out.splitlines()[0] == "['fill'] [True]"


def test_dumps_and_overrides_of_the_user_still_work(world: World) -> None:
    dumps = world.root / "dumps"
    code = "print(0x40A00000 in map(int, __import__('re').findall(r'\\d+', "
    code += "k.fill[(1,)](o, MODE=9).asm['ptx'])))\n"
    ran = world.run(code, TRITON_KERNEL_DUMP="1", TRITON_DUMP_DIR=str(dumps))
    assert ran.out.splitlines()[0] == "True"
    (dumped,) = dumps.rglob("fill.ptx")
    # The same place in another directory overrides the code: 6.0 instead of 5.0.
    changed = world.root / "overrides" / dumped.parent.name / "fill.ptx"
    changed.parent.mkdir(parents=True)
    changed.write_text(dumped.read_text().replace(str(0x40A00000), str(0x40C00000)))
    ran = world.run(
        code.replace("A00000", "C00000"),
        TRITON_KERNEL_OVERRIDE="1",
        TRITON_ALWAYS_COMPILE="1",
        TRITON_OVERRIDE_DIR=str(changed.parents[1]),
    )
    assert "Overriding kernel with file" in ran.out
    assert ran.out.splitlines()[-2] == "True"
    assert ran.stats["uncached"] == 1
    ran = world.run(code)  # What was overridden is not stored.
    assert ran.out.splitlines()[0] == "True"
    assert "compiles" not in ran.stats


CHILD = """
import subprocess, sys
code = '''
import sys, kernels
from tensors import Tensor
kernels.fill[(1,)](Tensor("fp32"), MODE=int(sys.argv[1]))
import preheat, preheat.adapters
stats = preheat.default_builder().stats()["process"]
print(preheat.adapters.installed(), stats.get("compiles", 0), stats.get("misses.absent", 0))
'''
for mode in (1, 1, 2):
    subprocess.run([sys.executable, "-c", code, str(mode)], check=True)
"""


def test_a_child_process_that_does_not_know_preheat_uses_the_store(world: World) -> None:
    """The cache manager is in its environment, and connects the rest when Triton makes it."""
    ran = world.run("k.fill[(1,)](o, MODE=1)\n" + CHILD)
    lines = ran.out.splitlines()[:3]
    assert lines == [f"('triton',) {n} {n}" for n in (0, 0, 1)]
    stored = json.loads(world.preheat("cache", "ls", "--json").ok().out)
    kernels = [(row["program"], row["arch"]) for row in stored if "host" not in row["program"]]
    assert kernels.count(("kernels:fill", "sm_90")) == 2
    assert not [row for row in kernels if row[0].endswith(".json")]


WORKER = """
import subprocess, sys
code = '''
import kernels, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
source = ASTSource(kernels.fill, {"o_ptr": "*fp32", "MODE": "constexpr"}, {(1,): 7}, {})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
import preheat
print(preheat.default_builder().stats()["process"].get("compiles", 0))
'''
for _ in range(2):
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_a_worker_process_that_compiles_for_a_target_stores_under_the_same_key(world: World) -> None:
    ran = world.run(WORKER)
    assert ran.out.splitlines()[:2] == ["1", "0"]
    stored = json.loads(world.preheat("cache", "ls", "--json").ok().out)
    assert [row["program"] for row in stored if row["arch"] == "sm_90"] == ["kernels:fill"]
    source = WORKER.partition("'''")[2].partition("import preheat")[0]
    here = world.run(source + "print(len(preheat.adapters.installed()))\n", cc=None)
    assert here.misses == 0
