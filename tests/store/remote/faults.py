"""What tests of faults have in common: the error of a call, and every call of an engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from preheat.store.remote.engine import Engine, RemoteError
from tests.store.remote.servers import ESCAPED_PASSWORD, PASSWORD

__all__ = ["LARGE", "NAME", "every_call", "fault"]

NAME = "v1/ab/name"
LARGE = bytes(range(256)) * (8 << 10)


def fault(call: Callable[[], object]) -> RemoteError:
    """Return the error of a call. It has one line and no password."""
    with pytest.raises(RemoteError) as raised:
        call()
    message = str(raised.value)
    assert message.isprintable()
    assert PASSWORD not in message
    assert ESCAPED_PASSWORD not in message
    return raised.value


def every_call(engine: Engine) -> list[Callable[[], object]]:
    """Return all calls, for a loop over them."""
    return [
        lambda: engine.get(NAME),
        lambda: engine.put(NAME, b"content"),
        lambda: engine.remove(NAME),
        lambda: engine.exists([NAME]),
        lambda: engine.exists([f"v1/ab/{each}" for each in range(9)]),
        lambda: list(engine.names()),
        lambda: engine.create(NAME, b"content", seconds=60),
        lambda: engine.swap(NAME, b"old", b"new", seconds=60),
        lambda: engine.discard(NAME, b"old"),
    ]
