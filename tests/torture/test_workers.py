"""Attacks on compiler processes: their owner is killed during a compile and while requests wait."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.model.linked_program import RelocatableProgram
from preheat.model.program import Program
from preheat.toolchain import scratch
from preheat.toolchain.compiler import Toolchain
from tests import processes
from tests.processes import TIMEOUT_SECONDS
from tests.toolchain import support
from tests.torture.conftest import Campaign

SM_90 = Arch.parse("sm_90")

#: Compiles 16 programs at once, which no machine ends in time, with headers looked for in argv[2].
COMPILE = """
import sys, threading
from preheat.model.arch import Arch
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.toolchain.compiler import Toolchain

toolchain = Toolchain(Events(), timeout=3000.0)
toolchain.located
source = open(sys.argv[1]).read()

def compile(number):
    program = Program.of(f"{source}// {number}", include=[sys.argv[2]])
    toolchain.compile(program, Arch.parse("sm_90"))

for number in range(16):
    threading.Thread(target=compile, args=(number,)).start()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a temporary directory of the test, which its children use too."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    return place


def start_compiles(place: Path) -> subprocess.Popen[str]:
    """Return a process that compiles, with all its directories in `place`."""
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root, for a mount namespace of its own")
    endless = place.parent / "endless.cu"
    endless.write_text(support.slow(30_000))
    mount = 'mount --bind "$0" /dev/shm && exec "$@"'
    code = [sys.executable, "-c", COMPILE, str(endless), str(place.parent)]
    process = processes.start_process([unshare, "--mount", "sh", "-c", mount, str(place), *code])
    support.compiling(process.pid)
    return process


@pytest.mark.parametrize(
    "workers_too",
    [pytest.param(False, marks=pytest.mark.long), True],
    ids=["the parent", "parent and workers"],
)
def test_killed_processes_leave_no_directory(
    campaign: Campaign, temporary: Path, workers_too: bool
) -> None:
    for _ in range(campaign.rounds(quick=1, long=40)):
        process = start_compiles(temporary)
        assert list(temporary.iterdir()) != []
        workers = support.workers_of(process.pid)
        if workers_too:
            for worker in workers:  # stopped, so that they cannot clean up after their parent
                os.kill(worker, signal.SIGSTOP)
        processes.kill(process)
        if workers_too:
            for worker in workers:
                os.kill(worker, signal.SIGKILL)
        processes.wait_for(functools.partial(_emptied, temporary, sweep=workers_too))


def _emptied(place: Path, *, sweep: bool) -> bool:
    if sweep:
        scratch.sweep()  # as the next process does that starts a worker
    return list(place.iterdir()) == []


def test_no_sweep_takes_a_directory_that_is_in_use(campaign: Campaign, tmp_path: Path) -> None:
    sweeper = processes.start_python(
        "from preheat.toolchain import scratch\nprint('go', flush=True)\nwhile True: scratch.sweep()"
    )
    assert processes.read_line(sweeper) == "go"
    for _ in range(campaign.rounds(quick=300, long=20_000)):
        made = scratch.make({"@0": str(tmp_path)})
        assert made is not None
        assert os.path.samefile(f"{made.path}/@0", tmp_path)
        made.remove()
        assert not os.path.exists(made.path)


def test_directories_of_other_users_stay(tmp_path: Path, temporary: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to make a directory of another user")
    theirs = temporary / f"{scratch._PREFIX}theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    (temporary / f"{scratch._PREFIX}link").symlink_to(tmp_path)
    os.mkfifo(temporary / f"{scratch._PREFIX}fifo")
    (temporary / f"{scratch._PREFIX}mine").mkdir()
    scratch.sweep()
    assert {each.name.removeprefix(scratch._PREFIX) for each in temporary.iterdir()} == {
        "theirs",
        "link",
        "fifo",
    }
    assert tmp_path.is_dir()


@pytest.mark.parametrize(
    ("relocatable", "options"),
    [
        (False, ("-G",)),
        (False, ("-lineinfo",)),
        pytest.param(False, ("--device-debug", "--dopt=on"), marks=pytest.mark.long),
        pytest.param(True, ("--generate-line-info",), marks=pytest.mark.long),
    ],
)
def test_two_compiles_with_line_information_are_equal(
    campaign: Campaign, tmp_path: Path, relocatable: bool, options: tuple[str, ...]
) -> None:
    (tmp_path / "v.h").write_text("__device__ inline int v(int x) { return x * 3 + 1; }\n")
    source = '#include "v.h"\nextern "C" __global__ void k(int* x) { *x = v(*x); }\n'
    program = Program.of(source, include=[tmp_path], options=options)
    if relocatable:
        program = RelocatableProgram.part(program, lto=False)
    made = set()
    for _ in range(campaign.rounds(quick=2, long=10)):
        toolchain = Toolchain(Events(), timeout=TIMEOUT_SECONDS)
        compiled = toolchain.compile(program, SM_90)
        toolchain.close()
        made.add((compiled.ptx, compiled.cubin))
    assert len(made) == 1
    ((text, cubin),) = made
    assert b"/dev/shm" not in text + cubin
    assert b'"/proc/self/cwd/@0/v.h"' in text
