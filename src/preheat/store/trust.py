"""Directories and files that contain code: private, and rejected when another user could change them.

A path is walked one step at a time from `/`. Each directory is opened relative to the one before it,
and the open directory is checked. Every directory on the path must belong to this user or to root, and
other users may be able to write to it only if it has the sticky bit, like `/tmp`: then they cannot
replace its entries. Symbolic links on the path must belong to this user or to root as well. After a
path has passed, only this user and root can change where it leads.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from preheat.model.events import Events
from preheat.process.files import MAX_FILE_BYTES, OTHERS_WRITE, Descriptor, open_fd, others_can_replace
from preheat.store.filesystem import TRANSIENT, retry_transient

__all__ = [
    "DistrustedError",
    "NotAFileError",
    "distrust_reason",
    "first_usable",
    "make_private",
    "open_file",
    "read_file",
    "unusable_reason",
    "usable",
    "writable_by_others",
]

_OVERRIDE = "set PREHEAT_TRUST_CACHE_DIR=1 if that is intended"
_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe must not wait for its writer; opening a terminal must not make it the controlling one.
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_FILE_ITSELF = _FILE | os.O_NOFOLLOW
_KIND_AND_WRITERS = 0o170000 | OTHERS_WRITE  # the bits of a mode that identify a private regular file
_MAX_STEPS = 1000  # bounds a cycle of links


class DistrustedError(PermissionError):
    """Another user could have written this file or directory, or redirected its path."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EPERM, why)

    def __str__(self) -> str:
        return str(self.strerror)

    @property
    def why(self) -> str:
        """The message without the advice to trust the file, for files that must never be trusted."""
        return str(self).removesuffix(_OVERRIDE).removesuffix(", or ").removesuffix("; ")


class NotAFileError(OSError):
    """A directory, a pipe, a device or the like is in the place of a regular file."""

    def __init__(self) -> None:
        super().__init__(errno.EINVAL, "it is not a file")


def make_private(path: Path, *, trust: bool = False) -> None:
    """Create `path` and its missing parents, private to this user, and check it unless it is trusted.

    Nothing is created in a directory that fails the check, nor through a link that leads nowhere.
    """
    if trust:
        retry_transient(_make_trusted, path)
        return
    if _is_unchanged(path):
        return
    if _is_unchanged(path.parent):  # Only this user can make directories there.
        with suppress(OSError):
            os.mkdir(path, 0o700)
            _checked_paths[os.fspath(path)] = _identify(os.lstat(path))
            return
    retry_transient(_make_checked, path)


def _make_trusted(path: Path) -> None:
    missing = [p for p in (path, *path.parents) if not os.path.lexists(p)]
    for directory in reversed(missing):
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:  # Another process was faster.
            continue
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory")


def _make_checked(path: Path) -> None:
    try:
        with _directory(path, _trusted_users(None), make=True) as status:
            if why := writable_by_others(status):
                raise DistrustedError(why)
            _checked_paths[os.fspath(path)] = _identify(status)
    except FileNotFoundError:  # The path contains a dangling link.
        raise NotADirectoryError(f"{path} is not a directory") from None


# The state of every directory when its whole path was checked, by path. A directory that has the same
# state is the one that was checked, and still private to this user.
_checked_paths: dict[str, tuple[int, ...]] = {}


def _is_unchanged(path: Path) -> bool:
    with suppress(OSError):
        return _checked_paths.get(os.fspath(path)) == _identify(os.lstat(path))
    return False


def _identify(status: os.stat_result) -> tuple[int, ...]:
    return os.geteuid(), status.st_dev, status.st_ino, status.st_uid, status.st_mode


def distrust_reason(path: Path, me: int | None = None) -> str | None:
    """Return why the user `me`, by default this one, cannot trust code in `path`, or None."""
    try:
        with _directory(path, _trusted_users(me)) as status:
            return writable_by_others(status, me)
    except DistrustedError as distrusted:
        return str(distrusted)


def writable_by_others(status: os.stat_result, me: int | None = None) -> str | None:
    """Return why users other than this one and root can write to a file, or None when they cannot."""
    if status.st_uid not in (os.geteuid() if me is None else me, 0):
        return f"it belongs to user {status.st_uid}, not to you; {_OVERRIDE}"
    if status.st_mode & OTHERS_WRITE:
        return f"others can write to it ({_mode(status)}); run chmod go-w on it, or {_OVERRIDE}"
    return None


def open_file(path: Path, *, trust: bool = False) -> Descriptor:
    """Open the regular file at `path`; `DistrustedError` when another user could change it."""
    if trust:
        file = open_fd(path, _FILE)
    else:
        holder, name = _open_parent(path, _trusted_users(None), make=False)
        with holder:
            file = open_fd(name, _FILE | os.O_NOFOLLOW, dir_fd=holder)
    _require_file(os.fstat(file), trust=trust)
    return file


def read_file(
    path: str, *, trust: bool = False, retry: bool = True, limit: int = MAX_FILE_BYTES
) -> tuple[bytes, os.stat_result]:
    """Return the bytes and the status of a file in a directory that was checked. No link is followed.

    Raises `OSError` for anything but a regular file of at most `limit` bytes, and `DistrustedError` for
    one that others can write.
    With `retry`, the file is opened again after an error that may pass in a moment.
    """
    # Every hit from the disk runs this, so it uses no function or `with` for what is rare. The file is
    # closed here, because an interrupt in its finalizer would be lost and would leave the file open.
    file = None
    try:
        file = next(map(Descriptor, map(os.open, (path,), (_FILE_ITSELF,))))
        status = os.fstat(file)
        private = status.st_mode & _KIND_AND_WRITERS == stat.S_IFREG and status.st_uid == os.geteuid()
        if not private:
            _require_file(status, trust=trust)
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size:,} bytes are too many", path)
        return os.read(file, status.st_size + 1), status
    except OSError as fault:
        if not retry or fault.errno not in TRANSIENT:
            raise
    finally:
        if file is not None:
            file.close()
    return retry_transient(read_file, path, trust=trust, retry=False, limit=limit)


def unusable_reason(path: Path, *, trust: bool = False, write: bool = True) -> str | None:
    """Return why `path` cannot be used as a cache or layer, or None when it can.

    With `write`, it is created if it is missing, and must be writable.
    """
    try:
        if write and trust:
            make_private(path, trust=True)
        elif write:
            retry_transient(_make_checked, path)
        elif trust:
            retry_transient(os.stat, path)
        else:
            return retry_transient(distrust_reason, path)
    except DistrustedError as distrusted:
        return str(distrusted)
    except (OSError, ValueError) as fault:
        strerror = getattr(fault, "strerror", None)
        return f"it cannot be {'created' if write else 'read'}: {strerror or fault}"
    if write and not os.access(path, os.W_OK | os.X_OK):
        return "it is not writable"
    return None


def usable(
    candidates: Iterable[Path], events: Events, *, trust: bool = False, write: bool = True
) -> Iterator[Path]:
    """Yield the candidates that can be used. Each rejected one is an event with the reason."""
    for path in candidates:
        why = unusable_reason(path, trust=trust, write=write)
        if why is None:
            yield path
        else:
            events.emit("refused", path=str(path), reason=why)


def first_usable(candidates: Iterable[Path], events: Events, *, trust: bool = False) -> Path | None:
    """Return the first candidate that is a trusted writable directory, or can be created as one."""
    return next(usable(candidates, events, trust=trust), None)


# Walking a path


@contextmanager
def _directory(path: Path, trusted: set[int], *, make: bool = False) -> Iterator[os.stat_result]:
    """Hold the directory that `path` leads to open, and return its status."""
    holder, name = _open_parent(path, trusted, make=make)
    try:
        with holder:
            directory = open_fd(name, _DIRECTORY, dir_fd=holder)
    except NotADirectoryError:
        raise NotADirectoryError(f"{path} is not a directory") from None
    with directory:
        yield os.fstat(directory)


def _open_parent(path: Path, trusted: set[int], *, make: bool) -> tuple[Descriptor, str]:
    """Return the parent of what `path` leads to, open and checked, and the name in it.

    With `make`, a missing step is created, unless a link leads to it.
    """
    steps = [(name, make) for name in reversed(Path(os.path.abspath(path)).parts[1:])]
    here = open_fd("/", _DIRECTORY)
    walked = "/"
    shared = False
    for _ in range(_MAX_STEPS):  # A descriptor without references is closed.
        shared = _require_ancestor(os.fstat(here), walked, trusted, below_shared=shared)
        if not steps:
            return here, "."
        name, create = steps.pop()
        link = _link_target(here, name, walked, trusted, create=create)
        if link is None and not steps:
            return here, name
        if link is None:
            here = open_fd(name, _DIRECTORY, dir_fd=here)
            walked = f"{walked.rstrip('/')}/{name}"
        else:
            steps += [(part, False) for part in reversed(link.split("/")) if part not in ("", ".")]
            if link.startswith("/"):
                here = open_fd("/", _DIRECTORY)
                walked = "/"
                shared = False
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _link_target(here: int, name: str, walked: str, trusted: set[int], *, create: bool) -> str | None:
    """Return the target of the symbolic link `name` in the directory `here`; None for anything else.

    Nothing changes between two system calls, because `here` was checked: only trusted users can write
    it.
    """
    try:
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        if not create:
            raise
        try:
            os.mkdir(name, 0o700, dir_fd=here)
        except FileExistsError:  # Another process was faster.
            return _link_target(here, name, walked, trusted, create=False)
        return None
    if not stat.S_ISLNK(status.st_mode):
        return None
    if status.st_uid not in trusted:
        where = os.path.join(walked, name)
        raise DistrustedError(f"{where} is a symbolic link owned by user {status.st_uid}; {_OVERRIDE}")
    return os.readlink(name, dir_fd=here)


def _require_ancestor(
    status: os.stat_result, walked: str, trusted: set[int], *, below_shared: bool
) -> bool:
    """Raise `DistrustedError` when others may replace entries; return whether others can write."""
    if status.st_uid not in trusted and (below_shared or status.st_uid != _unmapped()):
        raise DistrustedError(f"{walked}, above it, belongs to user {status.st_uid}; {_OVERRIDE}")
    if others_can_replace(status):
        mode = _mode(status)
        raise DistrustedError(
            f"others can write to {walked}, above it ({mode}); run chmod go-w on it, or {_OVERRIDE}"
        )
    return bool(status.st_mode & OTHERS_WRITE)


def _require_file(status: os.stat_result, *, trust: bool) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise NotAFileError
    if not trust and (why := writable_by_others(status)):
        raise DistrustedError(why)


def _trusted_users(me: int | None) -> set[int]:
    return {os.geteuid() if me is None else me, 0}


def _mode(status: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(status.st_mode):04o}"


@cache
def _unmapped() -> int | None:
    """Return the user that owns the directories of root in a container that maps only some users.

    Such a directory may be above a cache where no other user can write, but never inside a directory
    like `/tmp`, where every user can create one.
    """
    try:
        rows = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if any(int(outside) == 0 for _, outside, _ in rows):
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return None
