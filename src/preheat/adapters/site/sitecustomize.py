"""Runs when a Python of a recorded or audited command starts: it installs adapters and the audit.

The directory of this file is the first of PYTHONPATH. The `sitecustomize` that Python would have found
without it runs first.
"""

import importlib.util
import os
import sys
from types import ModuleType


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


def _join_audit() -> None:
    """Run the Python side of the audit."""
    hook = _load("adapters", "import_hook.py")
    audit = _load("audit", "in_process.py")
    compile_hooks = _load("audit", "compile_hooks.py")
    audit.start(os.environ, hook.ImportHook, compile_hooks)


def _load(*path: str) -> ModuleType:
    """Load a module of preheat by its path: this Python may not have preheat."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    name = "preheat_" + os.path.splitext(path[-1])[0]
    spec = importlib.util.spec_from_file_location(name, os.path.join(package, *path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


try:
    _run_other()
finally:  # Python reports an error of the other one. The adapters are installed in any case.
    if "PREHEAT_AUDIT_LIBRARY" in os.environ and sys.version_info >= (3, 8):  # It may be any Python.
        _join_audit()
    # Importing preheat takes longer than the start of most programs. Another Python may not have it.
    wanted = os.environ.get("PREHEAT_ADAPTERS", "") not in ("", "off")
    if wanted and importlib.util.find_spec("preheat") is not None:
        from preheat.adapters.imports import activate

        activate()
