"""Commands that preheat runs, with adapters in their Python processes and with signals forwarded."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from preheat.adapters.imports import child_environment
from preheat.tools.cli.signals import forward_signals

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
    with forward_signals() as forwarder:
        try:
            child = _start(words, env, output)
        except OSError as fault:
            raise CannotRunError(words, fault) from None
        with child:
            status = forwarder.wait(child)
    return status if status >= 0 else 128 - status


def _start(words: Sequence[str], env: Mapping[str, str], output: int | None) -> subprocess.Popen[bytes]:
    """Start a command. A text without `#!` is a script of the shell, as everywhere."""
    # Descriptors that preheat has inherited are passed on to the command.
    try:
        return subprocess.Popen(words, env=env, stdout=output, close_fds=False)
    except OSError as fault:
        script = shutil.which(words[0], path=env.get("PATH", os.defpath))
        if fault.errno != errno.ENOEXEC or script is None or not _is_text(script):
            raise
        shell = ["/bin/sh", script, *words[1:]]
        return subprocess.Popen(shell, env=env, stdout=output, close_fds=False)


def _is_text(path: str) -> bool:
    """Return whether the first line of a file has no byte of a binary program, by the test of bash."""
    with open(path, "rb") as file:
        return b"\0" not in file.readline(128)
