"""Programs with graphs of explicit nodes: streams of every kind, and faults."""

from __future__ import annotations

import pytest

from preheat.driver.library import LIBRARY
from tests.driver.test_processes import run

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built")

START = """
from tests.driver.calls.graphs import Kept, allocation_of, copy_of, fill_of
kept, stream = Kept(), ok(cu.cuStreamCreate(1))
graph, child = ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
address = program.memory([0] * 5)
"""
EVERYTHING = """
event, other = ok(cu.cuEventCreate(0)), ok(cu.cuStreamCreate(1))
inside = allocation_of(20)
made = ok(cu.cuGraphAddMemAllocNode(graph, None, 0, inside))
fill = ok(cu.cuGraphAddMemsetNode(graph, [made], 1, fill_of(inside.dptr, 3, 5), program.context))
twice = kept.kernel(program.function("twice"), inside.dptr, 5)
first = ok(cu.cuGraphAddKernelNode(child, None, 0, twice))
ok(cu.cuGraphAddKernelNode(child, [first], 1, twice))
node = ok(cu.cuGraphAddChildGraphNode(graph, [fill], 1, child))
copy = copy_of(address, inside.dptr, 20)
back = ok(cu.cuGraphAddMemcpyNode(graph, [node], 1, copy, program.context))
record = ok(cu.cuGraphAddEventRecordNode(graph, [back], 1, event))
ok(cu.cuGraphAddMemFreeNode(graph, [record], 1, inside.dptr))
executable = ok(cu.cuGraphInstantiate(graph, 0))
for _ in range(2):
    ok(cu.cuGraphLaunch(executable, stream))
ok(cu.cuStreamWaitEvent(other, event, 0))
ok(program.launch("add", address, 5, 1, stream=other))
ok(cu.cuStreamSynchronize(other))
print(*program.values(address, 5))
ok(cu.cuGraphNodeSetEnabled(executable, back, 0))
ok(cu.cuGraphLaunch(executable, stream))
ok(cu.cuStreamSynchronize(stream))
print(*program.values(address, 5))
"""
FAULT = """
twice = kept.kernel(program.function("twice"), address, 32)
ok(cu.cuGraphAddKernelNode(child, None, 0, twice))
ok(cu.cuGraphAddChildGraphNode(graph, None, 0, child))
executable = ok(cu.cuGraphInstantiate(graph, 0))
print(status(cu.cuGraphLaunch(executable, stream)), status(cu.cuStreamSynchronize(stream)))
print(status(cu.cuGraphLaunch(executable, stream)), status(cu.cuGraphCreate(0)))
"""


@pytest.mark.parametrize("schedule", ["off", "1", "2"])
def test_a_graph_works_at_once_and_in_deferred_streams(schedule: str) -> None:
    printed, messages = run(START + EVERYTHING, schedule=schedule)
    assert printed == ["13 13 13 13 13", "13 13 13 13 13"]
    assert not messages


@pytest.mark.parametrize("schedule", ["off", "1"])
def test_a_fault_in_a_graph_ends_the_context_and_is_named(schedule: str) -> None:
    printed, messages = run(START + FAULT, schedule=schedule)
    assert printed == ["0 700", "700 700"]
    assert "twice, PTX line" in messages
    assert "0 bytes past the end of the 20-byte buffer" in messages


OTHER_DEVICE = """
inside = allocation_of(20, device=1)
made = ok(cu.cuGraphAddMemAllocNode(graph, None, 0, inside))
ok(cu.cuGraphAddMemsetNode(graph, [made], 1, fill_of(inside.dptr, 3, 5), program.context))
executable = ok(cu.cuGraphInstantiate(graph, 0))
print(status(cu.cuGraphLaunch(executable, stream)), status(cu.cuGraphLaunch(executable, stream)))
ok(cu.cuStreamSynchronize(stream))
print(*program.values(inside.dptr, 5))
print(status(cu.cuMemFreeAsync(inside.dptr, stream)), status(cu.cuGraphLaunch(executable, stream)))
"""


@pytest.mark.parametrize("schedule", ["off", "1"])
def test_a_graph_allocates_memory_of_another_device(schedule: str) -> None:
    printed, messages = run(START + OTHER_DEVICE, schedule=schedule, devices="2")
    assert printed == ["0 1", "3 3 3 3 3", "0 0"]
    assert not messages
