"""The exit of a process and of a forked child while two libraries share memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices.support import import_or_skip
from tests.interop.support import ends_in_silence

# Code that keeps an exported array, called `view`, until exit.
HOLDERS = {
    "a logging handler": """
import logging
class Handler(logging.Handler):
    def __init__(self, view):
        super().__init__()
        self.view = view
logging.getLogger().addHandler(Handler(view))
""",
    "an attribute of its library": "library.keep = view",
    "an attribute of sys": "import sys; sys.keep = view",
    "a cycle": "holder = [view]; holder.append(holder)",
}

EXPORT = """
import {name} as library
import preheat
gpu = preheat.device("{device}")
view = library.from_dlpack(gpu.zeros(33))
{hold}
del view
"""

held = pytest.mark.parametrize("holder", HOLDERS)


@pytest.mark.gpu
@held
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_a_process_ends_without_output_while_a_library_holds_an_array(
    name: str, holder: str, tmp_path: Path
) -> None:
    import_or_skip(name)
    code = EXPORT.format(name=name, device="cuda", hold=HOLDERS[holder])
    ends_in_silence(code, tmp_path)


@held
def test_a_process_ends_without_output_while_numpy_holds_an_array_of_the_emulator(
    holder: str, tmp_path: Path
) -> None:
    code = EXPORT.format(name="numpy", device="emulator", hold=HOLDERS[holder])
    ends_in_silence(code, tmp_path)


@pytest.mark.torch
@held
def test_a_process_ends_without_output_while_torch_holds_an_array_of_the_emulator(
    holder: str, tmp_path: Path
) -> None:
    import_or_skip("torch")
    code = EXPORT.format(name="torch", device="emulator", hold=HOLDERS[holder])
    ends_in_silence(code, tmp_path)


GRAPHS = """
import os, sys, torch, preheat
gpu = preheat.device("cuda")
x, y = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
put = gpu.kernel('extern "C" __global__ void put(float* x) { x[threadIdx.x] = 1; }', "put")
put[1, 32](x)
"""
WITH_TORCH = """
with gpu.capture() as graph:
    z = x * 2 + 1
    torch.add(z, 1, out=y)
graph.replay()
"""
LIVES = {
    "alive": WITH_TORCH,
    "dropped": WITH_TORCH + "del graph\n",
    "in a cycle": WITH_TORCH + "cycle = [graph]; cycle.append(cycle)\ndel cycle, graph\n",
    "alive in a fork that exits": """
with gpu.capture() as graph:
    put[1, 32](x)
graph.replay()
gpu.synchronize()
pid = os.fork()
if not pid:
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert status == 0, status
""",
}


@pytest.mark.gpu
@pytest.mark.parametrize("life", LIVES)
def test_a_process_ends_without_output_with_a_graph_of_torchs_work(life: str, tmp_path: Path) -> None:
    import_or_skip("torch")
    ends_in_silence(GRAPHS + LIVES[life], tmp_path)


FORKS = """
import os, signal, threading
import preheat

gpu = preheat.device("emulator")

def churn():
    x = gpu.zeros(4)
    while True:
        x[0:2]

for _ in range(4):
    threading.Thread(target=churn, daemon=True).start()
for _ in range(100):
    pid = os.fork()
    if not pid:
        signal.alarm(240)
        gpu.zeros(4).numpy()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        print("a child ended with", status, flush=True)
        break
os._exit(0)
"""


def test_a_fork_does_not_hang_while_other_threads_make_views(tmp_path: Path) -> None:
    ends_in_silence(FORKS, tmp_path)
