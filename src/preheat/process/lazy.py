"""What is made when it is first used: attributes of objects, and modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar, overload

from preheat.process.locks import no_fork, wait_before_logging

__all__ = ["LazyModule", "lazy"]

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 - used like `property`
    """A method read as an attribute: computed at the first access and kept in the instance.

    Unlike `functools.cached_property` of Python 3.11, it takes no lock. A forked child could find such
    a lock held by a thread that does not exist in the child. Two threads may both compute the value;
    one is kept.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> T | lazy[T]:
        if instance is None:
            return self
        value: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value


class LazyModule:
    """A module that is imported when one of its attributes is first read.

        if TYPE_CHECKING:
            from preheat.build import refusal
        else:
            refusal = LazyModule("preheat.build.refusal")  # Only a sealed process needs it.

    The import is held back while the process forks. Without that, a child that is forked by another
    thread during the import would wait for the lock of the import for ever. `logs` is for a module that
    makes a logger, such as asyncio.
    """

    __slots__ = ("_logs", "_module", "_name")

    def __init__(self, name: str, *, logs: bool = False) -> None:
        self._name = name
        self._logs = logs
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            with no_fork:
                if self._logs:
                    wait_before_logging()
                self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)
