"""Where a decode step stands, on the device: one captured step serves every position."""

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

from preheat.callsite import caller
from preheat.errors import CaptureError, GraphError, InputError
from preheat.gpu import Gpu
from preheat.graph.replay import Replayer
from preheat.kernels.op import dimension
from preheat.runtime.kernel import Kernel

__all__ = ["DecodeKernel", "DecodeState", "Decoded"]

_SOURCE = Path(__file__).with_name("decode.cu")
_LARGEST = 2**31 - 1  # of an int32
_THREADS = 128


Integers = SupportsIndex | Iterable[SupportsIndex]

#: The states whose `on_device` blocks are open in this thread or task, the innermost one last.
_on_device: ContextVar[tuple[DecodeState, ...]] = ContextVar("preheat_on_device", default=())


class Decoded(NamedTuple):
    """A decode state on the host, one value for each sequence.

    `overrun` counts the advances that a sequence at its limit did not make.
    """

    token: tuple[int, ...]
    position: tuple[int, ...]
    length: tuple[int, ...]
    overrun: tuple[int, ...]


class DecodeState:
    """Token, position and valid length of each sequence, int32 on the device at fixed addresses.

        state = preheat.DecodeState(gpu, batch=3, limit=rows)
        state.set(tokens, positions)          # one copy
        with gpu.capture() as graph:
            step(state, …)                    # kernels read state.token, .position and .length
            state.advance(sampled)            # one launch
        for _ in range(40):
            graph.replay()                    # the host writes nothing

    `position` is the number of the step and the row of a cache it writes, `length` (one more) how many
    rows are valid then. Every state is its owner's alone. A sequence that is at the last of `limit`
    positions does not advance: it stays at that step, token and all, so a replay too many does the
    last step again, never beyond the cache, and `read()` tells how many there were.
    """

    def __init__(self, gpu: Gpu, batch: int = 1, *, limit: int | None = None) -> None:
        if not isinstance(gpu, Gpu):
            raise InputError(f"{gpu!r} is not a device", hint="DecodeState(preheat.device(…), batch)")
        self.batch = dimension("batch", batch)
        self.limit = _LARGEST if limit is None else dimension("limit", limit)
        self._advance = gpu.kernel(_SOURCE, "advance")
        self._values = gpu.empty((len(Decoded._fields), self.batch), "int32")
        self.token, self.position, self.length = (self._values[row] for row in range(3))
        self._known: tuple[int, ...] | None = None  # to the host, of a single sequence
        # How often each graph that advances the state had been replayed when the state was set.
        self._replays: list[tuple[weakref.ref[Replayer], int]] = []
        self.set([0] * self.batch, [0] * self.batch)

    def set(self, token: Integers, position: Integers) -> None:
        """Put every sequence at a token and a position, by one copy; with one sequence, by two ints."""
        tokens = self._each("token", token, -_LARGEST - 1, _LARGEST)
        positions = self._each("position", position, 0, self.limit - 1)
        lengths = [at + 1 for at in positions]
        replays = [(weakref.ref(graph), graph.num_replays) for graph in self._advancing()]
        self._values.write([tokens, positions, lengths, [0] * self.batch])
        self._known = (tokens[0], positions[0], lengths[0]) if self.batch == 1 else None
        self._replays = replays

    def advance(self, sampled: Any = None, *, stream: object = None) -> None:
        """Move every sequence on by one position, to its token in `sampled` if given; one launch.

        `sampled` is int32 on the device, one for each sequence. Captured, every replay advances.
        """
        capture = self._values.buffer.context.active_capture()
        with nullcontext() if capture is None else capture.note_errors():
            self._check(sampled)
            self._advance.launch(
                self._values, sampled, self.limit, self.batch,
                grid=-(-self.batch // _THREADS), block=_THREADS, stream=stream,
            )  # fmt: skip
        self._known = None

    def _check(self, sampled: Any) -> None:
        shape, kind = getattr(sampled, "shape", None), str(getattr(sampled, "dtype", "int32"))
        if shape is not None and math.prod(shape) != self.batch:
            raise InputError(f"{self.batch} sequences cannot go on with tokens of shape {tuple(shape)}")
        if kind.removeprefix("torch.") != "int32":
            raise InputError(f"tokens are int32, not {kind}", hint="cast what was sampled to int32")

    def read(self) -> Decoded:
        """Where every sequence is, after all work submitted so far."""
        return Decoded(*(tuple(row) for row in self._values.numpy().tolist()))

    @contextmanager
    def on_device(self) -> Iterator[DecodeState]:
        """Let every launch of a `DecodeKernel` inside the block read this state on the device.

            with gpu.capture() as graph, state.on_device():
                model.step()                  # its launches need neither `state` nor `device_state`

        Launches that name no state use this one; those that name it read it on the device whatever
        their `device_state` says, and those that name another state are left alone. Blocks nest: the
        innermost one is the default, and each holds for its own state. A block holds for the thread,
        or the asyncio task, that opened it.
        """
        token = _on_device.set((*_on_device.get(), self))
        try:
            yield self
        finally:
            _on_device.reset(token)

    def by_value(self) -> tuple[int, ...]:
        """Token, position and length of the one sequence as the host knows them, for one launch."""
        capture = self._values.buffer.context.active_capture()
        if capture is not None:
            with capture.note_errors():
                raise CaptureError(
                    "a decode state by value would be baked into the graph",
                    where=caller(),
                    hint="capture with device_state=True, or inside `with state.on_device():`",
                )
        if self.batch != 1:
            raise InputError(
                f"a decode state goes by value for one sequence, not for {self.batch}",
                hint="launch with device_state=True",
            )
        if self._known is None or self._replayed():
            raise GraphError(
                "the host does not know the decode state: "
                "it was advanced on the device, or a graph that does so was replayed",
                hint="launch with device_state=True, or state.set(token, position) first",
            )
        return self._known

    def close(self) -> None:
        """Give the memory back; graphs that use it are stale. Twice is fine."""
        self._values.close()

    def __repr__(self) -> str:
        limit = "" if self.limit == _LARGEST else f", limit={self.limit}"
        return f"<DecodeState batch={self.batch}{limit} on {self._values.device}>"

    def _advancing(self) -> list[Replayer]:
        """The graphs that advance this state."""
        graphs = [each for each in self._values.buffer.dependents() if isinstance(each, Replayer)]
        return [one for one in graphs if any(self._values in node.arrays for node in one.work.nodes)]

    def _replayed(self) -> bool:
        """Whether one of them was replayed since the state was set, or is gone and may have been."""
        return any((graph := ref()) is None or graph.num_replays != n for ref, n in self._replays)

    def _each(self, what: str, given: Any, least: int, most: int) -> list[int]:
        """One integer for each sequence."""
        try:
            rows = [operator.index(n) for n in (given if isinstance(given, Iterable) else (given,))]
        except TypeError:
            raise InputError(f"{what} {given!r} is not one integer for each sequence") from None
        if len(rows) != self.batch:
            raise InputError(f"{len(rows)} values of {what} for {self.batch} sequences")
        for n in rows:
            if not least <= n <= most:
                raise InputError(f"{what} {n} is outside {least} to {most}")
        return rows


class DecodeKernel:
    """A kernel in two variants: one takes a decode state by value, one reads it on the device.

        attend = preheat.DecodeKernel(by_value, on_device)
        attend[heads, 128](q, cache, out, state=state)                        # on the device
        attend[heads, 128](q, cache, out, state=state, device_state=False)    # by value
        with state.on_device():
            attend[heads, 128](q, cache, out)                                 # on the device

    Behind its own arguments the first gets three ints, the second three arrays: token, position and
    length. Only the second can be captured; the first is for one sequence, as the host last set it.
    """

    def __init__(self, by_value: Kernel, on_device: Kernel) -> None:
        self.by_value, self.on_device = by_value, on_device

    def __getitem__(self, config: Any) -> Callable[..., None]:
        """The launch with this grid and block."""
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
        """Launch once, with everything that `Kernel.launch` can be told."""
        kernel, more = self._variant(state, device_state)
        kernel.launch(*args, *more, **how)

    def _variant(self, state: DecodeState | None, device_state: bool) -> tuple[Kernel, tuple[Any, ...]]:
        blocks = _on_device.get()
        if state is None and blocks:
            state = blocks[-1]
        if state is None:
            raise InputError(
                f"{self.on_device.name} is launched without a decode state",
                hint="pass state=state, or launch inside `with state.on_device():`",
            )
        if not isinstance(state, DecodeState):
            raise InputError(f"state={state!r} is not a DecodeState")
        if device_state or state in blocks:
            return self.on_device, (state.token, state.position, state.length)
        return self.by_value, state.by_value()

    def __repr__(self) -> str:
        return f"<DecodeKernel {self.by_value.entry} or {self.on_device.entry}>"
