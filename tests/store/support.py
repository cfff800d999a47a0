"""Helpers for the tests of the cache: a settable clock, child processes, small file systems."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import processes

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def start(role: str, *arguments: object) -> subprocess.Popen[str]:
    """Another process that plays `role` of tests/store/children.py, killed when the test ends."""
    command = [sys.executable, "-m", "tests.store.children", role, *map(str, arguments)]
    return processes.start_process(command, cwd=REPOSITORY)


def finish(*children: subprocess.Popen[str]) -> list[str]:
    """Return the output of each child after all have exited successfully; stdin is closed at once."""
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
            child.stdin = None
    said = [processes.wait_for_exit(child) for child in children]
    assert [(child.returncode, errors) for child, (_, errors) in zip(children, said, strict=True)] == [
        (0, "") for _ in children
    ]
    return [out for out, _ in said]


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything under `root`: mode, time of change and content by relative path."""
    found = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (status.st_mode, status.st_mtime_ns, content)
    return found


@contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    """Mount a small file system at `path`; skip the test where mounting is not permitted."""
    path.mkdir()
    mounted = _run("mount", "-t", "tmpfs", "-o", options, "none", str(path))
    if mounted is not None:
        pytest.skip(f"cannot mount a file system: {mounted}")
    try:
        yield path
    finally:
        assert _run("umount", str(path)) is None


def remount(path: Path, options: str) -> None:
    """Change the options of a mounted file system."""
    assert _run("mount", "-o", f"remount,{options}", str(path)) is None


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run the block without root's powers."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _run(*command: str) -> str | None:
    """Return None if the command succeeded, and its error message otherwise."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as missing:
        return str(missing)
    return None if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
