"""Barriers in shared memory: `mbarrier` objects, on which threads and copies arrive.

An object is one 64-bit word. From its lowest bit on it contains the number of arrivals that the phase
still waits for (20 bits), the number for the next phase (20), the bytes of copies that are expected and
not complete (21, biased), the parity of the phase (1), and a flag that the object is initialised (1). A
phase is complete, and the next one begins, when neither arrivals nor bytes are missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from preheat.emulator import access
from preheat.emulator.atomics import Update, atomic
from preheat.emulator.memory import Violation

if TYPE_CHECKING:
    from preheat.emulator.addresses import Addresses
    from preheat.emulator.group import Group

__all__ = ["arrive", "initialise", "invalidate", "pending", "phase", "waited"]

_WORD = np.dtype(np.int64)
_COUNT = (1 << 20) - 1  # The largest number of arrivals, and of bytes.
_BYTES = (1 << 21) - 1
_BIAS = 1 << 20
_MARK = 1


def _pack(phase: Any, transfer: Any, expected: Any, missing: Any) -> Any:
    return _MARK << 62 | phase << 61 | transfer << 40 | expected << 20 | missing


def pending(word: Any) -> Any:
    """Return how many arrivals the phase of an object, or of a state, still waits for."""
    return word & _COUNT


def phase(word: Any) -> Any:
    """Return the parity of the phase of an object or of a state."""
    return word >> 61 & 1


def _transfer(word: Any) -> Any:
    return word >> 40 & _BYTES


def _count_arrivals(word: Any, arrivals: Any, transfer: Any, dropped: Any) -> Any:
    """Return an object after arrivals and a change of the expected bytes."""
    missing = pending(word) - arrivals
    transfer = _transfer(word) + transfer
    expected = (word >> 20 & _COUNT) - dropped
    complete = (missing == 0) & (transfer == _BIAS)
    missing = missing + complete * expected
    return _pack(phase(word) ^ complete, transfer & _BYTES, expected, missing)


_ARRIVE = Update(_count_arrivals, scalar=_count_arrivals)


def initialise(group: Group, at: Addresses, offset: int, site: int, count: Any) -> None:
    """Initialise an object that waits for `count` arrivals in each phase."""
    _check_space(at, site)
    count = count.astype(_WORD)
    wrong = (count < 1) | (count > _COUNT)
    if wrong.any():
        position = int(np.argmax(wrong))
        number = np.atleast_1d(count)[position]
        message = f"initialises an mbarrier for {number} arrivals; there may be 1 to {_COUNT}"
        raise Violation(message, site, position)
    access.store(group, at, offset, _WORD, site, _pack(0, _BIAS, count, count))


def invalidate(group: Group, at: Addresses, offset: int, site: int) -> None:
    """Invalidate an object, so that its memory can be reused."""
    _check_space(at, site)
    _check_valid(at, offset, site, access.load(group, at, offset, _WORD, site))
    access.store(group, at, offset, _WORD, site, np.int64(0))


def arrive(
    group: Group,
    at: Addresses,
    offset: int,
    site: int,
    *,
    arrivals: Any = 0,
    transfer: Any = 0,  # Bytes expected from now on, minus those that are complete.
    drop: bool = False,  # The arriving threads do not take part in later phases.
    completes: bool = True,
) -> Any:
    """Count arrivals and bytes. Return the state: the object as each thread found it."""
    _check_space(at, site)
    _check_valid(at, offset, site, access.load(group, at, offset, _WORD, site))
    counts, changes = (np.asarray(number).astype(_WORD) for number in (arrivals, transfer))
    numbers = counts, changes, counts * drop
    before = atomic(group, at, offset, _WORD, site, _ARRIVE, True, *numbers)
    group.wave.writes += 1
    after = _transfer(before) + changes
    wrongs = {
        "arrives at an mbarrier whose phase waits for fewer arrivals": counts > pending(before),
        f"expects or completes more than {_COUNT} bytes": np.abs(after - _BIAS) > _COUNT,
        "completes the phase of an mbarrier by an arrival with .noComplete": (
            (counts == pending(before)) & (after == _BIAS) & (not completes)
        ),
    }
    # The results of threads after the first failing one are meaningless, so that one is reported.
    found = [(int(np.argmax(wrong)), message) for message, wrong in wrongs.items() if wrong.any()]
    if found:
        position, message = min(found)
        raise Violation(message, site, position)
    return before


def waited(group: Group, at: Addresses, offset: int, site: int, parity: Any) -> Any:
    """Return whether the phase with this parity is complete, that is, the object is in the next one."""
    _check_space(at, site)
    word = access.load(group, at, offset, _WORD, site)
    _check_valid(at, offset, site, word)
    complete = phase(word) != parity
    if not complete.all():
        group.wave.stall(site, int(np.argmin(complete)))
    return complete


def _check_valid(at: Addresses, offset: int, site: int, word: Any) -> None:
    wrong = word >> 62 != _MARK
    if wrong.any():
        position = int(np.argmax(wrong))
        values = np.atleast_1d(at.values)
        address = int(values[position if len(values) > 1 else 0]) + offset
        message = f"uses an mbarrier at {at.describe(position, offset)} that is not initialised"
        hint = "initialise it in one thread, and let the others wait for that at a barrier"
        raise Violation(message, site, position, address, hint)


def _check_space(at: Addresses, site: int) -> None:
    if at.space not in ("shared", "cluster"):
        raise Violation(f"uses an mbarrier in {at.space} memory; it has to be in shared memory", site)
