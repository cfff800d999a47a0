"""The check of a sanitized emulator for barriers that not all threads of a block reach together.

CUDA C++ leaves it undefined if only some threads of a block reach a `__syncthreads()`, which is
`bar.sync` in PTX. PTX allows more: threads that have exited are not waited for, and threads may arrive
at `barrier.sync` by several instructions. The second is not reported: cooperative groups use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from preheat.emulator.layout import coordinates
from preheat.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.emulator.barrier import Arrival
    from preheat.emulator.group import Frame, Group
    from preheat.emulator.wave import Wave

__all__ = ["check_barrier"]

Array = np.ndarray[Any, Any]

_EXIT_HINT = (
    "let every thread of the block reach the barrier: put a condition around the work instead of "
    "returning early, and repeat a loop with a barrier equally often in all threads"
)
_BRANCH_HINT = (
    "all threads of a block must execute the same __syncthreads(): move it out of the branch or the "
    "loop"
)


def check_barrier(wave: Wave, waiting: Iterable[tuple[Group, Arrival]], complete: Array) -> None:
    """Raise `Violation` if threads pass a barrier of their block without all others.

    `waiting` are the groups at a barrier that has no thread count, and `complete` says for which
    blocks of the wave it is complete.
    """
    present = [
        (group, arrival)
        for group, arrival in waiting
        if complete[group.per_thread("block_index")].any()
    ]
    if len({_instruction(group, arrival) for group, arrival in present}) > 1:
        _check_instructions(wave, present, complete)
    short = complete & (wave.alive < wave.layout.threads)
    if short.any():
        _raise_exited(wave, present, int(np.argmax(short)))


def _instruction(group: Group, arrival: Arrival) -> tuple[Frame, int] | None:
    """Return what must be the same for all threads; None if the instruction is not aligned."""
    return (group.frame, group.pc) if arrival.aligned else None


def _check_instructions(wave: Wave, present: list[tuple[Group, Arrival]], complete: Array) -> None:
    """Raise `Violation` if threads of one block are at different instructions."""
    numbers: dict[object, int] = {}
    number_of = np.full(wave.layout.count, -1)
    for group, arrival in present:
        number_of[group.all_lanes] = numbers.setdefault(_instruction(group, arrival), len(numbers))
    threads = wave.layout.threads
    for block in np.flatnonzero(complete).tolist():
        first = block * threads
        here = number_of[first : first + threads]
        arrived = np.flatnonzero(here >= 0)
        others = arrived[here[arrived] != here[arrived[0]]]
        if len(others):
            group, arrival = _at(present, first + int(arrived[0]))
            other, _ = _at(present, first + int(others[0]))
            frame = other.frame
            site = _site(other)
            what = "are at other instructions"
            verb = "is"
            same = frame.code is group.frame.code and site == _site(group)
            if same and frame.parent is not None and frame.call is not None:
                what = "came to it through other calls"
                verb = "came through the call"
                site = frame.call.site
                frame = frame.parent
            _raise(
                group,
                first + int(arrived[0]),
                f"passes barrier {arrival.barrier_id}, at which {len(others)} of the {threads} threads "
                f"of its block {what}: thread {coordinates(int(others[0]), wave.layout.block)} {verb}",
                (frame, site),
                _BRANCH_HINT,
            )


def _raise_exited(wave: Wave, present: list[tuple[Group, Arrival]], block: int) -> NoReturn:
    threads = wave.layout.threads
    first = block * threads
    exited = np.flatnonzero(wave.exited[first : first + threads])
    lane = first + int(exited[0])
    place = next((frame, site) for frame, site, lanes in wave.exits if lane in lanes)
    group, arrival = next(
        each for each in present if (each[0].per_thread("block_index") == block).any()
    )
    waits = int(group.all_lanes[np.argmax(group.per_thread("block_index") == block)])
    _raise(
        group,
        waits,
        f"passes barrier {arrival.barrier_id}, which {len(exited)} of the {threads} threads of its "
        f"block have not reached: thread {coordinates(int(exited[0]), wave.layout.block)} exited",
        place,
        _EXIT_HINT,
    )


def _raise(group: Group, lane: int, message: str, other: tuple[Frame, int], hint: str) -> NoReturn:
    group.wave.running = group
    position = int(np.searchsorted(group.all_lanes, lane))
    raise Violation(message, _site(group), position, hint=hint, other=other)


def _at(present: list[tuple[Group, Arrival]], lane: int) -> tuple[Group, Arrival]:
    """Return the group that a thread belongs to."""
    return next(each for each in present if lane in each[0].all_lanes)


def _site(group: Group) -> int:
    """Return the site of the barrier that a group has arrived at."""
    return group.frame.code.blocks[group.pc - 1].site
