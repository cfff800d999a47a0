"""The cache of Numba on the store: one compile for all processes, verified, and of files alone."""

from __future__ import annotations

import dataclasses
import json

import pytest

pytest.importorskip("numba_cuda", reason="Numba-CUDA is installed by `make test-adapters`")

from preheat.build.builder import Builder
from tests.adapters.numba.world import Started, World
from tests.processes import read_line, write_line

ADD = "k.add[1, 32](x, x, 32)\n"
READY = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\n"


def test_a_second_process_compiles_nothing_and_launches_the_same(world: World) -> None:
    code = ADD + "k.halve[1, 32](x)\nk.add[1, 32](x, x, 32.0)\n"
    first, second = world.run(code), world.run(code)
    assert (first.compiles, second.compiles, second.hits) == (3, 0, 3)
    assert (second.launches, second.result) == (first.launches, first.result)
    assert first.launches == 3


def test_numba_counts_hits_and_misses_of_its_own(world: World) -> None:
    code = ADD + "s = k.add.stats; print(sum(s.cache_hits.values()), sum(s.cache_misses.values()))\n"
    assert world.run(code).out.splitlines()[0] == "0 1"
    assert world.run(code).out.splitlines()[0] == "1 0"


def test_functions_with_a_cache_of_their_own_write_no_file_beside_the_source(world: World) -> None:
    world.run("k.halve[1, 32](x)\n")
    assert sorted(path.name for path in world.app.rglob("*")) == ["app.py", "kernels.py", "more.py"]


def test_processes_that_start_together_compile_each_kernel_once(world: World) -> None:
    code = READY + ADD + "k.halve[1, 32](x)\n"
    started = [world.start_app(code) for _ in range(8)]
    for each in started:
        assert read_line(each.process) == "ready"
    for each in started:
        write_line(each.process)
    ran = [each.end().ok() for each in started]
    assert sum(each.stats.get("compiles", 0) for each in ran) == 2
    assert all(each.launches == 2 for each in ran)


def test_a_compile_that_fails_gives_up_its_lock(world: World) -> None:
    code = """
@cuda.jit
def broken(x):
    x[0] = undefined
for _ in range(2):
    try: broken[1, 1](x)
    except Exception as error: print(type(error).__name__)
"""
    assert world.run(code).out.splitlines()[:2] == ["TypingError", "TypingError"]


def killed_while_it_compiles(world: World) -> Started:
    code = (
        "from numba.cuda import dispatcher\n"
        "def stop(*_, **__):\n"
        "    import time; print('compiling', flush=True); time.sleep(1000)\n"
        "dispatcher.compile_cuda = stop\n"
    )
    started = world.start_app(code + ADD)
    assert read_line(started.process) == "compiling"
    return started


def test_a_process_that_is_killed_is_replaced(world: World) -> None:
    started = killed_while_it_compiles(world)
    waiting = world.start_app(ADD)
    started.process.kill()
    started.process.wait()
    assert waiting.end().ok().compiles == 1


def test_a_damaged_file_is_a_miss(world: World) -> None:
    world.run(ADD)
    (file,) = world.cache.rglob("*.heat")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    ran = world.run(ADD)
    assert (ran.compiles, len(ran.told["damaged"])) == (1, 1)
    assert world.run(ADD).compiles == 0


@pytest.mark.parametrize(
    "change",
    [
        {"kernel.json": b"{"},
        {"kernel.json": b"[]"},
        {"kernel.json": b'{"target": [9, 0, "a"]}'},
        {"kernel.ptx": b"\xff"},
        {"kernel.cubin": None},
    ],
    ids=str,
)
def test_an_entry_with_other_content_than_a_kernel_is_a_miss(
    world: World, change: dict[str, bytes | None]
) -> None:
    world.run(ADD)
    store = Builder.open(cache_dir=world.cache).foreign
    (entry,) = store.all("numba")
    changed = {**entry.files, **change}
    files = {name: content for name, content in changed.items() if content is not None}
    store.put(dataclasses.replace(entry, files=files))
    ran = world.run(ADD)
    assert ran.compiles == 1
    assert ran.told["damaged"][0].startswith("not a kernel of Numba: ")
    assert world.run(ADD).compiles == 0


def test_loading_an_entry_unpickles_nothing(world: World) -> None:
    world.run(ADD)
    refuse = (
        "import pickle, numba.cuda.serialize as s\n"
        "def refuse(*_, **__): raise AssertionError('unpickled')\n"
        "pickle.loads = pickle.load = pickle.Unpickler = s.loads = refuse\n"
    )
    ran = world.run(refuse + ADD)
    assert (ran.compiles, ran.hits) == (0, 1)
    store = Builder.open(cache_dir=world.cache).foreign
    (entry,) = store.all("numba")
    assert sorted(entry.files) == ["kernel.cubin", "kernel.json", "kernel.ll", "kernel.ptx"]
    assert entry.files["kernel.cubin"].startswith(b"\x7fELF")
    assert json.loads(entry.files["kernel.json"])["kernel"]["name"].startswith("_ZN")


@pytest.mark.parametrize(
    "code",
    [
        "k.add.forall(32)(x, x, 32)\n",
        "k.add.specialize(x, x, 32)[1, 32](x, x, 32)\n",
        "import more as k\nk.product(x, x)\n",
        "import more as k\nk.total(x)\n",
        "import more as k\nk.made(3)[1, 32](x)\n",
        "import more as k\nk.eager[1, 32](x)\n",
        "import more as k\nk.checked[1, 1](x, 1)\n",
    ],
)
def test_every_way_to_a_kernel_is_cached(world: World, code: str) -> None:
    first, second = world.run(code), world.run(code)
    assert first.compiles > 0
    assert (second.compiles, second.stats.get("misses.absent", 0)) == (0, 0)
    assert (second.launches, second.result) == (first.launches, first.result)


def test_what_people_inspect_is_there_after_a_hit(world: World) -> None:
    code = ADD + (
        "kernel = next(iter(k.add.overloads.values()))\n"
        "text = ''.join([*k.add.inspect_llvm().values()])\n"
        "print(kernel.entry_name in text, len(text), kernel.signature, k.add.nopython_signatures)\n"
    )
    first, second = world.run(code), world.run(code)
    assert first.out.splitlines()[0] == second.out.splitlines()[0]
    assert first.out.startswith("True ")


def test_an_exception_of_a_checked_kernel_has_its_message_after_a_hit(world: World) -> None:
    code = (
        "import more as k\nk.checked[1, 1](x, 1)\n"
        "kernel = next(iter(k.checked.overloads.values()))\n"
        "print(sorted(map(str, kernel.call_helper.exceptions.values())))\n"
    )
    first, second = world.run(code), world.run(code)
    assert "n is zero" in first.out
    assert second.out.splitlines()[0] == first.out.splitlines()[0]
    assert second.compiles == 0


def test_the_architecture_is_part_of_the_key(world: World) -> None:
    assert world.run(ADD, cc=90).compiles == 1
    assert world.run(ADD, cc=100).compiles == 1
    assert world.run(ADD, cc=90).compiles == 0


CARVEOUT = """
from numba.cuda.cudadrv import driver
asked = []
for kind in vars(driver).values():
    if isinstance(kind, type) and "set_shared_memory_carveout" in vars(kind):
        kind.set_shared_memory_carveout = lambda self, value: asked.append(value)

@cuda.jit(shared_memory_carveout=50)
def wide(x):
    x[0] = 1.0

wide[1, 1](x)
print(asked)
"""


def test_options_of_a_launch_are_applied_after_a_hit(world: World) -> None:
    first = world.attempt(CARVEOUT)
    if "unexpected keyword argument 'shared_memory_carveout'" in first.err:
        pytest.skip("this version of Numba-CUDA has no such option")
    second = world.run(CARVEOUT)
    assert first.ok().out.splitlines()[0] == "[50]"
    assert second.out.splitlines()[0] == "[50]"
    assert second.compiles == 0
