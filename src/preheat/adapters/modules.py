"""Functions of an application by name: `module:qualname`, and the directory of the module."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from preheat.process.messages import did_you_mean

__all__ = [
    "RECORD_AGAIN",
    "NotPortableError",
    "import_module",
    "import_object",
    "importable_module",
    "module_name",
    "object_in",
]

#: The hint for a function that is no longer in its module as it was recorded.
RECORD_AGAIN = "record again with --fresh"

Kind = type | tuple[type, ...]


class NotPortableError(Exception):
    """A value or function cannot be described in a way that another process can resolve.

    `hint` says what to do. It is None if the module was not found.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def module_name(function: Any) -> str:
    """Return the name by which the module of a function is imported, also for a script."""
    name: str = function.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    if name != "__main__" or file is None:
        return name
    return str(os.path.splitext(os.path.basename(file))[0])


def importable_module(function: Any) -> tuple[str, str]:
    """Return the name of the module of a function, and the directory from which it is imported.

    The directory is empty for an installed package. Raises `NotPortableError` for a module that another
    process cannot import, such as one that was generated.
    """
    name = function.__module__
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        raise NotPortableError(f"module {name} has no file")
    file = os.path.abspath(file)
    if name == "__main__":
        _require_definitions(file)
        return os.path.splitext(os.path.basename(file))[0], os.path.dirname(file)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or spec.origin is None or os.path.abspath(spec.origin) != file:
        raise NotPortableError(f"module {name} cannot be imported by name")
    root = os.path.dirname(file)
    is_package = os.path.basename(file) == "__init__.py"
    for _ in range(name.count(".") + is_package):
        root = os.path.dirname(root)
    return name, "" if f"-packages{os.sep}" in file else root


def _require_definitions(script: str) -> None:
    """Raise unless a script only defines things when it is imported.

    A bake imports the module of a function. A script without `if __name__ == "__main__":` would run.
    """
    try:
        with open(script, "rb") as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise NotPortableError(f"{script} cannot be read: {error}") from error
    for statement in body:
        allowed = isinstance(
            statement,
            ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
            | ast.Assign | ast.AnnAssign,
        )  # fmt: skip
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        guard = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        if not (allowed or text or guard):
            raise NotPortableError(f"{script} runs when it is imported (line {statement.lineno})")


def import_object(name: str, root: str = "", *, kind: Kind = object, noun: str = "function") -> Any:
    """Import `module:qualname`, with the directory `root` first on the path if it is given.

    Raises `NotPortableError` when there is no such module, and as `object_in` does.
    """
    if root and root not in sys.path:
        sys.path.insert(0, root)
    _, _, path = name.partition(":")
    return object_in(import_module(name), path, kind=kind, noun=noun)


def import_module(name: str) -> ModuleType:
    """Import the module of `module:qualname`. Raises `NotPortableError` if that is not possible."""
    try:
        return importlib.import_module(name.partition(":")[0])
    except (ImportError, AttributeError) as error:
        raise NotPortableError(f"{name} cannot be imported: {error}") from error


def object_in(module: ModuleType, path: str, *, kind: Kind = object, noun: str = "function") -> Any:
    """Return the object that a module has under a qualified name.

    Raises `NotPortableError` when there is none, with a hint that names the most similar object of
    `kind`. `noun` is the word for such an object.
    """
    found: Any = module
    owner = ""
    for part in path.split("."):
        if not hasattr(found, part):
            there = getattr(found, "__dict__", {})
            known = (f"{owner}{name}" for name, value in there.items() if isinstance(value, kind))
            similar = did_you_mean(f"{owner}{part}", known)
            file = getattr(module, "__file__", None)
            raise NotPortableError(
                f"module {module.__name__} has no {noun} {path}" + (f" ({file})" if file else ""),
                hint=RECORD_AGAIN if similar is None else f"{similar} If so, {RECORD_AGAIN}",
            )
        found = getattr(found, part)
        owner += f"{part}."
    return found
