"""Captures into graphs that exist, and events as nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.driver.calls.cuda import Program, cu, ok, status
from tests.driver.calls.graphs import (
    RELAXED,
    Kept,
    fill_of,
    run,
    types_of,
)

pytestmark = pytest.mark.cpu_driver

INVALID_VALUE = 1


def test_a_capture_adds_nodes_to_a_graph_that_exists(
    program: Program, stream: Any, graph: Any, address: Any, twice: Any
) -> None:
    fill = ok(cu.cuGraphAddMemsetNode(graph, None, 0, fill_of(address, 3, 1), program.context))
    apart = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    ok(cu.cuStreamBeginCaptureToGraph(stream, graph, [fill], None, 1, RELAXED))
    assert status(cu.cuGraphInstantiate(graph, 0)) == INVALID_VALUE
    ok(program.launch("twice", address, 1, stream=stream))
    made = ok(cu.cuStreamEndCapture(stream))
    assert int(made) == int(graph)
    assert len(types_of(graph)) == 3
    run(graph, stream)
    assert program.values(address, 1) == [6]
    ok(cu.cuStreamBeginCaptureToGraph(stream, graph, [fill], None, 1, RELAXED))
    ok(program.launch("twice", address, 1, stream=stream))
    assert status(cu.cuStreamSynchronize(stream)) == 900
    assert status(cu.cuStreamEndCapture(stream)) == 901
    assert len(types_of(graph)) == 3  # It is what it was.
    del apart, twice


def test_a_capture_need_not_wait_for_nodes_that_were_taken_from_its_dependencies(
    program: Program, stream: Any, address: Any
) -> None:
    flags = cu.CUstreamUpdateCaptureDependencies_flags
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    ok(program.launch("twice", address, 1, stream=stream))
    graph = ok(cu.cuStreamGetCaptureInfo(stream))[2]
    node = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    set_them = flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    ok(cu.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, set_them))
    made = ok(cu.cuStreamEndCapture(stream))
    assert len(types_of(made)) == 2
    ok(cu.cuGraphDestroy(made))


def test_external_events_are_nodes_of_a_capture(program: Program, stream: Any, address: Any) -> None:
    event = ok(cu.cuEventCreate(0))
    record, wait = (
        cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL,
        cu.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL,
    )
    assert status(cu.cuEventRecordWithFlags(event, stream, int(record))) == INVALID_VALUE
    ok(cu.cuStreamBeginCapture(stream, RELAXED))
    ok(cu.cuStreamWaitEvent(stream, event, int(wait)))
    ok(program.launch("twice", address, 1, stream=stream))
    ok(cu.cuEventRecordWithFlags(event, stream, int(record)))
    graph = ok(cu.cuStreamEndCapture(stream))
    assert [int(each) for each in types_of(graph)] == [6, 0, 7]
    node = ok(cu.cuGraphGetNodes(graph, 1))[0][0]
    assert int(ok(cu.cuGraphEventWaitNodeGetEvent(node))) == int(event)
    run(graph, stream)
    ok(cu.cuEventSynchronize(event))
    assert program.values(address, 1) == [2]
    ok(cu.cuGraphDestroy(graph))
    ok(cu.cuEventDestroy(event))


def test_an_event_is_recorded_in_the_midst_of_a_graph(program: Program, graph: Any, kept: Kept) -> None:
    """What comes after the record in the graph is not waited for by who waits for the event."""
    first, other, event = (
        ok(cu.cuStreamCreate(1)),
        ok(cu.cuStreamCreate(1)),
        ok(cu.cuEventCreate(0)),
    )
    address, result = program.memory([1]), program.memory([0])
    add = kept.kernel(program.function("add"), address, 1, 1)
    early = ok(cu.cuGraphAddKernelNode(graph, None, 0, add))
    record = ok(cu.cuGraphAddEventRecordNode(graph, [early], 1, event))
    late = kept.kernel(program.function("twice"), address, 1)
    ok(cu.cuGraphAddKernelNode(graph, [record], 1, late))
    made = ok(cu.cuGraphInstantiate(graph, 0))
    seen = set()
    for _ in range(40):
        ok(cu.cuMemsetD32(address, 1, 1))
        ok(cu.cuCtxSynchronize())
        ok(cu.cuGraphLaunch(made, first))
        ok(cu.cuStreamWaitEvent(other, event, 0))
        ok(cu.cuMemcpyDtoDAsync(result, address, 4, other))
        ok(cu.cuStreamSynchronize(other))
        ok(cu.cuStreamSynchronize(first))
        seen.add(program.values(result, 1)[0])
    assert seen == {2, 4}
    ok(cu.cuGraphExecDestroy(made))
    for each in (first, other):
        ok(cu.cuStreamDestroy(each))
    ok(cu.cuEventDestroy(event))
    for each in (address, result):
        ok(cu.cuMemFree(each))
