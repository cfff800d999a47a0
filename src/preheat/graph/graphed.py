"""`@gpu.graphed`: a function whose calls are replayed once they were captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from numbers import Number
from types import MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from preheat.devices import base
from preheat.errors import InputError
from preheat.graph import trees
from preheat.graph.slots import Graphs
from preheat.runtime.operands import kind_of

__all__ = ["Graphed"]

P = ParamSpec("P")
R = TypeVar("R")

_GIVE_A_KEY = "say what its calls differ in: @gpu.graphed(key=lambda …: …)"


class Graphed(Generic[P, R]):
    """A function around slots of its own, `graphs`: see `Gpu.graphed`.

    As a method it has slots for each instance, which go when the instance does.
    """

    __wrapped__: Callable[P, R]

    def __init__(
        self,
        function: Callable[P, R],
        graphs: Graphs,
        *,
        key: Callable[..., Hashable] | None = None,
        copy: bool = False,
        copy_inputs: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.graphs, self._key = graphs, key
        self._name = getattr(function, "__qualname__", repr(function)).rpartition("<locals>.")[2]
        self._copy, self._copy_inputs, self._method = copy, copy_inputs, False

    def __set_name__(self, owner: type, name: str) -> None:
        self._method = True  # told by the class whose body it stands in

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """One call, replayed where it was captured: see `Graphs.run`."""
        first = 1 if self._method else 0  # of the arguments that are not the instance
        told = None if self._key is None else self._key(*args[first:], **kwargs)
        reader = _Reader(
            self.graphs._device, values=self._key is None, copied=self._copy_inputs, title=self._name
        )
        key = _Call(self._name, told, reader.group(args[first:]), reader.group(kwargs))

        def body(inputs: Sequence[Any]) -> R:
            if not inputs:
                return self.__wrapped__(*args, **kwargs)
            place = {id(array): own for array, own in zip(reader.arrays, inputs, strict=True)}
            swapped: Any = trees.each((args[first:], kwargs), lambda item: place.get(id(item), item))
            function: Any = self.__wrapped__
            made: R = function(*args[:first], *swapped[0], **swapped[1])
            return made

        owner = args[0] if first else None
        return self.graphs._step(key, body, reader.arrays, owner=owner, copy=self._copy)

    def __repr__(self) -> str:
        return f"<graphed {self._name}: {self.graphs!r}>"


class _Call(NamedTuple):
    """What tells one slot of a function from another: the user's key, if any, and the arguments."""

    function: str
    key: object
    positional: _Group
    named: _Group

    def __repr__(self) -> str:
        if self.key is not None:
            return f"{self.function} {self.key!r}"
        return f"{self.function}({', '.join((*self.positional.rows(), *self.named.rows()))})"


class _Group(NamedTuple):
    """The arguments in a tuple, a list or a dict."""

    kind: type
    names: tuple[Hashable, ...]
    items: tuple[Hashable, ...]

    def rows(self) -> list[str]:
        """Each in words."""
        if not self.names:
            return [repr(item) for item in self.items]
        return [f"{name}={item!r}" for name, item in zip(self.names, self.items, strict=True)]

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({', '.join(self.rows())})"


class _Value(NamedTuple):
    """An argument that a capture bakes: numbers as they are written, so that 0.0 and -0.0 differ."""

    type: type
    value: Hashable

    def __repr__(self) -> str:
        return str(self.value) if issubclass(self.type, Number) else repr(self.value)


class _Reader:
    """Reads the arguments of one call: arrays by their memory and, where wanted, other `values`.

    Where arrays are `copied`, any memory will do. `arrays` are those to copy, each once.
    """

    def __init__(self, device: base.Device, *, values: bool, copied: bool, title: str) -> None:
        self._device, self._values, self._copied, self._title = device, values, copied, title
        self.arrays: list[Any] = []

    def group(self, given: Any) -> _Group:
        """The arguments in a container."""
        if isinstance(given, dict):
            return _Group(type(given), tuple(given), tuple(map(self._read, given.values())))
        return _Group(type(given), (), tuple(map(self._read, given)))

    def _read(self, given: Any) -> Hashable:
        if isinstance(given, tuple | list | dict):
            return self.group(given)
        memory = trees.memory(given, self._device)
        if memory is None:
            return self._value(given) if self._values else None
        if not self._copied or not trees.fillable(given):
            return memory
        known = [array is given for array in self.arrays]
        if True not in known:
            self.arrays.append(given)
            known.append(True)
        return memory._replace(place=(known.index(True),))

    def _value(self, given: Any) -> _Value:
        try:
            if kind_of(given) is not None:
                raise TypeError("its memory is not on this device")
            hash(given)
        except TypeError as bad:
            what = f"{self._title}: an argument of type {type(given).__name__}"
            raise InputError(f"{what} cannot be part of a key: {bad}", hint=_GIVE_A_KEY) from None
        return _Value(type(given), repr(given) if isinstance(given, Number) else given)
