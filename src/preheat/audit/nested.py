"""An audit inside another one, as in `preheat audit -- preheat run --sealed -- COMMAND`.

Each session has its own directory. When the inner one ends, it hands what its processes have
reported over to the outer one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from preheat.audit.events import EventLog, lost_events
from preheat.model.config import SealMode

__all__ = ["announce_bundles", "announced_bundles", "hand_over", "outer_audit", "outer_seal"]

_SESSION = "session"  # the event that names the bundles of an inner command


def outer_audit(env: Mapping[str, str]) -> Path | None:
    """Return the directory of the audit that `env` belongs to; None where there is none."""
    place = env.get("PREHEAT_AUDIT", "")
    return Path(place) if place.startswith("/") and os.path.isdir(place) else None


def outer_seal(env: Mapping[str, str]) -> SealMode:
    """Return the seal of the audit that `env` belongs to. An inner command is sealed as strictly."""
    names = {mode.name.lower(): mode for mode in SealMode}
    return names.get(env.get("PREHEAT_AUDIT_SEAL", ""), SealMode.OFF)


def announce_bundles(env: Mapping[str, str], bundles: Sequence[Path]) -> None:
    """Tell the outer audit which bundles the modules of the command may come from."""
    place = outer_audit(env)
    if place is None or not bundles:
        return
    row = {"time": time.monotonic(), "pid": os.getpid(), "event": _SESSION}
    line = json.dumps({**row, "bundles": [os.path.abspath(path) for path in bundles]})
    with suppress(OSError):  # The outer audit has ended.
        _append(place / f"{os.getpid()}.jsonl", line.encode() + b"\n")


def announced_bundles(log: EventLog) -> list[Path]:
    """Return the bundles of the commands of preheat inside an audit, each once."""
    return [
        *dict.fromkeys(Path(path) for event in log.named(_SESSION) for path in event.words("bundles"))
    ]


def hand_over(directory: Path, outer: Path) -> None:
    """Copy what the processes of an inner audit have reported to the outer one."""
    with suppress(OSError):  # The outer audit has ended.
        for number in range(lost_events(directory)):
            _append(outer / f"{directory.name}-{number}.lost", b"")
        for path in sorted(directory.iterdir()):
            if path.suffix == ".jsonl":
                _append(outer / f"{directory.name}-{path.name}", path.read_bytes())
            elif path.suffix == ".image" and not (outer / path.name).exists():
                shutil.copyfile(path, outer / path.name)


def _append(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    finally:
        os.close(file)
