"""Commands that preheat runs: with adapters in every Python, with signals forwarded."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from preheat.adapters.imports import child_environment

__all__ = ["CannotRunError", "run_command"]


class CannotRunError(Exception):
    """The command cannot be run. `status` is the exit status of a shell in that case."""

    def __init__(self, words: Sequence[str], fault: OSError) -> None:
        self.status = 127 if isinstance(fault, FileNotFoundError) else 126
        self.hint = None
        why = fault.strerror or str(fault)
        if words[0].endswith(".py") and Path(words[0]).is_file():
            why = "it is a Python file, not a command"
            self.hint = f"name the interpreter: python {shlex.join(words)}"
        elif "/" not in words[0] and Path(words[0]).is_file():
            self.hint = f"name the directory of a command that is not in PATH: ./{words[0]}"
        super().__init__(f"cannot run {words[0]}: {why}")


def run_command(
    words: Sequence[str], env: Mapping[str, str], *, output: int | None = None, adapters: str = "auto"
) -> int:
    """Run a command with adapters, and return its exit status as a shell reports it.

    `adapters` are those that are installed unless the environment names others.
    """
    env = child_environment(env, adapters)
    with _forward_signals() as forward_to:
        try:
            child = subprocess.Popen(words, env=env, stdout=output)
        except OSError as fault:
            raise CannotRunError(words, fault) from None
        with child:
            forward_to(child)
            status = child.wait()
    return status if status >= 0 else 128 - status


@contextmanager
def _forward_signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward signals to the command, and exit when the command exits.

    Signals that arrive before the process of the command is known are forwarded later.
    """
    command: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _: object) -> None:
        if command is None:
            early.append(number)
        elif number != signal.SIGINT or not _in_foreground():
            command.send_signal(number)

    def forward_to(child: subprocess.Popen[bytes]) -> None:
        nonlocal command
        command = child
        for number in early:
            forward(number, None)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield forward_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Return True in the foreground of a terminal, where Ctrl-C also reaches the command itself."""
    try:
        with open(os.ctermid()) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
