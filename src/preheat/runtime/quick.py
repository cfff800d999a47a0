"""Launches written out as one Python function, for the arguments most launches have.

What a launch costs beyond the driver's own call is Python, so a launch that is used again gets a
function made for it: one `if` that tests everything `Launch.run` would test, the arguments stored where
the driver reads them, the driver's call. Arguments that fail the test go to `Launch.run`, which either
copes or says what is wrong. The function for saxpy(float, float const*, float*, int):

    def quick(a0=missing, a1=missing, a2=missing, a3=missing, /, *more):
        go = cell = None
        try:
            if (
                context.alert is None and not more and (type(a0) is float or type(a0) is int)
                and a1.tag is own0 and a2.tag is own1 and type(a3) is int
            ):
                pointers, vf, vQ, vi = cell = take()
                vf[0] = a0; vQ[1] = a1.address; vQ[2] = a2.address; vi[6] = a3
                go = submit
        except Unfit:
            …
        status = go(pointers, 0)

Tensors of torch and CuPy have a section each like the one shown: they go to the stream that their
library works in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from preheat.devices.base import ON_HOST
from preheat.dtypes import DType
from preheat.runtime.arguments import Block, Slot, new_block
from preheat.runtime.launch import Launch
from preheat.runtime.operands import LIBRARIES, kind_of

__all__ = ["quick"]

_STORABLE = "bBhHiIqQfd"  # struct formats a memory view can be assigned in


class _Section(NamedTuple):
    """How one kind of array is tested (place, element type), addressed, and sent on its way."""

    place: str
    element: str
    address: str
    submit: str


_SECTIONS = {
    # The tag says it all: alive, on this device, of this type, at home in this stream.
    "own": _Section("{0}.tag[2] is stream", "{0}.tag is {1}", "{0}.address", "submit"),
    # A stream besides the device's own: it must be known to be ordered behind the array's home.
    "second": _Section(
        "({0}.tag[2] is stream or {0}.tag[2] is home and handle in {0}.buffer.behind)",
        "{0}.tag[1] is {1}",
        "{0}.address",
        "submit",
    ),
    "torch": _Section(
        "{0}.get_device() == index",
        "{0}.dtype in {1}",
        "{0}.data_ptr()",
        "submits[torch.current(index)]",
    ),
    "cupy": _Section(
        "{0}.data.device_id == index",
        "{0}.dtype in {1}",
        "{0}.data.ptr",
        "submits[cupy.current(index)]",
    ),
}


def quick(launch: Launch, args: Sequence[Any]) -> Callable[..., None]:
    """The function for launches with arguments like `args`; `launch.run` where there is none."""
    slots, context = launch.signature.slots, launch.context
    stream = launch.stream or context.stream
    # In a stream that is not ours every use of an array needs an event after it: see `Buffer`.
    if launch.blocking or not context.owns(stream) or not all(map(_plain, slots)):
        return launch.run
    given = {kind.library for kind in map(kind_of, args) if kind is not None}
    libraries = LIBRARIES if context.device.dlpack[0] != ON_HOST else {}
    names = sorted(["own", *libraries], key=lambda name: name not in given)  # first what came this time
    if launch.stream is not None:
        names = ["own" if stream is context.stream else "second"]
    dtypes = [dtype for slot in slots for dtype in slot.dtypes or ()]
    values: dict[str, Any] = {name: LIBRARIES[name] for name in names if name in LIBRARIES}
    for name in names:
        rows = enumerate(_elements(launch, name, dtypes))
        values |= {f"{name}{n}": element for n, element in rows}
    make = _maker(tuple(names), slots, tuple(values))
    block = new_block(launch.signature)
    made: Callable[..., None] = make(
        launch, launch.prepared(stream), stream, block, _cell(slots, block), **values
    )
    return made


def _plain(slot: Slot) -> bool:
    code = "Q" if slot.value is None else slot.value.code
    return (slot.pointer or slot.value is not None) and code in _STORABLE


def _elements(launch: Launch, section: str, dtypes: Sequence[DType]) -> list[Any]:
    """What arrays of one kind say when they hold elements of these types."""
    if section in LIBRARIES:
        return [LIBRARIES[section].elements[dtype] for dtype in dtypes]
    tags = launch.context.tags(launch.context.stream)
    return [tags[dtype] for dtype in dtypes] if section == "own" else list(dtypes)


def _cell(slots: Sequence[Slot], block: Block) -> tuple[Any, ...]:
    """A parameter block as the function uses it: the pointers, and one view for each format."""
    data: Any = block.data
    formats = dict.fromkeys(slot.format for slot in slots)
    return (block.pointers, *(data.cast(code) for code in formats))


@functools.lru_cache(maxsize=256)
def _maker(names: tuple[str, ...], slots: tuple[Slot, ...], values: tuple[str, ...]) -> Any:
    """What makes the function for parameters like these and arrays of these kinds."""
    given = [f"a{n}" for n in range(len(slots))]
    text = _FUNCTION.format(
        values=", ".join(values),
        parameters="".join(f"{name}=missing, " for name in given) + ("/, " if given else ""),
        sections="".join(_section(name, slots, first=name == names[0]) for name in names),
        given="".join(f"{name}, " for name in given),
    )
    scope: dict[str, Any] = {
        "Unfit": (LookupError, AttributeError, TypeError, ValueError, OverflowError),
        "missing": object(),
    }
    exec(compile(text, f"{__file__}: generated", "exec"), scope)
    return scope["make"]


def _section(name: str, slots: Sequence[Slot], *, first: bool) -> str:
    section = _SECTIONS[name]
    tests = [*([] if first else ["go is None"]), "context.alert is None", "not more"]
    stores, element = [], 0
    for position, slot in enumerate(slots):
        given = f"a{position}"
        elements = [f"{name}{element + n}" for n in range(len(slot.dtypes or ()))]
        element += len(elements)
        is_number = _number_test(slot, given)
        is_array = _array_test(section, given, elements, whole=name == "own")
        address, test = section.address.format(given), is_array
        if slot.value is not None and not slot.pointer:
            test, address = is_number, given
        elif slot.value is not None and name not in LIBRARIES:  # an untyped word
            test = f"({is_number} or {is_array})"
            address = f"{given} if {is_number} else {address}"
        tests.append(test)
        at = slot.parameter.offset // slot.parameter.size
        stores.append(f"v{slot.format}[{at}] = {address}")
    views = "".join(f"v{code}, " for code in dict.fromkeys(slot.format for slot in slots))
    return _SECTION.format(
        tests=" and ".join(tests), views=views, stores="; ".join(stores) or "pass", go=section.submit
    )


def _number_test(slot: Slot, given: str) -> str:
    if slot.value is not None and slot.value.real:
        return f"(type({given}) is float or type({given}) is int)"
    kind = "bool" if slot.value is not None and slot.value.truth else "int"
    return f"type({given}) is {kind}"


def _array_test(section: _Section, given: str, elements: Sequence[str], *, whole: bool) -> str:
    """Python that tells whether `given` is memory that can go straight into the stream.

    `whole` says that the test of the element type tests the place as well.
    """
    place = section.place.format(given)
    if not elements:  # any type will do
        return place
    fits = " or ".join(section.element.format(given, element) for element in elements)
    fits = fits if len(elements) == 1 else f"({fits})"
    return fits if whole else f"{place} and {fits}"


_SECTION = """
        try:
            if {tests}:
                pointers, {views} = cell = take()
                {stores}
                go = {go}
        except Unfit:
            if cell is not None:
                give(cell)
                cell = None
"""
_FUNCTION = """\
def make(launch, submit, stream, block, cell, {values}):
    context, submits, handle = launch.context, launch.submits, stream.handle
    index, home = context.device.dlpack[1], context.stream
    cells = [cell]  # a launch takes the one there is: two threads never share it
    take, give = cells.pop, cells.append
    run, complain = launch.run, launch.complain
    def quick({parameters}*more):
        go = cell = None
{sections}
        if go is None:
            return run(*[a for a in ({given}) if a is not missing], *more)
        status = go(pointers, 0)
        give(cell)
        if status[0]:
            complain(status)
    quick.block = block  # which owns what the pointers are addresses in
    return quick
"""
