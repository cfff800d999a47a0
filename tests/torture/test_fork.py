"""Forks during builds: every child can build, whatever the threads of the parent do."""

from __future__ import annotations

from pathlib import Path

from tests.processes import expect_success, start_python
from tests.torture.conftest import Campaign

# Threads build without end, beginning with the first import, while the main thread forks. Each child
# builds something new, something old and the same as a sibling. A child that hangs is killed by its
# alarm, and reported with a traceback of its position.
FORKS = """
import faulthandler, os, random, signal, sys, threading, time

forks, at_once, seed = map(int, sys.argv[1:])
random = random.Random(seed)
import preheat

def source(number):
    return f'extern "C" __global__ void k(int* x) {{ *x = {number}; }}'

def build(number):
    text = preheat.compile(source(number), "sm_90").ptx
    assert f"{number};".encode() in text, text

stop, errors = False, []

def work(thread):
    number = 1000 * thread
    while not stop:
        try:
            build(number := number + 1)
        except Exception as error:
            errors.append(repr(error))

threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(1, 5)]
for thread in threads:
    thread.start()
children, bad = set(), []

def reap():
    child, status = os.wait()
    children.discard(child)
    if status:
        bad.append(os.waitstatus_to_exitcode(status))

for fork in range(forks):
    time.sleep(random.choice([0, 0.0005, 0.002, 0.01, 0.03]) * random.random())
    child = os.fork()
    if child == 0:
        code = 3
        try:
            faulthandler.dump_traceback_later(120, exit=True)
            build(7)
            build(100_000 + fork // 2)
            code = 0
        finally:
            os._exit(code)
    children.add(child)
    while len(children) >= at_once:
        reap()
while children:
    reap()
stop = True
for thread in threads:
    thread.join(120)
stuck = sum(thread.is_alive() for thread in threads)
print("bad children", bad, "errors of the parent", errors, "stuck threads", stuck)
os._exit(0)
"""


def test_no_child_hangs_however_often_a_process_forks_while_its_threads_build(
    tmp_path: Path, campaign: Campaign
) -> None:
    forks = campaign.rounds(quick=10, long=500)
    for each in range(forks // 5):  # a new process each time: much happens in its first builds
        env = {
            "PREHEAT_CACHE_DIR": str(tmp_path / f"cache{each}"),
            "PREHEAT_LOCK_DIR": str(tmp_path / f"locks{each}"),
        }
        if each % 2:
            env["PREHEAT_EVENTS"] = str(tmp_path / "events")
            env["PREHEAT_RECORD"] = str(tmp_path / "manifest.toml")
        said = expect_success(
            start_python(FORKS, "5", "3", str(campaign.random.randrange(1 << 30)), env=env)
        )
        assert said == "bad children [] errors of the parent [] stuck threads 0\n"


# Every module that a build imports after `import preheat` is imported where no fork can happen. The
# finder is asked for each module that is not loaded yet.
IMPORTS = """
import sys, threading

class Watch:
    def find_spec(self, name, path=None, target=None):
        if not any(
            (last := holder.last()).thread == threading.get_ident() and last.alive()
            for holder in no_fork._holders
        ):
            print(name)

import preheat
from preheat.process.locks import no_fork
sys.meta_path.insert(0, Watch())
"""
BUILDS = """
source = '#include <cuda_fp16.h>\\nextern "C" __global__ void k(int* x) { *x = 1; }'
try:
    preheat.compile("nonsense", "sm_90")
except preheat.CompileError as error:
    str(error)
artifact = preheat.compile(source, "sm_90")
preheat.compile(artifact.ptx.decode(), "sm_90")
preheat.compile(source, "sm_90")
preheat.default_builder().disk.sweep()
preheat.default_builder().stats()
preheat.default_builder().close()
sys.meta_path.pop(0)
"""


def test_a_build_imports_nothing_where_a_fork_could_happen(tmp_path: Path) -> None:
    env = {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_RECORD": str(tmp_path / "manifest.toml"),
    }
    (tmp_path / "cache" / "v0" / "ab").mkdir(parents=True)  # of another format: swept
    for code in (IMPORTS + BUILDS, IMPORTS + BUILDS):  # misses, then hits
        assert expect_success(start_python(code, env=env)) == ""
