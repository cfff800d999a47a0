"""The verdict of a run: its bundles, its modules, and whether all modules are accounted for."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preheat._version import __version__
from preheat.audit.report import Report
from preheat.model.config import Config
from preheat.model.setting_values import split_pin

__all__ = ["BundleFile", "describe_bundles", "make_verdict"]


@dataclass(frozen=True)
class BundleFile:
    """A bundle as it was before the command. Digest and size are None if it could not be read."""

    path: Path
    digest: str | None = None
    bytes: int | None = None
    identity: tuple[int, ...] = ()

    def is_unchanged(self) -> bool:
        """Return whether the same file is still at the path."""
        return _identity(self.path) == self.identity


def describe_bundles(bundles: Sequence[Path]) -> tuple[BundleFile, ...]:
    """Return the bundles, which may have pins, as they are now. Call it before the command starts."""
    return tuple(_describe(split_pin(path)[0]) for path in bundles)


def _describe(path: Path) -> BundleFile:
    identity = _identity(path)
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return BundleFile(path, digest, os.fstat(file.fileno()).st_size, identity)
    except OSError:
        return BundleFile(path, identity=identity)


def _identity(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _weakest(policies: set[str]) -> str:
    """Return the policy for headers that refuses least. A program may have set its own."""
    return next((policy for policy in ("ignore", "warn") if policy in policies), "error")


def make_verdict(report: Report, bundles: Sequence[BundleFile], config: Config) -> dict[str, Any]:
    """Return the verdict as JSON values. `config` has the settings of the command.

    `accounted` is True when nothing was compiled, refused, unaccounted for or unseen. The verdict is
    "not proven" if something was unseen and nothing else is wrong.
    """
    changed = [each.path for each in bundles if not each.is_unchanged()]
    unseen = [
        *report.unseen,
        *(f"the content of {path}: it changed during the run" for path in changed),
    ]
    origins = Counter(each.origin.kind for each in report.loaded)
    failed = bool(report.compiles or report.refusals or report.unaccounted)
    return {
        "version": 1,
        "preheat": __version__,
        "command": list(report.command),
        "exit_status": report.status,
        "sealed": config.sealed.name.lower(),
        "sealed_headers": _weakest({config.sealed_headers, *report.header_policies}),
        "stale": [
            {"name": row.get("program"), "header": row.get("header"), "line": row.get("caller")}
            for row in report.stale
        ],
        "bundles": [
            {"path": str(each.path), "sha256": each.digest, "bytes": each.bytes} for each in bundles
        ],
        "accounted": not failed and not unseen,
        "verdict": "not accounted" if failed else "not proven" if unseen else "accounted",
        "modules": {
            "loaded": len(report.loaded),
            "accounted": len(report.loaded) - len(report.unaccounted),
            "by_origin": dict(sorted(origins.items())),
            "seen_by": report.seen_by,
        },
        "unaccounted": [
            {
                "kind": each.load.image.kind,
                "sha256": each.load.image.digest,
                "origin": str(each.origin),
                "compiled_by_driver": each.load.compiled,
                "line": each.load.by.line,
                "library": each.load.by.library,
            }
            for each in report.unaccounted
        ],
        "compiled": [
            {
                "compiler": each.kind,
                "name": each.name,
                "rejected": each.rejected,
                "library": each.by.library,
                "line": each.by.line,
            }
            for each in report.compiles
        ],
        "refused": [
            {"what": each.what, "name": each.name, "library": each.by.library, "line": each.by.line}
            for each in report.refusals
        ],
        "unseen": unseen,
        "allowed_unseen": list(report.allowed),
        "compiler_libraries": [each.json(report.allowed) for each in report.mapped],
    }
