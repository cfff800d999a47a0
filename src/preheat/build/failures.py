"""Programs that the compiler rejected, which are not compiled again in the same process."""

from __future__ import annotations

import time
from collections import OrderedDict

from preheat.build.request import Request
from preheat.errors import PreheatError, copy_error
from preheat.model.events import Events

__all__ = ["Failure", "Failures"]

_MOST = 1024


class Failure:
    """A rejected program: the error, how often it was requested, and when it first failed."""

    __slots__ = ("count", "error", "first")

    def __init__(self, error: PreheatError, count: int, first: float) -> None:
        self.error = error
        self.count = count
        self.first = first


class Failures:
    """The rejected programs of this process, by the digest of their request."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.by_digest: OrderedDict[str, Failure] = OrderedDict()

    def remember(self, request: Request, error: PreheatError) -> None:
        """Remember a rejection, unless something other than the program may have caused it."""
        if request.program.may_include or request.program.uncacheable:
            return
        self.by_digest[request.digest] = Failure(error, 1, time.time())
        while len(self.by_digest) > _MOST:
            self.by_digest.popitem(last=False)

    def raise_known(self, request: Request) -> None:
        """Raise the error of an earlier compile of the same request, if there was one."""
        failure = self.by_digest.get(request.digest)
        if failure is None:
            return
        failure.count += 1
        label = request.program.label
        self._events.emit("recall", key=request.digest, program=label, count=failure.count)
        raise copy_error(failure.error, count=failure.count)
