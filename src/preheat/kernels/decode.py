"""The state of a decode loop on the device, so that one captured step serves every position."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

from preheat.devices.kernel import Kernel
from preheat.errors import CaptureError, GraphError, InputError
from preheat.gpu import Gpu
from preheat.graph.replay import Replayer
from preheat.kernels.op import dimension
from preheat.model.tracebacks import short_methods
from preheat.process.callsite import caller

__all__ = ["DecodeKernel", "DecodeState", "Decoded"]

_SOURCE = Path(__file__).with_name("decode.cu")
_INT_MAX = 2**31 - 1
_THREADS = 128


Integers = SupportsIndex | Iterable[SupportsIndex]

#: The states whose `on_device` blocks are open in this thread or task, innermost last.
_on_device: ContextVar[tuple[DecodeState, ...]] = ContextVar("preheat_on_device", default=())


class Decoded(NamedTuple):
    """The values of a decode state, one for each sequence.

    `overrun` counts the calls of `advance` that did not move a sequence because it was at its limit.
    """

    token: tuple[int, ...]
    position: tuple[int, ...]
    length: tuple[int, ...]
    overrun: tuple[int, ...]


@short_methods(without={"by_value", "on_device"})
class DecodeState:
    """Token, position and valid length of each sequence, int32 on the device at fixed addresses.

    `position` is the index of the step and of the cache row that it writes. `length` is one more: the
    number of valid rows. Each state has its own memory. A sequence at the last of `limit` positions
    does not advance: it keeps its token and position, so surplus replays repeat the last step and never
    write beyond the cache. `read()` returns how many there were.

    Args:
        gpu: The device.
        batch: The number of sequences.
        limit: The number of positions.

    Examples:
        >>> state = preheat.DecodeState(gpu, batch=2, limit=100)
        >>> state.set([7, 9], [0, 3])  # one copy
        >>> with gpu.capture() as graph:
        ...     state.advance()  # and before it the kernels of the step
        >>> for _ in range(5):
        ...     graph.replay()  # The host writes nothing.
        >>> state.position.numpy()
        array([5, 8], dtype=int32)
    """

    def __init__(self, gpu: Gpu, batch: int = 1, *, limit: int | None = None) -> None:
        if not isinstance(gpu, Gpu):
            raise InputError(f"{gpu!r} is not a device", hint="DecodeState(preheat.device(…), batch)")
        self.batch = dimension("batch", batch)
        self.limit = _INT_MAX if limit is None else dimension("limit", limit)
        self._advance = gpu.kernel(_SOURCE, "advance")
        self._values = gpu.empty((len(Decoded._fields), self.batch), "int32")
        self.token, self.position, self.length = (self._values[row] for row in range(3))
        self._known: tuple[int, ...] | None = None  # to the host, of a single sequence
        # How often each graph that advances the state had been replayed when the state was set.
        self._replays: list[tuple[weakref.ref[Replayer], int]] = []
        self.set([0] * self.batch, [0] * self.batch)

    def set(self, token: Integers, position: Integers) -> None:
        """Set the token and the position of every sequence with one copy. One sequence takes ints.

        Raises:
            InputError: There are not as many values as sequences, or a position is not below the limit.

        Examples:
            >>> state = preheat.DecodeState(gpu, batch=1, limit=100)
            >>> state.set(7, 3)
            >>> state.length.numpy()
            array([4], dtype=int32)
        """
        tokens = self._each("token", token, -_INT_MAX - 1, _INT_MAX)
        positions = self._each("position", position, 0, self.limit - 1)
        lengths = [at + 1 for at in positions]
        replays = [(weakref.ref(graph), graph.num_replays) for graph in self._advancing()]
        self._values.write([tokens, positions, lengths, [0] * self.batch])
        self._known = (tokens[0], positions[0], lengths[0]) if self.batch == 1 else None
        self._replays = replays

    def advance(self, sampled: Any = None, *, stream: object = None) -> None:
        """Advance every sequence by one position with one launch, and set its token from `sampled`.

        If this is captured, every replay advances the state.

        Args:
            sampled: An int32 array on the device with one token for each sequence. Without it, tokens
                stay.
            stream: The stream of the launch.

        Examples:
            >>> state = preheat.DecodeState(gpu, batch=1, limit=100)
            >>> state.set(7, 3)
            >>> state.advance(gpu.array([42], "int32"))
            >>> state.token.numpy()
            array([42], dtype=int32)
        """
        capture = self._values.buffer.context.active_capture()
        with nullcontext() if capture is None else capture.operation():
            self._check(sampled)
            self._advance.launch(
                self._values, sampled, self.limit, self.batch,
                grid=-(-self.batch // _THREADS), block=_THREADS, stream=stream,
            )  # fmt: skip
        self._known = None

    def _check(self, sampled: Any) -> None:
        shape = getattr(sampled, "shape", None)
        kind = str(getattr(sampled, "dtype", "int32"))
        if shape is not None and math.prod(shape) != self.batch:
            raise InputError(
                f"sampled of shape {tuple(shape)} is not one token for each of {self.batch} sequences"
            )
        if kind.removeprefix("torch.") != "int32":
            raise InputError(f"sampled tokens must be int32, not {kind}", hint="cast them to int32")

    def read(self) -> Decoded:
        """Return the state of every sequence after all work submitted so far.

        Examples:
            >>> state = preheat.DecodeState(gpu, batch=1, limit=100)
            >>> state.set(7, 3)
            >>> decoded = state.read()
        """
        return Decoded(*(tuple(row) for row in self._values.numpy().tolist()))

    @contextmanager
    def on_device(self) -> Iterator[DecodeState]:
        """Make every launch of a `DecodeKernel` inside the block read this state on the device.

        Launches without a `state` use this one. Launches with this state read it on the device whatever
        their `device_state` is, and launches with another state are not affected. Blocks can be nested:
        the innermost one is the default, and each applies to its own state. A block applies to the
        thread or asyncio task that opened it.

        Examples:
            >>> state = preheat.DecodeState(gpu, batch=1, limit=100)
            >>> with gpu.capture() as graph, state.on_device():
            ...     state.advance()  # Launches of a model here need neither `state` nor `device_state`.
        """
        token = _on_device.set((*_on_device.get(), self))
        try:
            yield self
        finally:
            _on_device.reset(token)

    def by_value(self) -> tuple[int, ...]:
        """Return token, position and length of a single sequence, if the host knows them.

        Raises:
            InputError: There are several sequences.
            GraphError: The device has advanced the state, so that the host does not know it.
            CaptureError: A capture is open, and a graph would fix the values.

        Examples:
            >>> state = preheat.DecodeState(gpu, batch=1, limit=100)
            >>> state.set(7, 3)
            >>> state.by_value()
            (7, 3, 4)
        """
        capture = self._values.buffer.context.active_capture()
        if capture is not None:
            with capture.operation():
                raise CaptureError(
                    "a decode state passed by value would be fixed in the graph",
                    where=caller(),
                    hint="capture with device_state=True, or inside `with state.on_device():`",
                )
        if self.batch != 1:
            raise InputError(
                f"only a decode state of one sequence can be passed by value, not one of {self.batch}",
                hint="launch with device_state=True",
            )
        if self._known is None or self._replayed():
            raise GraphError(
                "the host does not know the decode state: "
                "it was advanced on the device, or a graph that advances it was replayed",
                hint="launch with device_state=True, or state.set(token, position) first",
            )
        return self._known

    def close(self) -> None:
        """Free the memory. Graphs that use it become stale. Closing twice is allowed.

        Examples:
            >>> state = preheat.DecodeState(gpu, batch=1, limit=100)
            >>> state.close()
        """
        self._values.close()

    def __repr__(self) -> str:
        limit = "" if self.limit == _INT_MAX else f", limit={self.limit}"
        return f"<DecodeState batch={self.batch}{limit} on {self._values.device}>"

    def _advancing(self) -> list[Replayer]:
        """Return the graphs that advance this state."""
        graphs = [each for each in self._values.buffer.graphs() if isinstance(each, Replayer)]
        return [one for one in graphs if any(self._values in node.arrays for node in one.work.nodes)]

    def _replayed(self) -> bool:
        """Return whether such a graph was replayed since `set`, or was deleted and may have been."""
        return any((graph := ref()) is None or graph.num_replays != n for ref, n in self._replays)

    def _each(self, what: str, given: Any, least: int, limit: int) -> list[int]:
        """Return `given` as a list with one integer for each sequence, or raise."""
        try:
            rows = [operator.index(n) for n in (given if isinstance(given, Iterable) else (given,))]
        except TypeError:
            raise InputError(f"{what} {given!r} is not one integer for each sequence") from None
        if len(rows) != self.batch:
            raise InputError(f"{len(rows)} values of {what} for {self.batch} sequences")
        for n in rows:
            if not least <= n <= limit:
                raise InputError(f"{what} {n} is outside {least} to {limit}")
        return rows


class DecodeKernel:
    """A kernel in two variants: one takes a decode state by value, one reads it on the device.

    After its own arguments, the first kernel takes three ints and the second three arrays: token,
    position and length. Only the second can be captured. The first is for a single sequence whose state
    the host has set.

    Args:
        by_value: The kernel that takes three ints.
        on_device: The kernel that takes three arrays.

    Examples:
        >>> VALUE = 'extern "C" __global__ void v(int* y, int t, int p, int n) { *y = p; }'
        >>> DEVICE = 'extern "C" __global__ void d(int* y, int* t, int* p, int* n) { *y = *p; }'
        >>> rope = preheat.DecodeKernel(gpu.kernel(VALUE, "v"), gpu.kernel(DEVICE, "d"))
        >>> state, y = preheat.DecodeState(gpu, batch=1, limit=8), gpu.zeros(1, "int32")
        >>> state.set(11, 3)
        >>> rope[1, 1](y, state=state)  # on the device
        >>> rope[1, 1](y, state=state, device_state=False)  # by value
        >>> with state.on_device():
        ...     rope[1, 1](y)  # on the device
        >>> y.numpy()
        array([3], dtype=int32)
    """

    def __init__(self, by_value: Kernel, on_device: Kernel) -> None:
        self.by_value = by_value
        self.on_device = on_device

    def __getitem__(self, config: Any) -> Callable[..., None]:
        """Return a function that launches with this grid and block."""
        return partial(self._run, config)

    def _run(
        self,
        config: Any,
        *args: Any,
        state: DecodeState | None = None,
        device_state: bool = True,
        **named: Any,
    ) -> None:
        kernel, more = self._variant(state, device_state)
        kernel[config](*args, *more, **named)

    def launch(
        self, *args: Any, state: DecodeState | None = None, device_state: bool = True, **how: Any
    ) -> None:
        """Launch with the keyword arguments of `Kernel.launch`.

        Args:
            args: The arguments of the kernel before the state.
            state: The state. The default is the innermost `DecodeState.on_device` block's.
            device_state: Read the state on the device. With False, pass it by value.
            how: The keyword arguments of `Kernel.launch`.

        Examples:
            >>> VALUE = 'extern "C" __global__ void v(int* y, int t, int p, int n) { *y = n; }'
            >>> DEVICE = 'extern "C" __global__ void d(int* y, int* t, int* p, int* n) { *y = *n; }'
            >>> rope = preheat.DecodeKernel(gpu.kernel(VALUE, "v"), gpu.kernel(DEVICE, "d"))
            >>> state, y = preheat.DecodeState(gpu, batch=1, limit=8), gpu.zeros(1, "int32")
            >>> rope.launch(y, state=state, grid=1, block=1)
        """
        kernel, more = self._variant(state, device_state)
        kernel.launch(*args, *more, **how)

    def _variant(self, state: DecodeState | None, device_state: bool) -> tuple[Kernel, tuple[Any, ...]]:
        blocks = _on_device.get()
        if state is None and blocks:
            state = blocks[-1]
        if state is None:
            raise InputError(
                f"{self.on_device.name} was launched without a decode state",
                hint="pass state=state, or launch inside `with state.on_device():`",
            )
        if not isinstance(state, DecodeState):
            raise InputError(f"state={state!r} is not a DecodeState")
        if device_state or state in blocks:
            return self.on_device, (state.token, state.position, state.length)
        return self.by_value, state.by_value()

    def __repr__(self) -> str:
        return f"<DecodeKernel {self.by_value.entry.prototype} or {self.on_device.entry.prototype}>"
