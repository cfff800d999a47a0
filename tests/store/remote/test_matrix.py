"""The remote tier on each kind of server: what it stores, and what each fault of a server costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from preheat.build.remotes import open_remotes, open_shared_chain
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.store import Chain, DiskStore, MemoryStore
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.url import entry_name
from preheat.store.signing.keys import SigningKey
from tests.conftest import Recorder
from tests.processes import TIMEOUT_SECONDS
from tests.store.entries import blob_of, digest_of
from tests.store.remote.proxy import Proxy
from tests.store.remote.remote_stores import entry
from tests.store.remote.stores import KINDS, Store

KEY = digest_of(1)
BLOB = blob_of(1)
SHORT = 0.3  # seconds: the time-out of requests to a server that does not answer


@dataclass
class Machine:
    """The tiers of one machine."""

    chain: Chain
    remote: RemoteStore
    disk: DiskStore


@dataclass
class Machines:
    """Machines that share a store and a key to sign, each with a disk of its own."""

    store: Store
    place: Path
    events: Events
    config: Config
    opened: list[Machine] = field(default_factory=list)

    def open(
        self, number: int, *, port: int | None = None, timeout: float = 60.0, url: str | None = None
    ) -> Machine:
        """Open the tiers of the machine with this number, perhaps through a proxy."""
        config = replace(
            self.config, remote=(url or self.store.url(port=port),), remote_timeout=timeout
        )
        disk = DiskStore(
            self.place / f"cache-{number}", self.events, lock_dir=self.place / f"locks-{number}"
        )
        chain = open_shared_chain([MemoryStore(1 << 20), disk], config, self.events)
        (remote,) = chain.shared
        assert isinstance(remote, RemoteStore)
        self.opened.append(Machine(chain, remote, disk))
        return self.opened[-1]


@pytest.fixture
def open_machines(
    tmp_path: Path, events: Events, recorder: Recorder
) -> Iterator[Callable[[Store], Machines]]:
    opened: list[Machines] = []

    def open_them(store: Store) -> Machines:
        key = tmp_path / "key"
        SigningKey.new().save(key)
        config = Config(cache_dirs=(), lock_dir=tmp_path / "locks", signing_key=key)
        opened.append(Machines(store, tmp_path, events, config))
        return opened[-1]

    yield open_them
    recorder.forgive = True  # of faults that a test is about
    for machine in (machine for machines in opened for machine in machines.opened):
        machine.chain.close()


@pytest.fixture(params=[kind for kind in KINDS if kind != "memory"])
def machines(
    request: pytest.FixtureRequest,
    open_store: Callable[[str], Store],
    open_machines: Callable[[Store], Machines],
) -> Machines:
    """Return machines that share a store of each kind."""
    return open_machines(open_store(request.param))


@pytest.fixture
def served_machines(served: Store, open_machines: Callable[[Store], Machines]) -> Machines:
    """Return machines that share a store on each kind of server."""
    return open_machines(served)


@pytest.fixture
def proxy(served_machines: Machines, open_proxy: Callable[..., Proxy], recorder: Recorder) -> Proxy:
    """Return a proxy in front of the server of `served_machines`, whose faults are forgiven."""
    recorder.forgive = True
    server = served_machines.store.server
    assert server is not None
    return open_proxy(server.port)


def faults(recorder: Recorder) -> list[tuple[str, str]]:
    return [(event["where"], event["verb"]) for event in recorder.named("fault")]


def test_what_one_machine_stores_another_one_finds_and_keeps(machines: Machines) -> None:
    first, second = machines.open(1), machines.open(2)
    first.chain.put(KEY, BLOB)
    first.chain.put(digest_of(2), blob_of(2, 300_000))
    first.chain.close()
    assert second.chain.get(KEY) == (BLOB, "remote")
    assert second.chain.get(digest_of(2)) == (blob_of(2, 300_000), "remote")
    assert second.chain.get(digest_of(3)) is None
    assert second.disk.get(KEY) == BLOB
    second.chain.close()


def test_many_digests_are_looked_up_ahead(machines: Machines) -> None:
    machine = machines.open(1)
    for number in range(0, 40, 2):
        machine.remote.put_later(digest_of(number), blob_of(number))
    assert machine.remote.flush(TIMEOUT_SECONDS)
    digests = {digest_of(number): number for number in range(40)}
    assert machine.remote.exists(digests) == {digest_of(number) for number in range(0, 40, 2)}
    machine.remote.look_ahead(digests)
    assert [number for key, number in digests.items() if entry(machine.remote, key)] == [
        *range(0, 40, 2)
    ]
    assert machines.events.stats()["requests.remote.read"] == 20
    machine.chain.close()


@pytest.mark.parametrize("what", ["damaged", "foreign", "of another entry", "unsigned"])
def test_an_object_that_cannot_be_trusted_is_a_miss_and_fills_nothing(
    what: str, machines: Machines, recorder: Recorder
) -> None:
    recorder.forgive = True
    first, second = machines.open(1), machines.open(2)
    first.remote.put(KEY, BLOB)
    first.remote.put(digest_of(2), blob_of(2))
    first.chain.close()
    engine = machines.store.open()
    data = engine.get(entry_name(KEY))
    assert data is not None
    other = {
        "damaged": data[:-5] + bytes([data[-5] ^ 4]) + data[-4:],
        "foreign": b"<html>It works!</html>",
        "of another entry": engine.get(entry_name(digest_of(2))) or b"",
        "unsigned": BLOB,
    }
    engine.put(entry_name(KEY), other[what])
    assert second.chain.get(KEY) is None
    assert second.disk.get(KEY) is None
    assert [event["key"] for event in recorder.named("untrusted")] == [KEY]
    second.chain.put(KEY, BLOB)  # Who compiles it replaces it for all.
    second.chain.close()
    assert machines.open(3).chain.get(KEY) == (BLOB, "remote")


def test_a_dead_server_costs_a_few_attempts_once(
    served_machines: Machines, proxy: Proxy, recorder: Recorder
) -> None:
    machine = served_machines.open(1, port=proxy.port)
    machine.remote.put_later(KEY, BLOB)
    assert machine.remote.flush(TIMEOUT_SECONDS)
    proxy.refuse()
    for number in range(50):
        assert machine.chain.get(digest_of(number + 10)) is None
        machine.chain.put(digest_of(number + 10), blob_of(number + 10))
    assert machine.remote.flush(TIMEOUT_SECONDS)
    assert {verb for _, verb in faults(recorder)} <= {"read", "write"}
    reasons = [event["error"] for event in recorder.named("fault")]
    assert 1 <= len(reasons) == len(set(reasons)) <= 2  # Each reason is reported once.
    stats = served_machines.events.stats()
    # Three requests, with those of the other threads. A slow machine adds trials.
    assert 3 <= stats["failed_requests.remote"] <= 20
    assert stats["dropped.remote"] == 50
    assert machine.disk.get(digest_of(10)) == blob_of(10)


def test_a_server_that_stalls_costs_one_time_out_once(
    served_machines: Machines, proxy: Proxy, recorder: Recorder
) -> None:
    machine = served_machines.open(1, port=proxy.port, timeout=SHORT)
    proxy.stall()
    assert not any(machine.chain.get(digest_of(number)) for number in range(50))
    assert faults(recorder) == [("remote", "read")]
    assert served_machines.events.stats()["requests.remote.read"] == 1


def test_an_upload_that_is_cut_leaves_nothing_behind(
    served_machines: Machines, proxy: Proxy, recorder: Recorder
) -> None:
    machine = served_machines.open(1, port=proxy.port)
    assert entry(machine.remote, KEY) is None  # It is connected.
    large = blob_of(1, 2_000_000)
    proxy.cut_after(100_000)
    machine.remote.put_later(KEY, large)
    assert machine.remote.flush(TIMEOUT_SECONDS)
    assert [event["key"] for event in recorder.named("dropped")] == [KEY]
    second = served_machines.open(2)
    assert second.chain.get(KEY) is None
    assert recorder.named("untrusted") == recorder.named("damaged") == []


def test_wrong_credentials_cost_one_request(served_machines: Machines, recorder: Recorder) -> None:
    recorder.forgive = True
    wrong = served_machines.store.url().replace("open-sesame", "wrong")
    machine = served_machines.open(1, url=wrong)
    for number in range(20):
        assert machine.chain.get(digest_of(number)) is None
    assert faults(recorder) == [("remote", "read")]
    (fault,) = recorder.named("fault")
    assert "wrong" not in fault["error"].replace("wrong password", "")
    assert served_machines.events.stats()["requests.remote.read"] == 1


def test_a_server_that_refuses_to_be_written_stays_readable(
    open_store: Callable[[str], Store],
    open_machines: Callable[[Store], Machines],
    recorder: Recorder,
) -> None:
    machines = open_machines(open_store("webdav"))
    first = machines.open(1)
    first.remote.put(KEY, BLOB)
    first.chain.close()
    recorder.forgive = True
    assert machines.store.server is not None
    name = machines.store.url().rpartition("/")[2]
    address = f"127.0.0.1:{machines.store.server.port}/plain/{name}"
    # A web server is never written. The other URL leads to the same place, where writes are refused.
    for number, scheme, expected in ((2, "http", []), (3, "dav", [("remote", "write")])):
        machine = machines.open(number, url=f"{scheme}://{address}")
        for key in range(5):
            machine.chain.put(digest_of(key + 10), blob_of(key + 10))
        assert machine.remote.flush(TIMEOUT_SECONDS)
        assert faults(recorder) == expected
        assert machine.chain.get(KEY) == (BLOB, "remote")


def test_an_object_that_the_server_has_no_room_for_is_dropped(
    open_store: Callable[[str], Store],
    open_machines: Callable[[Store], Machines],
    recorder: Recorder,
) -> None:
    recorder.forgive = True
    machine = open_machines(open_store("webdav")).open(1)
    machine.remote.put_later(KEY, blob_of(1, 9_000_000))  # The server takes 8 MiB.
    assert machine.remote.flush(TIMEOUT_SECONDS)
    assert [event["key"] for event in recorder.named("dropped")] == [KEY]
    assert faults(recorder) == [("remote", "write")]
    assert entry(machine.remote, KEY) is None
    machine.remote.put_later(digest_of(2), blob_of(2))  # Other entries are still written.
    assert machine.remote.flush(TIMEOUT_SECONDS)
    assert entry(machine.remote, digest_of(2)) == blob_of(2)


def test_a_lookup_creates_no_directory_of_a_store(
    tmp_path: Path, config: Config, events: Events, recorder: Recorder
) -> None:
    recorder.forgive = True
    root = tmp_path / "mount" / "shared" / "kernels"
    config = replace(config, remote=(f"file://{root}",), signing_key=None, trusted_keys=())
    (tier,) = open_remotes(config, events)
    assert entry(tier, KEY) is None
    tier.put_later(KEY, BLOB)
    assert tier.flush(TIMEOUT_SECONDS)
    assert not (tmp_path / "mount").exists()
    assert "does not exist; its filesystem may not be mounted" in recorder.named("fault")[0]["error"]
    root.parent.mkdir(mode=0o700, parents=True)
    (tier,) = open_remotes(config, events)
    assert entry(tier, KEY) is None
    assert not root.exists()
    tier.put_later(KEY, BLOB)
    assert tier.flush(TIMEOUT_SECONDS)
    assert entry(tier, KEY) == BLOB
    assert root.stat().st_mode & 0o777 == 0o700
    assert len(recorder.named("fault")) == 1


def test_a_store_that_is_not_there_is_no_error_at_open(config: Config, events: Events) -> None:
    urls = ("redis://127.0.0.1:1/0", "s3://bucket/x?endpoint=http://127.0.0.1:1&region=r")
    tiers = open_remotes(replace(config, remote=urls, remote_unsigned=True), events)
    assert [tier.name for tier in tiers] == ["remote", "remote.2"]
