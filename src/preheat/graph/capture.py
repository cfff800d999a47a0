"""The active capture: what becomes part of the graph, and which operations are refused."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from preheat.devices import base
from preheat.devices.active_capture import Allocator, RecordedLaunch, RefusedOperation
from preheat.devices.array import Array
from preheat.devices.context import Context
from preheat.devices.launch import Launch, LaunchArguments, LoadedModule
from preheat.devices.operands import Operand
from preheat.devices.uses import Uses, add_use
from preheat.errors import CaptureError, ContextLostError, DeviceError, DriverError
from preheat.graph.captured_streams import CapturedStreams, give_back_stream, take_stream
from preheat.graph.libraries import RedirectedLibraries, SharedPool
from preheat.graph.nodes import Node, Record
from preheat.process.callsite import CallSite, call_site, caller, format_site

__all__ = ["MODES", "Capture"]

_CAPTURE_ERRORS = range(900, 910)  # the driver's errors about captures
_INVALIDATED = 901  # the driver's error for work in a capture that is invalid already
_UNJOINED = 904  # its error for a forked stream that the captured one does not wait for

E = TypeVar("E", bound=BaseException)
MODES = ("thread_local", "global", "relaxed")


class Capture:
    """A capture of one thread, from its begin to its end. It implements `ActiveCapture`.

    The captured stream is used for captures only. Work for `requested`, the stream that the caller
    named, is captured as well. New arrays come from `allocator`, and other libraries allocate from
    `shared_pool`, if it is given. The first error inside is kept with the line that caused it, and
    `end` reports that one, not the errors that follow from it. `streams` has the captured stream and
    the streams that were forked from it.
    """

    def __init__(
        self,
        context: Context,
        requested: base.Stream | None,
        mode: str,
        graph: object,
        allocator: Allocator | None = None,
        shared_pool: SharedPool | None = None,
    ) -> None:
        self.context = context
        self.mode = mode
        self.allocator = allocator
        self.graph: Callable[[], object] = weakref.ref(graph)
        self.thread = threading.get_ident()
        self._owner = threading.current_thread()
        self.over = self.interrupted = False
        self.records: list[Record] = []
        self.after: list[tuple[int, ...]] | None = None  # see `RecordedWork`
        self._num_other_nodes = 0  # nodes of fills and copies
        self.arrays: dict[Array, None] = {}  # arrays of preheat, in order of appearance
        self.uses: dict[Uses, bool] = {}  # the uses of their memory, with True for a write
        self.foreign: dict[tuple[int, int, int], Operand] = {}
        self.libraries: set[str] = set()
        self.modules: dict[LoadedModule, None] = {}
        self.first_error: tuple[str, BaseException] | None = None
        self._began = self.last_site = self._place = call_site()
        self._placed: dict[int, Node] = {}  # fills and copies, which have no name, by position
        self._opened = False  # True once the context lists the capture
        self._at_device = False  # True while the device captures
        self._shared_pool = shared_pool
        self.stream = take_stream(context) if shared_pool is None else shared_pool.stream
        self.streams = CapturedStreams(context, self.stream, requested, self._began)
        self.libraries_inside = RedirectedLibraries(context.device, self.stream, shared_pool)

    def open(self) -> None:
        """Begin the capture. If this fails or is interrupted, `abort` undoes what was done."""
        self.context.active_captures()
        if self._shared_pool is not None and self.thread not in self.context.captures_by_thread:
            self._shared_pool.begin_turn(self.streams.token)
        with self.context.capture_lock:
            self.context.add_capture(self)
            self._opened = True
            self.libraries_inside.enter()
            try:
                self._at_device = True
                self.stream.begin_capture(self.mode)
            except DeviceError:
                self._at_device = False
                raise

    @property
    def began(self) -> str:
        """The line of the program where the capture began."""
        return format_site(self._began)

    # Its end

    def end(self) -> base.Graph:
        """End the capture and return the graph; `CaptureError` reports the first error inside."""
        if self.thread != threading.get_ident():
            raise CaptureError(
                f"this capture belongs to another thread, which began it at {self.began}",
                hint="end it in the thread that began it",
            )
        try:
            self._join_streams()
            graph = self._end()
        except ContextLostError:
            raise
        except DeviceError as error:
            if self.context.lost is not None:
                raise
            raise self._failure(error) from (self.first_error[1] if self.first_error else error)
        finally:
            self._close()
        try:
            if self.first_error is not None:
                raise self._failure(self.first_error[1]) from self.first_error[1]
            launches = [record for record in self.records if isinstance(record, tuple)]
            self._merge(graph, launches)
            self._collect_uses(launches)
        except BaseException:
            graph.close()
            raise
        return graph

    def _end(self) -> base.Graph:
        """End the capture at the device, even if a library that took part raises."""
        try:
            if self.thread == threading.get_ident():
                self.libraries_inside.leave()
            self.context.require_alive("capture the graph again: gpu.capture()")
        except BaseException:
            if self.context.lost is None:
                self._end_at_device().close()
            raise
        return self._end_at_device()

    def _join_streams(self) -> None:
        """Join the forked streams of preheat.

        The errors for one that the program did not join, and for one that cannot be joined, are
        remembered, because the device has to end the capture nevertheless.
        """
        for branch in self.streams.unjoined():
            error = CaptureError(
                f"{branch.title} was forked from the captured stream and is not joined",
                where=format_site(branch.site),
                hint="join it before the end of the capture: gpu.wait(stream)",
            )
            self.remember_error(error)
        for branch in self.streams.forked:
            try:
                self.streams.join(branch)
            except DeviceError as fault:
                text = f"{branch.title} cannot be joined at the end of the capture: {fault}"
                self.remember_error(CaptureError(text, where=format_site(branch.site)))

    def _end_at_device(self) -> base.Graph:
        try:
            graph = self.stream.end_capture()
        except DeviceError:
            self._at_device = False
            raise
        self._at_device = False
        return graph

    def discard(self, because: BaseException) -> None:
        """Abort the capture because its body raised `because`."""
        self.abort()
        if self.first_error is not None and self.first_error[1] is not because:
            where, error = self.first_error
            text = str(error).removeprefix(f"{where}: ")
            because.add_note(f"the first error inside this capture was, at {where}: {text}")

    @property
    def abandoned(self) -> bool:
        """True if nothing can end the capture: its graph was dropped, or its thread has ended."""
        if self._owner is threading.current_thread():
            return self.interrupted or self.graph() is None
        return not self._owner.is_alive()

    def abort(self) -> None:
        """Undo a partly begun capture and discard its graph."""
        try:
            if self._at_device:
                self._end().close()
            else:
                self.libraries_inside.leave()
        except ContextLostError:
            self._at_device = False  # A lost context has no captures.
        except DeviceError as error:
            if not _is_unjoined(error):  # An aborted capture need not be joined.
                self.remember_error(self._invalidated(error, self.last_site))
        finally:
            self._close()
            self.release_pools()

    def _close(self) -> None:
        """Close the capture, or mark it abandoned if an interrupt kept the device from ending it."""
        if self._at_device and self.context.lost is None:
            self.interrupted = True
            return
        self.over = True
        if self.context.remove_capture(self) or not self._opened:
            self.streams.close()
            if self._shared_pool is None:
                give_back_stream(self.context, self.stream)
        if self._shared_pool is not None:
            self._shared_pool.end_turn(self.streams.token)

    def release_pools(self) -> None:
        """Release memory of other libraries at a safe point.

        Inside a capture, this would end the process.
        """
        pools = self.libraries_inside.take_pools()
        if pools:
            self.context.deferred_cleanups.append(partial(_release, pools))

    def _failure(self, error: BaseException) -> CaptureError:
        if self.first_error is not None:
            where, first = self.first_error
            text = str(first).removeprefix(f"{where}: ") or type(first).__name__
            return CaptureError(
                f"the capture failed: {text}", where=where, hint=getattr(first, "hint", None)
            )
        return self._invalidated(error, self.last_site)

    def _invalidated(self, error: BaseException, where: CallSite) -> CaptureError:
        if _is_unjoined(error):
            return CaptureError(
                f"another library forked a stream from the captured one and did not join it: {error}",
                where=format_site(where),
                hint="join it before the end of the capture, in torch by "
                "torch.cuda.current_stream().wait_stream(side)",
            )
        if isinstance(error, DriverError) and error.code not in _CAPTURE_ERRORS:
            return CaptureError(f"the capture cannot be ended: {error}", where=format_site(where))
        after = "" if where == self.last_site else f", after {format_site(self.last_site)}"
        return CaptureError(
            f"a call of another library invalidated the capture{after}: {error}",
            where=format_site(where),
            hint="look after that line for a synchronisation, an allocation or a copy to the host",
        )

    def _merge(self, graph: base.Graph, launches: Sequence[RecordedLaunch]) -> None:
        """Insert the nodes of other libraries among ours. The device lists all nodes in order."""
        left = deque(launches)
        ours_alone = graph.num_nodes() == len(left) + self._num_other_nodes
        if ours_alone and self.streams.single:
            return
        merged: list[Record] = []
        positions: list[int] = []  # in `merged`, of each node of the device
        for at, driver_node in enumerate(graph.nodes()):
            if at in self._placed:
                merged += [self._placed[at]] if self._placed[at] not in merged[-1:] else []
            elif left and driver_node == ("kernel", left[0][0].function.name):
                merged.append(left.popleft())
            else:
                merged.append(Node(driver_node.kind, driver_node.name, foreign=True))
            positions.append(len(merged) - 1)
        self.records = [*merged, *left]
        self.after = _merge_dependencies(graph.dependencies(), positions, len(self.records))

    def _collect_uses(self, launches: Sequence[RecordedLaunch]) -> None:
        """Find the arrays of the captured launches, their uses and the modules."""
        distinct = {(launch, args): None for launch, _, args, *_ in launches}
        for launch, args in distinct:
            self.modules[launch.module] = None
            for position, write in launch.signature.memory_positions:
                array = args[position]
                if isinstance(array, Array):
                    self._use(array, write=write)

    # What happens inside

    def refuse(self, operation: RefusedOperation, stream: base.Stream | None) -> None:
        """Raise if this capture does not permit `operation` in this thread, on `stream` if given."""
        mine = self.thread == threading.get_ident()
        if mine:
            permitted = operation.relaxed and self.mode == "relaxed"
        else:
            permitted = not (operation.unsafe and self.mode == "global")
        if permitted and stream is not self.stream:
            return
        where = caller()
        if mine:
            raise self.remember_error(
                CaptureError(f"{operation.name} inside a capture", where=where, hint=operation.hint)
            )
        raise CaptureError(
            f"{operation.name} while another thread captures (since {self.began})", where=where
        )

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Do one piece of work inside the capture, which remembers its place and the first error."""
        self._place = call_site()
        try:
            yield
        except BaseException as error:
            if isinstance(error, DriverError) and error.code == _INVALIDATED:
                raise self.remember_error(self._invalidated(error, self._place)) from error
            # After an interrupt nobody knows whether the work became part of the graph.
            self.remember_error(error)
            raise
        self.last_site = self._place

    def remember_error(self, error: E) -> E:
        """Keep the first error and return it, so that no frame of its traceback has to hold it."""
        if self.first_error is None:
            self.first_error = (getattr(error, "where", None) or caller(), error)
        return error

    # What becomes part of it

    def add_export(self, array: Array) -> None:
        """Keep an array that another library uses inside the capture."""
        self._use(array, write=True)
        self.streams.wait_before_export(array.buffer.uses)

    def add_uses(self, arguments: LaunchArguments) -> None:
        """Keep the operands of a call that became part of the capture."""
        self._add_foreign(arguments)
        self.arrays |= dict.fromkeys(arguments.arrays.values())
        for uses, write in arguments.uses.items():
            add_use(self.uses, uses, write=write)

    def _add_foreign(self, arguments: LaunchArguments) -> None:
        """Keep the memory of other libraries, once for each of their allocations."""
        for operand in arguments.foreign:
            self.foreign.setdefault((operand.start, operand.nbytes, id(operand.owner)), operand)
        self.libraries |= arguments.libraries

    def _use(self, array: Array, *, write: bool) -> None:
        self.arrays[array] = None
        add_use(self.uses, array.buffer.uses, write=write)

    def add_launch(self, launch: Launch, data: bytes, arguments: LaunchArguments) -> None:
        """Add a launch with the packed parameters `data`, and keep its operands."""
        self._add_foreign(arguments)
        args = tuple(map(arguments.arrays.get, range(len(launch.signature.params))))
        self.records.append((launch, data, args, self._place, tuple(arguments.foreign)))

    def add_fill(self, array: Array, value: bytes, pieces: int) -> None:
        """Add a node for filling an array."""
        self._use(array, write=True)
        if pieces:  # An empty array needs no node.
            self._put(Node("fill", "fill", self._place, packed=({0: array}, value)), pieces)

    def add_copy(self, target: Array, source: Array) -> None:
        """Add a node for copying an array."""
        self._use(target, write=True)
        self._use(source, write=False)
        packed = ({0: target, 1: source}, b"")
        self._put(Node("copy", "copy", self._place, packed=packed), 1)

    def _put(self, node: Node, pieces: int) -> None:
        self.records.append(node)
        self._num_other_nodes += pieces
        end = self.stream.num_captured_nodes()
        self._placed |= dict.fromkeys(range(end - pieces, end), node)


def _is_unjoined(error: BaseException) -> bool:
    return isinstance(error, DriverError) and error.code == _UNJOINED


def _merge_dependencies(
    dependencies: Sequence[Sequence[int]], positions: Sequence[int], count: int
) -> list[tuple[int, ...]]:
    """Return the dependencies of `count` records, of which the nodes have these `positions`."""
    merged: list[set[int]] = [set() for _ in range(count)]
    for position, before in zip(positions, dependencies, strict=True):
        merged[position] |= {positions[at] for at in before} - {position}
    return [tuple(sorted(each)) for each in _reduce(merged)]


def _reduce(dependencies: Sequence[set[int]]) -> Sequence[set[int]]:
    """Return the dependencies without those that others imply. A join may add some of these."""
    if all(len(before) < 2 for before in dependencies):
        return dependencies
    ancestors: list[int] = []  # a bit for each earlier node
    reduced: list[set[int]] = []
    for before in dependencies:
        implied = 0
        for at in before:
            implied |= ancestors[at]
        reduced.append({at for at in before if not implied >> at & 1})
        ancestors.append(implied | sum(1 << at for at in before))
    return reduced


def _release(pools: object) -> None:
    """Do nothing: when the call ends, the last reference to the pools is dropped."""
