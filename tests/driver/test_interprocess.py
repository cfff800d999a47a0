"""Memory and events that several processes share, each of which has the CPU driver."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from preheat.driver.library import LIBRARY, driver_environment
from tests.processes import import_path

pytestmark = [
    pytest.mark.skipif(not LIBRARY.is_file(), reason="the CPU driver was not built"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the driver needs Linux"),
]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start programs of other users")

ROOT = Path(__file__).parents[2]
NOBODY = 65534
FREED = int.from_bytes(b"\xdd" * 4, "little", signed=True)
INVALID_VALUE, INVALID_CONTEXT, MAP_FAILED, INVALID_HANDLE, NOT_SUPPORTED = 1, 201, 205, 400, 801
#: Evaluates the expressions that it reads, and prints their values.
PROGRAM = """
import ctypes, os, sys
from tests.driver.calls.cuda import Program, cu, ok, status
program = Program()
made = program.memory([1, 2, 3])

def words(handle):
    return ctypes.string_at(handle.getPtr(), 64)

def handle_of(kind, packed):
    handle = kind()
    ctypes.memmove(handle.getPtr(), packed, 64)
    return handle

def share(address):
    return words(ok(cu.cuIpcGetMemHandle(address)))

def open_memory(packed, flags=1):
    found = cu.cuIpcOpenMemHandle(handle_of(cu.CUipcMemHandle, packed), flags)
    return int(found[1]) if status(found) == 0 else -status(found)

def close(address):
    return status(cu.cuIpcCloseMemHandle(cu.CUdeviceptr(address)))

def values(address):
    return program.values(cu.CUdeviceptr(int(address)), 3)

def launch(name, address, *more, stream=0):
    return status(program.launch(name, cu.CUdeviceptr(int(address)), *more, stream=stream))

def new_event(flags=6):
    return ok(cu.cuEventCreate(flags))

def open_event(packed):
    found = cu.cuIpcOpenEventHandle(handle_of(cu.CUipcEventHandle, packed))
    return found[1] if status(found) == 0 else -status(found)

stream = ok(cu.cuStreamCreate(1))
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


class Peer:
    """A process with the CPU driver."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": import_path()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=driver_environment(env, beside_gpu=1),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, expression: str) -> Any:
        """Return the value of an expression there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return ast.literal_eval(self.process.stdout.readline())

    def end(self) -> None:
        """End the process, and wait for it."""
        self.process.communicate()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    """Yield two processes."""
    made = [Peer(), Peer()]
    yield made
    for peer in made:
        peer.end()


def test_processes_see_what_the_others_write(peers: list[Peer]) -> None:
    ours, theirs = peers
    address = ours("int(made)")
    opened = theirs(f"open_memory({ours('share(made)')!r})")
    assert theirs(f"values({opened})") == [1, 2, 3]
    assert theirs(f"launch('add', {opened}, 3, 10)") == 0
    assert theirs("status(cu.cuCtxSynchronize())") == 0
    assert ours("values(made)") == [11, 12, 13]
    assert ours("launch('twice', made, 3)") == 0
    assert ours("status(cu.cuCtxSynchronize())") == 0
    assert theirs(f"values({opened})") == [22, 24, 26]
    assert ours("int(made)") == address
    assert ours("status(cu.cuMemFree(made))") == 0


def test_memory_is_opened_once_and_closed_as_often_as_it_was_opened(peers: list[Peer]) -> None:
    ours, theirs = peers
    packed = ours("share(made)")
    assert ours("share(made)") == packed
    opened = theirs(f"open_memory({packed!r})")
    assert theirs(f"open_memory({packed!r})") == opened
    assert theirs(f"[close({opened}), values({opened})]") == [0, [1, 2, 3]]
    assert theirs(f"[close({opened}), close({opened})]") == [0, INVALID_VALUE]
    assert theirs(f"status(cu.cuMemcpyDtoH(bytearray(12), {opened}, 12))") != 0


def test_queued_work_is_executed_before_memory_is_closed(peers: list[Peer]) -> None:
    ours, theirs = peers
    opened = theirs(f"open_memory({ours('share(made)')!r})")
    assert theirs(f"launch('add', {opened}, 3, 1, stream=stream)") == 0
    assert theirs(f"close({opened})") == 0
    assert ours("values(made)") == [2, 3, 4]


def test_large_memory_keeps_its_contents_when_it_is_shared(peers: list[Peer]) -> None:
    ours, theirs = peers
    large, last = 5_000_001, 4 * (5_000_001 - 3)
    assert ours(f"(big := ok(cu.cuMemAlloc(4 * {large}))) and None") is None
    assert ours(f"[status(cu.cuMemsetD32(big, 7, {large})), status(cu.cuCtxSynchronize())]") == [0, 0]
    opened = theirs(f"open_memory({ours('share(big)')!r})")
    assert theirs(f"values({opened} + {last})") == [7, 7, 7]
    assert theirs(f"launch('add', {opened + last}, 3, 1)") == 0
    assert theirs("status(cu.cuCtxSynchronize())") == 0
    assert ours(f"values(int(big) + {last})") == [8, 8, 8]
    assert theirs(f"[launch('add', {opened + last}, 4, 1), status(cu.cuCtxSynchronize())]") == [0, 700]


def test_what_cannot_be_shared_is_refused(peers: list[Peer]) -> None:
    ours, theirs = peers
    packed = ours("share(made)")
    get = "status(cu.cuIpcGetMemHandle({}))"
    assert ours(get.format("int(made) + 4")) == INVALID_VALUE
    assert ours(get.format("ok(cu.cuMemAllocAsync(8, stream))")) == INVALID_VALUE
    assert ours(get.format("ok(cu.cuMemAllocManaged(8, 1))")) == INVALID_VALUE
    assert ours(f"open_memory({packed!r})") == -INVALID_CONTEXT
    assert theirs(f"open_memory({packed!r}, 0)") == -INVALID_VALUE
    assert theirs("open_memory(bytes(64))") == -INVALID_VALUE
    assert theirs(f"open_event({packed!r})") == -INVALID_VALUE
    assert ours("status(cu.cuIpcGetEventHandle(new_event(2)))") == INVALID_HANDLE
    attribute = "ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute(10), {}))"
    assert ours(attribute.format("made")) is True
    assert ours(attribute.format("ok(cu.cuMemAllocManaged(8, 1))")) is False


def test_a_handle_is_of_no_use_once_its_memory_is_freed(peers: list[Peer]) -> None:
    ours, theirs = peers
    count = "len(os.listdir('/proc/self/fd'))"
    before = ours(count)
    packed = ours("share(made)")
    assert ours(count) == before + 1
    assert ours("status(cu.cuMemFree(made))") == 0
    assert ours(count) == before
    assert theirs(f"open_memory({packed!r})") == -MAP_FAILED
    ours("(more := [program.memory([5]) for _ in range(9)], [share(each) for each in more]) and None")
    assert theirs(f"open_memory({packed!r})") == -MAP_FAILED  # The number is that of another file.


def test_freed_memory_is_no_longer_that_of_other_processes(peers: list[Peer]) -> None:
    ours, theirs = peers
    large = "program.memory([4, 5, 6] * 100_000)"
    assert ours(f"status(cu.cuMemFree({large}))") == 0
    old = ours(f"int(large := {large})")
    opened = theirs(f"open_memory({ours('share(large)')!r})")
    assert ours("status(cu.cuMemFree(large))") == 0
    assert theirs(f"values({opened})") == [FREED] * 3
    assert old in ours(f"[int({large}) for _ in range(20)]")  # The process uses the address again.
    assert ours(f"values({old})") == [4, 5, 6]
    assert theirs(f"values({opened})") == [FREED] * 3


def test_nothing_is_left_of_a_process_that_was_killed(peers: list[Peer]) -> None:
    ours, theirs = peers
    packed = ours("share(made)")
    opened = theirs(f"open_memory({packed!r})")
    ours.process.send_signal(signal.SIGKILL)
    ours.process.wait()
    assert theirs(f"values({opened})") == [1, 2, 3]
    assert theirs(f"close({opened})") == 0
    assert theirs(f"open_memory({packed!r})") == -MAP_FAILED


@needs_root
def test_other_users_cannot_open_memory(peers: list[Peer]) -> None:
    ours, theirs = peers
    assert ours(f"os.setuid({NOBODY})") is None
    assert theirs(f"open_memory({ours('share(made)')!r})") == -MAP_FAILED
    assert ours(f"open_memory({theirs('share(made)')!r})") == -MAP_FAILED


def test_a_wait_for_a_shared_event_is_a_wait_for_the_work_before_it(peers: list[Peer]) -> None:
    """The other process sees the result although this one never waits for its kernel."""
    ours, theirs = peers
    opened = theirs(f"open_memory({ours('share(made)')!r})")
    packed = ours("(event := new_event()) and words(ok(cu.cuIpcGetEventHandle(event)))")
    assert theirs(f"(event := open_event({packed!r})) and None") is None
    for round in range(1, 9):
        assert ours("launch('add', made, 3, 1, stream=stream)") == 0
        assert ours("status(cu.cuEventRecord(event, stream))") == 0
        assert theirs("status(cu.cuEventQuery(event))") == 0
        assert theirs("status(cu.cuStreamWaitEvent(stream, event, 0))") == 0
        assert theirs(f"values({opened})") == [1 + round, 2 + round, 3 + round]


def test_a_captured_record_of_a_shared_event_is_not_supported(peers: list[Peer]) -> None:
    ours, _ = peers
    assert ours("status(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode(0)))") == 0
    assert ours("status(cu.cuEventRecordWithFlags(new_event(), stream, 1))") == NOT_SUPPORTED
    assert ours("status(cu.cuEventRecordWithFlags(new_event(0), stream, 1))") == 0
