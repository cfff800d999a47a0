"""Processes of machines that share stores, for a campaign of faults.

`python -m tests.torture.remote_load FOLDER KEYS` reads lines from its stdin: a number, a seed and the
URLs of the stores. For each it forks a process, and prints its process id. The process opens a builder
with an empty disk, requests a few of the entries, checks each of them, and begins again as another
machine, until it is told to end by SIGTERM. It writes what it does to the file NUMBER.log in FOLDER, a
line at a time, and a byte for each request to the file `requests`. SIGUSR1 makes its clock jump. An
entry that is wrong, an error, or a request that takes too long ends the process with a message.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["KIND", "REQUESTS", "entry_of", "main"]

KIND = "campaign"
REQUESTS = "requests"  # the file that grows by a byte with each request
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND
_REQUESTS = 12  # of one machine
_LONGEST = 120.0  # seconds for one request, on a machine that does much else
_COMMON = 0.2  # of the requests are for keys that all machines want at the time
_QUICK, _SLOW = 0.02, 1.0  # seconds that a compile takes at most, and one that all machines want
_LEASE = 2.0  # seconds: leases of killed processes are taken over soon


class Clock:
    """The time of a machine, which jumps."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._time = time.time

    def __call__(self) -> float:
        return self._time() + self.offset

    def jump(self, *_: object) -> None:
        """Go forward or backward by up to two days."""
        self.offset = random.uniform(-2, 2) * 86_400


clock = Clock()
if __name__ == "__main__":  # Before preheat is imported, which takes `time.time` as it is.
    time.time = clock

from preheat.build.builder import Builder  # noqa: E402
from preheat.model.config import Config  # noqa: E402
from preheat.model.events import Events  # noqa: E402
from preheat.model.foreign import ForeignRequest  # noqa: E402
from preheat.store.remote import lease, opendal_engine, redis_engine  # noqa: E402, F401


def entry_of(key: int) -> bytes:
    """Return the known answer for a key: between nothing and 40 KiB that do not compress."""
    seed = hashlib.sha256(f"entry {key}".encode()).digest()
    return hashlib.shake_128(seed).digest(seed[0] * 160)


class Machine:
    """One process and its log. A builder of it lives for a few requests."""

    def __init__(self, folder: Path, number: int, seed: int, urls: str, keys: int) -> None:
        self._folder = folder / f"machine-{number}"
        self._random = random.Random(seed)
        self._keys = keys
        self._log = os.open(folder / f"{number}.log", _APPEND)
        self._requests = os.open(folder / REQUESTS, _APPEND)
        schemes = [url.partition(":")[0] for url in urls.split()]
        self._schemes = dict(zip(("remote", "remote.2"), schemes, strict=True))  # by tier
        self._env = {
            "PREHEAT_REMOTE": urls,
            "PREHEAT_REMOTE_TIMEOUT": "1",
            "PREHEAT_SIGNING_KEY": str(folder / "key.pem"),
            "PREHEAT_LOCK_WAIT": "30",
            "PREHEAT_MEMORY_LIMIT": "0",
        }
        self._stop = threading.Event()
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGUSR1, clock.jump)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def stop(self, *_: object) -> None:
        """End after this request."""
        self._stop.set()

    def say(self, *words: object) -> None:
        """Write a line to the log, in one piece."""
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def run(self) -> None:
        """Be one machine after another."""
        round_ = 0
        while not self._stop.is_set():
            round_ += 1
            disk = self._folder / str(round_)
            places = {"PREHEAT_CACHE_DIR": f"{disk}/cache", "PREHEAT_LOCK_DIR": f"{disk}/locks"}
            events = Events()
            events.subscribe(self._stored, "put")
            builder = Builder.open(Config.from_env({**self._env, **places}), events=events)
            for _ in range(_REQUESTS):
                if self._stop.is_set():
                    break
                self._request(builder)
            builder.close()
            stats = builder.stats()["process"]
            shutil.rmtree(disk, ignore_errors=True)
            self.say("closed", *(f"{name}={stats.get(name, 0):g}" for name in _COUNTED))
        self.say("ended")

    def _stored(self, _: str, fields: Mapping[str, Any]) -> None:
        if fields["tier"] in self._schemes:
            self.say("stored", self._schemes[fields["tier"]], fields["key"])

    def _request(self, builder: Builder) -> None:
        wanted_by_all = self._random.random() < _COMMON
        key = self._common_key() if wanted_by_all else self._random.randrange(self._keys)

        def make() -> dict[str, bytes]:
            self.say("makes", key)
            time.sleep(self._random.uniform(0, _SLOW if wanted_by_all else _QUICK))
            return {"file": entry_of(key)}

        self.say("wants", key)
        faulthandler.dump_traceback_later(_LONGEST, exit=True)
        entry = builder.foreign.obtain(ForeignRequest(KIND, str(key)), make)
        faulthandler.cancel_dump_traceback_later()
        if entry.files != {"file": entry_of(key)}:
            raise AssertionError(f"key {key} has another answer")
        self.say("has", key)
        os.write(self._requests, b".")

    def _common_key(self) -> int:
        """Return a key that the other machines want at the same time, so that they wait for one."""
        return (int(time.monotonic()) * 8 + self._random.randrange(8)) % self._keys


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_COUNTED = ("hits.remote", "hits.remote.2", "misses.absent", "untrusted", "damaged", "faults", "waits")


def _live(folder: Path, keys: int, line: str) -> None:
    """Be the process that `line` describes, to its end."""
    number, seed, urls = line.split(maxsplit=2)
    code = 1
    try:
        random.seed(int(seed))
        Machine(folder, int(number), int(seed), urls, keys).run()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path, keys: int) -> None:
    """Fork a process for each line. At the end of stdin, print how many of them failed, and wait."""
    lease.LEASE_SECONDS = _LEASE
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until a process has handlers for them
    lives: dict[int, int] = {}
    codes: list[int] = []

    def reap(flags: int) -> None:
        while lives:
            pid, status = os.waitpid(-1, flags)
            if not pid:
                return
            del lives[pid]
            codes.append(os.waitstatus_to_exitcode(status))

    (folder / REQUESTS).touch()
    for line in iter(sys.stdin.readline, ""):
        reap(os.WNOHANG)
        if (pid := os.fork()) == 0:
            _live(folder, keys, line)
        lives[pid] = int(line.split()[0])
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    for pid in lives:
        os.kill(pid, signal.SIGTERM)
    reap(0)
    killed = codes.count(-signal.SIGKILL)
    failed = sorted(set(codes) - {0, -signal.SIGKILL})
    sys.stdout.write(f"{codes.count(0)} {killed} {failed}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
