"""More variants of a recorded launch than were recorded.

Triton compiles another variant of a kernel where an integer is 1 or divisible by 16, needs 64 bits, or
where a pointer is not aligned. `closure` is all of them. `weak` are four variants that assume less and
less, which serve every launch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

from preheat.adapters.base import Row
from preheat.adapters.triton import values
from preheat.adapters.triton.rows import source_class
from preheat.errors import InputError

__all__ = ["MOST_VARIANTS", "WEAK", "closure", "closure_size", "weaker"]

#: A closure with more variants is refused.
MOST_VARIANTS = 4096
#: The number of weak variants.
WEAK = 4

_INTEGERS = tuple(f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64))
_WIDE = 1 << 31  # An integer of this size needs 64 bits, and is divisible by 16.


def weaker(source: Any) -> Iterator[Any]:
    """Yield sources of the same launch, each with fewer assumptions than the one before.

    First nothing is assumed of integers, then nothing of pointers either; then integers have 64 bits.
    """
    function = source.fn
    make_source = source_class(function)
    for wide, pointers in ((False, False), (False, True), (True, False), (True, True)):
        constants = dict(source.constants)
        attributes = dict(source.attrs)
        signature = {
            parameter.name: _weaken(
                source.signature[parameter.name], (index,), parameter, constants, attributes,
                wide=wide, pointers=pointers,
            )
            for index, parameter in enumerate(function.params)
        }  # fmt: skip
        yield make_source(function, signature, constants, dict(sorted(attributes.items())))


def _weaken(
    kind: Any,
    path: tuple[int, ...],
    parameter: Any,
    constants: dict[Any, Any],
    attributes: dict[Any, Any],
    *,
    wide: bool,
    pointers: bool,
) -> Any:
    """Return the type of an argument that assumes less. `constants` and `attributes` are modified.

    `parameter` is None for an element of a tuple.
    """
    if isinstance(kind, tuple):
        return tuple(
            _weaken(each, (*path, index), None, constants, attributes, wide=wide, pointers=pointers)
            for index, each in enumerate(kind)
        )
    if parameter is not None and parameter.is_constexpr:
        return kind
    is_one = kind == "constexpr" and type(constants.get(path)) is int
    if is_one or kind in _INTEGERS:
        constants.pop(path, None)
        if is_one or path in attributes:
            attributes[path] = []
        annotated = parameter is not None and bool(parameter.annotation_type)
        if wide and not annotated and kind != "u64":
            return "i64"
        return "i32" if is_one else kind
    if pointers and kind.startswith("*") and path in attributes:
        attributes[path] = []
    return kind


class _Pointer:
    """An argument that Triton takes for a tensor at an address."""

    def __init__(self, dtype: str, address: int) -> None:
        self.dtype = dtype
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def _domains(row: Row, function: Any) -> list[list[Any]]:
    """Return a representative value for each class of values of each argument."""
    constants = {tuple(path): value for path, value in row["constants"]}
    kinds = dict(row["signature"])

    def values_of(kind: Any, path: tuple[int, ...], parameter: Any) -> list[Any]:
        if isinstance(kind, list):
            parts = [values_of(each, (*path, index), None) for index, each in enumerate(kind)]
            return list(itertools.product(*parts))
        return _representatives(kind, constants.get(path), parameter)

    return [
        values_of(kinds[parameter.name], (index,), parameter)
        for index, parameter in enumerate(function.params)
    ]


def _representatives(kind: str, constant: Any, parameter: Any) -> list[Any]:
    """Return one value for each variant that an argument can have at run time."""
    if parameter is not None and parameter.is_constexpr:
        return [values.decode(constant)]
    specialised = parameter is None or not parameter.do_not_specialize
    aligned = parameter is None or not parameter.do_not_specialize_on_alignment
    annotated = parameter is not None and bool(parameter.annotation_type)
    if kind.startswith("*"):
        element = kind[1:].removeprefix("k")
        addresses = (0, 4) if specialised and aligned else (0,)
        return [_Pointer(element, address) for address in addresses]
    if kind in _INTEGERS or (kind == "constexpr" and type(constant) is int):
        small = [3, *([1] if specialised else []), *([16] if specialised and aligned else [])]
        large = [_WIDE + 1, *([_WIDE] if specialised and aligned else [])]
        return small if annotated else small + large
    if kind == "constexpr":
        return [values.decode(constant)]
    return [True] if kind in ("u1", "i1") else [1.5]


def closure_size(row: Row, function: Any) -> int:
    """Return how many variants the closure of a recorded launch has, at most."""
    return math.prod(map(len, _domains(row, function)))


def closure(row: Row, function: Any, backend: Any) -> Iterator[Any]:
    """Yield the source of every variant that the launch can become for other values of its arguments.

    Triton's own binder makes them from representative values, so that they are exact in every version.
    Raises `InputError` when there are too many.
    """
    from triton.runtime.jit import create_function_from_signature

    size = closure_size(row, function)
    if size > MOST_VARIANTS:
        raise InputError(
            f"the closure of {row['function']} has {size:,} variants, of at most {MOST_VARIANTS:,}",
            hint='use coverage = "weak" for this function: four kernels serve every launch',
        )
    make_source = source_class(function)
    bind = create_function_from_signature(function.signature, function.params, backend)
    seen: set[str] = set()
    for arguments in itertools.product(*_domains(row, function)):
        keywords = dict(row["options"])
        bound, specialisation, options = bind(*arguments, **keywords)
        _, signature, constants, attributes = function._pack_args(
            backend, keywords, bound, specialisation, options
        )
        source = make_source(function, signature, constants, attributes)
        if source.hash() not in seen:
            seen.add(source.hash())
            yield source
