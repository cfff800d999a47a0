"""Plans: what depends only on the shapes and types of a call of `Ops` is decided once.

A call checks its operands, selects a kernel and a geometry, and launches. All of that but the launch
depends on the shapes, types and libraries of the arrays alone. A repeated call therefore finds a `Plan`
by these, and only what differs from call to call is tested again: the plan tests that no result
overlaps an operand, and the fast function of the launch (`preheat.runtime.fast_launch`) tests element
types, devices, contiguity, captures and the order of streams. If a test fails, nothing was submitted,
and the call takes the complete path, which handles the arrays or says what is wrong. The function for
two operands and one result:

    def planned(plans, name, a0, a1, r0, stream):
        try:
            plan = plans[
                name, a0.dtype, type(a0), a0.shape, type(a1), a1.shape,
                type(r0), None if r0 is None else r0.shape,
                None if stream is None else stream._raw.id,
            ]
            launch = plan.launcher().launch
            address = plan.address
            n0, s0, s1, = plan.sizes
            v0, = plan.values
            p0 = address(a0); p1 = address(a1); q0 = address(r0)
            …
        except UNFIT:
            return None
        …
        try:
            launch(a0, a1, r0, v0)
        except NotPlanned:
            return None
        …
        return r0
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from preheat import native
from preheat.errors import CaptureError
from preheat.gpu import Gpu
from preheat.kernels.op import Op, open_traces
from preheat.kernels.operands import ArraySpec
from preheat.locks import Lock
from preheat.runtime.array import Array
from preheat.runtime.context import Context
from preheat.runtime.fast_launch import can_be_fast, fast_launch
from preheat.runtime.kernel import Kernel
from preheat.runtime.launch import Launch
from preheat.runtime.native_launch import native_launcher
from preheat.runtime.operands import tensor_kind
from preheat.runtime.stream import raw_stream

__all__ = [
    "ADDRESSES", "UNFIT", "Launcher", "NotPlanned", "Plan", "Plans", "Step", "add_plan",
    "address_getter", "functions", "kernel_launcher", "library_of", "new_result",
]  # fmt: skip

#: What the tests of arguments raise for arguments that are not arrays, or are of another library.
UNFIT = (LookupError, AttributeError, TypeError, ValueError, RuntimeError)

_NEVER_SEEN = object()
_MOST_PLANS = 1024  # of one `Ops`
_MOST_LAUNCHERS = 512  # of one kernel
#: How the address of an array is read, by the API of its library, "" for ours.
ADDRESSES: dict[str, Callable[[Any], int]] = {
    "": operator.attrgetter("address"),
    "torch": operator.methodcaller("data_ptr"),
    "cupy": operator.attrgetter("data.ptr"),
}


class NotPlanned(Exception):  # noqa: N818  (It never leaves this package.)
    """A launcher has done nothing, because its arguments need all checks."""


class Launcher:
    """A function that launches prepared work or raises `NotPlanned`. It can be referenced weakly."""

    __slots__ = ("__weakref__", "launch")

    def __init__(self, launch: Callable[..., object]) -> None:
        self.launch = launch


class Plan(NamedTuple):
    """How a call with arrays of certain shapes, types and libraries is launched.

    `launcher` is weak, because what launches keeps a module loaded: `Gpu.trim` unloads it. `values` are
    the arguments after the arrays. `ops` are traced; operands that are not aligned are reported as a
    slow path of those in `reporting`. `sizes` are the bytes of the results and the operands. A result
    may be an operand if `in_place`. `specs` describe the results. A workspace counts as a result.
    """

    launcher: Callable[[], Launcher | None]
    context: Context
    gpu: Gpu
    ops: tuple[Op, ...]
    reporting: tuple[Op, ...]
    values: tuple[Any, ...]
    address: Callable[[Any], int]
    sizes: tuple[int, ...]
    in_place: bool
    specs: tuple[ArraySpec, ...]

    @property
    def usable(self) -> bool:
        """Return False once the kernel was unloaded or the context has ended."""
        return self.launcher() is not None and self.context.lost is None

    def new_result(self, name: str, index: int, stream: object) -> Array | None:
        """Return memory for a result, or None if a capture or a pool of the caller takes part."""
        context = self.context
        if context.lost_or_capturing is not None or context.thread_state.allocator is not None:
            return None
        return new_result(self.gpu, name, self.specs[index], stream)


#: The plans of one `Ops` by key. None stands for a key that was seen once.
Plans = dict[object, Plan | None]


def new_result(gpu: Gpu, name: str, spec: ArraySpec, stream: object) -> Array:
    """Allocate the result `name` of an op."""
    try:
        return gpu.empty(spec.shape, spec.dtype, stream=stream)
    except CaptureError as error:
        argument = name.partition("[")[0]
        error.hint = f"pass {argument}=…, allocated before the capture or from a gpu.pool()"
        raise


def add_plan(plans: Plans, key: object, make: Callable[[], Plan | None]) -> None:
    """Make a plan for a key that is seen again and has no plan that can be used."""
    try:
        known = plans.get(key, _NEVER_SEEN)
    except TypeError:  # Something in the key cannot be hashed.
        return
    if key is None or (isinstance(known, Plan) and known.usable):
        return
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = None if known is _NEVER_SEEN else make()


def library_of(arrays: Sequence[Any]) -> str | None:
    """Return the API of the library of all arrays, "" for ours; None if no plan is possible."""
    found = {"" if isinstance(array, Array) else _api(array) for array in arrays}
    api = found.pop()
    return api if not found and api in ADDRESSES else None


def _api(array: Any) -> str | None:
    kind = tensor_kind(array)
    return None if kind is None or kind.source is None else kind.source.api


def address_getter(arrays: Sequence[Any]) -> Callable[[Any], int] | None:
    """Return the function that returns the address of each array; None if there is no plan."""
    api = library_of(arrays)
    return None if api is None else ADDRESSES[api]


class _PlannedLaunch(Launch):
    """A launch whose fast function raises `NotPlanned` for arguments that do not pass its tests."""

    def run(self, *args: Any, **named: Any) -> None:
        """Raise `NotPlanned`, after preparing the launch in the stream that such arguments choose.

        The fast function takes prepared launches alone, and only the complete path would prepare them.
        """
        del named
        if self.context.lost_or_capturing is None:
            self.prepared(self.choose_stream(args))
        raise NotPlanned


_launchers: weakref.WeakKeyDictionary[Kernel, dict[object, Launcher]] = weakref.WeakKeyDictionary()
_changing = Lock()


class Step(NamedTuple):
    """One launch of a call: its op, and which arguments of the call it takes; None means all.

    `reports_alignment` says that a launch with operands that are not aligned is reported.
    """

    op: Op
    arguments: Callable[..., tuple[Any, ...]] | None = None
    reports_alignment: bool = True

    def pick(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of this launch, given those of the call."""
        return args if self.arguments is None else self.arguments(*args)


def kernel_launcher(
    gpu: Gpu, steps: tuple[Step, ...], stream: object, args: tuple[Any, ...]
) -> Launcher | None:
    """Return the launcher of a call with arguments like `args`, which lives as long as its kernel.

    It is None if every launch needs all checks. The first launch tests its arguments before anything
    is done. The launches after it handle any arguments.
    """
    raw = None if stream is None else raw_stream(gpu._context, stream)
    kernels = [step.op.kernel(gpu) for step in steps]
    geometries = [step.op.geometry(gpu) for step in steps]
    made = [
        kernel._launch(kernel.geometry(**geometry), raw)
        for kernel, geometry in zip(kernels, geometries, strict=True)
    ]
    entries = [(step.op.entry, launch.geometry) for step, launch in zip(steps, made, strict=True)]
    key = (*entries, raw and raw.id, library_of(args[:1]))
    with _changing:
        known = _launchers.setdefault(kernels[0], {})
        if key not in known:
            first = made[0]
            launch = _PlannedLaunch(
                first.context, first.function, first.signature, first.geometry, raw,
                module=first.module, blocking=first.blocking,
            )  # fmt: skip
            if not can_be_fast(launch):
                return None
            functions = [
                _fast(one, step.pick(args))
                for one, step in zip((launch, *made[1:]), steps, strict=True)
            ]
            if len(known) >= _MOST_LAUNCHERS:
                known.clear()
            known[key] = Launcher(_chained(steps, functions))
        return known[key]


def _fast(launch: Launch, args: tuple[Any, ...]) -> Callable[..., None]:
    """Return the fastest function for launches with arguments like `args`."""
    fast = fast_launch(launch, args)
    native_one = None if native.core is None else native_launcher(launch, fast)
    return native_one or fast


def _chained(steps: tuple[Step, ...], functions: list[Callable[..., None]]) -> Callable[..., object]:
    """Return one function that calls all, each with its part of the arguments."""
    if len(steps) == 1 and steps[0].arguments is None:
        return functions[0]
    parts = list(zip(functions, steps, strict=True))

    def launch_all(*args: Any) -> None:
        for function, step in parts:
            function(*step.pick(args))

    return launch_all


# The generated functions


@cache
def functions(
    operands: int, results: int, values: int, *, choice: bool = False, workspace: bool = False
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the function that launches by a plan, and the one that returns the key of a plan.

    Both take the plans, the name of the op, the operands, the results or None for new memory, a stream
    and, with `choice`, one further value on which the plan depends. The first one returns the results,
    or None if the complete path has to be taken. The second one returns None if there is no key.
    `values` is the number of arguments of a launch after the arrays. With `workspace`, there is one
    more array after the results, which is neither returned nor an operand.
    """
    ins = range(operands)
    outs = range(results + workspace)
    arrays = [*(f"a{n}" for n in ins), *(f"r{n}" for n in outs)]
    key = "name, a0.dtype, "
    key += "".join(f"type(a{n}), a{n}.shape, " for n in ins)
    key += "".join(f"type(r{n}), None if r{n} is None else r{n}.shape, " for n in outs)
    key += "None if stream is None else stream._raw.id"
    key += ", type(choice), choice" if choice else ""
    names = ["out"] if results == 1 else [f"out[{n}]" for n in range(results)]
    names += ["workspace"] * workspace
    overlaps = [_OVERLAP.format(r=r, a=a) for r in range(results) for a in ins]
    overlaps += [f"-n{results} < q{results} - p{a} < s{a}" for a in ins] if workspace else []
    overlaps += [f"-n{r} < q{r} - q{other} < n{other}" for r in outs for other in range(r)]
    text = _FUNCTIONS.format(
        parameters=", ".join(["plans", "name", *arrays, "stream", *(["choice"] if choice else ())]),
        key=key,
        sizes="".join(f"n{n}, " for n in outs) + "".join(f"s{n}, " for n in ins),
        operand_addresses="; ".join(f"p{n} = address(a{n})" for n in ins),
        result_addresses="; ".join(_RESULT_ADDRESS.format(n=n, new=_NEW << n) for n in outs),
        missing=" or ".join([*(f"not p{n}" for n in ins), *(f"not q{n}" for n in outs)]),
        overlaps=" or ".join(overlaps),
        new=" or ".join(f"r{n} is None" for n in outs),
        allocations="".join(_ALLOCATION.format(n=n, name=names[n]) for n in outs),
        values="".join(f"v{n}, " for n in range(values)),
        arguments=", ".join([*arrays, *(f"v{n}" for n in range(values))]),
        bits=" | ".join([*(f"p{n}" for n in ins), *(f"q{n}" for n in range(results))]),
        result=", ".join(f"r{n}" for n in range(results)),
    )
    scope: dict[str, Any] = {"UNFIT": UNFIT, "NotPlanned": NotPlanned, "open_traces": open_traces}
    exec(compile(text, f"{__file__}: generated", "exec"), scope)
    return scope["planned"], scope["key"]


# Stands for the address of a result that is allocated later, shifted by the index of the result. It is
# aligned, and far from every other address.
_NEW = 1 << 80
_RESULT_ADDRESS = "q{n} = {new} if r{n} is None else address(r{n})"
# A result may be a whole operand where the plan permits it, and overlap an operand in no other way.
_OVERLAP = "(-n{r} < q{r} - p{a} < s{a} and not (plan.in_place and q{r} == p{a} and n{r} == s{a}))"
_ALLOCATION = """
        if r{n} is None:
            r{n} = plan.new_result("{name}", {n}, stream)
            if r{n} is None:
                return None
"""
_FUNCTIONS = """\
def key({parameters}):
    try:
        return ({key})
    except UNFIT:
        return None

def planned({parameters}):
    try:
        plan = plans[{key}]
        launch = plan.launcher().launch
        address = plan.address
        {sizes}= plan.sizes
        {values}= plan.values
        {operand_addresses}
        {result_addresses}
        if {missing} or {overlaps}:
            return None
    except UNFIT:
        return None
    if {new}:
{allocations}
    try:
        launch({arguments})
    except NotPlanned:
        return None
    for trace in open_traces():
        trace.extend(plan.ops)
    if ({bits}) & 15:
        for op in plan.reporting:
            op.report_misaligned(plan.gpu)
    return {result}
"""
