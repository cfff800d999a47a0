"""Pictures of graphs: what they show of nodes, of other libraries' work and of differences."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import pytest
from hypothesis import given
from hypothesis import strategies as st

import preheat
from preheat.build.builder import Builder
from preheat.emulator.device import EmulatorDevice
from preheat.errors import GraphError
from preheat.gpu import Gpu
from preheat.graph.graph import Graph
from preheat.graph.nodes import Node
from preheat.graph.pictures import drawable, layout
from preheat.graph.pictures.formats import as_dot, as_svg
from preheat.graph.pictures.picture import (
    Change,
    Item,
    Link,
    Picture,
    folded,
    picture_of,
    picture_of_change,
)
from tests.graph.support import KERNELS, axpy_case, scalar_log
from tests.graph.test_nodes import Page, behind
from tests.graph.test_svg import permitted
from tests.standin import FakeTorch, introduce

SVG = "{http://www.w3.org/2000/svg}"
NASTY = [
    'k<"&amp;">',
    "operator<<(std::ostream&, T&&)",
    "</text><script>alert(1)</script>",
    "back\\slash\\",
    "nul\0 bell\a escape\x1b",
    "lone \ud800 surrogate \uffff",
    "two\nlines\r\nand\ttabs",
    "漢字" * 20,
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEE" * 3,
    "",
]


ANY_NAME = st.text(st.characters(exclude_categories=()), min_size=1, max_size=20)


@pytest.fixture
def emulator(open_device: Callable[..., Gpu]) -> Gpu:
    return open_device("emulator")


# Helpers that read pictures


def boxes(drawn: str) -> list[Element]:
    """Return the groups of an SVG that are boxes."""
    groups = ElementTree.fromstring(drawn).iter(f"{SVG}g")
    return [group for group in groups if group.find(f"{SVG}rect") is not None]


def style(box: Element) -> str:
    rect = box.find(f"{SVG}rect")
    assert rect is not None
    return rect.attrib["class"]


def texts(box: Element) -> list[str]:
    return [text.text or "" for text in box.iter(f"{SVG}text")]


def tooltip(box: Element) -> str:
    return box.findtext(f"{SVG}title") or ""


def all_text(drawn: str) -> str:
    return " ".join(ElementTree.fromstring(drawn).itertext())


def extent(text: Element) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a text."""
    x, y, length = (float(text.attrib[name]) for name in ("x", "y", "textLength"))
    left = x - length if text.attrib.get("text-anchor") == "end" else x
    size = float(text.attrib.get("font-size", 12))
    return left, y - size, left + length, y


def check_text(drawn: str) -> None:
    """Check that no text overlaps another one of its group or leaves the box."""
    for box in boxes(drawn):
        rect = box.find(f"{SVG}rect")
        assert rect is not None
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        places = [extent(text) for text in box.iter(f"{SVG}text")]
        for left, top, right, bottom in places:
            assert x < left <= right < x + width
            assert y < top < bottom < y + height
        for one, other in combinations(places, 2):
            beside = one[2] < other[0] or other[2] < one[0]
            above = one[3] <= other[1] or other[3] <= one[1]
            assert beside or above


def chain(names: list[str]) -> list[Node]:
    """Return kernels of another library, one after another."""
    nodes = [Node("kernel", name, foreign=True) for name in names]
    for at, node in enumerate(nodes[1:]):
        node.after = (at,)
    return nodes


# What a picture shows


def test_a_box_shows_kernel_geometry_and_bytes(device: Gpu) -> None:
    page = Page(device)
    graph = page.captured(grid=(2, 3), block=(8, 4, 2), shared=128)
    mix, fill, copy, spin = boxes(graph.svg())
    assert texts(mix) == ["mix", "#0", "grid 2x3  block 8x4x2", "25 B arguments  128 B shared"]
    assert texts(fill) == ["fill", "#1", "48 B of 2.5"]
    assert texts(copy) == ["copy", "#2", "280 B"]
    assert texts(spin) == ["spin", "#3", "grid 1  block 32", "8 B arguments"]
    assert [style(box) for box in (mix, fill, copy, spin)] == ["kernel", "memory", "memory", "kernel"]
    details = tooltip(mix).splitlines()
    assert details[0] == "node 0: mix"
    assert details[1] == f"captured at {graph.nodes[0].where}"
    assert details[2] == "argument 0 (float): 1.5"
    assert details[4] == "argument 2 (float const*): Array float32[70]"
    check_text(graph.svg())


def test_arrows_follow_what_nodes_wait_for(device: Gpu) -> None:
    graph = branched(device)
    assert [node.after for node in graph.nodes] == [(), (0,), (0,), (1, 2)]
    dot = graph.dot()
    assert re.findall(r"n(\d) -> n(\d);", dot) == [("0", "1"), ("0", "2"), ("1", "3"), ("2", "3")]
    drawn = ElementTree.fromstring(graph.svg())
    assert len([path for path in drawn.iter(f"{SVG}path") if path.attrib["class"] == "edge"]) == 4
    branches = [text for box in boxes(graph.svg()) for text in texts(box) if "branch" in text]
    assert branches == ["branch 0", "branch 0", "branch 1", "branch 0"]


def branched(gpu: Gpu) -> Graph:
    """Return a graph with a fork and a join."""
    spin, side = gpu.kernel(KERNELS, "spin"), gpu.stream()
    with gpu.capture(name="fork") as graph:
        spin[1, 32](0)
        side.wait(gpu.record())
        spin[1, 64](0)
        spin.launch(0, grid=1, block=96, stream=side)
        gpu.wait(side)
        spin[1, 128](0)
    return graph


def test_a_scalar_that_replays_set_is_marked(device: Gpu) -> None:
    log = scalar_log(device, name="step")
    log.note[1, 1](log.step, log.out, log.count)
    graph = log.captured()
    (box,) = boxes(graph.svg())
    assert texts(box)[-1] == "replay(step=…)"
    assert [text.attrib["class"] for text in box.iter(f"{SVG}text")][-1] == "scalar"
    assert "scalar that replay() sets" in all_text(graph.svg())
    assert "replay(step=…)" in graph.dot()


def test_work_of_other_libraries_is_marked(device: Gpu) -> None:
    made = axpy_case(device)
    spare = device.zeros(9, "int32")
    with device.capture(name="both") as graph:
        made.launch(2)
        device._device.fill(spare.address, b"\1\0\0\0", 2, behind(graph))
    ours, theirs = boxes(graph.svg())
    assert (style(ours), style(theirs)) == ("kernel", "foreign")
    assert texts(theirs) == ["fill", "#1", "fill of another library"]
    assert "graph 'both': 2 nodes, 1 of other libraries" in all_text(graph.svg())
    (dashed,) = (line for line in graph.dot().splitlines() if "dashed" in line)
    assert dashed.startswith("  n1 ")


def test_work_of_torch_is_marked(shared_builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(EmulatorDevice(0, "sm_90"), shared_builder)
    torch = FakeTorch(gpu)
    introduce(torch, monkeypatch)
    tensor, made = torch.full(3, 1), axpy_case(gpu)
    with gpu.capture() as graph:
        tensor.fill_(7)
        made.launch(2)
    assert [style(box) for box in boxes(graph.svg())] == ["foreign", "kernel"]
    gpu.close()


def test_a_run_of_equal_nodes_is_one_box(device: Gpu) -> None:
    graph = Page(device).captured(again=5)
    assert len(graph) == 9
    last = boxes(graph.svg())[-1]
    assert texts(last)[:2] == ["spin", "#3-8"]
    assert "6 nodes, one after another" in texts(last)
    assert "node 3: spin" in tooltip(last)
    assert "node 8: spin" in tooltip(last)
    assert len(boxes(graph.svg(fold=False))) == 9
    assert graph.dot().count("->") == 3
    assert graph.dot(fold=False).count("->") == 8


def test_a_closed_graph_can_still_be_drawn(device: Gpu) -> None:
    graph = Page(device).captured()
    drawn, dot = graph.svg(), graph.dot()
    graph.close()
    assert (graph.svg(), graph.dot()) == (drawn, dot)


def test_a_graph_without_nodes_cannot_be_drawn(emulator: Gpu) -> None:
    graph = emulator.capture(name="early")
    for draw in (graph.svg, graph.dot):
        with pytest.raises(
            GraphError, match="graph 'early' cannot be drawn: it has no nodes"
        ) as caught:
            draw()
        assert caught.value.hint is not None
    assert graph._repr_svg_() is None


def test_a_notebook_shows_the_picture_unless_it_is_enormous(
    emulator: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Page(emulator).captured()
    assert graph._repr_svg_() == graph.svg()
    monkeypatch.setattr(drawable, "_MAX_INLINE", 3)
    assert graph._repr_svg_() is None
    assert len(boxes(graph.svg())) == 4


def test_three_hundred_nodes_fit_the_width_of_a_page(emulator: Gpu) -> None:
    page = Page(emulator)
    with emulator.capture() as graph:
        for at in range(320):
            page.spin[1 + at % 2, 32](0)
    drawn = graph.svg()
    root = ElementTree.fromstring(drawn)
    width = float(root.attrib["viewBox"].split()[2])
    assert len(boxes(drawn)) == 320
    assert 700 < width < 1250
    check_text(drawn)


# Differences


def test_differences_of_two_captures_are_coloured_and_counted(device: Gpu) -> None:
    page = Page(device)
    old, new = page.captured(), page.captured(by=2.5, spin=False)
    with device.capture(name="third") as third:
        page.mix.launch(2.5, False, page.x, page.y, 33, grid=1, block=64)
        page.wide[1:7].fill(2.5)
        page.z.copy_from(page.y)
        page.z.fill(7)
    drawn = old.svg(diff=third)
    mix, fill, copy, *rest = boxes(drawn)
    assert [style(box) for box in (mix, fill, copy)] == ["changed", "memory", "memory"]
    assert sorted((style(box), texts(box)[0]) for box in rest) == [
        ("added", "+ fill"),
        ("removed", "- spin"),
    ]
    for row in old.diff(third):
        assert row in "\n".join(map(tooltip, boxes(drawn)))
    for words in ("+ added: 1", "- removed: 1", "~ changed: 1"):
        assert words in all_text(drawn)
    assert "compared with graph 'third'" in all_text(drawn)
    assert [style(box) for box in boxes(old.svg(diff=new.nodes))][-1] == "removed"
    check_text(drawn)


def test_captures_that_are_equal_have_no_coloured_boxes(device: Gpu) -> None:
    page = Page(device)
    drawn = page.captured().svg(diff=page.captured())
    assert {style(box) for box in boxes(drawn)} == {"kernel", "memory"}
    assert "+ added: 0" in all_text(drawn)


def test_edges_that_only_one_capture_has_are_coloured(emulator: Gpu) -> None:
    forked = branched(emulator)
    spin = emulator.kernel(KERNELS, "spin")
    with emulator.capture() as straight:
        for block in (32, 64, 96, 128):
            spin[1, block](0)
    links = {
        (link.source, link.target): link.change
        for link in picture_of_change("", forked.nodes, straight.nodes).links
    }
    added, removed = Change.ADDED, Change.REMOVED
    assert links == {(0, 1): None, (0, 2): removed, (1, 2): added, (1, 3): removed, (2, 3): None}
    drawn = forked.svg(diff=straight)
    classes = [path.attrib["class"] for path in ElementTree.fromstring(drawn).iter(f"{SVG}path")]
    assert classes.count("edge-added") == classes.count("tip-added") == 1
    assert classes.count("edge-removed") == 2
    assert "style=dashed" in forked.dot(diff=straight)


# Names


@pytest.mark.parametrize("name", NASTY, ids=ascii)
def test_any_name_is_drawn_and_found_whole_in_a_tooltip(name: str) -> None:
    drawn = as_svg(picture_of(name, chain(["before", name, "after"])))
    shown = boxes(drawn)[1]
    kept = "".join(each if permitted(each) else "\ufffd" for each in name) or "kernel"
    assert kept.replace("\r\n", "\n") in tooltip(shown)  # A reader of XML makes one break of two.
    check_text(drawn)
    assert parsed(as_dot(picture_of(name, chain([name])))) == [f"#0 {flat(name) or 'kernel'}"]


def flat(name: str) -> str:
    """Return what a line of Graphviz shows of a name."""
    shown = "".join(each if permitted(each) else "\ufffd" for each in name)
    return re.sub("[\t\n\r\x85\u2028\u2029]+", " ", shown)


QUOTED = r'"(?:[^"\\]|\\.)*"'
STATEMENT = re.compile(
    rf"  (?:(?:graph|node|n\d+) \[(?:\w+=(?:{QUOTED}|[\w.]+)(?:, )?)+\]|n\d+ -> n\d+(?: \[.*\])?);"
)


def parsed(dot: str) -> list[str]:
    """Return the first line of each node's label as Graphviz reads it; fail if a statement is wrong."""
    lines = dot.split("\n")
    assert (lines[0], lines[-2:]) == ("digraph {", ["}", ""])
    for line in lines[1:-2]:
        assert STATEMENT.fullmatch(line), line
    labels = [re.search(rf"n\d+ \[label=({QUOTED})", line) for line in lines]
    return [unescaped(found[1][1:-1]) for found in labels if found]


def unescaped(label: str) -> str:
    """Return the first line of a label."""
    pieces = re.findall(r"\\.|[^\\]", label)
    line = pieces[: pieces.index("\\l")]
    return "".join(piece[-1] for piece in line).replace("&amp;", "&")


@given(st.lists(ANY_NAME, min_size=1, max_size=5))
def test_graphviz_reads_every_name_as_it_is(names: list[str]) -> None:
    dot = as_dot(picture_of("t", chain(names)))
    assert parsed(dot) == [f"#{at} {flat(name)}" for at, name in enumerate(names)]


# Runs and branches


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=30))
def test_folding_keeps_every_node_and_the_order(names: list[str]) -> None:
    picture = folded(picture_of("t", chain(names)))
    assert "".join(item.name * item.count for item in picture.items) == "".join(names)
    assert all(item.count == 1 or item.count >= 3 for item in picture.items)
    last = 0
    for item in picture.items:
        assert item.number == last
        last += item.count
    assert [(link.source, link.target) for link in picture.links] == [
        (at, at + 1) for at in range(len(picture.items) - 1)
    ]


def test_nodes_that_changed_are_never_folded() -> None:
    items = tuple(Item(at, "k", "kernel", (), (), change=Change.CHANGED) for at in range(5))
    picture = Picture("t", items, tuple(Link(at, at + 1) for at in range(4)), compared=True)
    assert folded(picture) == picture


def test_branches_that_ended_are_continued() -> None:
    nodes = chain(list("abcdefg"))
    for at, after in enumerate([(), (0,), (0,), (1, 2), (3,), (3,), (4, 5)]):
        nodes[at].after = after
    lines = [item.lines[-1] for item in picture_of("t", nodes).items]
    assert [line.removeprefix("branch ") for line in lines] == list("0010010")


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(drawable, extraglobs={"preheat": preheat}) == (0, 8)
    assert doctest.testmod(layout).failed == 0


def test_capturing_does_not_import_what_draws() -> None:
    code = """if True:
        import sys, preheat
        gpu = preheat.device("emulator")
        x = gpu.zeros(4)
        with gpu.capture() as graph:
            x.fill(1)
        assert not {"preheat.graph.pictures.svg", "preheat.graph.pictures.picture"} & set(sys.modules)
        graph.svg()
        assert {"preheat.graph.pictures.svg", "preheat.graph.pictures.picture"} <= set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)
