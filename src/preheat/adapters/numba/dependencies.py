"""What the code of a kernel depends on: the functions that it calls, and the values that it reads.

Numba compiles the values of globals and closures into the code. The key of its own cache has only
the bytecode of the kernel. Here, names are followed through the bytecode of all called functions.
"""

from __future__ import annotations

import builtins
import dis
import enum
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.compiler import ExternFunction

from preheat.adapters.base import NotKeyableError
from preheat.adapters.numba import signature

__all__ = ["Dependencies", "comes_with_numba", "nested_code"]

# Packages whose versions are part of the key, and modules of Python. Their names identify their code.
_KNOWN = frozenset(
    {"numba", "numba_cuda", "llvmlite", "numpy", "math", "cmath", "operator", "builtins", "enum"}
)
# Options that do not change the code. Extensions convert arguments at each launch.
_NOT_OF_THE_CODE = frozenset({"extensions", "link"})
_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_LONGEST = 60  # characters of a value that is shown; a longer one is a digest
_MISSING = object()


class _OpaqueValueError(Exception):
    """A value has no digest. The message says which class it has."""


class Dependencies:
    """The parts of a key that describe the code of a function and everything that it uses.

    `parts` are texts by name, such as the value of a global. `codes` are the code objects of all
    functions that were followed. Raises `NotKeyableError` for a value of which no digest can be made.
    """

    def __init__(self, function: FunctionType, options: Mapping[str, Any]) -> None:
        self.parts: dict[str, str] = {}
        self.codes: set[CodeType] = set()
        self._labels: dict[FunctionType, str] = {}
        self._follow(function, options, lines=False)

    def _follow(self, function: FunctionType, options: Mapping[str, Any], *, lines: bool) -> str:
        """Describe a function, unless it is described already, and return its label."""
        if function in self._labels:
            return self._labels[function]
        label = self._labels[function] = self._free_label(function.__qualname__)
        lines = lines or bool(options.get("debug") or options.get("lineinfo"))
        try:
            defaults = [self._encode(value) for value in function.__defaults__ or ()]
            self.parts[f"options of {label}"] = self._options(options)
        except _OpaqueValueError as error:
            raise NotKeyableError(f"{label} has a default value or an option, {error}") from None
        self.parts[f"code of {label}"] = _digest([_code(function.__code__, lines=lines), defaults])
        self.codes.update(nested_code(function.__code__))
        for path in _paths(function.__code__):
            self._use(label, function, path, lines)
        return label

    def _free_label(self, name: str) -> str:
        taken = {*self._labels.values()}
        return next(
            text for text in (name, *(f"{name} {i}" for i in range(2, 2 + len(taken))))
            if text not in taken
        )  # fmt: skip

    def _options(self, options: Mapping[str, Any]) -> str:
        chosen = {
            name: _shown(value, self._encode(value))
            for name, value in sorted({**options, "debug": bool(options.get("debug"))}.items())
            if name not in _NOT_OF_THE_CODE and not _is_default(value)
        }
        return ", ".join(f"{name}={value}" for name, value in chosen.items())

    def _use(self, label: str, function: FunctionType, path: tuple[str, ...], lines: bool) -> None:
        """Describe the value that a function reads by a name, and attributes of modules."""
        name, value, rest = path[0], _lookup(function, path[0]), list(path[1:])
        while isinstance(value, ModuleType) and rest and not _is_known(value.__name__):
            name += f".{rest[0]}"
            value = getattr(value, rest.pop(0), _MISSING)
        if isinstance(value, ModuleType):
            if not _is_known(value.__name__):
                raise NotKeyableError(f"{label} uses module {value.__name__} as a value")
            self.parts[f"{'.'.join(path)} of {label}"] = ".".join([value.__name__, *rest])
            return
        try:
            encoded = self._encode(value, lines=lines)
        except _OpaqueValueError as error:
            raise NotKeyableError(f"{label} uses {name}, {error}") from None
        self.parts[f"{name} of {label}"] = _shown(value, encoded)

    def _encode(self, value: Any, *, lines: bool = False) -> Any:
        """Return a value as JSON. Values for which the compiled code may differ have different JSON."""
        if value is _MISSING:
            return ["not defined"]
        if (plain := _plain(value)) is not None:
            return plain
        if (known := _known_name(value)) is not None:
            return ["name", known]
        match value:
            case tuple() | list() | frozenset():
                return self._sequence(value, lines)
            case dict():
                return {str(key): self._encode(each, lines=lines) for key, each in value.items()}
            case types.Type():
                return ["type", signature.encode(value)]
            case ExternFunction():
                declared = [signature.encode(each) for each in (value.sig.return_type, *value.sig.args)]
                return ["declared function", value.name, declared]
            case FunctionType():
                return ["function", self._follow(value, {}, lines=lines)]
        called = getattr(value, "py_func", None)
        if isinstance(called, FunctionType) and isinstance(options := value.targetoptions, Mapping):
            return ["function", self._follow(called, options, lines=lines)]
        raise _OpaqueValueError(f"which is a {_class_of(value)}")

    def _sequence(self, value: Any, lines: bool) -> Any:
        encoded = [self._encode(each, lines=lines) for each in value]
        if isinstance(value, frozenset):
            encoded.sort(key=json.dumps)
        fields = list(getattr(value, "_fields", ()))
        return [type(value).__name__, *fields, encoded]


def _is_default(option: Any) -> bool:
    return option is None or option is False or (isinstance(option, str) and option == "never")


def _shown(value: Any, encoded: Any) -> str:
    """Return a value as short text that is different for different encodings."""
    if type(value) in (bool, int, float, str, type(None)):
        text = repr(value)
    elif encoded[0] in ("function", "name"):
        text = " ".join(encoded)
    else:
        text = json.dumps(encoded)
    return text if len(text) <= _LONGEST else _digest(encoded)


def _plain(value: Any) -> Any:
    """Return a number, a text, an array or a class of such as JSON values; None for all others."""
    match value:
        case enum.Enum():
            return ["enum", _class_of(value), value.name, repr(value.value)]
        case None | bool() | int() | str():
            return [type(value).__name__, value]
        case np.generic() | np.ndarray() if not value.dtype.hasobject:
            return _array(np.asarray(value), type(value).__name__)
        case float():
            return ["float", value.hex()]
        case complex():
            return ["complex", value.real.hex(), value.imag.hex()]
        case bytes():
            return ["bytes", value.hex()]
        case np.dtype():
            return ["dtype", repr(value)]
        case CodeType():
            return ["code", _code(value, lines=False)]
        case range() | slice():
            return ["range", repr(value)]
        case type() if issubclass(value, enum.Enum):
            return ["enum", value.__qualname__, [[each.name, repr(each.value)] for each in value]]
        case type() if issubclass(value, tuple) and hasattr(value, "_fields"):
            return ["named tuple", value.__qualname__, list(value._fields)]
    return ["ellipsis"] if value is Ellipsis else None


def _array(value: np.ndarray[Any, Any], kind: str) -> Any:
    content = hashlib.sha256(value.tobytes()).hexdigest() if value.ndim else value.tobytes().hex()
    order = [value.flags.c_contiguous, value.flags.f_contiguous, value.flags.aligned]
    return [kind, repr(value.dtype), list(value.shape), order, content]


def _code(code: CodeType, *, lines: bool) -> Any:
    """Return the content of a code object; with `lines`, including its line numbers."""
    constants = [
        _code(each, lines=lines) if isinstance(each, CodeType) else _constant(each)
        for each in code.co_consts
    ]
    described = [
        code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags,
        code.co_code.hex(), code.co_exceptiontable.hex(), constants, list(code.co_names),
        list(code.co_varnames), list(code.co_freevars), list(code.co_cellvars),
    ]  # fmt: skip
    if lines:
        file = os.path.basename(code.co_filename)
        described += [file, code.co_firstlineno, code.co_linetable.hex()]
    return described


def _constant(value: Any) -> Any:
    if not isinstance(value, tuple | frozenset):
        return _plain(value)
    encoded = [_constant(each) for each in value]
    if isinstance(value, frozenset):  # Its order differs from process to process.
        encoded.sort(key=json.dumps)
    return [type(value).__name__, encoded]


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions that are defined in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from nested_code(each)


def _paths(code: CodeType) -> list[tuple[str, ...]]:
    """Return the names that code reads from outside, each with the attributes that follow it."""
    found: dict[tuple[str, ...], None] = {}
    for each in nested_code(code):
        path: tuple[str, ...] = ()
        for instruction in dis.get_instructions(each):
            if instruction.opname == "EXTENDED_ARG":
                continue
            if path and instruction.opname in _ATTRIBUTES:
                path += (instruction.argval,)
                continue
            if path:
                found[path] = None
            loads = instruction.opname in _LOADS and instruction.argval not in code.co_cellvars
            path = (instruction.argval,) if loads else ()
    return [*found]


def _lookup(function: FunctionType, name: str) -> Any:
    """Return the value of a name that a function reads from outside."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if name in cells:
        try:
            return cells[name].cell_contents
        except ValueError:
            return _MISSING
    return function.__globals__.get(name, vars(builtins).get(name, _MISSING))


def _known_name(value: Any) -> str | None:
    """Return the name of an object of Numba, NumPy or Python itself; None for all others."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(name, str) and _is_known(module):
        return f"{module}.{name}" if _holds(module, name, value) else None
    for place in (cuda, np, builtins):  # Stubs of Numba and functions of NumPy may be instances.
        for name, each in vars(place).items():
            if each is value:
                return f"{place.__name__}.{name}"
    return None


def _holds(module: str, name: str, value: Any) -> bool:
    """Return whether a module has the object under this name, so that the name identifies it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def _is_known(module: str) -> bool:
    return module.partition(".")[0] in _KNOWN


def comes_with_numba(function: Any) -> bool:
    """Return whether a function belongs to a package whose version is part of the key."""
    return _is_known(getattr(function, "__module__", None) or "")


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _digest(described: Any) -> str:
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
