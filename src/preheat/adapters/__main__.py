"""A process that makes entries of another library, for `preheat bake` and `preheat check`.

It reads one request a line from stdin, and writes one answer a line to stdout, both as JSON. What the
modules of the application print goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from preheat import adapters
from preheat.adapters.base import Adapter
from preheat.build.default import default_builder
from preheat.errors import AdapterError, PreheatError
from preheat.model.arch import Arch

_STDOUT, _STDERR = 1, 2
_PR_SET_PDEATHSIG = 1  # of prctl: a process gets a signal when its parent ends


def main() -> None:
    """Answer requests until stdin ends. The argument is the name of the adapter."""
    answers = os.fdopen(os.dup(_STDOUT), "w")
    os.dup2(_STDERR, _STDOUT)
    name = sys.argv[1]
    for line in sys.stdin:
        print(json.dumps(_answer(name, json.loads(line))), file=answers, flush=True)


def _answer(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request of the adapter `name`."""
    return _attempt(partial(_install_and_carry_out, name, request))


def _attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return an answer, which may be an error."""
    try:
        return work()
    except PreheatError as error:
        return {"error": str(error), "hint": error.hint}
    except (Exception, SystemExit) as error:  # whatever the library or the application raises
        return {"error": f"{type(error).__name__}: {error}", "hint": None}


def _install_and_carry_out(name: str, request: dict[str, Any]) -> dict[str, Any]:
    adapters.install(name)
    adapter = adapters.adapter(name)
    if adapter.bakes_apart and request["verb"] == "bake":
        return _carry_out_in_child(adapter, request)
    return _carry_out(adapter, request)


def _carry_out_in_child(adapter: Adapter, request: dict[str, Any]) -> dict[str, Any]:
    """Carry a request out in a fork of this process, which has imported nothing of the application."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with os.fdopen(writing, "w") as pipe:
            json.dump(_attempt(partial(_carry_out, adapter, request)), pipe)
        default_builder().close()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        raise AdapterError(f"its process ended with status {code}", hint="its messages are above")
    result: dict[str, Any] = json.loads(answer)
    return result


def _carry_out(adapter: Adapter, request: dict[str, Any]) -> dict[str, Any]:
    if request["verb"] == "count":
        return {"count": adapter.count(request["row"], request["coverage"])}
    verb = adapter.bake if request["verb"] == "bake" else adapter.keys
    before = _compiles()
    needed = verb(request["row"], Arch.parse(request["arch"]), request["coverage"])
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
