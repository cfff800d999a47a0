"""The directory of the locks of a node, which must not be shared with other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from preheat.model.config import Config, node_local_lock_dirs
from preheat.model.events import Events
from preheat.store.filesystem import Mount, filesystem_of
from preheat.store.trust import first_usable

__all__ = ["choose_lock_dir", "shared_reason"]


def choose_lock_dir(config: Config, root: Path, events: Events, mounts: Sequence[Mount]) -> Path | None:
    """Return the directory for locks of the cache at `root`; None when there is none.

    Each candidate on a network filesystem is a `refused` event. On some of these filesystems, `flock`
    is missing or locks out only processes of the same node, and only the kernel of the same node
    releases the locks of a process that has died.
    """
    candidates = [config.lock_dir, root / "locks", *node_local_lock_dirs()]
    local = _local(dict.fromkeys(candidates), events, mounts)
    return first_usable(local, events, trust=config.trust_cache_dir)


def shared_reason(path: Path, mounts: Sequence[Mount] | None = None) -> str | None:
    """Return why locks cannot be at `path`, if it is on a network filesystem, or None."""
    filesystem = filesystem_of(path, mounts)
    if not filesystem.shared:
        return None
    return f"it is on {filesystem.kind}, which other nodes share; locks must be local to this node"


def _local(candidates: dict[Path, None], events: Events, mounts: Sequence[Mount]) -> Iterator[Path]:
    for path in candidates:
        why = shared_reason(path, mounts)
        if why is None:
            yield path
        else:
            events.emit("refused", path=str(path), reason=why)
