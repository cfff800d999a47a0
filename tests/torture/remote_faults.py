"""Faults of servers, networks and processes, for a campaign under the load of `remote_load`."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from preheat.store.remote.engine import Engine, RemoteError, open_engine
from preheat.store.remote.url import parse_remote
from preheat.store.signing.keys import SigningKey
from tests.processes import SOURCE, read_line, start_process, wait_for, write_line
from tests.store.remote.proxy import Proxy
from tests.store.remote.servers import PASSWORD, Server, redis_server, s3_server
from tests.torture.remote_load import REQUESTS

__all__ = ["Campaign", "Shared", "campaign"]

_FLUSHED = ("--appendonly", "yes", "--appendfsync", "always")  # Redis keeps what it has acknowledged.
_KEYS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": PASSWORD}
_LONGEST_FAULT = 1.5  # seconds


class Shared:
    """A server behind a proxy, which can be killed and started again in the same place."""

    def __init__(self, server: Server, proxy: Proxy) -> None:
        self.url = server.url("campaign", port=proxy.port)
        self.scheme = self.url.partition(":")[0]
        self.proxy = proxy
        self.flipped: set[str] = set()  # names of objects that were damaged on the server
        self._server = server
        self._process = server.process
        self._names: list[str] = []
        self.engine: Engine = open_engine(parse_remote(server.url("campaign")), timeout=60)

    def flip(self, chance: random.Random) -> bool:
        """Flip a bit of an object on the server, and return whether there was one."""
        with suppress(RemoteError):  # S3 has internal errors for a while after a restart.
            return self._flip(chance)
        return False

    def _flip(self, chance: random.Random) -> bool:
        if not self._names or chance.random() < 0.1:
            self._names = sorted(self.engine.names("v1/"))
        if not self._names:
            return False
        name = chance.choice(self._names)
        data = self.engine.get(name)
        if not data:
            return False
        bits = bytearray(data)
        bits[chance.randrange(len(bits))] ^= 1 << chance.randrange(8)
        self.flipped.add(name)
        self.engine.put(name, bytes(bits))
        return True

    def read(self, name: str) -> bytes | None:
        """Return an object, once the server answers."""
        answers: list[bytes | None] = []

        def answered() -> bool:
            with suppress(RemoteError):
                answers.append(self.engine.get(name))
            return bool(answers)

        wait_for(answered)
        return answers[0]

    def restart(self) -> None:
        """Kill the server, and start it again once its ports are free."""
        self._process.kill()
        self._process.wait()
        self._start()
        wait_for(self._answers)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._server.process.args,
            cwd=self._server.folder,
            env={**os.environ, **_KEYS},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _answers(self) -> bool:
        if self._process.poll() is not None:  # The last one had not released a port yet.
            self._start()
        with suppress(RemoteError):
            self.engine.put("started", b"")
            self.engine.remove("started")
            return True
        return False

    def close(self) -> None:
        """End a server that was started again."""
        self.engine.close()
        self._process.kill()
        self._process.wait()


@dataclass
class Load:
    """The processes, of which the same number lives at any time."""

    folder: Path
    nursery: subprocess.Popen[str]
    urls: list[str]
    chance: random.Random
    pids: list[int] = field(default_factory=list)
    started: int = 0

    def start(self) -> None:
        """Start a process. Half of them ask the stores in the other order, and have leases there."""
        self.started += 1
        urls = self.urls[:: self.chance.choice([1, -1])]
        write_line(self.nursery, f"{self.started} {self.chance.randrange(1 << 32)} {' '.join(urls)}")
        self.pids.append(int(read_line(self.nursery)))

    def requests(self) -> int:
        """Return how many requests have ended."""
        return (self.folder / REQUESTS).stat().st_size

    def made(self, requests: int) -> bool:
        """Return whether so many requests have ended."""
        return self.requests() >= requests

    def kill(self) -> None:
        """Kill a process, and start another one."""
        os.kill(self.pids.pop(self.chance.randrange(len(self.pids))), signal.SIGKILL)
        self.start()

    def signal(self, number: int) -> int:
        """Send a signal to a process, and return its id. A process that has ended is found later."""
        pid = self.chance.choice(self.pids)
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid


class Campaign:
    """Random faults, some at the same time, and how many there were of each kind."""

    def __init__(self, stores: list[Shared], load: Load, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.stores = stores
        self.load = load
        self._random = random.Random(seed)
        self._timers: list[threading.Timer] = []
        self._faults: dict[str, tuple[int, Callable[[], None]]] = {
            "kill": (30, load.kill),
            "stop and continue": (10, self._stop_process),
            "clock jump": (10, self._jump),
            "flip": (20, self._flip),
            "stall": (10, lambda: self._break(Proxy.stall)),
            "refuse": (10, lambda: self._break(Proxy.refuse)),
            "reset": (10, lambda: self._store().proxy.cut()),
            "slow reply": (5, lambda: self._break(lambda proxy: proxy.drip(0.0005))),
            "cut upload": (5, lambda: self._break(self._cut_upload)),
            "restart": (1, lambda: self._store().restart()),
        }

    def run(self, faults: int, *, every: float, requests: int) -> None:
        """Cause so many faults, of each kind at least one.

        The next one comes after `every` seconds on average and so many `requests`, however busy the
        machine is. Most faults last longer than that.
        """
        kinds = list(self._faults)
        weights = [weight for weight, _ in self._faults.values()]
        chosen = kinds + self._random.choices(kinds, weights, k=faults - len(kinds))
        self._random.shuffle(chosen)
        for kind in chosen:
            done = self.load.requests()
            self._faults[kind][1]()
            self.counts[kind] += 1
            time.sleep(self._random.uniform(0, 2 * every))
            wait_for(partial(self.load.made, done + requests))
        for timer in self._timers:
            timer.join()
        for store in self.stores:
            store.proxy.heal()

    def _store(self) -> Shared:
        return self._random.choice(self.stores)

    def _flip(self) -> None:
        wait_for(lambda: self._store().flip(self._random))

    def _cut_upload(self, proxy: Proxy) -> None:
        proxy.cut_after(self._random.randrange(60_000))

    def _break(self, fault: Callable[[Proxy], None]) -> None:
        proxy = self._store().proxy
        fault(proxy)
        self._later(proxy.heal)

    def _jump(self) -> None:
        self.load.signal(signal.SIGUSR1)

    def _stop_process(self) -> None:
        pid = self.load.signal(signal.SIGSTOP)

        def resume() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._later(resume)

    def _later(self, act: Callable[[], None]) -> None:
        timer = threading.Timer(self._random.uniform(0.01, _LONGEST_FAULT), act)
        timer.start()
        self._timers = [each for each in self._timers if each.is_alive()] + [timer]


@contextmanager
def campaign(folder: Path, seed: int, *, processes: int, keys: int) -> Iterator[Campaign]:
    """Start the servers and the processes. The processes end with the block, and log to `folder`."""
    SigningKey.new().save(folder / "key.pem")
    chance = random.Random(seed)
    with ExitStack() as opened:
        places = [folder / "redis", folder / "s3"]
        for place in places:
            place.mkdir()
        servers = [redis_server(places[0], *_FLUSHED), s3_server(places[1])]
        stores = []
        for context in servers:
            server = opened.enter_context(context)
            stores.append(Shared(server, opened.enter_context(Proxy(server.port))))
            opened.callback(stores[-1].close)
        command = [sys.executable, "-m", "tests.torture.remote_load", str(folder), str(keys)]
        nursery = start_process(command, env={"PYTHONPATH": f"{SOURCE}:{SOURCE.parent}"})
        load = Load(folder, nursery, [store.url for store in stores], chance)
        for _ in range(processes):
            load.start()
        yield Campaign(stores, load, seed)
