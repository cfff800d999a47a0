"""Commands that preheat runs, with adapters in their Python processes and with signals forwarded.

Signals that reach preheat while a command runs are forwarded to the command.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shlex
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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


_FORWARDED = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGWINCH,
)  # fmt: skip
#: Signals that a terminal sends to all processes in its foreground, such as by Ctrl-C.
_FROM_TERMINAL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH)
_SI_KERNEL = 0x80  # the si_code of signals from a terminal; others are sent by processes
_SIGNALFD_INFO = struct.Struct("=IiI116x")  # ssi_signo, ssi_errno, ssi_code
_POLL = 0.05  # seconds between two checks of a command, if the kernel cannot notify this process


class SignalForwarder:
    """Forwards signals to a command, and waits for its end.

    A signal of a terminal also reaches the command, so it is not forwarded. `signalfd` shows which
    signals the kernel sent for a terminal. If another thread of this process received the signal, or
    there is no `signalfd`, a signal is forwarded unless this process is in the foreground of a
    terminal.
    """

    def __init__(self, numbers: set[int]) -> None:
        self._numbers = numbers
        self._command: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def handle(self, number: int, _: object = None) -> None:
        """Handle a signal whose sender is not known."""
        if self._command is None:
            self._early.append(number)  # It is forwarded when the command has a process.
        elif number not in _FROM_TERMINAL or not _in_foreground():
            self._command.send_signal(number)

    def wait(self, command: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a command, and return its status."""
        self._command = command
        for number in self._early:
            self.handle(number)
        with ExitStack() as stack:
            sources = [*stack.enter_context(_pidfd(command.pid)), *stack.enter_context(_wakeups())]
            notified = len(sources) == 2
            with _signalfd(self._numbers) as signals:
                while command.poll() is None:
                    ready, _, _ = select.select(
                        [*sources, *signals], [], [], None if notified else _POLL
                    )
                    for file in ready:
                        if file in signals:
                            self._read(file, command)
                        elif file == sources[-1]:
                            with suppress(OSError):
                                os.read(file, 512)
        return command.wait()

    def _read(self, file: int, command: subprocess.Popen[bytes]) -> None:
        with suppress(BlockingIOError):
            number, _, code = _SIGNALFD_INFO.unpack(os.read(file, _SIGNALFD_INFO.size))
            if code != _SI_KERNEL:
                command.send_signal(number)


@contextmanager
def forward_signals() -> Iterator[SignalForwarder]:
    """Handle the signals that are to be forwarded. Signals that are ignored stay ignored.

    SIGCHLD is the exception: a process that ignores it gets no exit status of its children.
    """
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    numbers = {number for number, handler in before.items() if handler != signal.SIG_IGN}
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    forwarder = SignalForwarder({int(number) for number in numbers})
    for number in numbers:
        signal.signal(number, forwarder.handle)
    try:
        yield forwarder
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _pidfd(pid: int) -> Iterator[list[int]]:
    """Yield a descriptor that is readable when the process has ended; none on an old kernel."""
    try:
        file = os.pidfd_open(pid)
    except OSError:
        yield []
        return
    try:
        yield [file]
    finally:
        os.close(file)


@contextmanager
def _wakeups() -> Iterator[list[int]]:
    """Yield a descriptor that is readable when another thread has received a signal."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield [reader]
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


@contextmanager
def _signalfd(numbers: set[int]) -> Iterator[list[int]]:
    """Yield a descriptor from which signals are read, with their senders, while they are blocked."""
    libc = ctypes.CDLL(None, use_errno=True)
    mask = (ctypes.c_ubyte * 128)()
    for number in numbers:
        mask[(number - 1) // 8] |= 1 << (number - 1) % 8
    file = libc.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
    if file < 0:
        yield []
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield [file]
    finally:
        os.close(file)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _in_foreground() -> bool:
    """Return True in the foreground of a terminal, where Ctrl-C also reaches the command itself."""
    try:
        with open(os.ctermid()) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
