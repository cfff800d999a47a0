"""An engine in memory, which tests can make slow, dead, full, read-only or lying."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from preheat.store.remote.engine import Engine, ObjectError, RemoteError, TimeLimit

__all__ = ["MemoryEngine", "limited"]

T = TypeVar("T")


class Unlimited(TimeLimit):
    """Calls the engine in the thread of the caller."""

    def call(self, work: Callable[[], T]) -> T:
        return work()

    def iterate(self, work: Callable[[], Iterator[T]]) -> Iterator[T]:
        return work()


class MemoryEngine(Engine):
    """Objects in a dictionary. `before` runs before each call, with its verb and name."""

    def __init__(
        self, *, conditional: bool = True, before: Callable[[str, str], None] | None = None
    ) -> None:
        super().__init__("memory://test", timeout=1.0)
        self.limit = Unlimited(self.name, 1.0)
        self.conditional = conditional
        self.objects: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.before = before
        self.closed = False
        self._lock = threading.Lock()

    def _enter(self, verb: str, name: str = "") -> None:
        if self.closed:
            raise RemoteError("the engine is closed")
        self.calls[verb] += 1
        if self.before is not None:
            self.before(verb, name)

    def _get(self, name: str, limit: int) -> bytes | None:
        self._enter("read", name)
        data = self.objects.get(name)
        if data is not None and len(data) > limit:
            raise ObjectError(f"the object has more than {limit:,} bytes")
        return data

    def _put(self, name: str, data: bytes) -> None:
        self._enter("write", name)
        self.objects[name] = data

    def _remove(self, name: str) -> None:
        self._enter("delete", name)
        self.objects.pop(name, None)

    def _existing(self, names: list[str]) -> set[str]:
        self._enter("existing")
        return {name for name in names if name in self.objects}

    def _groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        yield list(names)

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        self._enter("names", prefix)
        yield [name for name in list(self.objects) if name.startswith(prefix)]

    def _create(self, name: str, data: bytes, seconds: float) -> bool:
        del seconds
        self._enter("create", name)
        with self._lock:
            if name in self.objects:
                return False
            self.objects[name] = data
            return True

    def _swap(self, name: str, old: bytes, new: bytes, seconds: float) -> bool:
        del seconds
        self._enter("swap", name)
        with self._lock:
            if self.objects.get(name) != old:
                return False
            self.objects[name] = new
            return True

    def _discard(self, name: str, old: bytes) -> bool:
        self._enter("discard", name)
        with self._lock:
            if self.objects.get(name) != old:
                return False
            del self.objects[name]
            return True

    def close(self) -> None:
        self.closed = True


def limited(engine: MemoryEngine, timeout: float) -> MemoryEngine:
    """Return the engine with a time limit for its calls, as all others have it."""
    engine.limit = TimeLimit(engine.name, timeout)
    return engine
