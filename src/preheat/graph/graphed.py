"""`@gpu.graphed`: a function whose calls are captured once and then replayed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast

from preheat.errors import InputError, PreheatError
from preheat.graph import trees
from preheat.graph.cache import NOT_REPLAYED, GraphCache
from preheat.graph.cached_graph import Step
from preheat.graph.keys import NO_NAMES, ArgumentReader, CallKey, key_of, key_text, stable_repr
from preheat.model.tracebacks import short_methods, shorten_traceback

__all__ = ["Graphed", "Method", "call_key_text"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[[Any], object])


@short_methods(without={"require_capacity", "warm_key"})
class Graphed(Generic[P, R]):
    """A function whose calls are captured and replayed, made by `gpu.graphed`.

    As a method it has graphs for each instance, which are released with the instance.

    Attributes:
        graphs: The `GraphCache` with the graphs.

    Examples:
        >>> @gpu.graphed
        ... def fill(x):
        ...     return x.fill(1)
        >>> x = gpu.zeros(2)
        >>> for _ in range(3):
        ...     y = fill(x)
        >>> len(fill.graphs.report().graphs)
        1
    """

    __wrapped__: Callable[P, R]

    def __init__(
        self,
        function: Callable[P, R],
        graphs: GraphCache,
        *,
        key: Callable[..., Hashable] | None = None,
        copy: bool = False,
        copy_inputs: bool = False,
    ) -> None:
        _check_function(function)
        _check_key(key)
        functools.update_wrapper(self, function)
        self.graphs = graphs
        self._key = key
        self._name = name_of(function) or stable_repr(function)
        self._copy = copy
        self._reader = ArgumentReader(
            graphs.device, values=key is None, copied=copy_inputs, title=self._name
        )
        graphs.title = f"{self._name}.graphs"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return Method(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, or replay the graph of a call like this one: see `GraphCache.run`."""
        try:
            return self._call((), args, kwargs)
        except PreheatError as error:
            shorten_traceback(error)
            raise

    def warm(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> None:
        """Execute and capture each call, those with the largest arrays first: see `GraphCache.warm`.

        Args:
            calls: Tuples of arguments, or dicts of named ones.

        Raises:
            GraphError: Some calls could not be captured. The error lists them.

        Examples:
            >>> @gpu.graphed
            ... def fill(x):
            ...     return x.fill(1)
            >>> fill.warm([(gpu.zeros(2),), (gpu.zeros(4),)])
            >>> len(fill.graphs.report().graphs)
            2
        """
        self._warm((), calls)

    def warmer(self, function: F) -> F:
        """Register how `gpu.warm` captures a key: `function(key)` returns the arguments of a call.

        The arguments are a tuple, or a dict of named ones, with the arrays that later calls are given.
        With `copy_inputs`, arrays with the same layout are enough.

        Raises:
            InputError: The function was made without `key`, or is a method.

        Examples:
            >>> buffers = {size: gpu.zeros(size) for size in (2, 4)}
            >>> @gpu.graphed(key=lambda x: x.shape, name="fill")
            ... def fill(x):
            ...     return x.fill(1)
            >>> @fill.warmer
            ... def arguments(shape):
            ...     return (buffers[shape[0]],)
        """
        self._check_warmer()
        name = self._name if self.graphs.name is None else self.graphs.name
        self.graphs.register_warmer(name, self)
        self._warmer: Callable[[Any], Any] = function
        return function

    def _check_warmer(self) -> None:
        if self._key is None:
            hint = "name what distinguishes its calls: @gpu.graphed(key=lambda …: …)"
            raise InputError(f"{self._name} has no keys that a warmer could be called with", hint=hint)
        if "self" in tuple(inspect.signature(self.__wrapped__).parameters)[:1]:
            raise _method_warmer_error(self._name)

    def require_capacity(self, keys: int) -> None:
        """Raise if the cache cannot hold graphs for so many keys."""
        self.graphs.require_capacity(keys)

    def warm_key(self, key: Any) -> bool:
        """Capture the call that the warmer returns for a key: see `GraphCache.warm_key`."""
        step = self._warmer_step(key)
        if step.key != self._warmer_step(key).key:
            raise InputError(
                f"the warmer of {self._name} returns other arrays each time, so no call can use "
                "its graph",
                hint="return the arrays that calls are given, or let graphs copy their inputs: "
                "@gpu.graphed(copy_inputs=True, …)",
            )
        return self.graphs.warm_step(step)

    def _warmer_step(self, key: Any) -> Step:
        """Return the call that the warmer gives for a key."""
        args, kwargs = _arguments(self._warmer(key))
        step = self._new_step((), args, kwargs)
        user_key = cast(CallKey, step.key).user_key
        if user_key != (key,):
            raise InputError(
                f"the warmer of {self._name} returns a call of another key: "
                f"{user_key and user_key[0]!r}"
            )
        return step

    def invalidate(self) -> None:
        """Forget all graphs and failures, so that the next calls capture again.

        Examples:
            >>> @gpu.graphed
            ... def fill(x):
            ...     return x.fill(1)
            >>> fill.warm([(gpu.zeros(2),)])
            >>> fill.invalidate()
            >>> len(fill.graphs.report().graphs)
            0
        """
        self.graphs.invalidate()

    def _call(self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        """Run a call, `bound` to an instance or to nothing."""
        arrays: list[Any] = []
        key = self._call_key(args, kwargs, arrays)
        owner = bound[0] if bound else None
        result: R = self.graphs.replay_step(key, arrays, owner, self._copy)
        if result is NOT_REPLAYED:
            body = partial(self._body, bound, args, kwargs, arrays)
            result = self.graphs.run_step(CallKey(*key), body, arrays, owner=owner, copy=self._copy)
        return result

    def _warm(self, bound: tuple[Any, ...], calls: Iterable[Any]) -> None:
        arguments = sorted(map(_arguments, _require_iterable(calls)), key=_nbytes, reverse=True)
        steps = [self._new_step(bound, *each) for each in arguments]
        self.graphs.warm_steps(steps, bound[0] if bound else None)

    def _call_key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], arrays: list[Any]
    ) -> tuple[Any, ...]:
        """Return the fields of the `CallKey` of a call, and append what is copied to `arrays`."""
        user_key = None if self._key is None else (key_of(self._key(*args, **kwargs)),)
        positional = self._reader.container_key(args, arrays)
        named = self._reader.container_key(kwargs, arrays) if kwargs else NO_NAMES
        return (self._name, user_key, positional, named)

    def _new_step(self, bound: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        arrays: list[Any] = []
        key = CallKey(*self._call_key(args, kwargs, arrays))
        return Step(key, partial(self._body, bound, args, kwargs, arrays), arrays)

    def _body(
        self,
        bound: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arrays: Sequence[Any],
        inputs: Sequence[Any],
    ) -> R:
        """Call the function itself, with `inputs` in the place of `arrays`."""
        place = {id(array): own for array, own in zip(arrays, inputs, strict=True)}
        call: Any = (args, kwargs)
        if inputs:
            call = trees.map_leaves(call, lambda item: place.get(id(item), item))
        function: Any = self.__wrapped__
        result: R = function(*bound, *call[0], **call[1])
        return result

    def __repr__(self) -> str:
        return f"<graphed {self._name}: {self.graphs!r}>"


class Method:
    """A graphed function that is accessed through an instance, or through its class."""

    def __init__(self, function: Graphed[..., Any], instance: object) -> None:
        self.__func__ = function
        self.__self__ = instance
        self.__doc__ = function.__doc__

    @property
    def graphs(self) -> GraphCache:
        """The cache with the graphs of all instances."""
        return self.__func__.graphs

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        function: Any = self.__func__.__wrapped__
        return function if self.__self__ is None else MethodType(function, self.__self__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or replay the graph of a call like this one: see `GraphCache.run`."""
        if self.__self__ is not None:
            return self.__func__._call((self.__self__,), args, kwargs)
        if not args:
            name = self.__func__._name
            hint = f"call it on an instance, or pass the instance first: {name}(instance, …)"
            raise InputError(f"{name} is a method: it was called without an instance", hint=hint)
        return self.__func__._call(args[:1], args[1:], kwargs)

    def warm(self, calls: Iterable[tuple[Any, ...] | Mapping[str, Any]]) -> None:
        """Warm calls of this instance: see `Graphed.warm`."""
        self.__func__._warm((self._instance(),), calls)

    def warmer(self, _: object) -> NoReturn:
        """Raise `InputError`: a warmer gets a key and cannot know the instance."""
        raise _method_warmer_error(self.__func__._name)

    def invalidate(self) -> None:
        """Forget all calls of this instance or, without an instance, of all instances."""
        self.graphs.invalidate(owner=self.__self__)

    def _instance(self) -> object:
        if self.__self__ is None:
            name = self.__func__._name
            raise InputError(
                f"{name} is a method, and has no instance here",
                hint="warm it on an instance",
            )
        return self.__self__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return repr(self.__func__)


def name_of(function: Any) -> str | None:
    """Return the name of a function as it is defined."""
    name: str | None = getattr(function, "__qualname__", None)
    return name and name.rpartition("<locals>.")[2]


def call_key_text(key: Any) -> str:
    """Return the key of a call as text: the user's key, if the function has one."""
    return stable_repr(key) if key.user_key is None else key_text(key.user_key[0])


def _method_warmer_error(name: str) -> InputError:
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
                f"{name} is {kind}, which returns before its work is done, so it cannot be captured",
                hint="move the work to a plain function, decorate that one, and call it",
            )


_NOT_STEPS = {
    "a coroutine function": inspect.iscoroutinefunction,
    "an asynchronous generator": inspect.isasyncgenfunction,
    "a generator": inspect.isgeneratorfunction,
}


def _require_iterable(calls: Any) -> Iterable[Any]:
    if not isinstance(calls, Iterable):
        raise InputError(f"{calls!r} is not a collection of calls", hint="step.warm([(x, y), …])")
    return calls


def _arguments(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(call, tuple):
        return call, {}
    if isinstance(call, Mapping):
        return (), dict(call)
    hint = "use tuples of arguments, or dicts of named ones: step.warm([(x, y), …])"
    raise InputError(f"{call!r} is not a call to warm", hint=hint)


def _nbytes(call: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Return the bytes of all arrays among the arguments."""
    items = (item for _, item in trees.leaves(call))
    return sum(len(trees.address_range(item)) for item in items)
