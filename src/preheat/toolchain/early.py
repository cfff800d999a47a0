"""Requests that are sent to workers before their replies are needed.

While one worker locates the compilers, others can compile, with the compiler that will probably be
found. A reply is used only for a call with exactly the same request, byte for byte. A request names the
compiler and the include directories, so a reply is never used if another compiler was found.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from preheat.locks import Lock
from preheat.toolchain.cancel import Cancellation

if TYPE_CHECKING:
    from preheat.toolchain.frames import Frame
    from preheat.toolchain.process import WorkerProcess

__all__ = ["EarlyRequests"]


class EarlyRequests:
    """Sends requests to workers, one after another to each, and keeps the replies.

    `requests` are functions that return the bytes of a request when it is sent, or None to skip it.
    `is_reusable` says whether a worker can take another request after a reply, and otherwise ends the
    worker. `release` returns workers to the pool. `interpret` may parse a reply ahead of its receiver.
    """

    def __init__(
        self,
        requests: Sequence[Callable[[], bytes | None]],
        timeout: float,
        is_reusable: Callable[[WorkerProcess, Frame], bool],
        release: Callable[[WorkerProcess], None],
        interpret: Callable[[Frame], object],
    ) -> None:
        self._requests = deque(requests)
        self._timeout = timeout
        self._is_reusable = is_reusable
        self._release = release
        self._interpret = interpret
        self._lock = Lock()  # Protects all that follows.
        self._busy: dict[bytes, WorkerProcess] = {}
        self._replies: dict[bytes, Frame] = {}
        self._called: set[bytes] = set()  # Requests that calls made before they were sent.
        self._stop = Cancellation()
        self._polled: dict[int, tuple[bytes, WorkerProcess]] = {}
        self._ready = select.poll()
        self._ready.register(self._stop.descriptor, select.POLLIN)

    # In the thread that sends

    def begin(self, worker: WorkerProcess) -> None:
        """Send the next request to a worker that has just started."""
        self._continue(worker)

    def run(self) -> None:
        """Receive replies and send further requests, until there are none left or `end` is called."""
        try:
            while self._polled and not self._stop.cancelled:
                for descriptor, _ in self._ready.poll():
                    if descriptor in self._polled:
                        self._ready.unregister(descriptor)
                        self._receive(*self._polled.pop(descriptor))
        finally:
            self._polled.clear()

    def _receive(self, request: bytes, worker: WorkerProcess) -> None:
        with self._lock:
            if self._busy.get(request) is not worker:
                return  # A call waits for the reply itself.
            try:
                reply = worker.receive(self._timeout)
            except Exception:  # It stays busy: a call for its reply gets the same error.
                return
            del self._busy[request]
            self._replies[request] = reply
        if self._is_reusable(worker, reply):
            self._continue(worker)
        self._interpret(reply)

    def _continue(self, worker: WorkerProcess) -> None:
        """Send the next request, or give the worker back when there is none."""
        with self._lock:
            request = self._next()
            if request is not None:
                self._busy[request] = worker
                if worker.send(request):  # Otherwise the call that needs the reply sends the rest.
                    self._polled[worker.replies] = request, worker
                    self._ready.register(worker.replies, select.POLLIN)
                return
        self._release(worker)

    def _next(self) -> bytes | None:
        while self._requests and not self._stop.cancelled:
            request = self._requests.popleft()()
            if request is not None and request not in self._called:
                return request
        return None

    # In other threads

    def take(self, request: bytes) -> Frame | WorkerProcess | None:
        """Return the reply to a request, the worker that will send it, or None if it was not sent."""
        with self._lock:
            reply = self._replies.pop(request, None)
            if reply is not None:
                return reply
            self._called.add(request)
            return self._busy.pop(request, None)

    def pause(self, act: Callable[[], object]) -> None:
        """Call `act` while no request is sent."""
        with self._lock:
            act()

    @property
    def waits(self) -> bool:
        """Whether the thread that sends waits for a reply, after which a worker may be free."""
        return bool(self._polled)

    def end(self) -> list[WorkerProcess]:
        """Stop, forget all replies, and return the workers whose replies no call waits for."""
        self._stop.cancel()
        with self._lock:
            workers = list(self._busy.values())
            self._busy.clear()
            self._replies.clear()
            self._requests.clear()
            return workers
