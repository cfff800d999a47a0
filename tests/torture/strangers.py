"""Another user of the machine, who prepares files in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import processes

VICTIM, ATTACKER = 61001, 61002
_BECOME = """
import json, os, shutil, sys
from pathlib import Path
from preheat.build.opening import open_disk
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.store.lock import FileLock
place = Path(sys.argv[2])
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1])); os.umask(0)
"""


@contextmanager
def public_place() -> Iterator[Path]:
    """Return a directory like `/tmp`: all users create files in it and remove only their own."""
    place = Path(tempfile.mkdtemp(prefix="preheat-torture-", dir="/tmp"))
    place.chmod(0o1777)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def play(uid: int, place: Path, code: str, *arguments: str) -> str:
    """Return the output of user `uid` who runs `code`, in which `place` is defined."""
    return processes.expect_success(start_as(uid, place, code, *arguments))


def start_as(uid: int, place: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Return a process of user `uid` that runs `code`, in which `place` is known."""
    return processes.start_python(_BECOME + code, str(uid), str(place), *arguments)


def act(uid: int, place: Path, code: str) -> None:
    """Do something to files as user `uid`, in a forked child that imports nothing."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0)
            exec(code, {"os": os, "place": place})
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
