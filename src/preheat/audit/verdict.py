"""What an operator keeps of a run: which bundle, which modules, and if all are accounted for."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preheat._version import __version__
from preheat.audit.report import Report
from preheat.config import SealMode
from preheat.pins import split_pin

__all__ = ["file_digest", "make_verdict"]


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_verdict(report: Report, bundles: Sequence[Path], seal: SealMode) -> dict[str, Any]:
    """Return the verdict as JSON values. `accounted` is True when nothing at all is left open."""
    origins = Counter(each.origin.kind for each in report.loaded)
    return {
        "version": 1,
        "preheat": __version__,
        "command": list(report.command),
        "exit_status": report.status,
        "sealed": seal.name.lower(),
        "bundles": [
            {"path": str(path), "sha256": file_digest(path), "bytes": path.stat().st_size}
            for path, _ in map(split_pin, bundles)
        ],
        "accounted": report.clean and not report.unseen,
        "modules": {
            "loaded": len(report.loaded),
            "accounted": len(report.loaded) - len(report.unaccounted),
            "by_origin": dict(sorted(origins.items())),
            "seen_by": "CUPTI" if report.cupti else "the preload library",
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
            {"compiler": each.kind, "name": each.name, "library": each.by.library, "line": each.by.line}
            for each in report.activities
        ],
        "refused": [
            {"what": each.what, "name": each.name, "library": each.by.library, "line": each.by.line}
            for each in report.refusals
        ],
        "unseen": list(report.unseen),
    }
