"""Runs when a Python of a recorded command starts: it installs the adapters, and nothing else.

The directory of this file is the first of PYTHONPATH. The `sitecustomize` that Python would have found
without it runs first.
"""

import importlib.util
import os
import sys


def _run_other() -> None:
    """Run the `sitecustomize` that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    hidden = sys.modules.pop("sitecustomize", None)
    before = list(sys.path)
    sys.path[:] = [entry for entry in before if os.path.abspath(entry or ".") != here]
    try:
        if importlib.util.find_spec("sitecustomize") is not None:
            import sitecustomize  # noqa: F401
        elif hidden is not None:
            sys.modules["sitecustomize"] = hidden
    finally:
        added = [entry for entry in sys.path if entry not in before]
        sys.path[:] = [*added, *before]


try:
    _run_other()
finally:  # An error of the other one is Python's to report. The adapters are installed all the same.
    if importlib.util.find_spec("preheat") is not None:  # Another Python may not have it.
        from preheat.adapters.imports import activate

        activate()
