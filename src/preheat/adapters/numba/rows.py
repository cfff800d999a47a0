"""Recorded requests of Numba: a compile as JSON values, and back."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from numba.cuda.dispatcher import CUDADispatcher

from preheat.adapters.base import NotKeyableError, Row, version_note
from preheat.adapters.modules import RECORD_AGAIN, NotPortableError, import_object, importable_module
from preheat.adapters.numba import signature
from preheat.adapters.numba.request import KernelRequest
from preheat.adapters.numba.toolchain import variables, versions
from preheat.model.arch import Arch

__all__ = ["changes", "request_of", "row_of"]


def row_of(request: KernelRequest) -> Row | None:
    """Return the row of a request; None when it cannot be made again by another process."""
    try:
        module, root = importable_module(request.function)
        types = [signature.encode(each) for each in request.argument_types]
        if "__main__:" in json.dumps(types):
            raise NotPortableError("the class of an argument is defined in a script")
        return {
            "function": f"{module}:{request.function.__qualname__}",
            "root": root,
            "types": types,
            "signature": signature.text(request.argument_types),
            **_own_or_given_options(request),
            "env": variables(),
            "recorded": {"parts": request.properties},
        }
    except (NotPortableError, NotKeyableError):
        return None


def _own_or_given_options(request: KernelRequest) -> dict[str, Any]:
    """Return the options of a request, or none where they are those of the decorated function.

    A bake takes those from the module, so that it follows when the decorator is edited.
    """
    name = request.function.__qualname__
    if "<locals>" in name:
        raise NotPortableError(f"{name} is defined inside a function")
    found: Any = sys.modules.get(request.function.__module__)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:  # A kernel with signatures is compiled before its module has it.
        return {}
    if isinstance(found, CUDADispatcher) and found.py_func is request.function:
        if found.targetoptions == request.options:
            return {}
    elif found is not request.function:
        raise NotPortableError(f"{name} of its module is something else")
    options = {name: value for name, value in request.options.items() if value not in (None, [], ())}
    try:
        return {"options": json.loads(json.dumps(options))}
    except TypeError as error:
        raise NotPortableError(f"an option is no JSON: {error}") from None


def request_of(row: Row, arch: Arch) -> KernelRequest:
    """Return the request of a row. Raises `NotPortableError` if its module has changed."""
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


def changes(row: Row, request: KernelRequest) -> list[str]:
    """Return the changes since a request was recorded that also change its key."""
    before: Mapping[str, str] = row["recorded"]["parts"]
    now = request.properties
    packages = versions()
    found = []
    for name in {**before, **now}:
        old, new = before.get(name, "nothing"), now.get(name, "nothing")
        if old == new:
            continue
        if name in packages:
            found += version_note(name, old, new)
        elif name.startswith("code of "):
            found.append(f"the {name} has changed")
        else:
            found.append(f"{name} was {old or 'nothing'}, and is {new or 'nothing'}")
    return found
