"""Builders of several hosts on one server in memory: who compiles, who waits, and what is released."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.build import remotes
from preheat.build.builder import Builder
from preheat.build.compile_lock import Attempt, WouldWait
from preheat.build.parallel import Runner, run_all
from preheat.errors import CompileError
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.foreign import ForeignRequest
from preheat.model.program import Program
from preheat.store.lock import FileLock
from preheat.store.remote.engine import RemoteError
from preheat.store.remote.lease import LeaseContent, lease_name
from preheat.store.remote.url import entry_name
from preheat.toolchain import translate
from preheat.toolchain.translate import Compiled
from tests.conftest import Recorder
from tests.processes import wait_for
from tests.store.remote.memory_engine import MemoryEngine

ARCH = Arch.parse("sm_90")


def program(number: int = 0) -> Program:
    source = 'extern "C" __global__ void k(float* x) {{ x[threadIdx.x] += {}; }}'
    return Program.of(source.format(number), label=f"k{number}.cu")


class Compiler:
    """Takes the place of the compiler. A compile of a program whose label is in `held` waits."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self.labels: list[str] = []
        self.held: dict[str, threading.Event] = {}
        self.error: Exception | None = None

    def __call__(self, _: object, __: str, program: Program, *___: object) -> Compiled:
        self.labels.append(program.label)
        if program.label in self.held:
            assert self.held[program.label].wait(60)
        if self.error is not None:
            raise self.error
        return replace(self._compiled, log=program.label)


class Host:
    """One host: a builder with a cache and locks of its own, and its events."""

    def __init__(self, config: Config, shared: Builder) -> None:
        self.recorder = Recorder()
        self.config = config
        self.builder = Builder.open(config, events=Events(self.recorder))
        self.builder.toolchain._located = shared.toolchain.located

    def starts(self, wanted: Program) -> threading.Thread:
        """Build in a thread."""
        thread = threading.Thread(target=self.builder.build, args=(wanted, ARCH), daemon=True)
        thread.start()
        return thread

    def outcomes(self, name: str) -> list[str]:
        return [fields["outcome"] for fields in self.recorder.named(name)]

    def lock_is_free(self, digest: str) -> bool:
        lock = FileLock(self.config.lock_dir / digest)
        taken = lock.acquire(0)
        lock.release()
        return taken


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> MemoryEngine:
    """Return the server of all hosts."""
    engine = MemoryEngine()
    monkeypatch.setattr(engine, "close", lambda: None)  # Other hosts use it.
    monkeypatch.setattr(remotes, "open_engine", lambda *_, **__: engine)
    return engine


@pytest.fixture(scope="module")
def compiled(shared_builder: Builder) -> Compiled:
    return shared_builder.toolchain.compile(program(), ARCH)


@pytest.fixture
def compiler(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler(compiled)
    monkeypatch.setattr(translate, "compile_cuda", compiler)
    return compiler


@pytest.fixture
def open_host(
    engine: MemoryEngine, compiler: Compiler, shared_builder: Builder, tmp_path: Path
) -> Iterator[Callable[..., Host]]:
    del engine, compiler
    opened: list[Host] = []

    def open_one(lock_wait: float = 300.0, same_as: Host | None = None) -> Host:
        folder = tmp_path / f"host-{len(opened)}"
        config = Config(
            cache_dirs=(folder / "cache",),
            lock_dir=folder / "locks",
            lock_wait=lock_wait,
            remote=("redis://127.0.0.1:1",),
            remote_unsigned=True,
        )
        opened.append(Host(config if same_as is None else same_as.config, shared_builder))
        return opened[-1]

    yield open_one
    for host in opened:
        host.builder.close()


@pytest.fixture
def host(open_host: Callable[..., Host]) -> Host:
    return open_host()


@pytest.fixture
def other(open_host: Callable[..., Host]) -> Host:
    return open_host()


@pytest.fixture
def holder(
    host: Host, compiler: Compiler, engine: MemoryEngine
) -> Iterator[tuple[threading.Event, str]]:
    """Let the first host compile `program()` until the event is set; with the digest of the key."""
    end = compiler.held["k0.cu"] = threading.Event()
    digest = host.builder.key(program(), ARCH).digest
    thread = host.starts(program())
    wait_for(lambda: compiler.labels and lease_name(digest) in engine.objects)
    yield end, digest
    end.set()
    thread.join(60)


def try_once(host: Host, attempt: Attempt, wanted: Program | None = None) -> str | None:
    """Return the tier that had the program; None while it has to wait."""
    try:
        return host.builder.obtain(wanted or program(), ARCH, attempt=attempt).tier
    except WouldWait:
        return None


def knows_the_holder(host: Host) -> bool:
    """Return whether a host has read the lease of another one."""
    return bool(host.builder.events.stats().get("requests.remote.read_lease"))


# Waiting


def test_a_host_that_waits_takes_what_the_other_compiled(
    host: Host,
    other: Host,
    compiler: Compiler,
    engine: MemoryEngine,
    holder: tuple[threading.Event, str],
) -> None:
    waiting = other.starts(program())
    wait_for(lambda: engine.calls["create"] == 2)
    holder[0].set()
    waiting.join(60)
    assert compiler.labels == ["k0.cu"]
    assert other.outcomes("wait") == ["finished"]
    assert other.outcomes("lease") == ["found"]
    wait_for(lambda: host.outcomes("lease") == ["held", "released"])


def test_a_deferred_request_keeps_the_lock_and_asks_the_server_only_when_it_is_due(
    other: Host, compiler: Compiler, engine: MemoryEngine, holder: tuple[threading.Event, str]
) -> None:
    end, digest = holder
    attempt = Attempt()
    assert try_once(other, attempt) is None
    assert attempt.pending is not None
    assert not other.lock_is_free(digest)  # No other process of this host asks for the lease.
    attempt.pending[1].request._due = float("inf")
    asked = engine.calls.total()
    assert try_once(other, attempt) is None
    assert not attempt.due()
    assert engine.calls.total() == asked
    end.set()
    wait_for(lambda: entry_name(digest) in engine.objects and lease_name(digest) not in engine.objects)
    attempt.pending[1].request._due = 0.0
    assert attempt.due()
    assert try_once(other, attempt) == "remote"
    assert other.lock_is_free(digest)
    assert compiler.labels == ["k0.cu"]


def test_a_deferral_that_is_closed_releases_the_lock(
    other: Host, engine: MemoryEngine, holder: tuple[threading.Event, str]
) -> None:
    attempt = Attempt()
    assert try_once(other, attempt) is None
    attempt.close()
    assert other.lock_is_free(holder[1])
    assert lease_name(holder[1]) in engine.objects  # That of the other host.


def test_cancelled_tasks_release_the_lock(other: Host, holder: tuple[threading.Event, str]) -> None:
    runner = Runner()
    task = runner.submit(lambda attempt: other.builder.obtain(program(), ARCH, attempt=attempt))
    wait_for(lambda: task.attempt is not None and task.attempt.pending is not None)
    runner.cancel()
    task.wait()
    assert task.cancelled
    assert other.lock_is_free(holder[1])


def test_waiting_for_a_host_does_not_block_other_keys(
    other: Host, compiler: Compiler, holder: tuple[threading.Event, str]
) -> None:
    wanted = [program(number) for number in range(4)]
    done: list[int] = []

    def ended(index: int, _: object) -> None:
        done.append(index)
        if len(done) == 3:
            holder[0].set()

    run_all(
        wanted,
        lambda job, attempt: other.builder.obtain(job, ARCH, attempt=attempt),
        threads=1,
        on_done=ended,
    )
    assert sorted(compiler.labels) == ["k0.cu", "k1.cu", "k2.cu", "k3.cu"]
    assert done[-1] == 0


def test_a_wait_is_bounded(
    open_host: Callable[..., Host], compiler: Compiler, holder: tuple[threading.Event, str]
) -> None:
    impatient = open_host(lock_wait=0.2)
    waiting = impatient.starts(program())
    wait_for(lambda: len(compiler.labels) == 2)
    assert impatient.outcomes("wait") == ["gave up"]
    holder[0].set()
    waiting.join(60)


def test_one_process_of_a_host_asks_for_the_lease(
    other: Host,
    open_host: Callable[..., Host],
    engine: MemoryEngine,
    holder: tuple[threading.Event, str],
) -> None:
    neighbour = open_host(same_as=other)
    asked = engine.calls["create"]
    first = other.starts(program())
    wait_for(lambda: engine.calls["create"] == asked + 1)
    second = neighbour.starts(program())
    holder[0].set()
    first.join(60)
    second.join(60)
    assert engine.calls["create"] == asked + 1
    assert neighbour.outcomes("lease") == []


# Releasing


def test_a_lease_is_released_after_the_entry_is_on_the_server(host: Host, engine: MemoryEngine) -> None:
    digest = host.builder.key(program(), ARCH).digest
    upload = threading.Event()

    def before(verb: str, _: str) -> None:
        if verb == "write":
            assert upload.wait(60)

    engine.before = before
    host.builder.build(program(), ARCH)
    assert host.lock_is_free(digest)  # The processes of this host have the entry already.
    assert lease_name(digest) in engine.objects
    upload.set()
    wait_for(lambda: lease_name(digest) not in engine.objects)
    assert entry_name(digest) in engine.objects


def test_a_builder_that_is_closed_leaves_no_lease(host: Host, engine: MemoryEngine) -> None:
    for number in range(3):
        host.builder.build(program(number), ARCH)
    host.builder.close()
    assert list(engine.names("v1/leases/")) == []


def test_after_a_rejected_program_each_host_compiles_for_itself(
    host: Host, other: Host, compiler: Compiler, engine: MemoryEngine
) -> None:
    end = compiler.held["k0.cu"] = threading.Event()
    compiler.error = CompileError("k0.cu", "sm_90", (), "no")
    digest = host.builder.key(program(), ARCH).digest
    outcomes: list[Exception] = []

    def build(each: Host) -> None:
        try:
            each.builder.build(program(), ARCH)
        except CompileError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=build, args=(each,)) for each in (host, other)]
    threads[0].start()
    wait_for(lambda: lease_name(digest) in engine.objects)
    read: list[str] = []
    engine.before = lambda _, name: read.append(name)
    threads[1].start()
    wait_for(lambda: read.count(lease_name(digest)) >= 3)  # It knows that the first host compiles.
    end.set()
    for thread in threads:
        thread.join(60)
    assert len(outcomes) == 2
    assert host.outcomes("lease") == ["held", "ended"]
    assert other.outcomes("wait") == ["ended"]


def test_hosts_do_not_wait_for_each_other_where_the_store_is_full(
    host: Host, open_host: Callable[..., Host], compiler: Compiler, engine: MemoryEngine
) -> None:
    end = compiler.held["k0.cu"] = threading.Event()
    digest = host.builder.key(program(), ARCH).digest
    others = [open_host() for _ in range(3)]

    def before(verb: str, _: str) -> None:
        if verb == "write":
            raise RemoteError("it is full")

    engine.before = before
    for each in (host, *others):
        each.recorder.forgive = True
    threads = [host.starts(program())]
    wait_for(lambda: lease_name(digest) in engine.objects and compiler.labels)
    threads += [each.starts(program()) for each in others]
    wait_for(lambda: all(map(knows_the_holder, others)))
    end.set()
    for thread in threads:
        thread.join(60)
    assert len(compiler.labels) == 4
    wait_for(lambda: host.outcomes("lease") == ["held", "ended"])
    assert [each.outcomes("wait") for each in others] == [["ended"]] * 3


def test_the_locks_of_a_node_are_released_before_the_lease(host: Host, engine: MemoryEngine) -> None:
    request = ForeignRequest("triton", "0" * 64)
    free: list[bool] = []

    def before(verb: str, _: str) -> None:
        if verb == "discard":
            free.append(host.lock_is_free(request.digest))
            raise RuntimeError("a defect of an engine")

    lock, _ = host.builder.foreign.lock(request, sys._getframe())
    engine.before = before
    with pytest.raises(RuntimeError, match="a defect"):
        lock.release()
    assert free == [True]


def test_a_slot_is_released_although_giving_the_lease_back_fails(
    host: Host, engine: MemoryEngine
) -> None:
    digest = "ab" * 32
    lock = host.builder._locks.begin(digest, sys._getframe(), Attempt())

    def look(*, local: bool = False) -> None:
        looks.append(local)

    looks: list[bool] = []
    lock.acquire(look)
    assert looks[0] is True
    slot = lock._slot
    assert slot is not None

    def before(verb: str, _: str) -> None:
        if verb == "discard":
            raise RuntimeError("a defect of an engine")

    engine.before = before
    with pytest.raises(RuntimeError, match="a defect"):
        lock.release()
    assert not slot.held
    assert host.lock_is_free(digest)


# Faults


def test_a_server_without_atomic_operations_is_not_asked_for_a_lease(
    host: Host, other: Host, compiler: Compiler, engine: MemoryEngine
) -> None:
    engine.conditional = False
    compiler.held["k0.cu"] = threading.Event()
    first = host.starts(program())
    wait_for(lambda: len(compiler.labels) == 1)
    second = other.starts(program())
    wait_for(lambda: len(compiler.labels) == 2)  # It does not wait.
    compiler.held["k0.cu"].set()
    first.join(60)
    second.join(60)
    assert engine.calls["create"] == engine.calls["swap"] == 0


@pytest.mark.parametrize("verb", ["create", "discard"])
def test_a_fault_of_a_lease_costs_no_compile(
    verb: str, host: Host, compiler: Compiler, engine: MemoryEngine
) -> None:
    host.recorder.forgive = True

    def before(called: str, _: str) -> None:
        if called == verb:
            raise RemoteError("no")

    engine.before = before
    for number in range(3):
        assert host.builder.build(program(number), ARCH).log == f"k{number}.cu"
    host.builder.close()
    assert len(compiler.labels) == 3
    assert len(host.recorder.named("fault")) == 1


# Other libraries


def test_entries_of_other_libraries_are_made_once_among_hosts(
    host: Host, other: Host, engine: MemoryEngine
) -> None:
    request = ForeignRequest("triton", "0" * 64)
    calls: list[str] = []
    go_on = threading.Event()

    def make(name: str) -> Callable[[], dict[str, bytes]]:
        def run() -> dict[str, bytes]:
            calls.append(name)
            assert go_on.wait(60)
            return {"k.cubin": b"code"}

        return run

    threads = [
        threading.Thread(target=each.builder.foreign.obtain, args=(request, make(str(number))))
        for number, each in enumerate((host, other))
    ]
    threads[0].start()
    wait_for(lambda: calls)
    threads[1].start()
    wait_for(lambda: engine.calls["create"] == 2)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert calls == ["0"]
    assert other.outcomes("lease") == ["found"]


def test_hosts_do_not_wait_for_each_other_where_another_compiler_fails(
    host: Host, open_host: Callable[..., Host], engine: MemoryEngine
) -> None:
    request = ForeignRequest("triton", "0" * 64)
    hosts = [host, open_host(), open_host(), open_host()]
    go_on = threading.Event()
    errors: list[Exception] = []

    def make() -> dict[str, bytes]:
        assert go_on.wait(60)
        raise ValueError("ptxas fatal")

    def obtain(each: Host) -> None:
        try:
            each.builder.foreign.obtain(request, make)
        except ValueError as error:
            errors.append(error)

    threads = [threading.Thread(target=obtain, args=(each,)) for each in hosts]
    threads[0].start()
    wait_for(lambda: lease_name(request.digest) in engine.objects)
    for thread in threads[1:]:
        thread.start()
    wait_for(lambda: all(map(knows_the_holder, hosts[1:])))
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 4
    assert host.outcomes("lease") == ["held", "ended"]
    assert [each.outcomes("wait") for each in hosts[1:]] == [["ended"]] * 3


def test_a_lock_that_is_given_up_ends_the_lease(host: Host, engine: MemoryEngine) -> None:
    request = ForeignRequest("triton", "0" * 64)
    lock, _ = host.builder.foreign.lock(request, sys._getframe())
    lock.give_up()
    assert LeaseContent(engine.objects[lease_name(request.digest)]).ended
    assert host.lock_is_free(request.digest)


def test_a_lock_that_is_released_without_an_entry_gives_the_lease_back(
    host: Host, engine: MemoryEngine
) -> None:
    request = ForeignRequest("triton", "0" * 64)
    lock, entry = host.builder.foreign.lock(request, sys._getframe())
    assert entry is None
    assert lease_name(request.digest) in engine.objects
    lock.release()
    assert lease_name(request.digest) not in engine.objects
