"""A capture under way: what becomes part of it, and what it refuses."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from preheat.callsite import CallSite, call_site, caller, format_site
from preheat.devices import base
from preheat.errors import CaptureError, ContextLostError, DeviceError, DriverError
from preheat.graph.foreign import Guests
from preheat.graph.record import Node
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.launch import Gathered, Launch, Loaded
from preheat.runtime.operands import Operand
from preheat.runtime.uses import Uses, add_use
from preheat.runtime.window import Act, Allocator

__all__ = ["MODES", "Capture"]

_INVALIDATED = 901  # how work is refused once a capture is spoilt

E = TypeVar("E", bound=Exception)
MODES = ("thread_local", "global", "relaxed")


class Capture:
    """A capture from its begin to its end, in one thread.

    It has a stream to itself, where nothing else is ever done. `meant` is the one that the caller
    named: work for that becomes part of the capture, too. `allocator` is what new arrays come from. The
    first error inside is kept with the line that caused it: it is what the end reports, whatever went
    wrong because of it later.
    """

    def __init__(
        self,
        context: Context,
        stream: base.Stream | None,
        mode: str,
        graph: object,
        allocator: Allocator | None = None,
    ) -> None:
        self.context, self.mode, self.meant, self.allocator = context, mode, stream, allocator
        self._graph = weakref.ref(graph)
        self.thread, self._owner = threading.get_ident(), threading.current_thread()
        self.over = self._interrupted = False
        self.nodes: list[Node] = []
        self.arrays: dict[Array, None] = {}  # of ours, in order of appearance
        self.uses: dict[Uses, bool] = {}  # of their memory, and True where it is written
        self.foreign: list[Operand] = []
        self.libraries: set[str] = set()
        self.modules: dict[Loaded, None] = {}
        self.first: tuple[str, Exception] | None = None
        self._began = self._last = self._place = call_site()
        self._placed: dict[int, Node] = {}  # by position, what has no name to be known by
        self._opened = self._at_device = False  # whether there is a window, and the device captures
        self.stream = context.lane()
        self.guests = Guests(context.device, self.stream)

    def open(self) -> None:
        """Begin. Whatever goes wrong or is interrupted here, `forsake` undoes it."""
        self.context.captures()
        with self.context.gate:
            self.context.open_window(self)
            self._opened = True
            self.guests.enter()
            try:
                self._at_device = True
                self.stream.begin_capture(self.mode)
            except DeviceError:
                self._at_device = False
                raise

    @property
    def began(self) -> str:
        """The line where it began."""
        return format_site(self._began)

    # Its end

    def end(self) -> base.Graph:
        """What was captured; `CaptureError` where something in it went wrong."""
        if self.thread != threading.get_ident():
            raise CaptureError(
                f"this capture belongs to another thread, which began it at {self.began}",
                hint="end it in the thread that began it",
            )
        try:
            graph = self._end()
        except ContextLostError:
            raise
        except DeviceError as error:
            if self.context.lost is not None:
                raise
            raise self._given_up(error) from (self.first[1] if self.first else error)
        finally:
            self._close()
        try:
            if self.first is not None:
                raise self._given_up(self.first[1]) from self.first[1]
            self._merge(graph)
        except BaseException:
            graph.close()
            raise
        return graph

    def _end(self) -> base.Graph:
        """End the capture at the device, whatever happens to those who took part."""
        try:
            if self.thread == threading.get_ident():
                self.guests.leave()
            self.context.require("capture the graph again: gpu.capture()")
        finally:
            if self.context.lost is None:
                try:
                    graph = self.stream.end_capture()
                    self._at_device = False
                except DeviceError:
                    self._at_device = False
                    raise
        return graph

    def discard(self, because: BaseException) -> None:
        """The body raised: end the capture and drop it; `because` is what comes out of it."""
        self.forsake()
        if self.first is not None and self.first[1] is not because:
            where, error = self.first
            text = str(error).removeprefix(f"{where}: ")
            because.add_note(f"the first error inside this capture was, at {where}: {text}")

    @property
    def forsaken(self) -> bool:
        """Whether nobody is left who could end it: its graph was dropped, or its thread is over."""
        if self._owner is threading.current_thread():
            return self._interrupted or self._graph() is None
        return not self._owner.is_alive()

    def forsake(self) -> None:
        """End it, as far as it had begun, and drop what it gives, valid or not."""
        try:
            if self._at_device:
                self._end().close()
            else:
                self.guests.leave()
        except ContextLostError:
            self._at_device = False  # nor is there anything else
        except DeviceError as error:
            self.note(self._spoilt(error, self._last))
        finally:
            self._close()
            self.let_go()

    def _close(self) -> None:
        """Close the window, unless an interrupt kept the capture from its end: then it is forsaken."""
        if self._at_device and self.context.lost is None:
            self._interrupted = True
            return
        self.over = True
        if self.context.close_window(self) or not self._opened:
            self.context.lanes.append(self.stream)

    def let_go(self) -> None:
        """Let another library's memory go, at a safe point: inside a capture that ends the process."""
        pools = self.guests.claim()
        if pools:
            self.context.garbage.append(partial(_let_go, pools))

    def _given_up(self, error: DeviceError | Exception) -> CaptureError:
        if self.first is not None:
            where, first = self.first
            text = str(first).removeprefix(f"{where}: ")
            return CaptureError(
                f"the capture was given up: {text}", where=where, hint=getattr(first, "hint", None)
            )
        return self._spoilt(error, self._last)

    def _spoilt(self, error: Exception, where: CallSite) -> CaptureError:
        after = "" if where == self._last else f", after {format_site(self._last)}"
        return CaptureError(
            f"a call of another library spoilt the capture{after}: {error}",
            where=format_site(where),
            hint="look behind that line for a synchronisation, an allocation or a copy to the host",
        )

    def _merge(self, graph: base.Graph) -> None:
        """Put other libraries' nodes where they belong among ours, which come in the same order."""
        left = deque(node for node in self.nodes if node.kind == "kernel")
        merged: list[Node] = []
        for at, found in enumerate(graph.nodes()):
            if at in self._placed:
                merged += [self._placed[at]] if self._placed[at] not in merged[-1:] else []
            elif left and found == ("kernel", left[0].entry):
                merged.append(left.popleft())
            else:
                merged.append(Node(found.kind, found.name, foreign=True))
        self.nodes = [*merged, *left]

    # What happens inside: see Window

    def refuse(self, act: Act, stream: base.Stream | None) -> None:
        """Raise where this capture cannot stand `act` in this thread, on `stream` if on one."""
        mine = self.thread == threading.get_ident()
        everywhere = act.unsafe and self.mode == "global"
        passes = act.relaxed and self.mode == "relaxed" if mine else not everywhere
        if passes and stream is not self.stream:
            return
        where = caller()
        if mine:
            raise self.note(CaptureError(f"{act.name} inside a capture", where=where, hint=act.hint))
        raise CaptureError(
            f"{act.name} while another thread captures (since {self.began})", where=where
        )

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Work of ours that becomes part of the capture; its first error is noted with its line."""
        self._place = call_site()
        try:
            yield
        except DriverError as error:
            if error.code != _INVALIDATED:
                self.note(error)
                raise
            raise self.note(self._spoilt(error, self._place)) from error
        except Exception as error:
            self.note(error)
            raise
        self._last = self._place

    def note(self, error: E) -> E:
        """Keep the first error; returns it, so that no frame of its traceback has to hold it."""
        if self.first is None:
            self.first = (getattr(error, "where", None) or caller(), error)
        return error

    def exported(self, array: Array) -> None:
        """Keep an array that another library uses inside the capture."""
        self._use(array, write=True)

    def used(self, gathered: Gathered) -> None:
        """Keep what a call inside the capture uses."""
        self.foreign += gathered.foreign
        self.libraries |= gathered.libraries
        self.arrays |= dict.fromkeys(gathered.arrays.values())
        for uses, write in gathered.uses.items():
            add_use(self.uses, uses, write=write)

    def _use(self, array: Array, *, write: bool) -> None:
        self.arrays[array] = None
        add_use(self.uses, array.buffer.uses, write=write)

    def launched(self, launch: Launch, gathered: Gathered, data: bytes) -> None:
        """Write a launch down."""
        self.used(gathered)
        self.modules[launch.module] = None
        name, given = launch.signature.kernel, (gathered.arrays, data)
        tensors = gathered.foreign
        self.nodes.append(
            Node("kernel", name, self._place, launch=launch, given=given, tensors=tensors)
        )

    def filled(self, array: Array, value: bytes, pieces: int) -> None:
        """Write down that an array is filled."""
        self._use(array, write=True)
        self._put(Node("fill", "fill", self._place, given=({0: array}, value)), pieces)

    def copied(self, target: Array, source: Array) -> None:
        """Write down that an array is copied."""
        self._use(target, write=True)
        self._use(source, write=False)
        given = ({0: target, 1: source}, b"")
        self._put(Node("copy", "copy", self._place, given=given), 1)

    def _put(self, node: Node, pieces: int) -> None:
        self.nodes.append(node)
        end = self.stream.captured()
        self._placed |= dict.fromkeys(range(end - pieces, end), node)


def _let_go(pools: object) -> None:
    """Whoever calls this held the last reference."""
