"""What a picture of a graph shows: a box for each node, links, and how two captures differ.

`formats.py` draws it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from preheat.devices import base
from preheat.graph.difference import Match, match
from preheat.graph.nodes import Node

__all__ = ["Change", "Item", "Link", "Picture", "folded", "picture_of", "picture_of_change"]

_FOLDED = 3  # A run with at least this many nodes becomes one box.
_LISTED = 32  # arguments in a tooltip


class Change(enum.Enum):
    """What a second capture did to a node, with the sign that says so without a colour."""

    ADDED = "+"
    REMOVED = "-"
    CHANGED = "~"


@dataclass(frozen=True, slots=True)
class Item:
    """One box: a node, or a run of `count` equal nodes that begins with the node `number`."""

    number: int
    name: str
    kind: str
    lines: tuple[str, ...]  # what is shown below the name
    details: tuple[str, ...]  # what a tooltip adds
    foreign: bool = False
    scalars: tuple[str, ...] = ()  # that `Graph.replay` sets
    change: Change | None = None
    count: int = 1

    @property
    def label(self) -> str:
        """The number of the node, or those of the first and the last node of a run."""
        last = f"-{self.number + self.count - 1}" if self.count > 1 else ""
        return f"#{self.number}{last}"

    @property
    def title(self) -> str:
        """The name, with the sign of the change."""
        return f"{self.change.value} {self.name}" if self.change is not None else self.name

    @property
    def rows(self) -> tuple[str, ...]:
        """All lines below the name."""
        run = [f"{self.count:,} nodes, one after another"] if self.count > 1 else []
        return (*self.lines, *run, *([self.setter] if self.scalars else []))

    @property
    def setter(self) -> str:
        """How `Graph.replay` sets the scalars that the node reads."""
        return f"replay({', '.join(f'{name}=…' for name in self.scalars)})"

    def looks_like(self, other: Item) -> bool:
        """Return True if both boxes show the same, apart from number and count."""
        return replace(self, number=0, count=1, details=()) == replace(
            other, number=0, count=1, details=()
        )


@dataclass(frozen=True, slots=True)
class Link:
    """An edge: the item `target` waits for the item `source`."""

    source: int
    target: int
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """Items in an order in which they can run, and the links between them."""

    title: str
    items: tuple[Item, ...]
    links: tuple[Link, ...]
    compared: bool = False  # with another capture


def picture_of(title: str, nodes: Sequence[Node]) -> Picture:
    """Return the picture of one capture."""
    branches = _branches(nodes)
    items = tuple(_item(at, node, branches[at]) for at, node in enumerate(nodes))
    links = [Link(before, at) for at, node in enumerate(nodes) for before in node.after]
    return Picture(title, items, tuple(links))


def picture_of_change(title: str, old: Sequence[Node], new: Sequence[Node]) -> Picture:
    """Return the nodes of both captures, each of them once, with what changed from `old` to `new`.

    Nodes have their numbers in `new`, and those that are gone have their numbers in `old`.
    """
    matches = list(match(old, new))
    branches = (_branches(old), _branches(new))
    items = tuple(_changed_item(each, old, new, branches) for each in matches)
    return Picture(title, items, tuple(_changed_links(matches, old, new)), compared=True)


def _changed_item(
    each: Match, old: Sequence[Node], new: Sequence[Node], branches: tuple[list[str], list[str]]
) -> Item:
    """Return the box of a node that one or both of two captures have."""
    if each.new is not None:
        item = _item(each.new, new[each.new], branches[1][each.new])
        change = Change.ADDED if each.old is None else Change.CHANGED if each.rows else None
    else:
        assert each.old is not None
        item = _item(each.old, old[each.old], branches[0][each.old])
        change = Change.REMOVED
    return replace(item, change=change, details=(*each.rows, *item.details))


def _changed_links(
    matches: Sequence[Match], old: Sequence[Node], new: Sequence[Node]
) -> Iterator[Link]:
    """Yield the links of both captures, between positions in `matches`."""
    where_old = {each.old: at for at, each in enumerate(matches)}
    where_new = {each.new: at for at, each in enumerate(matches)}
    was = {(where_old[b], where_old[at]) for at, node in enumerate(old) for b in node.after}
    now = {(where_new[b], where_new[at]) for at, node in enumerate(new) for b in node.after}
    for link in sorted(was | now):
        change = None if link in was & now else Change.ADDED if link in now else Change.REMOVED
        yield Link(*link, change)


# Boxes


def _item(number: int, node: Node, branch: str) -> Item:
    scalars = dict.fromkeys(each.scalar for each in node.arguments if each.scalar is not None)
    return Item(
        number=number,
        name=node.name or node.kind,
        kind=node.kind,
        lines=(*_lines(node), *([branch] if branch else [])),
        details=tuple(_details(number, node)),
        foreign=node.foreign,
        scalars=tuple(scalars),
    )


def _lines(node: Node) -> Iterator[str]:
    """Yield what a box shows of a node."""
    if node.foreign:
        yield f"{node.kind} of another library"
    elif node.geometry is not None:
        yield f"grid {_dim(node.geometry.grid)}  block {_dim(node.geometry.block)}"
        shared = f"  {node.shared:,} B shared" if node.shared else ""
        yield f"{sum(len(each.value) for each in node.arguments):,} B arguments{shared}"
    else:
        target, source = node.arguments
        yield f"{target.nbytes:,} B" + (f" of {source}" if node.kind == "fill" else "")


def _dim(size: base.Dim3) -> str:
    used = size[:1] if size[1:] == (1, 1) else size[:2] if size[2] == 1 else size
    return "x".join(map(str, used))


def _details(number: int, node: Node) -> Iterator[str]:
    """Yield what a tooltip says of a node."""
    yield f"node {number}: {node.name or node.kind}"
    if node.foreign:
        yield f"{node.kind} of another library"
    if node.where:
        yield f"captured at {node.where}"
    for position, argument in enumerate(node.arguments[:_LISTED]):
        yield f"argument {position} ({argument.type}): {argument}"
    if len(node.arguments) > _LISTED:
        yield f"and {len(node.arguments) - _LISTED} more arguments"


def _branches(nodes: Sequence[Node]) -> list[str]:
    """Name the branch of each node, or none if there is one branch only.

    The nodes of a branch run one after another. A node continues the branch of a node that it waits
    for directly; if other nodes have done so, it continues another branch that has ended before it.
    """
    branch: list[int] = []
    last: dict[int, int] = {}  # the last node of each branch
    ancestors: list[int] = []  # a bit for each earlier node
    for at, node in enumerate(nodes):
        before = sum(1 << each for each in node.after)
        for each in node.after:
            before |= ancestors[each]
        ancestors.append(before)
        direct = [branch[each] for each in node.after if last[branch[each]] == each]
        ended = (number for number, tip in last.items() if before >> tip & 1)
        number = direct[0] if direct else next(ended, len(last))
        last[number] = at
        branch.append(number)
    return [f"branch {number}" if len(last) > 1 else "" for number in branch]


# Runs


def folded(picture: Picture) -> Picture:
    """Return the picture with one box for each run of nodes that look alike and follow one another."""
    runs = _runs(picture)
    place = {at: number for number, run in enumerate(runs) for at in run}
    items = tuple(_folded_item(picture, run) for run in runs)
    links = {
        (place[link.source], place[link.target], link.change): None
        for link in picture.links
        if place[link.source] != place[link.target]
    }
    return replace(picture, items=items, links=tuple(Link(*link) for link in links))


def _runs(picture: Picture) -> list[range]:
    """Divide the positions of the items into runs."""
    before: list[list[int]] = [[] for _ in picture.items]
    after: list[list[int]] = [[] for _ in picture.items]
    for link in picture.links:
        before[link.target].append(link.source)
        after[link.source].append(link.target)
    runs: list[range] = []
    for at, item in enumerate(picture.items):
        alone = before[at] == [at - 1] and after[at - 1] == [at]
        if alone and item.change is not Change.CHANGED and item.looks_like(picture.items[at - 1]):
            runs[-1] = range(runs[-1].start, at + 1)
        else:
            runs.append(range(at, at + 1))
    return [part for run in runs for part in _long_enough(run)]


def _long_enough(run: range) -> list[range]:
    return [run] if len(run) >= _FOLDED else [range(at, at + 1) for at in run]


def _folded_item(picture: Picture, run: range) -> Item:
    first = picture.items[run.start]
    if len(run) == 1:
        return first
    last = picture.items[run.stop - 1]
    details = (f"{len(run)} nodes; the first:", *first.details, "the last:", *last.details)
    return replace(first, count=len(run), details=details)
