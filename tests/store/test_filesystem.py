"""The filesystem of a directory, from the mounts of this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.store.filesystem import (
    Filesystem,
    Mount,
    filesystem_of,
    is_silly_renamed,
    mount_of,
    parse_mounts,
    read_mounts,
)
from tests.store.support import tmpfs

# A login node: NFS homes behind an automounter, Lustre, a container's overlay, a bind mount, FUSE.
SAMPLE = r"""22 27 0:21 / /proc rw,relatime shared:13 - proc proc rw
27 1 0:44 / / rw,relatime - overlay overlay rw,lowerdir=/a:/b,upperdir=/c,workdir=/d
25 27 0:23 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=24684100k
60 27 0:50 / /home rw,relatime shared:30 - autofs systemd-1 rw,fd=29,pgrp=1
61 60 0:51 /export/home /home/ada rw,relatime shared:31 master:2 - nfs4 server:/home/ada rw,vers=4.2
62 27 0:52 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw,flock
63 27 259:2 /data/cache /cache rw,relatime - ext4 /dev/nvme0n1p2 rw
64 27 0:53 / /mnt/my\040bucket rw - fuse.rclone remote:bucket rw,user_id=0
65 27 0:54 / /mnt/back\134slash\043 rw - cifs //server/share rw
66 62 0:55 / /scratch/local rw - xfs /dev/sdb1 rw
"""
MOUNTS = list(parse_mounts(SAMPLE))


def kind_at(path: str, mounts: list[Mount], device: tuple[int, int] | None = None) -> str | None:
    mount = mount_of(path, device, mounts)
    return None if mount is None else mount.kind


def test_every_line_of_the_sample_is_a_mount() -> None:
    assert len(MOUNTS) == 10
    assert MOUNTS[4] == Mount((0, 51), "/home/ada", "nfs4")
    assert {mount.point for mount in MOUNTS} >= {"/mnt/my bucket", "/mnt/back\\slash#"}


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/proc/self", "proc", False),
        ("/somewhere/else", "overlay", False),
        ("/home/ada/.cache/preheat", "nfs4", True),
        ("/home/adam/.cache/preheat", "autofs", False),
        ("/scratch/preheat/not/there/yet", "lustre", True),
        ("/scratch/local/preheat", "xfs", False),
        ("/cache/preheat", "ext4", False),
        ("/mnt/my bucket/cache", "fuse.rclone", True),
        ("/mnt/back\\slash#/cache", "cifs", True),
    ],
)
def test_the_longest_mount_above_a_path_is_its_filesystem(path: str, kind: str, shared: bool) -> None:
    assert kind_at(path, MOUNTS) == kind
    assert Filesystem(kind).shared == shared


@pytest.mark.parametrize(
    "kind",
    "nfs nfs4 lustre cifs smb3 gpfs beegfs ceph 9p virtiofs afs wekafs fuse fuse.sshfs fuse.juicefs "
    "fuse.s3fs fuse.glusterfs fuse.gcsfuse fuse.blobfuse2 fuse.ceph".split(),
)
def test_network_filesystems_are_shared(kind: str) -> None:
    assert Filesystem(kind).shared


@pytest.mark.parametrize(
    "kind", "ext4 xfs btrfs zfs tmpfs overlay fuseblk fuse.fuse-overlayfs fuse.ntfs-3g unknown".split()
)
def test_local_filesystems_are_not(kind: str) -> None:
    assert not Filesystem(kind).shared


def test_a_mount_that_is_hidden_by_a_later_one_is_told_by_its_device() -> None:
    mounts = [
        Mount((8, 1), "/", "ext4"),
        Mount((0, 9), "/home/data", "nfs4"),
        Mount((8, 2), "/home", "xfs"),  # over the parent of the mount before
    ]
    assert kind_at("/home/data/cache", mounts, (8, 2)) == "xfs"
    assert kind_at("/home/data/cache", mounts, (0, 9)) == "nfs4"
    assert kind_at("/home/data/cache", mounts, (0, 77)) == "nfs4", "no mount has the device"


def test_of_two_mounts_in_one_place_the_later_one_counts() -> None:
    mounts = [Mount((0, 7), "/", "ext4"), Mount((0, 8), "/x", "autofs"), Mount((0, 9), "/x", "nfs")]
    assert kind_at("/x/y", mounts) == "nfs"


def test_a_link_leads_to_the_filesystem_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    mounts = [Mount((0, 7), "/", "ext4"), Mount((0, 8), str(tmp_path / "there"), "nfs")]
    assert filesystem_of(tmp_path / "link" / "cache", mounts).kind == "nfs"


def test_without_mounts_a_filesystem_is_unknown_and_local() -> None:
    assert filesystem_of("/x", []) == Filesystem("unknown")
    assert not filesystem_of("/x", []).shared


def test_the_mounts_of_this_machine() -> None:
    assert filesystem_of("/proc/self", read_mounts()).kind == "proc"
    assert filesystem_of("/proc") == Filesystem("proc")


def test_a_mount_is_found_at_once(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "a b\\c", "size=64k") as place:
        assert filesystem_of(place / "cache") == Filesystem("tmpfs")


@pytest.mark.parametrize("name", [".nfs000000000123456700000001", ".nfs0000000000abcdef0000002a"])
def test_the_names_of_open_files_that_were_removed(name: str) -> None:
    assert is_silly_renamed(name)


@pytest.mark.parametrize("name", [".nfs", ".nfsd-settings", "nfs000000000123456700000001", "a.heat"])
def test_other_names_are_not_taken_for_them(name: str) -> None:
    assert not is_silly_renamed(name)


_PATHS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=20)
_WORDS = st.text("abcdefghij.:,=/0123456789", min_size=1, max_size=12)


def _escaped(text: str) -> str:
    """Return a field as the kernel writes it."""
    return "".join(f"\\{ord(c):03o}" if c in " \t\n\\#" else c for c in text)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4095), st.integers(0, 1 << 20), _PATHS, _WORDS, st.lists(_WORDS, max_size=3)
        ),
        max_size=5,
    )
)
def test_any_mount_that_the_kernel_writes_is_read_back(
    rows: list[tuple[int, int, str, str, list[str]]],
) -> None:
    lines = [
        f"{number} 1 {major}:{minor} / {_escaped('/' + point)} rw,relatime "
        f"{''.join(f'{field} ' for field in optional)}- {kind} source rw\n"
        for number, (major, minor, point, kind, optional) in enumerate(rows)
    ]
    expected = [Mount((major, minor), f"/{point}", kind) for major, minor, point, kind, _ in rows]
    assert list(parse_mounts("".join(lines))) == expected


@given(st.text())
def test_any_other_text_is_passed_over(text: str) -> None:
    for mount in parse_mounts(f"{text}\n22 27 0:21 / /proc rw - proc proc rw\n"):
        assert mount.device[0] >= 0
    assert filesystem_of("/x/y", parse_mounts(text)).kind is not None
