"""The nodes of a graph, and the description of how one capture differs from another."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.build.builder import Builder
from preheat.devices import base
from preheat.devices.arguments import new_param_buffer
from preheat.devices.array import Array
from preheat.devices.base import Geometry
from preheat.emulator.device import EmulatorDevice
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.kernels.decode import DecodeState
from tests.devices.support import KERNELS as MORE
from tests.graph.support import KERNELS, axpy_case, line_here, scalar_log


class Page:
    """Kernels and arrays to capture with, each time a little differently."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.mix, self.spin = gpu.kernel(KERNELS, "mix"), gpu.kernel(KERNELS, "spin")
        self.x, self.y, self.z = (gpu.array(np.arange(70, dtype=np.float32) + i) for i in range(3))
        self.wide = gpu.array(np.arange(70) * 0.5)

    def captured(
        self,
        by: float = 1.5,
        odd: bool = False,
        x: Any = None,
        n: int = 33,
        grid: object = 1,
        block: object = 64,
        shared: int = 0,
        spin: bool = True,
        fill: complex = 2.5,
        again: int = 0,
    ) -> Graph:
        """Return a graph of a kernel, a fill, a copy, and another kernel."""
        with self.gpu.capture() as graph:
            x = self.x if x is None else x
            self.mix.launch(by, odd, x, self.y, n, grid=grid, block=block, shared=shared)
            self.wide[1:7].fill(fill)
            self.z.copy_from(self.y)
            if spin:
                self.spin[1, 32](0)
            for _ in range(again):
                self.spin[1, 32](1)
        return graph


@pytest.fixture
def page(device: Gpu) -> Page:
    return Page(device)


# Nodes


def test_nodes_say_everything_that_was_captured(device: Gpu) -> None:
    page = Page(device)
    made = axpy_case(device)
    shape: dict[str, Any] = {"grid": (2, 3), "block": (8, 4, 2), "shared": 128}
    with device.capture() as graph:
        page.mix.launch(1.5, True, page.x[3:], page.y, 33, **shape)
        where = line_here(-1)
        made.launch(-7)
    mix, axpy = graph.nodes
    assert (mix.kind, mix.name, mix.entry, mix.foreign) == ("kernel", "mix", "mix", False)
    assert (mix.grid, mix.block, mix.shared) == ((2, 3, 1), (8, 4, 2), 128)
    assert mix.geometry == Geometry((2, 3, 1), (8, 4, 2), 128)
    assert mix.digest == page.mix.module.artifact.digest
    assert mix.where == where
    assert axpy.where.startswith("tests/graph/support.py:")  # where it is launched
    assert [argument.type for argument in mix.arguments] == [
        "float", "bool", "float const*", "float*", "int",
    ]  # fmt: skip
    assert [str(argument) for argument in mix.arguments] == [
        "1.5", "True", "Array float32[67]", "Array float32[70]", "33",
    ]  # fmt: skip
    assert mix.arguments[0].value == np.float32(1.5).tobytes()
    assert (mix.arguments[2].offset, mix.arguments[3].offset) == (12, 0)
    assert mix.arguments[2].generation == page.x.buffer.generation
    assert [str(argument) for argument in axpy.arguments] == [
        "-7", "Array int32[257]", "Array int32[257]", "257",
    ]  # fmt: skip


def test_nodes_of_fills_and_copies_say_what_they_write(device: Gpu) -> None:
    page = Page(device)
    with device.capture() as graph:
        page.x[:5].fill(1.0)
        page.y.copy_from(page.x)
    fill, copy = graph.nodes
    assert (fill.kind, fill.grid, fill.block, fill.shared) == ("fill", None, None, 0)
    assert fill.where == line_here(-4)
    assert str(fill.arguments[0]) == "Array float32[5]"
    assert fill.arguments[1].value == np.float32(1.0).tobytes()
    assert (copy.kind, copy.where) == ("copy", line_here(-6))
    assert str(copy) == "copy(Array float32[70], Array float32[70])"


def test_nodes_read_like_the_launches_they_are(device: Gpu) -> None:
    page = Page(device)
    made = scalar_log(device)
    with device.capture() as graph:
        page.mix[2, 32](0.5, False, page.x, page.y, 64)
        page.mix.launch(0.5, True, page.x, page.y, 64, grid=(1, 2), block=(32, 2), shared=16)
        made.note[1, 1](made.step, made.out, made.count)
    assert [str(node) for node in graph.nodes] == [
        "mix[2, 32](0.5, False, Array float32[70], Array float32[70], 64)",
        "mix[(1, 2, 1), (32, 2, 1), shared=16](0.5, True, Array float32[70], Array float32[70], 64)",
        "note[1, 1](Scalar 'step' int32, Array int32[200], Array int32[1])",
    ]


def test_arguments_of_every_kind_can_be_read(device: Gpu) -> None:
    unpack, pick = device.kernel(MORE, "unpack"), device.kernel(MORE, "pick")
    follow = device.kernel(MORE, "follow")
    out = device.zeros(4, "int32")
    real = device.zeros(3, "float64")
    pair = np.array((3, 1.5, 2.5), np.dtype([("a", "i4"), ("b", "f4"), ("c", "f8")]))
    with device.capture() as graph:
        unpack[1, 1](pair, real)
        pick[1, 1](-1, bytes(range(128)), 5, out)
        follow[1, 1](None, out)
    rows = [[str(argument) for argument in node.arguments] for node in graph.nodes]
    assert rows[0][0] == "16 bytes 030000000000c03f…"
    assert rows[1] == ["-1", "128 bytes 0001020304050607…", "5", "Array int32[4]"]
    assert rows[2] == ["0x0", "Array int32[4]"]
    graph.replay()
    np.testing.assert_array_equal(real.numpy(), [3, 1.5, 2.5])
    np.testing.assert_array_equal(out.numpy()[:2], [-1, 5])


ADDRESS = re.compile(r"0x[0-9a-f]{5,}", re.IGNORECASE)


def held(gpu: Gpu) -> list[object]:
    """Return objects that a capturing program holds: numbers, tensors, streams and others."""
    made = axpy_case(gpu)
    pool = gpu.pool(4096)
    ours = made.axpy.bind(3, made.x, made.y, made.n, grid=5, block=64)
    theirs = [np.zeros(made.n, np.int32) for _ in range(2)] if gpu.name.startswith("emulator") else []

    class Options:
        """Something that a step is given."""

    @gpu.graphed(key=lambda *_: 7)
    def step(*_: object) -> None:
        made.launch()

    @gpu.graphed
    def plain(*_: object) -> None:
        made.launch()

    partly = gpu.graphed(key=lambda: 3)(functools.partial(step.__wrapped__, None, None))
    options = Options()
    for _ in range(3):
        step(held, options)
        plain(held, theirs[0] if theirs else made.x)
        partly()
    with gpu.capture() as graph:
        made.launch()
        made.y.fill(3)
        made.y.copy_from(made.x)
        for tensor in theirs:
            made.axpy[5, 64](2, made.x, tensor, made.n)
        inside = repr(graph.stream)
    nodes = graph.nodes
    arguments = [argument for node in graph.nodes for argument in node.arguments]
    reports = [each.graphs.report() for each in (step, plain, partly)]
    keys = [key for each in (step, plain, partly) for key in each.graphs]
    return [
        nodes, arguments, graph, inside, gpu, pool, pool.empty(3), made.axpy, made.axpy.module, made.x,
        gpu.scalar("int32", name="step"), gpu.stream(), gpu.record(), gpu.graphs(), ours, step, plain,
        partly, keys, *reports, *map(str, reports), DecodeState(gpu),
        *(one.graph for each in (step, plain, partly) for one in each.graphs._entries.graphs.values()),
    ]  # fmt: skip


def test_nothing_that_a_program_holds_shows_an_address(
    kind: str, open_device: Callable[..., Gpu]
) -> None:
    for each in held(open_device(kind, host_arrays=kind == "emulator")):
        assert not ADDRESS.search(repr(each)), repr(each)


def test_nodes_and_arguments_show_what_they_are(device: Gpu) -> None:
    made = axpy_case(device)
    graph = made.captured()
    assert repr(graph.nodes) == "(<Node axpy[5, 64](3, Array int32[257], Array int32[257], 257)>,)"
    assert [repr(argument) for argument in graph.nodes[0].arguments] == [
        "<Argument int: 3>", "<Argument int const*: Array int32[257]>",
        "<Argument int*: Array int32[257]>", "<Argument int: 257>",
    ]  # fmt: skip
    assert repr(device.record()) == f"<Event on {device.name}>"


def test_equal_programs_show_equal_text(open_device: Callable[..., Gpu]) -> None:
    texts = []
    for _ in range(2):
        shown = "\n".join(map(repr, held(open_device("emulator", host_arrays=True))))
        # The numbers of memory and streams continue from one device of a process to the next.
        texts.append(re.sub(r"@\d+\+\d+|Stream \d+", "", shown))
    assert texts[0] == texts[1]


def test_tensors_of_other_libraries_are_reported_by_type_and_size(
    permissive: Gpu,
) -> None:
    made = axpy_case(permissive)
    tensors = [np.zeros(made.n, np.int32) for _ in range(2)]
    graphs = []
    for tensor in tensors:
        with made.gpu.capture() as graph:
            made.axpy[5, 64](3, made.x, tensor, made.n)
        graphs.append(graph)
    assert [str(graph.nodes[0]) for graph in graphs] == [
        "axpy[5, 64](3, Array int32[257], int32 tensor of 1,028 bytes, 257)"
    ] * 2
    (row,) = graphs[0].diff(graphs[1])
    first, second = (hex(tensor.ctypes.data) for tensor in tensors)
    assert row.endswith(f"argument 2 (int*) {first} became {second}")


def test_a_graph_introduces_itself(device: Gpu) -> None:
    made = axpy_case(device)
    name = device.name
    graph = device.capture(name="decode")
    assert repr(graph) == f"<Graph 'decode': new, 0 nodes on {name}>"
    with graph:
        made.launch()
        assert repr(graph) == f"<Graph 'decode': capturing, 0 nodes on {name}>"
    assert repr(graph) == f"<Graph 'decode': ready, 1 node on {name}>"
    assert (str(graph), len(graph)) == ("graph 'decode'", 1)
    assert graph.nbytes == made.x.nbytes + made.y.nbytes
    graph.close()
    assert repr(graph).startswith("<Graph 'decode': closed, ")
    assert graph.nbytes == 0
    unnamed = made.captured()
    assert str(unnamed).startswith("graph 'captured at tests/graph/support.py:")
    assert str(device.capture()) == "graph"


# Other libraries' work


def behind(graph: Graph) -> base.Stream:
    """Return the captured stream, for work that the runtime does not see."""
    return graph.context.order.adopt(graph.stream.handle)


def test_work_by_another_library_is_counted_listed_in_order_and_marked(device: Gpu) -> None:
    made = axpy_case(device)
    page = Page(device)
    seam = device._device
    spare = device.zeros(9, "int32")

    def foreign(value: int, at: int) -> None:
        seam.fill(spare.address + 4 * at, value.to_bytes(4, "little"), 2, behind(graph))

    with device.capture() as graph:
        foreign(1, 0)
        made.launch(2)
        page.wide.fill(1.25)  # which some devices do in two pieces
        foreign(2, 2)
        foreign(3, 4)
        page.y.copy_from(page.x)
        made.launch(3)
        seam.copy(spare.address + 24, spare.address, 8, behind(graph))
    kinds = [(node.kind, node.foreign) for node in graph.nodes]
    assert kinds == [
        ("fill", True), ("kernel", False), ("fill", False), ("fill", True), ("fill", True),
        ("copy", False), ("kernel", False), ("copy", True),
    ]  # fmt: skip
    assert len(graph) == 8
    assert [node.kind for node in graph.foreign] == ["fill", "fill", "fill", "copy"]
    assert str(graph.foreign[0]) == "fill (another library's)"
    assert ", 8 nodes, 4 of other libraries on " in repr(graph)
    graph.replay()
    device.synchronize()
    assert spare.numpy().tolist() == [1, 1, 2, 2, 3, 3, 1, 1, 0]
    made.check(5)
    np.testing.assert_array_equal(page.wide.numpy(), np.full(70, 1.25))


def test_foreign_work_of_the_kind_of_ours_is_counted_though_it_looks_the_same(device: Gpu) -> None:
    page = Page(device)
    spare = device.zeros(1, "int32")
    with device.capture() as graph:
        device._device.fill(spare.address, b"\1\0\0\0", 1, behind(graph))
        page.wide.fill(1.25)
        page.wide.fill(2.25)
    assert (len(graph), len(graph.foreign)) == (3, 1)
    ours = [node.arguments[1].value for node in graph.nodes if not node.foreign]
    assert ours == [np.float64(value).tobytes() for value in (1.25, 2.25)]


def test_a_graph_of_foreign_work_alone_is_not_empty(device: Gpu) -> None:
    spare = device.zeros(5, "int32")
    with device.capture() as graph:
        device._device.fill(spare.address, b"\7\0\0\0", 5, behind(graph))
    assert [node.foreign for node in graph.nodes] == [True]
    graph.replay()
    device.synchronize()
    assert spare.numpy().tolist() == [7] * 5


def test_a_foreign_kernel_has_its_name(device: Gpu) -> None:
    made = axpy_case(device)
    geometry = Geometry((5, 1, 1), (64, 1, 1))
    block = new_param_buffer(made.axpy._signature)
    block.pack(3, made.x.address, made.y.address, made.n)
    with device.capture() as graph:
        made.launch(2)
        submit = made.axpy._function.prepare(geometry, behind(graph))
        assert submit(block.pointers, 0)[0] == 0
    ours, theirs = graph.nodes
    assert (ours.foreign, theirs.foreign) == (False, True)
    assert (theirs.kind, theirs.name) == ("kernel", "axpy")
    assert str(theirs) == "axpy (another library's)"
    graph.replay()
    made.check(5)


# Differences


def test_captures_of_the_same_work_do_not_differ(page: Page) -> None:
    first, second = page.captured(), page.captured()
    assert first.diff(second) == second.diff(first) == first.diff(first) == []
    assert first.diff(second.nodes) == []


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "int": ({"n": 34}, "node 0, mix (W): argument 4 (int) 33 became 34"),
    "float": ({"by": -0.5}, "node 0, mix (W): argument 0 (float) 1.5 became -0.5"),
    "bool": ({"odd": True}, "node 0, mix (W): argument 1 (bool) False became True"),
    "grid": ({"grid": (2, 3)}, "node 0, mix (W): grid (1, 1, 1) became (2, 3, 1)"),
    "block": ({"block": 32}, "node 0, mix (W): block (64, 1, 1) became (32, 1, 1)"),
    "shared": ({"shared": 48}, "node 0, mix (W): shared 0 became 48"),
    "gone": ({"spin": False}, "node 3: spin[1, 32](0) is gone"),
    "new": ({"again": 1}, "node 4: spin[1, 32](1) is new (W)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_reported_with_node_argument_type_and_both_values(name: str, page: Page) -> None:
    change, words = CHANGES[name]
    old, new = page.captured(), page.captured(**change)
    where = new.nodes[-1 if name == "new" else 0].where
    assert old.diff(new) == [words.replace("(W)", f"({where})")]
    assert len(new.diff(old)) == 1


def test_a_fill_with_another_value_is_reported_with_both(page: Page) -> None:
    old, new = page.captured(), page.captured(fill=0.5)
    where = new.nodes[1].where
    assert old.diff(new) == [f"node 1, fill ({where}): argument 1 (float64) 2.5 became 0.5"]


def test_another_array_and_another_part_of_one_are_distinguished(page: Page) -> None:
    first = page.captured()
    where = first.nodes[0].where
    head = f"node 0, mix ({where}): argument 2 (float const*) Array float32[70]"
    twin, small = page.gpu.array(page.x.numpy()), page.gpu.array(page.x.numpy()[:50])
    assert first.diff(page.captured(x=twin)) == [f"{head} became another array of that shape"]
    assert first.diff(page.captured(x=small)) == [f"{head} became Array float32[50]"]
    part, next_part = page.captured(x=page.x[:50]), page.captured(x=page.x[1:51])
    head = head.replace("[70]", "[50]")
    assert part.diff(next_part) == [f"{head} at byte 0 became the same at byte 4"]
    assert first.diff(part) == []  # which begins at the same place: a replay is the same


def test_memory_at_an_old_address_is_other_memory(page: Page) -> None:
    gone = page.gpu.array(page.x.numpy())
    first = page.captured(x=gone)
    address = gone.address
    gone.close()
    page.gpu.synchronize()
    tried: list[Array] = []
    for _ in range(20):  # Devices tend to reuse memory that was just freed.
        tried.append(page.gpu.empty(70))
        if tried[-1].address == address:
            break
    (row,) = first.diff(page.captured(x=tried[-1]))
    assert row.endswith(
        "argument 2 (float const*) Array float32[70] became another array of that shape"
    )


def test_several_changes_are_reported_each(page: Page) -> None:
    rows = page.captured().diff(page.captured(by=2.0, n=31, block=128, spin=False))
    assert len(rows) == 4
    assert ["block" in rows[0], "argument 0" in rows[1], "argument 4" in rows[2]] == [True] * 3
    assert rows[3] == "node 3: spin[1, 32](0) is gone"


def test_another_program_of_the_same_name_is_another_kernel(device: Gpu) -> None:
    made = axpy_case(device)
    other = device.kernel(KERNELS + "// changed\n", "axpy")
    with device.capture() as graph:
        other[5, 64](3, made.x, made.y, made.n)
    rows = made.captured().diff(graph)
    assert len(rows) == 2
    assert (rows[0].endswith("is gone"), " is new (" in rows[1]) == (True, True)


# The same, for captures of any kind


class Mix(NamedTuple):
    """A launch of `mix`: on part of an array, with a geometry."""

    by: float
    odd: bool
    x: int
    at: int
    n: int
    grid: int
    block: tuple[int, int]
    shared: int


class Fill(NamedTuple):
    """A fill of an array."""

    array: int
    value: float


class Copy(NamedTuple):
    """A copy from one array to another."""

    target: int
    source: int


Step = Mix | Fill | Copy
WORDS = {
    Mix: (
        "argument 0", "argument 1", "argument 2", "argument 2", "argument 4", "grid", "block", "shared",
    ),
    Fill: ("argument 0", "argument 1"),
    Copy: ("argument 0", "argument 1"),
}  # fmt: skip
CHOICES: dict[str, list[Any]] = {
    "by": [0.0, -0.0, 1.5, float("inf"), float("nan")],
    "odd": [False, True],
    "at": [0, 1, 13],
    "n": [-1, 0, 33, 2**31 - 1],
    "grid": [1, 2, 65536],
    "block": [(1, 1), (32, 1), (1, 32)],
    "shared": [0, 16, 1024],
    "value": [0.0, -0.0, 0.1, 7.0],
    **{which: [0, 1, 2] for which in ("x", "array", "target", "source")},
}


def steps() -> st.SearchStrategy[list[Step]]:
    """Return some steps of any kind."""
    kinds = [st.builds(kind, *map(_choice, kind._fields)) for kind in (Mix, Fill, Copy)]
    return st.lists(st.one_of(*kinds), min_size=1, max_size=6)


def _choice(field: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(CHOICES[field])


@pytest.fixture(scope="module")
def book(shared_builder: Builder) -> Iterator[Page]:
    """Yield a page for many examples: on the emulator, since nothing is replayed."""
    device: Any = EmulatorDevice(0, "sm_90")
    gpu = Gpu(device, shared_builder)
    yield Page(gpu)
    gpu.close()


def captured(page: Page, what: list[Step]) -> Graph:
    """Return a graph of these steps."""
    arrays = page.x, page.y, page.z
    with page.gpu.capture() as graph:
        for step in what:
            if isinstance(step, Mix):
                x = arrays[step.x][step.at : step.at + 9]
                shape: dict[str, Any] = {"grid": step.grid, "block": step.block, "shared": step.shared}
                page.mix.launch(step.by, step.odd, x, page.y, step.n, **shape)
            elif isinstance(step, Fill):
                arrays[step.array].fill(step.value)
            else:
                arrays[step.target].copy_from(arrays[step.source])
    return graph


@given(steps())
def test_no_capture_differs_from_another_of_the_same_steps(book: Page, what: list[Step]) -> None:
    first, second = captured(book, what), captured(book, what)
    assert first.diff(second) == []
    assert list(map(str, first.nodes)) == list(map(str, second.nodes))


@given(steps(), steps())
def test_a_difference_is_one_both_ways(book: Page, one: list[Step], other: list[Step]) -> None:
    first, second = captured(book, one), captured(book, other)
    assert bool(first.diff(second)) == bool(second.diff(first)) == (repr(one) != repr(other))


@given(steps(), st.data())
def test_any_single_change_is_found_and_named(
    book: Page, what: list[Step], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(what) - 1))
    field = data.draw(st.integers(0, len(what[at]) - 1))
    name = what[at]._fields[field]
    was = what[at][field]
    now = data.draw(_choice(name).filter(lambda value: repr(value) != repr(was)))
    changed = [*what[:at], what[at]._replace(**{name: now}), *what[at + 1 :]]
    (row,) = captured(book, what).diff(captured(book, changed))
    kind = type(what[at]).__name__.lower()
    assert row.startswith(f"node {at}, {kind} (tests/graph/test_nodes.py:")
    assert f"): {WORDS[type(what[at])][field]} " in row
    assert " became " in row


@given(steps(), st.data())
def test_a_step_more_or_less_is_found(book: Page, what: list[Step], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(what)))
    more = [*what[:at], Fill(0, 0.25), *what[at:]]
    first, second = captured(book, what), captured(book, more)
    assert any(" is new (tests/graph/test_nodes.py:" in row for row in first.diff(second))
    assert any(row.endswith(" is gone") for row in second.diff(first))


def test_another_length_of_a_fill_or_a_copy_is_a_difference(device: Gpu) -> None:
    x, y = device.zeros(20), device.zeros(20)

    def captured(n: int) -> Graph:
        with device.capture() as graph:
            x[:n].fill(1.0)
            y[:n].copy_from(x[:n])
        return graph

    old = captured(10)
    assert old.diff(captured(10)) == []
    reported = old.diff(captured(20))
    assert len(reported) == 3
    assert all("Array float32[10] became Array float32[20]" in row for row in reported)
