"""`@gpu.graphed`: a function whose calls are replayed once they were captured."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

from preheat.devices import base
from preheat.errors import InputError
from preheat.graph import trees
from preheat.graph.slots import Graphs, Step, described, key_of, text_of
from preheat.runtime.operands import kind_of

__all__ = ["Graphed", "Method", "shown"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[[Any], object])

_GIVE_A_KEY = (
    "say what its calls differ in: @gpu.graphed(key=lambda …: …); then each such object has graphs of "
    "its own, whatever is in it"
)
_FIXED = (FunctionType, BuiltinFunctionType, type, ModuleType, Enum, type(None), EllipsisType)
_PLAIN = (*_FIXED, Number, str, bytes)
_DESCRIBES_ARRAYS = ("numpy", "numpy.dtypes", "torch")  # modules of what only says what arrays are like


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
        _check_function(function)
        _check_key(key)
        functools.update_wrapper(self, function)
        self.graphs, self._key = graphs, key
        self._name = name_of(function) or described(function)
        self._copy, self._copy_inputs = copy, copy_inputs
        graphs._title = f"{self._name}.graphs"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return Method(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """One call, replayed where it was captured: see `Graphs.run`."""
        return self._call((), args, kwargs)

    def warm(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> None:
        """Execute each call once and capture it, those of the largest arrays first: see `Graphs.warm`.

        A call is a tuple of arguments, or a dict of named ones.
        """
        self._warm((), calls)

    def warmer(self, function: F) -> F:
        """Let `gpu.warm` capture the keys it is told of: `function(key)` gives the arguments of a call.

            @step.warmer
            def example(shape): return (buffers[shape],)

        They are a tuple, or a dict of named ones, and hold the arrays that later calls are given;
        with `copy_inputs` any that are laid out like those.
        """
        self._check_warmer()
        name = self._name if self.graphs.name is None else self.graphs.name
        self.graphs._warmers.add(name, self)
        self.graphs.name = name
        self._warmer: Callable[[Any], Any] = function
        return function

    def _check_warmer(self) -> None:
        if self._key is None:
            hint = "say what its calls differ in: @gpu.graphed(key=lambda …: …)"
            raise InputError(f"{self._name} has no keys that a warmer could be told", hint=hint)
        if "self" in tuple(inspect.signature(self.__wrapped__).parameters)[:1]:
            raise _of_instances(self._name)

    def require_room(self, keys: int) -> None:
        """Raise where so many keys cannot have a slot each."""
        self.graphs.require_room(keys)

    def warm_key(self, key: Any) -> bool:
        """Capture the call that the warmer gives for a key: see `Graphs.warm_key`."""
        step = self._example(key)
        if step.key != self._example(key).key:
            raise InputError(
                f"the warmer of {self._name} gives other arrays each time, so no later call is like it",
                hint="give the arrays that calls are given, or let graphs have their own: "
                "@gpu.graphed(copy_inputs=True, …)",
            )
        return self.graphs._warm_one(step)

    def _example(self, key: Any) -> Step:
        """The call that the warmer gives for a key."""
        args, kwargs = _arguments(self._warmer(key))
        step = self._step((), args, kwargs)
        told = cast(_Call, step.key).told
        if told != (key,):
            raise InputError(
                f"the warmer of {self._name} gives a call of another key: {told and told[0]!r}"
            )
        return step

    def invalidate(self) -> None:
        """Forget all calls, and that they failed."""
        self.graphs.invalidate()

    def _call(self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
        """A call, `bound` to an instance or to none."""
        step, owner = self._step(bound, args, kwargs), bound[0] if bound else None
        made: R = self.graphs._step(*step, owner=owner, copy=self._copy)
        return made

    def _warm(self, bound: tuple[Any, ...], calls: Iterable[Any]) -> None:
        given = sorted(map(_arguments, _several(calls)), key=_nbytes, reverse=True)
        steps = [self._step(bound, *each) for each in given]
        self.graphs._warm(steps, bound[0] if bound else None)

    def _step(self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step:
        told = None if self._key is None else (key_of(self._key(*args, **kwargs)),)
        reader = _Reader(
            self.graphs._device, values=self._key is None, copied=self._copy_inputs, title=self._name
        )
        key = _Call(self._name, told, reader.group(args), reader.group(dict(kwargs)))
        function: Any = self.__wrapped__

        def body(inputs: Sequence[Any]) -> R:
            place = {id(array): own for array, own in zip(reader.arrays, inputs, strict=True)}
            given: Any = (args, kwargs)
            if inputs:
                given = trees.each((args, dict(kwargs)), lambda item: place.get(id(item), item))
            made: R = function(*bound, *given[0], **given[1])
            return made

        return Step(key, body, reader.arrays)

    def __repr__(self) -> str:
        return f"<graphed {self._name}: {self.graphs!r}>"


class Method:
    """A graphed function as a method, of an instance or, asked for in the class, of any."""

    def __init__(self, function: Graphed[..., Any], instance: object) -> None:
        self.__func__, self.__self__, self.__doc__ = function, instance, function.__doc__

    @property
    def graphs(self) -> Graphs:
        """The slots of all instances."""
        return self.__func__.graphs

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        function: Any = self.__func__.__wrapped__
        return function if self.__self__ is None else MethodType(function, self.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call, replayed where it was captured: see `Graphs.run`."""
        if self.__self__ is not None:
            return self.__func__._call((self.__self__,), args, kwargs)
        if not args:
            name = self.__func__._name
            hint = f"call it on one, or give one first: {name}(instance, …)"
            raise InputError(f"{name} is a method: it was called without an instance", hint=hint)
        return self.__func__._call(args[:1], args[1:], kwargs)

    def warm(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> None:
        """Warm calls of this instance: see `Graphed.warm`."""
        self.__func__._warm((self._instance(),), calls)

    def warmer(self, _: object) -> NoReturn:
        """Refused: nothing that is told a key alone knows which instance it is for."""
        raise _of_instances(self.__func__._name)

    def invalidate(self) -> None:
        """Forget all calls of this instance or, without one, of all."""
        self.graphs.invalidate(owner=self.__self__)

    def _instance(self) -> object:
        if self.__self__ is None:
            name = self.__func__._name
            raise InputError(f"{name} is a method of no instance here", hint="warm it on an instance")
        return self.__self__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return repr(self.__func__)


def name_of(function: Any) -> str | None:
    """What a function is called where it is defined."""
    name: str | None = getattr(function, "__qualname__", None)
    return name and name.rpartition("<locals>.")[2]


def shown(key: Any) -> str:
    """A key of a graphed function as text: what the user's `key` gave, where there is one."""
    return described(key) if key.told is None else text_of(key.told[0])


def _of_instances(name: str) -> InputError:
    return InputError(
        f"{name} is a method, whose graphs are those of its instances: it cannot have a warmer",
        hint="warm each instance, model.step.warm([…]), or use gpu.graphs(name=…) with a warmer",
    )


def _check_key(key: Any) -> None:
    if key is not None and not callable(key):
        hint = "key=lambda …: …, which is given the arguments of the function"
        raise InputError(f"key={key!r} is not a function", hint=hint)


def _check_function(function: Any) -> None:
    if not callable(function):
        raise InputError(
            f"{function!r} is not a function", hint="@gpu.graphed(key=…), above a function"
        )
    for kind, test in _NOT_STEPS.items():
        if test(function):
            name = getattr(function, "__qualname__", repr(function))
            raise InputError(
                f"{name} is {kind}, which returns before its work is done: no capture sees that",
                hint="put the work into a plain function, graphed, and call that",
            )


_NOT_STEPS = {
    "a coroutine function": inspect.iscoroutinefunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
    "a generator": inspect.isgeneratorfunction,
}


def _several(calls: Any) -> Iterable[Any]:
    if not isinstance(calls, Iterable):
        raise InputError(f"{calls!r} is not a collection of calls", hint="step.warm([(x, y), …])")
    return calls


def _arguments(call: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(call, tuple):
        return call, {}
    if isinstance(call, Mapping):
        return (), call
    hint = "use tuples of arguments, or dicts of named ones: step.warm([(x, y), …])"
    raise InputError(f"{call!r} is not a call to warm", hint=hint)


def _nbytes(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> int:
    """Bytes of all arrays among the arguments."""
    held = (item for _, item in trees.leaves((call[0], dict(call[1]))))
    return sum(len(trees.span(item)) for item in held)


class _Call(NamedTuple):
    """What tells one slot of a function from another: the user's key, if any, and the arguments."""

    function: str
    told: tuple[Hashable] | None
    positional: _Group
    named: _Group

    def __repr__(self) -> str:
        if self.told is not None:
            return f"{self.function} {self.told[0]!r}"
        return f"{self.function}({', '.join((*self.positional.rows(), *self.named.rows()))})"


class _Group(NamedTuple):
    """The arguments in a tuple, a list, a dict or a dataclass."""

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
        return str(self.value) if issubclass(self.type, Number) else described(self.value)


class _Itself(weakref.ref[Any]):
    """An object told from every other by identity, and not kept alive."""

    __slots__ = ("_number",)

    _number: int

    def __new__(cls, given: Any) -> _Itself:
        made = super().__new__(cls, given)
        made._number = id(given)
        return made

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Itself) and self() is other() is not None)

    def __repr__(self) -> str:
        return f"<{type(self()).__name__}>"


class _Kept:
    """The same, for what only a strong reference can hold."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __hash__(self) -> int:
        return id(self._given)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self._given is other._given

    def __repr__(self) -> str:
        return f"<{type(self._given).__name__}>"


class _Reader:
    """Reads the arguments of one call: arrays by their memory, other things by `values` or identity.

    Where arrays are `copied`, any memory will do. `arrays` are those to copy, each once. Without
    `values`, what is plain is left to the user's key; what may hold memory that we do not see is not.
    """

    def __init__(self, device: base.Device, *, values: bool, copied: bool, title: str) -> None:
        self._device, self._values, self._copied, self._title = device, values, copied, title
        self.arrays: list[Any] = []

    def group(self, given: Any) -> _Group:
        """The arguments in a container."""
        held = trees.parts(given) or {}
        names = () if isinstance(given, tuple | list) else tuple(held)
        return _Group(type(given), names, tuple(map(self._read, held.values())))

    def _read(self, given: Any) -> Hashable:
        if trees.parts(given) is not None:
            return self.group(given)
        memory = trees.memory(given, self._device)
        if memory is None:
            return self._other(given)
        if not self._copied or not trees.fillable(given):
            return memory
        known = [array is given for array in self.arrays]
        if True not in known:
            self.arrays.append(given)
            known.append(True)
        return memory._replace(place=(known.index(True),))

    def _other(self, given: Any) -> Hashable:
        if isinstance(given, MethodType):
            return (given.__func__, self._read(given.__self__))
        if self._values:
            return self._value(given)
        if isinstance(given, _PLAIN) or _describes_arrays(given) or trees.is_array(given):
            return None
        try:
            return _Itself(given)
        except TypeError:
            return _Kept(given)

    def _value(self, given: Any) -> _Value:
        try:
            if kind_of(given) is not None:
                raise TypeError("its memory is not on this device")
            if _by_identity(given):
                raise TypeError("it is equal to itself alone, whatever is in it")
            hash(given)
        except TypeError as bad:
            what = f"{self._title}: an argument of type {type(given).__name__}"
            raise InputError(f"{what} cannot be part of a key: {bad}", hint=_GIVE_A_KEY) from None
        return _Value(type(given), repr(given) if isinstance(given, Number) else given)


def _by_identity(given: Any) -> bool:
    """Whether it counts as the same value as long as it is the same object, and may change."""
    hashed: object = type(given).__hash__
    return hashed is object.__hash__ and not isinstance(given, _FIXED) and not _describes_arrays(given)


def _describes_arrays(given: Any) -> bool:
    return type(given).__module__ in _DESCRIBES_ARRAYS
