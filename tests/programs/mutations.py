"""Remove one wait or one ownership at a time, and check that a test fails.

    make mutations        # or: python -m tests.programs.mutations [PART OF A NAME …]

Each mutation is applied to a copy of the sources. The tests of the order then run on deferred streams,
and the mutation is caught when one of them fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/devices/test_ordering.py",
    "tests/devices/test_shared_ordering.py",
    "tests/devices/test_foreign_captures.py",
    "tests/devices/test_shared_pools.py",
    "tests/devices/test_branch_ordering.py",
    "tests/programs/test_random_programs.py",
)


class Mutation(NamedTuple):
    """A change of the sources: `before` occurs once in `file`, and becomes `after`."""

    name: str
    file: str
    before: str
    after: str


ORDER, USES = "devices/order.py", "devices/uses.py"
BRANCHES = "graph/branches.py"
MUTATIONS = (
    Mutation(
        "no use waits for an earlier one", ORDER,
        "            if not uses.has_right(timeline, write=write):\n                uses.wait_for_uses",
        "            if False:\n                uses.wait_for_uses",
    ),
    Mutation(
        "no use waits for the stream with the exclusive right", USES,
        "        if self._writer_timeline is not None:\n"
        "            self._wait_for(timeline, self._writer_timeline, marks)\n",
        "",
    ),
    Mutation(
        "no use waits for the last write of a stream without a right", USES,
        "        for last in self._last_writes.values():\n            timeline.wait(*last)\n",
        "",
    ),
    Mutation(
        "no write waits for streams that may read", USES,
        "                self._wait_for(timeline, reader, marks)\n",
        "                pass\n",
    ),
    Mutation(
        "no write waits for reads of other libraries' streams", USES,
        "            for last in self._last_reads.values():\n                timeline.wait(*last)\n",
        "",
    ),
    Mutation(
        "a stream that reads gets the right to write", USES,
        "        if write or (self._writer_timeline is None and not other_readers):\n",
        "        if True:\n",
    ),
    Mutation(
        "a stream keeps its right to write while others read", USES,
        "        if self._writer_timeline is not None:  # `wait_for_uses` has just marked it.\n"
        "            self._make_writer_a_reader(self._writer_timeline.position)\n",
        "",
    ),
    Mutation(
        "having waited once is having waited for all that follows", USES,
        "self.waited_for.get(other.stream.id, 0) >= position",
        "other.stream.id in self.waited_for",
    ),
    Mutation(
        "prepared work is not told that it lost a right", USES,
        "        for dependent in self._dependents or ():\n            dependent.invalidate()\n",
        "",
    ),
    Mutation(
        "a use in a stream of another library is forgotten", ORDER,
        "            uses.record_use(self._timeline, position, write=write)\n",
        "            pass\n",
    ),
    Mutation(
        "a repeated use in a stream of another library is forgotten", ORDER,
        "                        uses.repeat_use(timeline, position, write=write)\n",
        "                        pass\n",
    ),
    Mutation(
        "a repeated use that was interrupted is not marked", ORDER,
        "            submitted = True  # An interrupt may come after the work was submitted.\n",
        "",
    ),
    Mutation(
        "nothing waits for the current streams of other libraries", ORDER,
        "        for other in self._others:\n            timeline.wait_for_all(other)\n",
        "",
    ),
    Mutation(
        "other libraries do not wait for uses of what they share", ORDER,
        "            other.wait(self._timeline, position)\n",
        "            pass\n",
    ),
    Mutation(
        "memory that was given away counts as ours alone", USES,
        "        return self.exported_by_interface or bool(self.dlpack_exports)\n",
        "        return False\n",
    ),
    Mutation(
        "an array interface is taken for released at once", USES,
        "        return self.exported_by_interface or bool(self.dlpack_exports)\n",
        "        return bool(self.dlpack_exports)\n",
    ),
    Mutation(
        "a consumer does not wait for what was done before the export", ORDER,
        "                uses.wait_for_uses(timeline, write=True, marks=marks)\n"
        "            uses.end_rights()",
        "            uses.end_rights()",
    ),
    Mutation(
        "an export leaves the short path open", ORDER,
        "                uses.wait_for_uses(timeline, write=True, marks=marks)\n"
        "            uses.end_rights()",
        "                uses.wait_for_uses(timeline, write=True, marks=marks)",
    ),
    Mutation(
        "nothing waits for where a consumer worked when it released memory", ORDER,
        "                    part.record_foreign_write(timeline)\n",
        "                    pass\n",
    ),
    Mutation(
        "a stream is known by its handle", ORDER,
        "            if handle in LEGACY_STREAMS:\n                self._by_handle[handle] = timeline",
        "            self._by_handle[handle] = timeline",
    ),
    Mutation(
        "a second consumer does not wait for the first", ORDER,
        "                for other in before:\n                    timeline.wait_for_all(other)\n",
        "",
    ),
    Mutation(
        "an array interface names a stream that has waited for nothing", "devices/dlpack.py",
        "[_LEGACY_STREAM, array.buffer.home.handle, *current_streams(device)]",
        "[_LEGACY_STREAM, *current_streams(device)]",
    ),
    Mutation(
        "scratch memory grows into memory that is still used", "graph/pool.py",
        "            self._context.order.add_pending_reader("
        "self._scratch.uses, self._context.stream)\n",
        "",
    ),
    Mutation(
        "parts of a block do not delay its free", "graph/arena.py",
        "            span.block.uses.freed_parts[id(uses)] = uses\n",
        "",
    ),
    Mutation(
        "memory is freed before its last use", "devices/context.py",
        "            self.order.section(home, {uses: True}).enter()\n",
        "            pass\n",
    ),
    Mutation(
        "a pool hands memory out before its last use", "graph/arena.py",
        "            order.section(home, {uses: True}).enter()\n",
        "            pass\n",
    ),
    Mutation(
        "places that frames hand out again have uses of their own", "graph/frames.py",
        "    def _new_uses(self) -> Uses:\n        return self.stack.uses\n",
        "",
    ),
    Mutation(
        "a graph owns a tensor and not its storage", "devices/operands.py",
        "    owner = value.untyped_storage()  # `value.data = other` does not change it.\n",
        "    owner = value\n",
    ),
    Mutation(
        "a graph holds no tensors of other libraries", "graph/capture.py",
        # The list of the capture and the record of the launch hold the same operands.
        "operands.\"\"\"\n        self._add_foreign(arguments)\n",
        "operands.\"\"\"\n        arguments.foreign.clear()\n        self._add_foreign(arguments)\n",
    ),
    Mutation(
        "a graph does not keep what other libraries allocated inside it", "graph/recorded.py",
        "            pools = capture.libraries_inside.take_pools()\n",
        "            capture.libraries_inside.take_pools()\n",
    ),
    Mutation(
        "a launch does not hold what its library does not wait for", "devices/launch.py",
        "        context.hold_until(record_event(context, stream), arguments.keep_alive)\n",
        "        pass\n",
    ),
    Mutation(
        "subclasses of tensors are strangers", "devices/libraries.py",
        '== (self.name, "Tensor") for each in kind.__mro__',
        '== (self.name, "Tensor") for each in (kind,)',
    ),
    Mutation(
        "a replay does not count as a write of its scalars", "graph/recorded.py",
        "capture.uses | {scalar.buffer.uses: True for scalar in scalars.values()}",
        "dict(capture.uses)",
    ),
    Mutation(
        "no branch of a capture waits for uses in another one", BRANCHES,
        "        self.wait_for_uses(branch, uses)\n        yield\n",
        "        yield\n",
    ),
    Mutation(
        "no branch waits for what was captured before the first event", BRANCHES,
        "                branch.wait(mark)\n",
        "                if mark is not self._first:\n                    branch.wait(mark)\n",
    ),
    Mutation(
        "no write waits for reads in other branches", BRANCHES,
        "(self._last_write, *self._reads) if write else (self._last_write,)",
        "(self._last_write,)",
    ),
    Mutation(
        "a use in a branch is forgotten", BRANCHES,
        "            self._uses_of(each).add(mark, write=write)\n",
        "            pass\n",
    ),
    Mutation(
        "a branch that has waited once has waited for all that follows", BRANCHES,
        "self._seen.get(other._number, 0) >= position",
        "other._number in self._seen",
    ),
    Mutation(
        "no branch waits for a side stream of another library", BRANCHES,
        "            branch.wait(self._mark(other))\n",
        "            pass\n",
    ),
    Mutation(
        "no side stream of another library waits for a branch", BRANCHES,
        "            other.wait(mark)\n",
        "            pass\n",
    ),
    Mutation(
        "shared memory counts as ours alone inside a capture", "graph/captured_streams.py",
        "        if any(each.exported for each in uses):\n",
        "        if False:\n",
    ),
    Mutation(
        "an export inside a capture does not wait for branches", "graph/captured_streams.py",
        "                self._order.wait_for_uses(branch, {uses: True})\n",
        "                pass\n",
    ),
    Mutation(
        "a launch inside a capture ignores the side stream of its library", "graph/captured_streams.py",
        "            for branch in self._foreign_branches([first]):\n",
        "            for branch in self._foreign_branches([first][:0]):\n",
    ),
    Mutation(
        "replays of graphs that share a pool are not ordered", "graph/recorded.py",
        "            uses[shared_pool.uses] = True\n",
        "            pass\n",
    ),
    Mutation(
        "copies of results do not delay other graphs that share their pool", "graph/cached_graph.py",
        "        self.graph.record_read()\n",
        "",
    ),
    Mutation(
        "a graph does not keep the pool that it shares", "graph/libraries.py",
        "else (self.shared_pool,)",
        "else (None,)",
    ),
    Mutation(
        "any write in a stream of another library counts as a repeated one", USES,
        "        return not known and self._last_writes.keys() == {timeline.stream.id}\n",
        "        return bool(self._last_writes) or bool(known)\n",
    ),
    Mutation(
        "a write of a variable does not wait for earlier work", "devices/module.py",
        "        context.wait_for_work()\n        context.device.copy_in(",
        "        context.device.copy_in(",
    ),
    Mutation(
        "a read of a variable does not wait for earlier work", "devices/module.py",
        "        context.wait_for_work()  # Any stream may have written it.\n",
        "",
    ),
)  # fmt: skip


def run(mutation: Mutation) -> tuple[bool, float, str]:
    """Apply a mutation to a copy and run the tests: whether they noticed, after how long, and where."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / "preheat" / mutation.file
        text = file.read_text()
        if text.count(mutation.before) != 1:
            raise SystemExit(f"{mutation.name}: {mutation.file} has changed, so the mutation must, too")
        file.write_text(text.replace(mutation.before, mutation.after))
        env = os.environ | {"PYTHONPATH": str(copy), "PREHEAT_TEST_PROGRAMS": "300"}
        env |= {"PREHEAT_TEST_ALL": "1", "PREHEAT_TEST_SHRINK": "0"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=line", *TESTS]
        command += ["-p", "no:cacheprovider", "--import-mode=importlib"]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode == 1, time.perf_counter() - started, (failed or [""])[0][:150]


def main(parts: list[str]) -> int:
    """Run the mutations whose names contain one of the parts, or all of them."""
    chosen = [each for each in MUTATIONS if not parts or any(part in each.name for part in parts)]
    missed = 0
    for number, mutation in enumerate(chosen, start=1):
        caught, seconds, where = run(mutation)
        missed += not caught
        verdict = "caught" if caught else "MISSED"
        print(f"{number:3} of {len(chosen)}  {verdict}  {seconds:5.1f} s  {mutation.name}", flush=True)
        if where:
            print(f"                      {where}", flush=True)
    print(f"{len(chosen) - missed} caught, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
