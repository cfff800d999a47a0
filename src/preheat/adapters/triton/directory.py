"""The directory in which Triton, Inductor and users look for the files of compiled kernels."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from _thread import get_ident
from contextlib import suppress
from pathlib import Path

from preheat.errors import InputError
from preheat.model.events import Events
from preheat.process.locks import Lock
from preheat.store.publish import replace as publish
from preheat.store.trust import DistrustedError, make_private, read_file

__all__ = ["KernelDirectory"]


class KernelDirectory:
    """Writes files below Triton's own cache directory.

    A process that cannot write there uses a temporary directory, and so does a process that must not
    trust the directory, because another user could change the code in it. With `trust`, it does not
    matter whether other users can write there.
    """

    def __init__(self, events: Events, *, trust: bool) -> None:
        self._events = events
        self._trust = trust
        self._lock = Lock()
        self._private: tuple[int, str] | None = None

    def write(self, key: str, variant: str, name: str, content: bytes) -> str:
        """Write a file of a key, and return its path in the directory of the variant."""
        from triton import knobs

        if os.path.basename(name) != name:
            raise InputError(f"{name!r} is not the name of a file of a kernel")
        place = self._private_directory
        if place is None:
            try:
                return _write(knobs.cache.dir, key, variant, name, content, trust=self._trust)
            except OSError as fault:  # There is no home, it is read-only, or others can write there.
                place = self._use_private_directory(knobs.cache.dir, fault)
        return _write(place, key, variant, name, content, trust=True)

    @property
    def _private_directory(self) -> str | None:
        """The temporary directory of this process, or None while Triton's own one is used."""
        process, directory = self._private or (None, None)
        return directory if process == os.getpid() else None  # A fork makes its own.

    def _use_private_directory(self, instead_of: str, fault: OSError) -> str:
        """Return the temporary directory for what could not be written, made and reported once."""
        with self._lock:
            if found := self._private_directory:
                return found
            if isinstance(fault, DistrustedError):
                self._events.emit("refused", path=instead_of, reason=str(fault))
            else:
                self._events.fault(instead_of, "write", fault)
            made = tempfile.mkdtemp(prefix="preheat-triton-")
            self._private = (os.getpid(), made)
            atexit.register(self._remove_private_directory)
            return made

    def _remove_private_directory(self) -> None:
        if found := self._private_directory:
            shutil.rmtree(found, ignore_errors=True)


def _write(cache: str, key: str, variant: str, name: str, content: bytes, *, trust: bool) -> str:
    directory = os.path.join(cache, key)
    path = os.path.join(directory, variant, name)
    _write_once(path, content, trust=trust)
    if variant:
        _link_once(path, os.path.join(directory, name), content, trust=trust)
    return path


def _write_once(path: str, content: bytes, *, trust: bool) -> None:
    """Write a file in one step, unless it has this content already and no other user can change it.

    Unless it is trusted, a directory in which another user could replace the file raises
    `DistrustedError`.
    """
    make_private(Path(path).parent, trust=trust)
    with suppress(OSError):
        if read_file(path, trust=trust)[0] == content:
            return
    publish(path, [content], durable=False)


def _link_once(path: str, other: str, content: bytes, *, trust: bool) -> None:
    """Make `other` the same file as `path`, which has this content, in one step."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path), os.stat(other)):
            return
    staged = f"{other}.{os.getpid()}.{get_ident()}"
    try:
        os.link(path, staged)
    except OSError:  # The file system has no hard links.
        _write_once(other, content, trust=trust)
    else:
        os.replace(staged, other)
