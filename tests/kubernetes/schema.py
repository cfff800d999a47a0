"""Strict validation of Kubernetes objects by the types of lightkube-models.

These dataclasses are generated from the OpenAPI description of Kubernetes: field names, types, and
which fields are required.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

__all__ = ["faults"]

# The models import three names of lightkube, a client that is not needed here.
_SCHEMA = types.ModuleType("lightkube.core.schema")
vars(_SCHEMA).update(dataclass=dataclasses.dataclass, field=dataclasses.field, DictMixin=object)
_MODULES = {"v1": "core_v1", "batch/v1": "batch_v1", "apps/v1": "apps_v1"}


def faults(document: dict[str, Any]) -> list[str]:
    """Return one line for each field of an object that Kubernetes does not accept."""
    sys.modules.setdefault("lightkube.core.schema", _SCHEMA)
    module = importlib.import_module(f"lightkube.models.{_MODULES[document['apiVersion']]}")
    return list(_check(document["kind"], getattr(module, document["kind"]), document))


def _check(where: str, expected: Any, value: Any) -> Iterator[str]:
    origin = typing.get_origin(expected)
    if origin is typing.Union:
        members = [each for each in typing.get_args(expected) if each is not type(None)]
        found = [list(_check(where, each, value)) for each in members]
        yield from min(found, key=len)  # None where one of the types fits.
    elif dataclasses.is_dataclass(expected):
        yield from _check_object(where, expected, value)
    elif origin is list:
        yield from () if isinstance(value, list) else [f"{where}: {value!r} is not a list"]
        for index, each in enumerate(value if isinstance(value, list) else ()):
            yield from _check(f"{where}[{index}]", typing.get_args(expected)[0], each)
    elif origin is dict or expected is dict:
        kinds = typing.get_args(expected) or (str, object)
        yield from () if isinstance(value, dict) else [f"{where}: {value!r} is not a table"]
        for name, each in value.items() if isinstance(value, dict) else ():
            yield from _check(f"{where}.{name}", kinds[1], each)
    elif isinstance(expected, type) and type(value) is not expected and expected is not object:
        yield f"{where}: {value!r} is not {expected.__name__}"


def _check_object(where: str, expected: Any, value: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where}: {value!r} is not an object"
        return
    hints = typing.get_type_hints(expected)
    fields = {field.metadata.get("json", field.name): field for field in dataclasses.fields(expected)}
    for name, each in value.items():
        if name not in fields:
            yield f"{where}: {expected.__name__} has no field {name!r}"
        else:
            yield from _check(f"{where}.{name}", hints[fields[name].name], each)
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in value:
            yield f"{where}: {expected.__name__} needs the field {name!r}"
