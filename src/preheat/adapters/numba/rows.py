"""Recorded requests of Numba: a compile as JSON values, and back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from numba.cuda.dispatcher import CUDADispatcher

from preheat.adapters.base import Row
from preheat.adapters.modules import RECORD_AGAIN, NotPortableError, import_object, importable_module
from preheat.adapters.numba import signature
from preheat.adapters.numba.request import KernelRequest
from preheat.adapters.numba.signature import UnkeyableError
from preheat.adapters.numba.toolchain import VARIABLES, versions
from preheat.arch import Arch

__all__ = ["changed_environment", "changes", "request_of", "row_of"]


def row_of(asked: KernelRequest) -> Row | None:
    """Return the row of a request; None when it cannot be made again by another process."""
    try:
        module, root = importable_module(asked.function)
        types = [signature.encode(each) for each in asked.argument_types]
        if "__main__:" in json.dumps(types):
            raise NotPortableError("the class of an argument is defined in a script")
        return {
            "function": f"{module}:{asked.function.__qualname__}",
            "root": root,
            "types": types,
            "signature": signature.text(asked.argument_types),
            **_own_or_given_options(asked),
            "env": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "recorded": {"parts": asked.properties},
        }
    except (NotPortableError, UnkeyableError):
        return None


def _own_or_given_options(asked: KernelRequest) -> dict[str, Any]:
    """Return the options of a request, or none where they are those of the decorated function.

    A bake takes those from the module, so that it follows when the decorator is edited.
    """
    name = asked.function.__qualname__
    if "<locals>" in name:
        raise NotPortableError(f"{name} is defined inside a function")
    found: Any = sys.modules.get(asked.function.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:  # A kernel with signatures is compiled before its module has it.
        return {}
    if isinstance(found, CUDADispatcher) and found.py_func is asked.function:
        if found.targetoptions == asked.options:
            return {}
    elif found is not asked.function:
        raise NotPortableError(f"{name} of its module is something else")
    options = {name: value for name, value in asked.options.items() if value not in (None, [], ())}
    try:
        return {"options": json.loads(json.dumps(options))}
    except TypeError as error:
        raise NotPortableError(f"an option is no JSON: {error}") from None


def request_of(row: Row, arch: Arch) -> KernelRequest:
    """Return the request of a row. Raises `NotPortableError` where its module has changed."""
    found = import_object(row["function"], row["root"], kind=CUDADispatcher)
    options: Mapping[str, Any] | None = row.get("options")
    if isinstance(found, CUDADispatcher):
        options = found.targetoptions if options is None else options
        found = found.py_func
    if options is None:
        name = row["function"]
        raise NotPortableError(f"{name} is no longer decorated by cuda.jit", hint=RECORD_AGAIN)
    types = tuple(signature.decode(each) for each in row["types"])
    return KernelRequest(found, options, types, arch.plain)


def changes(row: Row, asked: KernelRequest) -> list[str]:
    """Return what has changed since a request was recorded, and makes its key another one."""
    before: Mapping[str, str] = row["recorded"]["parts"]
    now = asked.properties
    packages = versions()
    found = []
    for name in {**before, **now}:
        old, new = before.get(name, "nothing"), now.get(name, "nothing")
        if old == new:
            continue
        if name in packages:
            found.append(f"recorded with {name} {old}, and this is {new}")
        elif name.startswith("code of "):
            found.append(f"the {name} has changed")
        else:
            found.append(f"{name} was {old or 'nothing'}, and is {new or 'nothing'}")
    return found


def changed_environment(row: Row) -> list[str]:
    """Return the variables that change code and differ from those of the recording."""
    return [
        f"{name} was {row['env'].get(name, 'not set')}, and is {os.environ.get(name, 'not set')}"
        for name in VARIABLES
        if row["env"].get(name) != os.environ.get(name)
    ]
