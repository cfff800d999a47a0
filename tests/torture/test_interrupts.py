"""Interrupts anywhere in a build: no later build hangs, no lock and no descriptor is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import expect_success, start_python
from tests.torture.conftest import Campaign

# Interrupts builds at random instructions of preheat, then looks at what is left. An interrupt that is
# `raised` raises exactly there. One that is `pending` is a signal that comes in there and that the
# interpreter delivers when it next handles signals, be that in preheat or below. The exception of the
# interrupted build is kept, as an interactive session keeps the last one, with all its frames hold.
INTERRUPTS = """
import ctypes, fcntl, os, random, signal, subprocess, sys, threading, time
from pathlib import Path

kind, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random = random.Random(seed)
import preheat
from preheat.model.artifact import EntryPoint
from preheat.toolchain.compiler import Toolchain
from preheat.toolchain.translate import Compiled

os.fsync = lambda _: None  # nothing here loses power
home = Path(os.environ["HOME"])
(home / "h.cuh").write_text("// header")
os.utime(home / "h.cuh", (1e9, 1e9))
builder = preheat.Builder.open()

def compiled(self, program, arch):
    opened = ("@0/h.cuh",) if program.include else ()
    build = self.located.libraries["nvrtc"].build
    entries = (EntryPoint("k", ()),)
    return Compiled(
        cubin=b"x" * 100, ptx=program.source.encode(), entries=entries, names={}, log="", timing="",
        seconds=0.01, build=build, opened=opened,
    )

builder.toolchain.located
if kind != "compile":
    Toolchain.compile = compiled

def program(number):
    if kind == "hit":
        return preheat.Program.of("// hit")
    if kind == "headers":
        return preheat.Program.of(f'#include "h.cuh"\\n// {number}', include=[home])
    if kind == "compile":
        return preheat.Program.of(f'extern "C" __global__ void k(int* x) {{ *x = {number}; }}')
    return preheat.Program.of(f"// {number}")

class Elsewhere:
    '''Another process that holds the lock of a program for a moment.'''

    CODE = '''if True:
        import fcntl, os, sys, time
        file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        print(flush=True)
        sys.stdin.read()
        os.unlink(sys.argv[1])
    '''

    def __init__(self, program):
        path = builder._locks._locks.directory / builder.key(program, "sm_90").digest
        command = [sys.executable, "-S", "-c", self.CODE, str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process.stdout.readline()
        self.timer = threading.Timer(0.01, self.process.stdin.close)
        self.timer.start()

    def end(self):
        self.timer.join()
        self.process.wait()
        self.process.stdout.close()

class Stop(KeyboardInterrupt):
    pass

def stop(*_):
    sys.settrace(None)
    raise Stop

signal.signal(signal.SIGINT, stop)
trip = ctypes.pythonapi.PyErr_SetInterrupt
trip.argtypes, trip.restype = [ctypes.py_object] * 3, None
OURS = os.path.dirname(preheat.__file__) + os.sep
OTHERS = ("locate.py", "elf.py", "config.py")

def traced(at, act, how='raised'):
    '''Run `act`, interrupted at instruction `at` of preheat; how many there were, and the interrupt.'''
    count = 0

    def trace(frame, event, _):
        nonlocal count
        name = frame.f_code.co_filename
        if not name.startswith(OURS) or name.endswith(OTHERS):
            return None
        # Python 3.13 counts instructions only once a frame has its trace function: at its first line.
        frame.f_trace_opcodes, frame.f_trace_lines = True, event == "call"
        if event == "opcode":
            count += 1
            if count == at and how == "raised":
                sys.settrace(None)
                raise Stop
            if count == at:
                return trip  # called at the next one: a function in C, where no signal is delivered
        return trace

    try:
        # Python 3.12 reports instructions only if a frame has asked for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)
        act()
        time.sleep(0)  # delivers a signal that came in with the last instruction
    except Stop as stopped:
        return count, stopped
    finally:
        sys.settrace(None)
    return count, None

def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass
    return found

def locked():
    names = []
    for path in builder._locks._locks.directory.iterdir():
        file = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            names.append(path.name)
        finally:
            os.close(file)
    return names

def in_thread(act):
    '''Whether `act` ends well in another thread.'''
    ended = []
    thread = threading.Thread(target=lambda: ended.append(act()), daemon=True)
    thread.start()
    thread.join(100)
    return bool(ended)

def build(number):
    builder.build(program(number), "sm_90")

def attack(at, how, number):
    other = Elsewhere(program(number)) if kind == "waiting" else None
    _, stopped = traced(at, lambda: build(number), how)
    wrong = []
    if not in_thread(lambda: build(number) or True):
        wrong.append("hangs")
    if stopped is not None and locked():
        wrong.append(f"locked {locked()}")
    if other is not None:
        other.end()
    if not in_thread(lambda: build(number + 1) or True):
        wrong.append("another hangs")
    where = None if stopped is None else place(stopped)
    del stopped
    return wrong, where

def place(error):
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    return f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"

build(0), build(0)
if kind == "hit":
    builder.cache.tiers[0].clear()
number = 10
total, _ = traced(0, lambda: build(number))
before, bad, interrupted = descriptors(), [], 0
places = [(at, how) for at in range(1, total + 1) for how in ("raised", "pending")]
places = random.sample(places, min(rounds, len(places)))
for at, how in places:
    number += 10
    if kind == "hit" and number % 20:
        builder.cache.tiers[0].clear()
    wrong, where = attack(at, how, number)
    interrupted += where is not None
    now = descriptors()
    if len(now) > len(before):
        wrong.append(f"descriptors {sorted(set(now.items()) - set(before.items()))}")
        before = now
    staged = os.listdir(builder.disk.root / "v1" / "staged")
    if staged:
        wrong.append("staged file")
        for name in staged:
            os.unlink(builder.disk.root / "v1" / "staged" / name)
    if wrong:
        bad.append((where, how, wrong))
print(f"{total} instructions, {len(places)} tried, {interrupted} interrupted", file=sys.stderr)
for each in bad:
    print(*each)
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["miss", "hit", "headers", "waiting"])
def test_an_interrupt_anywhere_leaves_nothing_that_a_later_build_waits_for(
    kind: str, tmp_path: Path, campaign: Campaign
) -> None:
    attack(kind, campaign.rounds(quick=10 if kind == "waiting" else 40, long=4000), tmp_path, campaign)


@pytest.mark.long
def test_an_interrupt_during_a_compile_leaves_nothing_behind(
    tmp_path: Path, campaign: Campaign
) -> None:
    attack("compile", campaign.rounds(quick=1, long=500), tmp_path, campaign)


def attack(kind: str, rounds: int, home: Path, campaign: Campaign) -> None:
    env = {
        "HOME": str(home),
        "PREHEAT_CACHE_DIR": str(home / "cache"),
        "PREHEAT_LOCK_DIR": str(home / "locks"),
    }
    assert (
        expect_success(start_python(INTERRUPTS, kind, str(rounds), str(campaign.seed), env=env)) == ""
    )
