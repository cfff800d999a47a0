"""The filesystem of a directory: its type, whether other nodes share it, and errors that pass.

The type comes from a mount in `/proc/self/mountinfo`. Where there is no such file, every filesystem
counts as unknown and local.

A network filesystem returns ESTALE after another node has replaced a file or directory, EBUSY while
another node has it open, and EIO or ETIMEDOUT while its server restarts. The same call by path often
succeeds a moment later. An error that stays is raised after less than a quarter of a second of pauses.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

__all__ = [
    "TRANSIENT",
    "Filesystem",
    "Mount",
    "filesystem_of",
    "is_silly_renamed",
    "is_transient",
    "mount_of",
    "parse_mounts",
    "read_mounts",
    "retry_transient",
]

P = ParamSpec("P")
T = TypeVar("T")

#: Types that several nodes or virtual machines can mount at the same time.
_SHARED = frozenset(
    "9p acfs afs beegfs beegfs_nodev ceph cifs coda ctfs dvs fhgfs gfs gfs2 glusterfs gpfs lustre mfs "
    "ncpfs nfs nfs4 ocfs2 orangefs panfs prl_fs pvfs2 smb2 smb3 smbfs stnfs vboxsf virtiofs vmhgfs "
    "wekafs".split()
)
#: Programs behind FUSE that show local files. Any other one, such as rclone, is a network filesystem.
_LOCAL_FUSE = frozenset(
    "bindfs cryfs encfs ext2fuse fuse-overlayfs fuseiso gocryptfs lxcfs mergerfs ntfs-3g ntfs "
    "overlayfs portal securefs squashfuse squashfuse_ll unionfs".split()
)
_ESCAPE = re.compile(r"\\([0-7]{3})")
#: Recognizes the name under which NFS keeps a file that was removed while a process had it open.
is_silly_renamed = re.compile(r"\.nfs[0-9a-f]{12,}").fullmatch
#: The errors after which the same call may succeed a moment later.
TRANSIENT = frozenset({errno.ESTALE, errno.EBUSY, errno.EIO, errno.ETIMEDOUT})
_PAUSES = (0.01, 0.04, 0.16)  # seconds before the second attempt, the third and the fourth
_MAX_SECONDS = 2.0  # seconds after which no attempt begins: each may have waited for a dead server


class Mount(NamedTuple):
    """One mount: the device number of its filesystem, its mount point, and the type."""

    device: tuple[int, int]
    point: str
    kind: str


class Filesystem(NamedTuple):
    """The filesystem of a directory. `kind` is its type, such as `nfs4`, or `unknown`."""

    kind: str

    @property
    def shared(self) -> bool:
        """Whether other nodes can mount it, and write it at the same time."""
        program = self.kind.removeprefix("fuse.")
        if program != self.kind or self.kind == "fuse":
            return program not in _LOCAL_FUSE
        return self.kind in _SHARED


def read_mounts() -> list[Mount]:
    """Return the mounts of this process in the order in which they were made; none if unknown."""
    try:
        # A mount point is any bytes, and `fsdecode` is how the rest of Python reads such a path.
        return list(parse_mounts(os.fsdecode(Path("/proc/self/mountinfo").read_bytes())))
    except OSError:
        return []


def parse_mounts(text: str) -> Iterator[Mount]:
    """Yield the mounts in the text of a `mountinfo` file. Lines of any other form are skipped.

    A line has a number, the number of its parent, major:minor, the root in the filesystem, the
    mount point, options, any number of optional fields, a hyphen, the type, the source and options.
    """
    for line in text.split("\n"):
        before, hyphen, after = line.partition(" - ")
        fields = before.split(" ")
        major, _, minor = fields[2].partition(":") if len(fields) >= 6 else ("", "", "")
        if hyphen and major.isdecimal() and minor.isdecimal():
            kind = _unescape(after.split(" ")[0])
            yield Mount((int(major), int(minor)), _unescape(fields[4]), kind)


def filesystem_of(path: str | os.PathLike[str], mounts: Iterable[Mount] | None = None) -> Filesystem:
    """Return the filesystem of `path`, or of its closest parent that exists."""
    place, device = _existing(os.path.realpath(path))
    mount = mount_of(place, device, read_mounts() if mounts is None else mounts)
    return Filesystem("unknown" if mount is None else mount.kind)


def mount_of(path: str, device: tuple[int, int] | None, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount of a path without links, whose device has this number if that is known.

    It is the one with the longest mount point above the path, among the mounts of the same device. A
    mount that a later mount above it hides has another device. Some filesystems, such as btrfs, show
    other device numbers for their files; then the path alone decides.
    """
    above = [mount for mount in mounts if _is_above(mount.point, path)]
    same = [mount for mount in above if mount.device == device]
    best = max(enumerate(same or above), key=lambda row: (len(row[1].point), row[0]), default=None)
    return None if best is None else best[1]


def _existing(path: str) -> tuple[str, tuple[int, int] | None]:
    """Return the closest parent of `path` that exists, or `path`, and the number of its device."""
    while True:
        try:
            device = os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
        except OSError:  # For example a mount whose server does not reply.
            return path, None
        else:
            return path, (os.major(device), os.minor(device))


def _is_above(point: str, path: str) -> bool:
    return f"{path}/".startswith(f"{point.rstrip('/')}/")


def _unescape(text: str) -> str:
    r"""Return a field without its escapes: space, tab, newline, `\` and `#` are octal numbers."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


# Errors that pass


def is_transient(fault: OSError) -> bool:
    """Return whether the same call may succeed a moment later."""
    return fault.errno in TRANSIENT


def retry_transient(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return `call(*args, **kwargs)`, repeated a few times while its `OSError` is a transient one.

    The call must open its files itself, because a stale descriptor stays stale.
    """
    deadline = time.monotonic() + _MAX_SECONDS
    for pause in _PAUSES:
        try:
            return call(*args, **kwargs)
        except OSError as fault:
            if fault.errno not in TRANSIENT or time.monotonic() > deadline:
                raise
        # Randomized, so that nodes do not retry together. The import of `random` takes milliseconds.
        time.sleep(pause * (0.5 + os.urandom(1)[0] / 512))
    return call(*args, **kwargs)
