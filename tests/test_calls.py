"""The number of Python calls on main paths, which does not depend on the machine.

Only calls outside the code of one kind of device count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from preheat import native
from tests.counting import Walk
from tests.processes import SOURCE as SOURCE_DIRECTORY

ROOT = Path(__file__).parents[1]

COUNTING = """
import json, os, sys
import preheat
from preheat.build.builder import Builder
from preheat.store.bundle import write
from preheat.model.program import Program
from tests.counting import count_calls as count

SOURCE = 'extern "C" __global__ void k(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }'
OTHER = SOURCE.replace("+= 1", "+= 2")
SCALAR = 'extern "C" __global__ void add(float* x, const int* step) { *x += *step; }'


gpu = preheat.device("emulator")
# Counters are written every few seconds, which would add calls to any of these by chance.
gpu.builder._counters.due = float("inf")
x = gpu.zeros(32, "float32")
gpu.kernel(OTHER, "k")  # what is imported when it is first needed
found = {"stored": count(lambda: gpu.kernel(SOURCE, "k"))}
kernel = gpu.kernel(SOURCE, "k")
gpu.kernel(OTHER, "k")[1, 32](x, 4)
found["first launch"] = count(lambda: kernel[1, 32](x, 4))
found["hot"] = count(lambda: gpu.kernel(SOURCE, "k"))
found["hot, not waiting"] = count(lambda: gpu.kernel(SOURCE, "k", wait=False))
gpu.kernels([(SOURCE, "k")])
found["ten together"] = count(lambda: gpu.kernels([(SOURCE, "k"), (OTHER, "k")] * 5))
for _ in range(3):
    kernel[1, 32](x, 4)
found["launch"] = count(lambda: kernel[1, 32](x, 4))
later = gpu.kernel(OTHER.replace("+= 2", "+= 3"), "k", wait=False)
for _ in range(3):
    later[1, 32](x, 4)
found["launch of one not waited for"] = count(lambda: later[1, 32](x, 4))
launch = kernel[1, 32]
found["kept launch"] = count(lambda: launch(x, 4))
with gpu.capture() as graph:
    kernel[1, 32](x, 4)
    found["recorded"] = count(lambda: kernel[1, 32](x, 4))
for _ in range(3):
    graph.replay()
found["replay"] = count(lambda: graph.replay())
step = gpu.scalar("int32", name="step")
add = gpu.kernel(SCALAR, "add")
with gpu.capture() as graph_with_scalar:
    add[1, 1](x, step)
for n in range(3):
    graph_with_scalar.replay(step=n)
found["replay with a scalar"] = count(lambda: graph_with_scalar.replay(step=4))
graphs = gpu.graphs()
graphed = gpu.graphed(lambda x, n: kernel[1, 32](x, n))
keyed = gpu.graphed(key=lambda x, n: x.shape)(lambda x, n: kernel[1, 32](x, n))
for name, act in {
    "graphs.replay": lambda: graphs.replay("k"),
    "graphs.run": lambda: graphs.run("k", lambda: kernel[1, 32](x, 4)),
    "graphed": lambda: graphed(x, 4),
    "graphed by key": lambda: keyed(x, n=4),
}.items():
    for _ in range(4):
        graphs.run("k", lambda: kernel[1, 32](x, 4))
        act()
    found[name] = count(act)
program = Program.of(SOURCE, label="k.cu")
entry, _ = gpu.builder.bundle_entry(program, "sm_90")
path = os.environ["PREHEAT_CACHE_DIR"] + ".heat"
write(path, entry.encode(), {})
builder = Builder.open(cache_dir=os.environ["PREHEAT_CACHE_DIR"] + "-empty")
builder._counters.due = float("inf")
builder.mount(path)
with preheat.sealed():
    artifact = builder.build(program, "sm_90")
    found["sealed"] = count(lambda: builder.build(program, "sm_90"))
def build():
    return gpu.builder.build(Program.of(OTHER, label="own.cu"), "sm_90")


held = build()
found["build, held"] = count(build)
del held
found["build from memory"] = count(build)
gpu.builder.clear_memory()
found["build from disk"] = count(build)
headers = Program.of('#include "v.h"\\n' + SOURCE, include=[os.environ["HEADERS"]])
gpu.builder.build(headers, "sm_90")
gpu.builder.clear_memory()
found["headers"] = count(lambda: gpu.builder.build(headers, "sm_90"))
programs = [Program.of(SOURCE.replace("+= 1", f"+= {os.getpid()}{n}.0f")) for n in range(2)]
gpu.builder.build(programs[0], "sm_90")  # This starts a worker.
gpu.builder._counters.due = 0.0
found["compiled"] = count(lambda: gpu.builder.build(programs[1], "sm_90"))
print(json.dumps(found))
"""
#: The largest number of calls of each path: a kernel that is loaded, a launch that was made before, a
#: replay, a kernel that an earlier process stored, its first launch, a stored program with a header, a
#: hit of a sealed process; a build of a stored program: its artifact is held, or it is in memory or on
#: the disk; a launch in a capture; replays of cached graphs, the replay itself included; ten loaded
#: kernels by `gpu.kernels`; a compile, without the worker that runs it. A launch includes finding it in
#: its kernel.
MOST_IN_PYTHON = {
    "hot": 2, "hot, not waiting": 1, "ten together": 145, "stored": 84, "headers": 152, "sealed": 35,
    "build, held": 29, "build from memory": 41, "build from disk": 50,
    "first launch": 84, "launch": 66, "launch of one not waited for": 66, "kept launch": 65,
    "recorded": 57, "replay": 57, "replay with a scalar": 72, "graphs.replay": 70, "graphs.run": 70,
    "graphed": 71, "graphed by key": 75, "compiled": 665,
}  # fmt: skip
#: The same with the native core, which makes launches and replays without a call of Python code.
MOST = MOST_IN_PYTHON | {
    "first launch": 18, "launch": 1, "launch of one not waited for": 1, "kept launch": 0, "recorded": 1,
    "replay": 0, "replay with a scalar": 0, "graphs.replay": 2, "graphs.run": 5, "graphed": 8,
    "graphed by key": 12,
}  # fmt: skip


#: What a new process passes from a call of the user to its end. The argument selects the process: one
#: that compiles with an empty cache, and writes a bundle; one that finds the kernel stored, and then
#: captures a launch; one that is sealed, has an empty cache, and finds the kernel in the bundle.
WALKS = """
import json, os, sys
import preheat
from preheat.store.bundle import write
from preheat.model.program import Program
from tests.counting import walk

SAXPY = '''extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
'''

def capture():
    with gpu.capture():
        kernel[1, 32](2.0, x, x, 4)

found = {}
process = sys.argv[1]
gpu = preheat.device("emulator")
if process == "sealed":
    with preheat.sealed():
        found["sealed"] = walk(lambda: gpu.kernel(SAXPY, "saxpy"))
else:
    found[process] = walk(lambda: gpu.kernel(SAXPY, "saxpy"))
kernel = gpu.kernel(SAXPY, "saxpy")
if process == "cold":
    entry, _ = gpu.builder.bundle_entry(Program.of(SAXPY), "sm_90")
    write(sys.argv[2], entry.encode(), {})
if process == "stored":
    x = gpu.zeros(32, "float32")
    kernel[1, 32](2.0, x, x, 4)
    found["capture"] = walk(capture)
print(json.dumps(found))
"""
#: The largest walks: a kernel that is compiled with an empty cache; one that an earlier process stored;
#: one that a sealed process finds in a bundle; the capture of one launch.
MOST_IN_WALKS = {
    "cold": Walk(calls=800, files=48, frames=14),
    "stored": Walk(calls=310, files=35, frames=0),
    "sealed": Walk(calls=300, files=31, frames=0),
    "capture": Walk(calls=130, files=22, frames=0),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


def counts(home: Path, **env: str) -> dict[str, int]:
    """Return the counts of a process that finds its kernels stored."""
    headers = home / "headers"
    headers.mkdir(exist_ok=True)
    (headers / "v.h").write_text("#define VALUE 1\n")
    env |= {
        "HOME": str(home),
        "HEADERS": str(headers),
        "PREHEAT_CACHE_DIR": str(home / "cache"),
        "PYTHONPATH": f"{SOURCE_DIRECTORY}:{ROOT}",
    }
    for _ in range(2):  # The first process compiles and stores.
        done = subprocess.run(
            [sys.executable, "-c", COUNTING], env=env, capture_output=True, text=True, check=True
        )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def counted(home: Path) -> dict[str, int]:
    return counts(home)


@pytest.fixture(scope="module")
def counted_in_python(home: Path) -> dict[str, int]:
    return counts(home, PREHEAT_NATIVE="0")


CAPTURE = """
import json
import sys
import preheat

SOURCE = 'extern "C" __global__ void k(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] += 1; }'
gpu = preheat.device("emulator")
gpu.builder._counters.due = float("inf")
x = gpu.zeros(32, "float32")
kernel, other = gpu.kernel(SOURCE, "k"), gpu.kernel(SOURCE.replace("+= 1", "+= 2"), "k")
with gpu.capture() as first:  # what is imported when it is first needed
    other[1, 32](x, 4)
files = []
inside = 0


def see(frame, event, _):
    global inside
    of_emulator = "/preheat/emulator/" in frame.f_code.co_filename
    if event == "call":
        inside += of_emulator
        if not inside:
            files.append(frame.f_code.co_filename)
    elif event == "return":
        inside -= of_emulator


sys.setprofile(see)
with gpu.capture() as graph:
    kernel[1, 32](x, 4)
sys.setprofile(None)
print(json.dumps(files))
"""


@pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")
def test_a_capture_of_one_launch_calls_few_functions_in_few_files(home: Path) -> None:
    """The kernel was never launched before, and the calls of the emulator itself do not count."""
    env = {"HOME": str(home), "PREHEAT_CACHE_DIR": str(home / "captured")}
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE],
        env=env | {"PYTHONPATH": f"{SOURCE_DIRECTORY}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    files = json.loads(done.stdout)
    assert len(files) <= 130
    assert len({name for name in files if not name.startswith("<")}) <= 26  # not "<frozen posixpath>"


@pytest.mark.skipif(native.core is None, reason=f"no native core: {native.reason}")
@pytest.mark.parametrize("path", MOST)
def test_a_main_path_calls_few_functions(counted: dict[str, int], path: str) -> None:
    assert counted[path] <= MOST[path]


@pytest.mark.parametrize("path", MOST_IN_PYTHON)
def test_a_main_path_without_the_native_core_calls_few_functions(
    counted_in_python: dict[str, int], path: str
) -> None:
    assert counted_in_python[path] <= MOST_IN_PYTHON[path]


@pytest.fixture(scope="module")
def walks() -> Iterator[dict[str, Walk]]:
    """Yield what each walk passes, with a cache that has always as many directories above it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        yield walk_processes(Path(home))


def walk_processes(home: Path) -> dict[str, Walk]:
    """Return what the walks pass. Of three cold ones, the shortest, which had not to wait."""
    cold = [walk_process(home, "cold", f"cache{number}")["cold"] for number in range(3)]
    bundle = {"PREHEAT_BUNDLE": str(home / "kernels.heat")}
    return {
        "cold": min(cold),
        **walk_process(home, "stored", "cache0"),
        **walk_process(home, "sealed", "empty", bundle),
    }


def walk_process(
    home: Path, process: str, cache: str, more: Mapping[str, str] | None = None
) -> dict[str, Walk]:
    env = {
        "HOME": str(home),
        "PYTHONPATH": f"{SOURCE_DIRECTORY}:{ROOT}",
        "PREHEAT_CACHE_DIR": str(home / cache),
    }
    command = [sys.executable, "-c", WALKS, process, str(home / "kernels.heat")]
    done = subprocess.run(
        command, env=env | dict(more or {}), capture_output=True, text=True, check=True
    )
    return {name: Walk(*row) for name, row in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", MOST_IN_WALKS)
def test_a_walk_through_preheat_is_short(walks: dict[str, Walk], name: str) -> None:
    most = MOST_IN_WALKS[name]
    passed = walks[name]
    assert passed.calls <= most.calls
    assert passed.files <= most.files
    assert passed.frames <= most.frames
