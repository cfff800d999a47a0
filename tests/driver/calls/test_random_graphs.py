"""Random graphs do what their nodes do one after the other, in every order that their edges allow."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preheat.driver.bootstrap import driver_of_this_process
from tests.driver.calls.cuda import Program, compiled, cu, ok
from tests.driver.calls.graphs import Kept, copy_of, fill_of

pytestmark = pytest.mark.cpu_driver

SEEDS = range(4)
MIX = b"""
extern "C" __global__ void mix(int* y, const int* x, int n, int a) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = y[i] * a + x[i];
}
"""


@dataclass(frozen=True)
class Step:
    """One node: what it does to which arrays. A child has steps of its own."""

    kind: str
    target: int = 0
    source: int = 0
    value: int = 0
    inner: tuple[Step, ...] = ()

    @property
    def written(self) -> set[int]:
        """The arrays that it writes."""
        if self.kind == "child":
            return set().union(*(step.written for step in self.inner))
        return {self.target} if self.kind in ("mix", "fill", "copy", "host") else set()

    @property
    def read(self) -> set[int]:
        """The arrays that it reads."""
        if self.kind == "child":
            return set().union(*(step.read for step in self.inner))
        return {"mix": {self.target, self.source}, "copy": {self.source}, "host": {self.target}}.get(
            self.kind, set()
        )

    def apply(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        """Do it with NumPy."""
        y, x = arrays[self.target], arrays[self.source]
        if self.kind == "mix":
            y[:] = y * np.int32(self.value) + x
        elif self.kind == "fill":
            y[:] = self.value
        elif self.kind == "copy":
            y[:] = x
        elif self.kind == "host":
            y[:] = y[::-1].copy()
        for step in self.inner:
            step.apply(arrays)


COUNT = 4  # arrays
plain = st.builds(
    Step,
    st.sampled_from(["mix", "mix", "fill", "copy", "host", "empty"]),
    st.integers(0, COUNT - 1),
    st.integers(0, COUNT - 1),
    st.integers(-3, 7),
)
child = st.lists(plain, max_size=4).map(lambda steps: Step("child", inner=tuple(steps)))
steps = st.lists(st.one_of(plain, plain, plain, child), min_size=1, max_size=10)


def edges_of(order: Sequence[Step], drop: Callable[[int, int], bool]) -> list[list[int]]:
    """Return the earlier steps that each step must follow, except some that it follows anyway."""
    direct: list[list[int]] = []
    reached: list[set[int]] = []
    for at, step in enumerate(order):
        found: list[int] = []
        known: set[int] = set()
        for before in reversed(range(at)):
            other = order[before]
            conflict = other.written & (step.read | step.written) or other.read & step.written
            if conflict and not (before in known and drop(before, at)):
                found.append(before)
                known |= {before} | reached[before]
        direct.append(found)
        reached.append(known)
    return direct


class Builder:
    """Builds graphs of steps over arrays on the device and one mirror of each on the host."""

    def __init__(self, program: Program, kept: Kept, addresses: list[Any], size: int) -> None:
        self.program, self.kept = program, kept
        self.addresses, self.size = addresses, size
        self.module = ok(cu.cuModuleLoadData(compiled(source=MIX)))
        self.mix = ok(cu.cuModuleGetFunction(self.module, b"mix"))
        self._functions: list[Any] = []

    def add(self, graph: Any, step: Step, before: list[Any]) -> Any:
        """Add one step as a node."""
        bytes_, context = 4 * self.size, self.program.context
        y, x = self.addresses[step.target], self.addresses[step.source]
        given_before = before or None, len(before)
        if step.kind == "mix":
            parameters = self.kept.kernel(self.mix, y, x, self.size, step.value, threads=self.size)
            return ok(cu.cuGraphAddKernelNode(graph, *given_before, parameters))
        if step.kind == "fill":
            fill = fill_of(y, step.value & 0xFFFFFFFF, self.size)
            return ok(cu.cuGraphAddMemsetNode(graph, *given_before, fill, context))
        if step.kind == "copy":
            return ok(cu.cuGraphAddMemcpyNode(graph, *given_before, copy_of(y, x, bytes_), context))
        if step.kind == "host":
            return ok(cu.cuGraphAddHostNode(graph, *given_before, self._reversal(int(y))))
        if step.kind == "empty":
            return ok(cu.cuGraphAddEmptyNode(graph, *given_before))
        inner = ok(cu.cuGraphCreate(0))
        self.build(inner, step.inner, lambda *_: False)
        node = ok(cu.cuGraphAddChildGraphNode(graph, *given_before, inner))
        ok(cu.cuGraphDestroy(inner))
        return node

    def _reversal(self, address: int) -> Any:
        """Return a function of the host that reverses an array, which it can reach."""

        def reverse(_: int) -> None:
            array = np.ctypeslib.as_array((ctypes.c_int32 * self.size).from_address(address))
            array[:] = array[::-1].copy()

        function = ctypes.CFUNCTYPE(None, ctypes.c_size_t)(reverse)
        self._functions.append(function)
        made = cu.CUDA_HOST_NODE_PARAMS()
        made.fn = cu.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)
        return made

    def build(self, graph: Any, order: Sequence[Step], drop: Callable[[int, int], bool]) -> None:
        """Add steps with the edges that they need."""
        nodes: list[Any] = []
        for step, before in zip(order, edges_of(order, drop), strict=True):
            nodes.append(self.add(graph, step, [nodes[at] for at in before]))

    def close(self) -> None:
        """Unload the kernel."""
        ok(cu.cuCtxSynchronize())
        ok(cu.cuModuleUnload(self.module))


def restart(seed: int) -> None:
    """Let the order of deferred work be that of another seed."""
    driver = driver_of_this_process()
    assert driver is not None
    scheduler = driver.gpus[0].emulator.scheduler
    assert scheduler is not None
    scheduler.restart(seed)


@pytest.fixture
def builder(program: Program, kept: Kept) -> Any:
    """Yields a function that makes arrays and a builder for them."""
    made: list[Builder] = []

    def make(values: list[np.ndarray[Any, Any]]) -> Builder:
        pinned = [cu.CUdeviceptr(int(ok(cu.cuMemAllocHost(array.nbytes)))) for array in values]
        made.append(Builder(program, kept, pinned, values[0].size))
        return made[-1]

    yield make
    for each in made:
        each.close()
        for address in each.addresses:
            ok(cu.cuMemFreeHost(int(address)))


def launched(
    graph: Any,
    builder: Builder,
    values: list[np.ndarray[Any, Any]],
    times: int,
    update: Callable[[Any], None] = lambda _: None,
) -> Any:
    """Return the arrays after launches of a graph, whose executable was updated."""
    stream = ok(cu.cuStreamCreate(1))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    update(executable)
    for address, array in zip(builder.addresses, values, strict=True):
        ctypes.memmove(int(address), array.ctypes.data, array.nbytes)
    for _ in range(times):
        ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    ok(cu.cuGraphExecDestroy(executable))
    ok(cu.cuStreamDestroy(stream))
    kind = ctypes.c_int32 * builder.size
    return [np.array(kind.from_address(int(address))) for address in builder.addresses]


@pytest.mark.parametrize("form", ["as it is", "a clone", "a child"])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=steps, data=st.data())
def test_a_random_graph_does_what_its_nodes_do_one_after_the_other(
    builder: Any, form: str, order: list[Step], data: st.DataObject
) -> None:
    size, seed = data.draw(st.sampled_from([1, 3, 31, 33, 100]), "size"), data.draw(st.integers(0, 99))
    random = np.random.default_rng(seed)
    values = [random.integers(-9, 9, size, np.int32) for _ in range(COUNT)]
    made = builder(values)
    graph = ok(cu.cuGraphCreate(0))
    made.build(graph, order, lambda before, at: bool((before * 7 + at * 3 + seed) % 2))
    used = graph
    if form == "a clone":
        used = ok(cu.cuGraphClone(graph))
    elif form == "a child":
        used = ok(cu.cuGraphCreate(0))
        ok(cu.cuGraphAddChildGraphNode(used, None, 0, graph))
    expected = [array.copy() for array in values]
    for step in order * 2:
        step.apply(expected)
    for schedule in SEEDS:
        restart(schedule)
        found = launched(used, made, values, times=2)
        np.testing.assert_array_equal(found, expected)
    for each in {int(graph): graph, int(used): used}.values():
        ok(cu.cuGraphDestroy(each))


def changed(step: Step) -> Step:
    """Return the same step with other numbers."""
    return replace(step, value=3 - step.value, inner=tuple(map(changed, step.inner)))


@pytest.mark.parametrize("one_by_one", [False, True])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=steps)
def test_an_updated_executable_does_what_the_other_graph_does(
    builder: Any, one_by_one: bool, order: list[Step]
) -> None:
    values = [np.arange(5, dtype=np.int32) + at for at in range(COUNT)]
    made = builder(values)
    other = [changed(step) for step in order]
    graphs = [ok(cu.cuGraphCreate(0)) for _ in range(2)]
    for graph, its_steps in zip(graphs, (order, other), strict=True):
        made.build(graph, its_steps, lambda *_: False)

    def update(executable: Any) -> None:
        if one_by_one:
            update_nodes(executable, *graphs)
        else:
            ok(cu.cuGraphExecUpdate(executable, graphs[1]))

    expected = [array.copy() for array in values]
    for step in other:
        step.apply(expected)
    np.testing.assert_array_equal(launched(graphs[0], made, values, 1, update), expected)
    for graph in graphs:
        ok(cu.cuGraphDestroy(graph))


def update_nodes(executable: Any, graph: Any, other: Any) -> None:
    """Give each node of an executable of a graph the parameters that another graph has."""
    count = ok(cu.cuGraphGetNodes(graph))[1]
    mine, theirs = (ok(cu.cuGraphGetNodes(each, count))[0] for each in (graph, other))
    kinds = cu.CUgraphNodeType
    for old, new in zip(mine, theirs, strict=True):
        kind = ok(cu.cuGraphNodeGetType(old))
        if kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
            child = ok(cu.cuGraphChildGraphNodeGetGraph(new))
            ok(cu.cuGraphExecChildGraphNodeSetParams(executable, old, child))
        elif kind != kinds.CU_GRAPH_NODE_TYPE_EMPTY:
            ok(cu.cuGraphExecNodeSetParams(executable, old, ok(cu.cuGraphNodeGetParams(new))))


@pytest.mark.parametrize("nested", [False, True])
def test_a_missing_edge_shows_under_some_seed(builder: Any, nested: bool) -> None:
    values = [np.array([1, 2, 3], np.int32), *(np.zeros(3, np.int32) for _ in range(COUNT - 1))]
    made = builder(values)
    graph = ok(cu.cuGraphCreate(0))
    first = Step("mix", 0, 1, 5)
    made.add(graph, Step("child", inner=(first,)) if nested else first, [])
    made.add(graph, Step("copy", 2, 0), [])
    seen = set()
    for seed in range(12):
        restart(seed)
        seen.add(tuple(launched(graph, made, values, times=1)[2].tolist()))
    assert seen == {(1, 2, 3), (5, 10, 15)}
    ok(cu.cuGraphDestroy(graph))


def test_nodes_run_between_those_of_a_child_that_they_do_not_depend_on(builder: Any) -> None:
    values = [np.array([1], np.int32) for _ in range(COUNT)]
    made = builder(values)
    graph = ok(cu.cuGraphCreate(0))
    made.add(graph, Step("child", inner=(Step("fill", 0, value=2), Step("mix", 0, 1, 3))), [])
    made.add(graph, Step("copy", 2, 0), [])
    seen = set()
    for seed in range(24):
        restart(seed)
        seen.add(int(launched(graph, made, values, times=1)[2][0]))
    assert seen == {1, 2, 7}  # before the child, between its nodes, and after it
    ok(cu.cuGraphDestroy(graph))
