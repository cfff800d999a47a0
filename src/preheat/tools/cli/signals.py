"""Signals that reach preheat while a command runs are forwarded to the command."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

__all__ = ["SignalForwarder", "forward_signals"]

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
