"""The streams of a capture: the captured one, and those that were forked from it.

A stream that waits for an event of the capture is forked, and work for it becomes a branch of the
graph. A stream of preheat is represented by another stream, which only captures use, so that the work
of other threads in it stays outside. A stream that another library forks takes part itself. The work of
the library there is not visible to preheat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

from preheat.devices import base
from preheat.devices.base import LEGACY_STREAMS
from preheat.devices.context import Context
from preheat.devices.libraries import current_streams
from preheat.devices.uses import Uses
from preheat.errors import CaptureError, DeviceError
from preheat.graph.branches import Branch, BranchOrder, Mark
from preheat.process.callsite import CallSite, call_site, caller

__all__ = ["CapturedStreams", "check_stream", "give_back_stream", "take_stream"]

_NO_STREAMS: Mapping[int, str] = {}


class CapturedStreams:
    """The streams of one capture, from its begin to its end.

    `main` is the captured stream, and `requested` the stream that the program named instead, if any.
    `token` identifies the capture.
    """

    def __init__(
        self, context: Context, main: base.Stream, requested: base.Stream | None, site: CallSite
    ) -> None:
        self.token = object()
        self.main = main
        self._context = context
        self._requested = requested
        self._main = Branch(main, self.token, "the captured stream", site)
        self._forked: dict[int, Branch] = {}  # by the id of the stream that the program names
        self._taken: list[base.Stream] = []  # those that represent streams of preheat
        self._order = BranchOrder(self._main)

    # Which streams take part

    @property
    def single(self) -> bool:
        """True while all work of preheat goes to the captured stream."""
        return not self._order.begun

    @property
    def forked(self) -> list[Branch]:
        """The forked streams of preheat."""
        return list(self._forked.values())

    def includes(self, stream: base.Stream | None) -> bool:
        """Return True if work for this stream becomes part of the capture."""
        if stream is None or self._find(stream) is not None:
            return True
        return self._is_captured_here(stream)

    def _is_captured_here(self, stream: base.Stream) -> bool:
        """Return True if another library has forked this stream from the captured one."""
        if stream.handle in LEGACY_STREAMS or self._context.order.owns(stream):
            return False
        number = self.main.capture_id()
        return number is not None and stream.capture_id() == number

    def stream_for(self, stream: base.Stream | None, libraries: Iterable[int]) -> base.Stream:
        """Return the captured stream for work in `stream`, which `includes` accepts.

        Work that names no stream goes to the current stream of the library whose tensors it uses, if
        the library has forked that one, and to the captured stream otherwise. `libraries` has the
        handles of those streams.
        """
        if stream is None:
            first = next(iter(libraries), self.main.handle)
            for branch in self._foreign_branches([first]):
                return branch.stream
        return self._branch(stream).stream

    def _branch(self, stream: base.Stream | None) -> Branch:
        if stream is None:
            return self._main
        return self._find(stream) or self._foreign_branch(stream)

    def _find(self, stream: base.Stream) -> Branch | None:
        """Return the branch of a stream of preheat, given as the program or as the capture has it."""
        if stream.id == self.main.id or (self._requested and stream.id == self._requested.id):
            return self._main
        inside = {branch.stream.id: branch for branch in self._forked.values()}
        return self._forked.get(stream.id) or inside.get(stream.id)

    def _foreign_branch(self, stream: base.Stream) -> Branch:
        # Not stored, because the library may destroy the stream and create another with the same
        # handle.
        return Branch(stream, self.token, "a stream of another library", call_site())

    def _foreign_branches(self, handles: Iterable[int]) -> Iterator[Branch]:
        """Yield the streams among these that another library has forked from the captured one."""
        for handle in handles:
            if handle != self.main.handle:
                stream = self._context.order.adopt(handle)
                if self._is_captured_here(stream):
                    yield self._foreign_branch(stream)

    # Order

    def ordered(
        self, stream: base.Stream, uses: Mapping[Uses, bool], libraries: Mapping[int, str] = _NO_STREAMS
    ) -> AbstractContextManager[None]:
        """Order work in a stream of `stream_for` with uses of its memory in other captured streams.

        `libraries` are the current streams of libraries whose tensors the work uses as well.
        """
        if any(each.exported for each in uses):
            libraries = {**libraries, **current_streams(self._context.device)}
        others = [each for each in self._foreign_branches(libraries) if each.stream.id != stream.id]
        branch = self._branch(stream)
        if others or branch is not self._main:
            self._begin_order()
        return self._order.section(branch, uses, others) if self._order.begun else nullcontext()

    def _begin_order(self) -> None:
        """Record the uses of memory from here on. No launch is fast afterwards."""
        if not self._order.begun:
            self._order.begin()
            self._context.thread_state.capture = None

    def record(self, stream: base.Stream | None) -> Mark:
        """Return the point after the captured work of `stream`, which `includes` accepts."""
        self._begin_order()
        return self._branch(stream).mark()

    def wait(self, stream: base.Stream | None, point: object) -> None:
        """Let later work of `stream` depend on `point`. A stream that is not included is forked."""
        if not isinstance(point, Mark) or point.branch.capture is not self.token:
            raise CaptureError(
                "the event was recorded inside another capture",
                where=caller(),
                hint="wait for an event of the same capture",
            )
        if stream is not None and not self.includes(stream):
            self._fork(stream, point)
        self._branch(stream).wait(point)

    def _fork(self, stream: base.Stream, point: Mark) -> None:
        title = f"<Stream {stream.id} on {self._context.device.name}>"
        inside = take_stream(self._context)
        self._taken.append(inside)
        branch = Branch(inside, self.token, title, call_site())
        branch.wait(point)  # If this fails, the stream takes no part, and has nothing to join.
        self._forked[stream.id] = branch

    def wait_before_export(self, uses: Uses) -> None:
        """Let the current streams of other libraries wait for the earlier uses of memory."""
        if self._order.begun:
            current = current_streams(self._context.device)
            for branch in (self._main, *self._foreign_branches(current)):
                self._order.wait_for_uses(branch, {uses: True})

    # End

    def unjoined(self) -> list[Branch]:
        """Return the forked branches with work that the captured stream does not wait for."""
        return [each for each in self._forked.values() if not self._main.has_seen(each, each.worked)]

    def join(self, branch: Branch) -> None:
        """Let the captured stream wait for a branch, so that a valid capture can end."""
        if self.main.capture_status() == "active":
            self._order.join(branch)

    def close(self) -> None:
        """Release the events and the streams but the captured one, after the end of the capture."""
        for stream in self._taken:
            give_back_stream(self._context, stream)
        if self._order.begun:
            self._context.deferred_cleanups.append(self._order.close)


# Streams that nothing but captures uses: each takes some, and gives them back in the end.


def take_stream(context: Context) -> base.Stream:
    """Return a stream for a capture."""
    try:
        return context.idle_capture_streams.popleft()
    except IndexError:
        return context.order.register_capture_stream(context.device.stream())


def give_back_stream(context: Context, stream: base.Stream) -> None:
    """Keep a stream of `take_stream` for later captures, if its capture has ended."""
    if check_stream(context, stream):
        context.idle_capture_streams.append(stream)


def check_stream(context: Context, stream: base.Stream) -> bool:
    """Return True if no capture has this stream; otherwise destroy it, which ends the capture.

    The end of a capture can fail. A stream that is still captured would let a later capture fail.
    """
    if context.lost is not None:
        return False
    try:
        if stream.capture_status() == "none":
            return True
        context.order.destroy_capture_stream(stream)
    except DeviceError:
        return False  # A stream without a status is not used again either.
    return False
