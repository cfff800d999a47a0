"""A capture under way: what becomes part of it, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from preheat.devices import base
from preheat.errors import CaptureError, DeviceError
from preheat.graph import record
from preheat.graph.foreign import Guests
from preheat.graph.record import Argument, Node, caller
from preheat.runtime.array import Array, Scalar
from preheat.runtime.context import Context
from preheat.runtime.launch import Gathered, Launch
from preheat.runtime.window import Act

__all__ = ["MODES", "Capture"]

MODES = ("thread_local", "global", "relaxed")


class Capture:
    """A capture from its begin to its end, in one thread.

    The first error inside is kept with the line that caused it: it is what the end reports, whatever
    went wrong because of it later.
    """

    def __init__(self, context: Context, stream: base.Stream | None, mode: str) -> None:
        self.context, self.mode, self.thread = context, mode, threading.get_ident()
        self._lent = stream is None
        self.stream = context.lane() if stream is None else stream
        self.nodes: list[Node] = []
        self.gathered = Gathered()  # the memory of all launches
        self.keep: list[object] = []  # and everything else that has to live as long as the graph
        self.scalars: list[Scalar] = []
        self.first: tuple[str, Exception] | None = None
        self.began = self._last = caller()
        self._ours: list[tuple[int, Node]] = []  # by their place in the driver's list
        try:
            context.open_window(self)
            self.stream.begin_capture(mode)
            try:
                self.guests = Guests(context.device, self.stream)
            except BaseException:
                self.abandon()
                raise
        except BaseException:
            self._closed()
            raise

    # Its end

    def end(self) -> base.Graph:
        """What was captured; `CaptureError` where something in it went wrong."""
        if self.thread != threading.get_ident():
            raise CaptureError(
                f"this capture belongs to another thread, which began it at {self.began}",
                hint="end it in the thread that began it",
            )
        try:
            self.guests.leave()
            self.context.require()
            graph = self.stream.end_capture()
        except DeviceError as error:
            raise self._given_up(error) from (self.first[1] if self.first else error)
        finally:
            self._closed()
        if self.first is not None:
            graph.close()
            raise self._given_up(self.first[1]) from self.first[1]
        self._merge(graph)
        return graph

    def discard(self, because: BaseException) -> None:
        """The body raised: end the capture and drop it; `because` is what comes out of it."""
        try:
            self.guests.leave()
            self.abandon()
        finally:
            self._closed()
        if self.first is not None and self.first[1] is not because:
            where, error = self.first
            because.add_note(f"the first error inside this capture was, at {where}: {error}")

    def abandon(self) -> None:
        """End the capture at the device and drop what it gives, valid or not."""
        if self.context.lost is not None:
            return
        try:
            self.stream.end_capture().close()
        except DeviceError as error:
            self.note(error)  # an invalid capture says so at its end: it is over all the same

    def _closed(self) -> None:
        self.context.close_window(self)
        if self._lent and self.context.lost is None:
            self.context.lanes.append(self.stream)

    def _given_up(self, error: DeviceError | Exception) -> CaptureError:
        if self.first is not None:
            where, first = self.first
            text = str(first).removeprefix(f"{where}: ")
            return CaptureError(
                f"the capture was given up: {text}", where=where, hint=getattr(first, "hint", None)
            )
        return CaptureError(
            f"the capture was spoilt by a call of another library after this line: {error}",
            where=self._last,
            hint="look for a synchronisation, an allocation or a copy to the host behind that line",
        )

    def _merge(self, graph: base.Graph) -> None:
        """Put other libraries' nodes where they belong among ours."""
        found = graph.nodes()
        ours = dict(self._ours)
        count = sum(1 for _ in self.nodes)
        if len(found) == len(ours) == count:
            return
        merged: list[Node] = []
        for at, node in enumerate(found):
            mine = ours.get(at)
            if mine is None:
                merged.append(Node(node.kind, node.name, foreign=True))
            elif not merged or merged[-1] is not mine:  # one of ours may have become two
                merged.append(mine)
        self.nodes = merged

    # What happens inside: see Window

    def refuse(self, act: Act, stream: base.Stream | None) -> None:
        """Raise where this capture cannot stand `act` in this thread, on `stream` if on one."""
        mine = self.thread == threading.get_ident()
        passes = act.relaxed and self.mode == "relaxed" if mine else not self._everywhere(act)
        if passes and stream is not self.stream:
            return
        where = caller()
        if mine:
            error = CaptureError(f"{act.name} inside a capture", where=where, hint=act.hint)
            self.note(error)
            raise error
        raise CaptureError(
            f"{act.name} while another thread captures (since {self.began})", where=where
        )

    def _everywhere(self, act: Act) -> bool:
        return act.unsafe and self.mode == "global"

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Work of ours that becomes part of the capture; its first error is noted with its line."""
        known = len(self.nodes)
        try:
            before = self.stream.captured()
            yield
            after = self.stream.captured()
        except Exception as error:
            self.note(error)
            raise
        self._last = caller()
        for node in self.nodes[known:]:
            self._ours += [(at, node) for at in range(before, after)]

    def note(self, error: Exception) -> None:
        """Keep the first error."""
        if self.first is None:
            self.first = (caller(), error)

    def exported(self, array: Array) -> None:
        """Keep an array that another library uses inside the capture."""
        self.gathered.buffers.append(array.buffer)

    def launched(self, launch: Launch, gathered: Gathered, data: bytes) -> None:
        """Write a launch down."""
        self.gathered.buffers += gathered.buffers
        self.gathered.foreign += gathered.foreign
        self.gathered.homes += gathered.homes
        self.scalars += [array for array in gathered.arrays.values() if isinstance(array, Scalar)]
        self.keep.append(launch.module)
        arguments = []
        for position, slot in enumerate(launch.signature.slots):
            array = gathered.arrays.get(position)
            if array is not None:
                arguments.append(record.memory(array, slot.title, slot=slot))
            else:
                at, size = slot.parameter.offset, slot.parameter.size
                arguments.append(Argument(slot.title, data[at : at + size], slot))
        node = record.kernel(
            launch.signature.kernel,
            launch.module.artifact,
            launch.function.name,
            launch.geometry,
            arguments,
        )
        self.nodes.append(node)

    def filled(self, array: Array, value: bytes) -> None:
        """Write down that an array is filled."""
        self.gathered.buffers.append(array.buffer)
        given = (record.memory(array), Argument(str(array.dtype), value))
        self.nodes.append(Node("fill", "fill", caller(), arguments=given))

    def copied(self, target: Array, source: Array) -> None:
        """Write down that an array is copied."""
        self.gathered.buffers += [target.buffer, source.buffer]
        given = (record.memory(target), record.memory(source))
        self.nodes.append(Node("copy", "copy", caller(), arguments=given))
