"""Roles for child processes of tests: `python -m tests.store.children ROLE ARGUMENT…`."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from preheat.model.events import Events
from preheat.store import DiskStore
from preheat.store.bundle import Bundle
from preheat.store.bundle import write as write_bundle
from preheat.store.journal import Journal
from preheat.store.lock import FileLock, hold
from preheat.store.trust import make_private
from tests.store.entries import blob_of, content, digest_of


def main(role: str, *arguments: str) -> None:
    """Play the role; trouble ends the process with a traceback."""
    roles: dict[str, Callable[..., None]] = {
        "hold": hold_until_told,
        "hold-and-fork": hold_and_fork,
        "fork-and-release": fork_and_release,
        "fork-and-lock-again": fork_and_lock_again,
        "count-under-lock": count_under_lock,
        "put-and-get": put_and_get,
        "put-forever-in-forks": put_forever_in_forks,
        "put-and-die-at-every-line": put_and_die_at_every_line,
        "bundle-and-die-at-every-line": bundle_and_die_at_every_line,
        "fork-and-read-bundle": fork_and_read_bundle,
        "count-in-journal": count_in_journal,
    }
    roles[role](*arguments)


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def open_disk(root: str, locks: str) -> DiskStore:
    return DiskStore(Path(root), Events(_alarm), lock_dir=Path(locks))


def _alarm(name: str, fields: Mapping[str, Any]) -> None:
    assert name not in ("fault", "damaged"), (name, dict(fields))


# Locks


def hold_until_told(path: str) -> None:
    """Hold the lock until stdin ends."""
    with hold(Path(path), 10) as mine:
        say("held" if mine else "not held")
        sys.stdin.read()


def hold_and_fork(path: str) -> None:
    """Hold the lock and leave a forked child behind, which lives until stdin ends."""
    with hold(Path(path), 10):
        child = os.fork()
        if child == 0:
            say(os.getpid())
        sys.stdin.read()


def fork_and_release(path: str) -> None:
    """Let a forked child release the lock object that it copied; hold until stdin ends."""
    lock = FileLock(Path(path))
    lock.acquire(10)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    say("held")
    sys.stdin.read()


def fork_and_lock_again(path: str, other: str) -> None:
    """Release a copied lock object while the child holds another lock; say whether that one stays."""
    inherited = FileLock(Path(path))
    inherited.acquire(10)
    child = os.fork()
    if child == 0:
        mine = FileLock(Path(other))
        mine.acquire(10)
        inherited.release()
        say("free" if FileLock(Path(other)).acquire(0) else "held")
        os._exit(0)
    os.waitpid(child, 0)


def count_under_lock(path: str, counter: str, times: str) -> None:
    """Read, add one, write back, many times, each under the lock."""
    for _ in range(int(times)):
        lock = FileLock(Path(path))  # one that removes its file, so that others race for the next
        assert lock.acquire(60)
        Path(counter).write_text(str(int(Path(counter).read_text()) + 1))
        lock.release()


# Entries


def put_and_get(root: str, locks: str, writer: str, writers: str, times: str) -> None:
    """Write an entry that others write too, and read what any of them wrote."""
    disk = open_disk(root, locks)
    mine = blob_of(1, 300_000, by=writer)
    known = {blob_of(1, 300_000, by=str(other)) for other in range(int(writers))}
    say("ready")
    sys.stdin.read()
    for _ in range(int(times)):
        disk.put(digest_of(1), mine)
        assert disk.get(digest_of(1)) in known


def put_forever_in_forks(root: str, locks: str, entries: str) -> None:
    """For each line of stdin, a seed, fork a writer that says its process id and writes until killed.

    An empty line waits until all writers have been killed. A fork takes less time than a new process.
    """
    writers: list[int] = []
    for seed in iter(sys.stdin.readline, ""):
        if seed.strip():
            writers.append(os.fork())
            if writers[-1] == 0:
                put_forever(root, locks, int(seed), int(entries))
        else:
            ends = {os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) for writer in writers}
            writers.clear()
            say(f"ended with {sorted(ends)}")


def put_forever(root: str, locks: str, seed: int, entries: int) -> NoReturn:
    """Write entries at random until killed."""
    disk = open_disk(root, locks)
    chance = random.Random(seed)
    say(os.getpid())
    while True:
        number = chance.randrange(entries)
        disk.put(digest_of(number), blob_of(number, 1000 * number))


def put_and_die_at_every_line(roots: str, locks: str) -> None:
    """Put an entry and exit at its first line, put another and exit at the second, up to the last.

    `roots` may have a place for the number of the death.
    """

    make_private(Path(locks))  # here: its making is the same each time

    def put(number: int) -> None:
        open_disk(roots.format(number), locks).put(digest_of(number), blob_of(number, 5000))

    say(1 + max(_die_at_every_line(put)))


def bundle_and_die_at_every_line(path: str) -> None:
    """Replace a bundle and exit at each of its lines; print the content that is found afterwards."""
    old, new = ({digest_of(number): blob_of(number, 5000)} for number in (1, 2))
    write_bundle(path, old, {})
    found = []
    for _ in _die_at_every_line(lambda _: write_bundle(path, new, {})):
        with Bundle.open(path) as opened:
            found.append({str(old): "old", str(new): "new"}[str(content(opened))])
    say(f"{len(found)} {','.join(dict.fromkeys(found))}")


def fork_and_read_bundle(path: str) -> None:
    """Let a forked child read and close a bundle, then read it as well; say how many were whole."""
    opened = Bundle.open(path)
    child = os.fork()
    if child == 0:
        say(f"child: {len(content(opened))}")
        opened.close()
        os._exit(0)
    os.waitpid(child, 0)
    say(f"parent: {len(content(opened))}")


def _die_at_every_line(act: Callable[[int], object]) -> Iterator[int]:
    """Kill a forked child at the first line of `act`, another at the second, until one gets through."""
    for lines in itertools.count():
        child = os.fork()
        if child == 0:
            sys.settrace(_Executioner(lines))
            act(lines)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            return
        yield lines


class _Executioner:
    """A trace function that kills its process after a number of lines of the store's code."""

    def __init__(self, lines: int) -> None:
        self._left = lines

    def __call__(self, frame: FrameType, event: str, _: object) -> _Executioner | None:
        file = frame.f_code.co_filename
        if "/preheat/store/" not in file or file.endswith(("/trust.py", "/transient.py")):  # no writes
            return None
        if frame.f_code.co_name == "sweep":  # longer with each death before: the end would never come
            return None
        if event == "line":
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)  # until it arrives
            self._left -= 1
        return self


# Counters


def count_in_journal(directory: str, locks: str, times: str) -> None:
    """Write growing counters, as a process does that continues to work."""
    journal = Journal(Path(directory), lock_dir=Path(locks))
    for number in range(1, int(times) + 1):
        journal.write({"hits.disk": number, "seconds_saved": number * 0.5})
    say(json.dumps(journal.total()))


if __name__ == "__main__":
    main(*sys.argv[1:])
