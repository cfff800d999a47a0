"""Recorded requests of Triton: a compile as JSON values, and back."""

from __future__ import annotations

import platform
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from preheat.adapters.base import Row, version_note
from preheat.adapters.modules import NotPortableError, importable_module
from preheat.adapters.triton import values
from preheat.adapters.triton.identity import build_digest

if TYPE_CHECKING:
    from preheat.adapters.triton.request import CompileRequest

__all__ = [
    "changes", "chosen_options", "enter_root", "facts_of", "other_parameters",
    "outdated", "row_of", "source_class", "source_of",
]  # fmt: skip

# Options that the backend derives from the architecture. They are derived again for another one.
_DERIVED = {
    *("arch", "backend_name", "warp_size", "extern_libs", "supported_fp8_dtypes"),
    *("deprecated_fp8_dot_operand_dtypes", "max_num_imprecise_acc_default"),
    *("allowed_dot_input_precisions", "default_dot_input_precision"),
}
# Options whose declared default is a setting of the process: Triton reads it when it is imported.
_FROM_SETTINGS = {"ptx_options"}


def row_of(request: CompileRequest) -> Row | None:
    """Return the row of a request; None when it cannot be made again by another process."""
    try:
        function = request.source.fn
        name = values.name_of(function)
        module, root = importable_module(function.fn)
        _, _, path = name.partition(":")
        return {
            "function": f"{module}:{path}",
            "root": root,
            "signature": [[name, kind] for name, kind in request.source.signature.items()],
            "constants": [
                [list(path), values.encode(value)] for path, value in request.source.constants.items()
            ],
            "attrs": [[list(path), value] for path, value in request.source.attrs.items()],
            "options": _plain(chosen_options(request)),
            "env": dict(request.env),
            "recorded": facts_of(function),
        }
    except (NotPortableError, AttributeError):  # AttributeError: a file of IR has no function.
        return None


def facts_of(function: Any) -> dict[str, Any]:
    """Return facts about a function and Triton, which explain why a key differs later."""
    import triton

    return {
        "line": function.starting_line_number,
        "source": function.cache_key,
        "triton": triton.__version__,
        "build": build_digest(),
        "python": _python_version(),
    }


def chosen_options(request: CompileRequest) -> dict[str, Any]:
    """Return the options that a process has to name so that Triton computes the same key.

    These are the options that differ from the declared defaults of Triton, and those that differ from
    what this process takes by default: a program may have changed a knob of Triton.
    """
    declared = {field.name: field.default for field in fields(request.options)}
    here = vars(request.backend.parse_options({}))
    return {
        name: value
        for name, value in sorted(vars(request.options).items())
        if name not in _DERIVED
        and (
            value != declared.get(name)
            or value != here.get(name)
            or (name in _FROM_SETTINGS and value is not None)
        )
    }


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not isinstance(value, int | float | str | bool | None):
            raise NotPortableError(f"option {name} is a {type(value).__qualname__}")
    return options


def enter_root(row: Row) -> None:
    """Put the directory of the modules of a row on the path."""
    root = row["root"]
    if root and root not in sys.path:
        sys.path.insert(0, root)


def source_class(function: Any) -> Any:
    """Return the class of the sources that `triton.compile` takes for a function."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource if function.is_gluon() else ASTSource


def source_of(row: Row) -> Any:
    """Return the source that `triton.compile` takes. Raises `NotPortableError` if it cannot be made."""
    enter_root(row)
    function = values.resolve(row["function"])
    return source_class(function)(
        function,
        {name: values.tuples(kind) for name, kind in row["signature"]},
        {tuple(path): values.decode(value) for path, value in row["constants"]},
        {tuple(path): value for path, value in row["attrs"]},
    )


def outdated(row: Row) -> str:
    """Return why a recording cannot be used at all; an empty text when it can.

    Another version of Triton may make other assumptions about the same arguments, so a bake of the
    recorded request would make kernels that no launch requests.
    """
    import triton

    notes = version_note("Triton", row["recorded"]["triton"], triton.__version__)
    return "".join(f"{note}: record again" for note in notes)


def other_parameters(row: Row, function: Any) -> str:
    """Return how the parameters of a function differ from the recorded ones; empty if they do not."""
    now = function.arg_names
    before = [name for name, _ in row["signature"]]
    if sorted(before) == sorted(now):
        return ""
    return (
        f"recorded with the parameters {', '.join(before)}, and it has {', '.join(now)}: record again"
    )


def changes(row: Row, function: Any) -> list[str]:
    """Return the changes since a request was recorded that also change its key."""
    before = row["recorded"]
    found = []
    if before["build"] != build_digest():
        found.append("recorded with another build of Triton")
    found += version_note("Python", before["python"], _python_version())
    if before["line"] != function.starting_line_number:
        found.append(f"moved from line {before['line']} to line {function.starting_line_number}")
    elif before["source"] != function.cache_key:
        found.append("its source, or that of a function that it calls, has changed")
    return found


def _python_version() -> str:
    return platform.python_version().rpartition(".")[0]
