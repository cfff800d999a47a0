"""Tables of the replays that `bench_replay.py` has measured, and the targets for them."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import report, spread, us
from replay_contenders import (
    BARE,
    CACHED,
    CORE,
    CUPY,
    NATIVE,
    NODES,
    OURS,
    TENSORS,
    TORCH,
    Capturer,
    Contender,
)
from replay_sizes import Costs, Size

USELESS = "does not pay"
SLOTS = f"{OURS}, slots"
LEAST = "the better of native C and CuPy"
NOTES = """\
Bursts: where shorter ones of the bare call cost about the same, no call waited for the device.
A graph pays once eager - replay, from end to end, has made up for its capture, instantiation and
upload; with a gain under 5 % it does not pay, however often it is used."""

Row = tuple[str, ...]


@dataclass
class Field:
    """All contenders, by category."""

    replays: list[Contender] = field(default_factory=list)
    eager: list[Contender] = field(default_factory=list)
    early: list[Contender] = field(default_factory=list)
    turns: list[Contender] = field(default_factory=list)
    scalars: list[Contender] = field(default_factory=list)
    short: list[Contender] = field(default_factory=list)  # The bare call in shorter bursts.
    floors: list[Contender] = field(default_factory=list)  # Native C on the graphs of the others.
    cached: list[Contender] = field(default_factory=list)
    tensors: list[Contender] = field(default_factory=list)
    captures: list[Capturer] = field(default_factory=list)

    def named(self, title: str) -> Contender:
        """Return the contender of a title, or raise if it does not work."""
        for each in self.replays:
            if each.title == title and not each.failure:
                return each
        raise LookupError(f"{title} does not work")


# Rows


def of(value: float, other: float | None) -> str:
    return "-" if other is None else f"{value / other:.2f} x"


def shown(value: float) -> str:
    return "-" if math.isnan(value) else us(value)


def rows_of(contenders: Sequence[Any], columns: int, cells: Callable[[Any], Row]) -> list[Row]:
    """Return title, cells and statement of each contender, or why it does not work."""
    return [
        (each.title, *("-",) * (columns - 2), each.failure)
        if each.failure
        else (each.title, *cells(each), each.statement)
        for each in contenders
    ]


def host_rows(contenders: Sequence[Contender]) -> list[Row]:
    cost = {each.title: each.host for each in contenders if each.hosts}

    def cells(each: Contender) -> Row:
        shares = (of(each.host, cost.get(NATIVE)), of(each.host, cost.get(BARE)))
        return (us(each.host), us(min(each.hosts)), spread(each.hosts), *shares)

    return rows_of(contenders, 7, cells)


def end_rows(contenders: Sequence[Contender]) -> list[Row]:
    cost = {each.title: each.end for each in contenders if each.ends}

    def cells(each: Contender) -> Row:
        return (us(each.end), spread(each.ends), of(each.end, cost.get(NATIVE)))

    return rows_of(contenders, 5, cells)


def capture_rows(capturers: Sequence[Capturer]) -> list[Row]:
    cost = {each.title: each.cost for each in capturers if each.costs}

    def cells(each: Capturer) -> Row:
        return (us(each.cost), spread(each.costs), of(each.cost, cost.get("cuda.bindings")))

    return rows_of(capturers, 5, cells)


def group_rows(contenders: Sequence[Contender]) -> list[Row]:
    """Return rows that compare each contender with the first one of its category."""
    first: dict[str, Contender] = {}

    def cells(each: Contender) -> Row:
        one = first.setdefault(each.title.rpartition(", ")[0], each)
        shares = (f"{over(each, one):+.2f} µs", of(each.host, one.host))
        return (us(each.host), spread(each.hosts), *shares, us(each.end))

    return rows_of(contenders, 7, cells)


def over(each: Contender, other: Contender) -> float:
    """Return what one costs beyond another: the median of the differences within a round."""
    rounds = zip(each.hosts, other.hosts, strict=True)
    return statistics.median(mine - theirs for mine, theirs in rounds)


def making_rows(sizes: Sequence[Size]) -> list[Row]:
    def cells(costs: Costs, nodes: int) -> Row:
        each = (costs.capture / nodes, costs.instantiate / nodes, costs.upload, costs.first)
        return tuple(map(shown, each))

    return [
        (size.title, *cells(size.ours, size.nodes), *cells(size.native, size.nodes)) for size in sizes
    ]


def paying_rows(sizes: Sequence[Size]) -> list[Row]:
    def cells(costs: Costs) -> Row:
        return tuple(map(shown, (costs.host, costs.replay, costs.eager)))

    return [
        (
            *(size.title, *cells(size.ours), of(size.ours.eager, size.ours.replay)),
            *(*cells(size.native), verdict(size.ours)),
        )
        for size in sizes
    ]


def verdict(costs: Costs) -> str:
    """Return after how many uses a graph pays off. A gain below 5 % does not count."""
    made, gain = costs.capture + costs.instantiate + costs.upload, costs.eager - costs.replay
    if gain < 0.05 * costs.eager:
        return USELESS
    return f"pays from {math.ceil(made / gain)} uses on"


# Targets


def target_rows(everyone: Field, sizes: Sequence[Size]) -> list[Row]:
    """Return what was wanted.

    torch and CuPy slow a whole process down, on the host and on the GPU, so native C and the bare call
    are met before they come.
    """
    groups = (everyone.replays, everyone.turns, everyone.cached, everyone.tensors, everyone.scalars)
    listed = [each for group in groups for each in group if each.hosts]
    host = {each.title: each.host for each in listed}
    peers = [host[each] for each in (NATIVE, CUPY) if each in host]
    host |= {LEAST: min(peers)} if peers else {}
    end = {each.title: each.end for each in listed if each.ends}
    bare = {each.title: each.host for each in everyone.early}
    early: dict[str, float] = {}
    for size in sizes:
        if (size.nodes, size.cycles) == (NODES, 0):
            early = {OURS: size.ours.replay, NATIVE: size.native.replay}
    return [
        share_target("host cost, of the bare cuda.bindings call", bare, OURS, BARE, 1.15),
        share_target(f"host cost, of {LEAST}", host, OURS, LEAST, 1.15),
        share_target("host cost, of torch", host, OURS, TORCH, 1.0),
        share_target("host cost, of cuda.core", host, OURS, CORE, 1.0),
        share_target("end to end, of native C", early, OURS, NATIVE, 1.05),
        share_target("end to end, of the bare cuda.bindings call", end, OURS, BARE, 1.03),
        *turn_targets(host, end),
        *cost_targets({each.title: each for each in listed}),
        cost_target("capture, for each kernel", captured_cost(everyone.captures), 4.0),
    ]


def turn_targets(host: dict[str, float], end: dict[str, float]) -> list[Row]:
    """Return what two graphs in turn may cost, each as a share of one graph twice."""
    once, turn = "one twice", "two in turn"
    extra = {
        name: host.get(f"{name}, {turn}", 0.0) / host.get(f"{name}, {once}", math.inf)
        for name in (OURS, SLOTS, "cuda.bindings")
    }
    slots = (f"{SLOTS}, {turn}", f"{SLOTS}, {once}")
    return [
        share_target("two slots in turn, of one, end to end", end, *slots, 1.03),
        share_target("two graphs in turn, of one, as cuda.bindings", extra, OURS, "cuda.bindings", 1.1),
        share_target("two slots in turn, of one, as cuda.bindings", extra, SLOTS, "cuda.bindings", 1.1),
    ]


def cost_targets(contenders: dict[str, Contender]) -> list[Row]:
    """Return what a replay may cost beyond a simpler one."""
    replay, arrays = f"{CACHED}, graph.replay", f"{TENSORS}, preheat on our arrays"
    wanted = [
        ("graphs.replay, over graph.replay", f"{CACHED}, graphs.replay", replay, 0.5),
        ("graphs.run, over graph.replay", f"{CACHED}, graphs.run", replay, 2.0),
        ("@graphed, over graph.replay", f"{CACHED}, @graphed", replay, 4.0),
        *(
            (f"{name}, over our arrays", f"{TENSORS}, {name}", arrays, 2.0)
            for name in ("preheat on torch tensors", "preheat on one of each")
        ),
        ("one scalar", "preheat, 1", "preheat, 0", 2.5),
        ("four scalars", "preheat, 4", "preheat, 0", 4.0),
    ]
    rows = []
    for title, ours, theirs, most in wanted:
        measured = ours in contenders and theirs in contenders
        more = over(contenders[ours], contenders[theirs]) if measured else None
        rows.append(cost_target(title, more, most))
    return rows


def captured_cost(capturers: Sequence[Capturer]) -> float | None:
    return next((each.cost for each in capturers if each.title == OURS and each.costs), None)


def cost_target(title: str, more: float | None, most: float) -> Row:
    """Return a row for a target in microseconds."""
    wanted = f"at most {most:g} µs"
    if more is None:
        return title, "-", wanted, "not measured"
    return title, f"{more:.2f} µs", wanted, "met" if more <= most else "missed"


def share_target(title: str, cost: dict[str, float], ours: str, theirs: str, most: float) -> Row:
    """Return a row for a target as a share of another cost."""
    wanted = f"at most {most:.2f} x"
    if ours not in cost or theirs not in cost:
        return title, "-", wanted, "not measured"
    share = cost[ours] / cost[theirs]
    return title, f"{share:.3f} x", wanted, "met" if share <= most else "missed"


# All tables


def tell(everyone: Field, sizes: Sequence[Size], args: argparse.Namespace) -> None:
    """Print all tables and write them to the file of results."""

    def table(title: str, head: Row, rows: Sequence[Row]) -> None:
        report("bench_replay", title, ("", *head), rows, into=args.json)

    hosts = ("a replay", "least", "spread", "of native C", "of cuda.bindings", "statement")
    groups = ("a replay", "spread", "over the first", "of the first", "end to end", "statement")
    made = ("capture/node", "instantiate/node", "upload", "first replay")
    used = ("host cost", "replay", "eager")
    floors = [each for each in everyone.replays if each.title in (NATIVE, BARE)] + everyone.floors
    table(
        f"Host cost of one replay of {NODES} kernels ({args.rounds} bursts of {args.burst})",
        hosts,
        host_rows([*everyone.replays, *everyone.short]),
    )
    table("The same graphs, launched by native C in this process", hosts, host_rows(floors))
    table(
        f"The same before any other library is loaded ({2 * args.rounds} bursts of {args.burst})",
        hosts,
        host_rows(everyone.early),
    )
    table(
        f"End to end, {NODES} kernels ({args.runs} times and one wait)",
        ("a replay", "spread", "of native C", "statement"),
        end_rows([*everyone.replays, *everyone.eager]),
    )
    table(f"Two graphs in turn, {NODES} kernels each", groups, group_rows(everyone.turns))
    table(f"The cache and the decorator, {NODES} kernels", groups, group_rows(everyone.cached))
    table(f"Tensors of torch, {NODES} kernels", groups, group_rows(everyone.tensors))
    table(
        f"Capture of {NODES} kernels, for each of them",
        ("a node", "spread", "of cuda.bindings", "statement"),
        capture_rows(everyone.captures),
    )
    scalars = f"Scalars set before a replay of {NODES + 1} kernels"
    table(scalars, groups, group_rows(everyone.scalars))
    table("Making a graph", (*made, *(f"C: {each}" for each in made)), making_rows(sizes))
    table(
        "Where graphs pay and where they do not, end to end",
        (*used, "eager/replay", *(f"C: {each}" for each in used), "in preheat, a graph"),
        paying_rows(sizes),
    )
    table("Targets", ("measured", "wanted", ""), target_rows(everyone, sizes))
    idle = [size.title for size in sizes if verdict(size.ours) == USELESS]
    print(f"\n{NOTES}")
    print(f"Graphs did not pay for: {', '.join(idle) or 'none of these'}.")
