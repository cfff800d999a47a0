"""A process that makes entries of another library, for `preheat bake` and `preheat check`.

It reads one request a line from stdin, and writes one answer a line to stdout, both as JSON. What the
modules of the application print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from preheat import adapters
from preheat.build.default import default_builder
from preheat.errors import PreheatError
from preheat.model.arch import Arch

_STDOUT, _STDERR = 1, 2


def main() -> None:
    """Answer requests until stdin ends. The argument is the name of the adapter."""
    answers = os.fdopen(os.dup(_STDOUT), "w")
    os.dup2(_STDERR, _STDOUT)
    name = sys.argv[1]
    for line in sys.stdin:
        print(json.dumps(_answer(name, json.loads(line))), file=answers, flush=True)


def _answer(name: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        adapters.install(name)
        adapter = adapters.adapter(name)
        if request["verb"] == "count":
            return {"count": adapter.count(request["row"], request["coverage"])}
        verb = adapter.bake if request["verb"] == "bake" else adapter.keys
        before = _compiles()
        needed = verb(request["row"], Arch.parse(request["arch"]), request["coverage"])
    except PreheatError as error:
        return {"error": str(error), "hint": error.hint}
    except (Exception, SystemExit) as error:  # whatever the library or the application raises
        return {"error": f"{type(error).__name__}: {error}", "hint": None}
    entries = [[entry.kind, entry.key, entry.variant, entry.label] for entry in needed.entries]
    return {
        "entries": entries,
        "notes": needed.notes,
        "outdated": needed.outdated,
        "made": _compiles() > before,
    }


def _compiles() -> float:
    return default_builder().events.stats().get("compiles", 0)


if __name__ == "__main__":
    main()
