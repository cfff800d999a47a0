"""A command that preheat runs has its descriptors, and gets the signals that preheat gets."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import SOURCE

PREHEAT = [sys.executable, "-m", "preheat", "run", "--"]
SIGNALS = ["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH"]
APP = f"""
import signal, sys, time
count = 0
def handle(number, _):
    global count
    count += 1
    print(signal.Signals(number).name, flush=True)
for name in {SIGNALS}: signal.signal(getattr(signal, name), handle)
print("ready", flush=True)
until = time.monotonic() + 20
while not count and time.monotonic() < until: time.sleep(0.01)
time.sleep(0.3)
sys.exit(count)
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PREHEAT_CACHE_DIR": str(tmp_path / "cache")}


def test_inherited_descriptors_reach_the_command(env: dict[str, str]) -> None:
    reader, writer = os.pipe()
    words = [*PREHEAT, sys.executable, "-c", f"import os; os.write({writer}, b'hi')"]
    done = subprocess.run(words, env=env, pass_fds=[writer])
    os.close(writer)
    with open(reader, "rb") as file:
        assert (done.returncode, file.read()) == (0, b"hi")


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_reaches_the_command_once(env: dict[str, str], name: str) -> None:
    words = [*PREHEAT, sys.executable, "-c", APP]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(getattr(signal, name))
        assert child.stdout.read() == f"{name}\n"
    assert child.returncode == 1


@pytest.mark.parametrize("sender", ["keyboard", "process"])
def test_an_interrupt_in_a_terminal_reaches_the_command_once(env: dict[str, str], sender: str) -> None:
    """Ctrl-C reaches all processes of the foreground. A signal from a process reaches preheat alone."""
    pid, terminal = pty.fork()
    if not pid:
        os.execve(sys.executable, [*PREHEAT, sys.executable, "-c", APP], env)
    send: dict[str, Callable[[], object]] = {
        "keyboard": lambda: os.write(terminal, b"\x03"),
        "process": lambda: os.kill(pid, signal.SIGINT),
    }
    output = b""
    until = time.monotonic() + 30
    while b"ready" not in output and time.monotonic() < until:
        output += os.read(terminal, 1024)
    time.sleep(0.2)  # preheat waits for the command by now.
    send[sender]()
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1
