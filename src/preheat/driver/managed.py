"""Hints about the place of managed memory, which is host memory here: they are kept, and told."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from preheat.driver.allocations import Allocation
from preheat.driver.calls import CallError, entry
from preheat.driver.raw import I32, U64, get, put
from preheat.driver.status import INVALID_VALUE
from preheat.driver.streams import stream_of

if TYPE_CHECKING:
    from preheat.driver.driver import Driver

__all__: list[str] = []

#: A place: its type, and the number of the device or of the node of NUMA.
_Place = tuple[int, int]

_NOWHERE, _ON_DEVICE, _ON_HOST = 0, 1, 2
_CPU, _NO_DEVICE = -1, -2  # numbers in the place of a device
_READ_MOSTLY, _PREFERRED, _ACCESSED_BY, _PREFETCHED = 1, 2, 3, 4
_PREFERRED_TYPE, _PREFERRED_ID, _PREFETCHED_TYPE, _PREFETCHED_ID = 5, 6, 7, 8


@dataclass
class Hints:
    """What a program has said about managed memory. It holds for the whole allocation."""

    read_mostly: bool = False
    preferred: _Place = (_NOWHERE, 0)
    prefetched: _Place = (_NOWHERE, 0)
    accessed_by: list[_Place] = field(default_factory=list)


def _find_managed(driver: Driver, address: int, size: int) -> Allocation:
    found = driver.memory.find(address)
    if found is None or not found.is_managed or not size or address + size > found.end:
        raise CallError(INVALID_VALUE)
    return found


def _hints(driver: Driver, address: int, size: int) -> Hints:
    found = _find_managed(driver, address, size)
    if not isinstance(found.owner, Hints):
        found.owner = Hints()
    return found.owner


def _check_place(driver: Driver, place: _Place) -> _Place:
    if place[0] == _ON_DEVICE:
        driver.gpu(place[1])
    elif place[0] < _ON_HOST:
        raise CallError(INVALID_VALUE)
    return place


def _place_of(number: int) -> _Place:
    """Return the place that older functions name by the number of a device."""
    return (_ON_HOST, 0) if number == _CPU else (_ON_DEVICE, number)


def _read_place(packed: int) -> _Place:
    """Return the place in a structure that was passed by value."""
    return packed & 0xFFFF_FFFF, packed >> 32


@entry("cuMemAdvise", 8000)
def _advise_device(driver: Driver, address: int, size: int, advice: int, device: int) -> None:
    _take(driver, _hints(driver, address, size), advice, _place_of(device))


@entry("cuMemAdvise", 12020)
def _advise(driver: Driver, address: int, size: int, advice: int, place: int) -> None:
    _take(driver, _hints(driver, address, size), advice, _read_place(place))


def _take(driver: Driver, hints: Hints, advice: int, place: _Place) -> None:
    match advice:
        case 1 | 2:
            hints.read_mostly = advice == 1
        case 3:
            hints.preferred = _check_place(driver, place)
        case 4:
            hints.preferred = _NOWHERE, 0
        case 5 | 6:
            _check_place(driver, place)
            others = [each for each in hints.accessed_by if each != place]
            hints.accessed_by = [*others, place] if advice == 5 else others
        case _:
            raise CallError(INVALID_VALUE)


@entry("cuMemPrefetchAsync", 8000, stream=3)
def _prefetch_to(driver: Driver, address: int, size: int, device: int, stream: int) -> None:
    stream_of(driver, stream)
    _hints(driver, address, size).prefetched = _check_place(driver, _place_of(device))


@entry("cuMemPrefetchAsync", 12020, stream=4)
def _prefetch(driver: Driver, address: int, size: int, place: int, flags: int, stream: int) -> None:
    stream_of(driver, stream)
    if flags:
        raise CallError(INVALID_VALUE)
    _hints(driver, address, size).prefetched = _check_place(driver, _read_place(place))


def _ranges(driver: Driver, starts: int, sizes: int, count: int) -> list[Hints]:
    """Return the hints of several ranges of managed memory."""
    if not count or not starts or not sizes:
        raise CallError(INVALID_VALUE)
    return [_hints(driver, get(starts + 8 * at), get(sizes + 8 * at)) for at in range(count)]


@entry("cuMemDiscardBatchAsync", stream=4)
def _discard_all(driver: Driver, starts: int, sizes: int, count: int, flags: int, stream: int) -> None:
    """Discard what is in memory: the program must not read it before it has written it again."""
    stream_of(driver, stream)
    _ranges(driver, starts, sizes, count)
    if flags:
        raise CallError(INVALID_VALUE)


def _prefetch_all(
    driver: Driver, starts: int, sizes: int, count: int, places: int, firsts: int, number: int,
    flags: int, stream: int,
) -> None:  # fmt: skip
    """Prefetch ranges, each to the last place that begins at its index or before it."""
    stream_of(driver, stream)
    ranges = _ranges(driver, starts, sizes, count)
    begins = [get(firsts + 8 * at) for at in range(number)]
    if flags or not begins or begins[0] or begins != sorted(set(begins)) or begins[-1] >= count:
        raise CallError(INVALID_VALUE)
    for at, hints in enumerate(ranges):
        place = places + 8 * (bisect_right(begins, at) - 1)
        hints.prefetched = _check_place(driver, _read_place(get(place)))


entry("cuMemPrefetchBatchAsync", stream=7)(_prefetch_all)
entry("cuMemDiscardAndPrefetchBatchAsync", stream=7)(_prefetch_all)


def _number(place: _Place) -> int:
    """Return a place as the number of a device, as older attributes tell it."""
    if place[0] == _ON_DEVICE:
        return place[1]
    return _NO_DEVICE if place[0] == _NOWHERE else _CPU


@entry("cuMemRangeGetAttribute")
def _attribute(driver: Driver, out: int, room: int, which: int, address: int, size: int) -> None:
    hints = _hints(driver, address, size)
    single = {
        _READ_MOSTLY: int(hints.read_mostly),
        _PREFERRED: _number(hints.preferred),
        _PREFETCHED: _number(hints.prefetched),
        _PREFERRED_TYPE: hints.preferred[0],
        _PREFERRED_ID: hints.preferred[1],
        _PREFETCHED_TYPE: hints.prefetched[0],
        _PREFETCHED_ID: hints.prefetched[1],
    }
    if not out or not room or room % 4 or (which in single and room != 4):
        raise CallError(INVALID_VALUE)
    if which in single:
        put(out, single[which], I32)
    elif which == _ACCESSED_BY:
        numbers = [_number(each) for each in hints.accessed_by]
        for at in range(room // 4):
            put(out + 4 * at, numbers[at] if at < len(numbers) else _NO_DEVICE, I32)
    else:
        raise CallError(INVALID_VALUE)


@entry("cuMemRangeGetAttributes")
def _attributes(
    driver: Driver, outs: int, rooms: int, which: int, count: int, address: int, size: int
) -> None:
    if not count:
        raise CallError(INVALID_VALUE)
    for at in range(count):
        out, room = get(outs + 8 * at, U64), get(rooms + 8 * at, U64)
        _attribute(driver, out, room, get(which + 4 * at, I32), address, size)
