"""Launches written out as one Python function, for the arguments most launches have.

What a launch costs beyond the driver's own call is Python, so a launch that is used again gets a
function made for it: one `if` that tests everything `Launch.run` would test, the arguments stored where
the driver reads them, the driver's call. Arguments that fail the test go to `Launch.run`, which either
copes or says what is wrong. The function for saxpy(float, float const*, float*, int):

    def quick(a0=missing, a1=missing, a2=missing, a3=missing, /, *more, **named):
        go = cell = None
        try:
            if (
                context.alert is None and not more and not named
                and (type(a0) is float or type(a0) is int)
                and a1.dtype is own0 and (a1.uses.stream is stream or number in a1.uses.readers)
                and a2.dtype is own1 and a2.uses.stream is stream and type(a3) is int
            ):
                pointers, vf, vQ, vi, owner = cell = take()
                vf[0] = a0; vQ[1] = a1.address; vQ[2] = a2.address; vi[6] = a3
                go = submit
        except Unfit:
            …
        status = go(pointers, 0)

`uses.stream` is the stream that may use the memory without waiting, and `uses.readers` those that may
read it: see `preheat.runtime.uses`. Tensors of torch and CuPy have a section each like the one shown:
they go to the stream that their library works in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from preheat.runtime.arguments import Signature, Slot, new_block
from preheat.runtime.launch import Launch
from preheat.runtime.libraries import LIBRARIES
from preheat.runtime.operands import kind_of

__all__ = ["quick"]

_STORABLE = "bBhHiIqQfd"  # struct formats a memory view can be assigned in


class _Section(NamedTuple):
    """How one kind of array is tested (place, element type), addressed and submitted.

    `written` tests the place of what the kernel writes, `read` that of what it only reads.
    """

    written: str
    read: str
    element: str
    address: str
    submit: str
    complex: str = ""  # one more test, of what may hold complex numbers


_OWN = _Section(
    "{0}.uses.stream is stream",
    "({0}.uses.stream is stream or number in {0}.uses.readers)",
    "{0}.dtype is {1}",
    "{0}.address",
    "submit",
)
_TORCH = "{0}.get_device() == index and {0}.is_contiguous() and not {0}.is_neg()"
_CUPY = "{0}.data.device_id == index and {0}._c_contiguous"
_CURRENT = "submits[{0}.current(index)]"
# By the way in which tensors of a library are read.
_SECTIONS = {
    "torch": _Section(
        _TORCH, _TORCH, "{0}.dtype in {1}", "{0}.data_ptr()", _CURRENT, "not {0}.is_conj()"
    ),
    "cupy": _Section(_CUPY, _CUPY, "{0}.dtype in {1}", "{0}.data.ptr", _CURRENT),
}


def quick(launch: Launch, args: Sequence[Any]) -> Callable[..., None]:
    """The function for launches with arguments like `args`; `launch.run` where there is none."""
    slots, context = launch.signature.slots, launch.context
    stream = launch.stream or context.stream
    # In a stream that is not ours every use of an array needs a mark after it: see `Timeline`.
    if launch.blocking or not context.order.owns(stream) or not all(map(_plain, slots)):
        return launch.run
    given = {kind.library for kind in map(kind_of, args) if kind is not None}
    place = context.device.dlpack[0]
    known = {lib.name: lib for lib in LIBRARIES.values() if lib.place == place and lib.api in _SECTIONS}
    names = sorted(["own", *known], key=lambda name: name not in given)  # first what came this time
    if launch.stream is not None:
        names = ["own"]
    dtypes = [dtype for slot in slots for dtype in slot.dtypes or ()]
    values: dict[str, Any] = {name: known[name] for name in names if name in known}
    for name in names:
        elements = [known[name].elements[each] for each in dtypes] if name in known else dtypes
        values |= {f"{name}{n}": element for n, element in enumerate(elements)}
    sections = tuple((name, known[name].api if name in known else "") for name in names)
    make = _maker(sections, slots, tuple(values))
    new_cell = functools.partial(_cell, launch.signature)
    made: Callable[..., None] = make(launch, launch.prepared(stream), stream, new_cell, **values)
    return made


def _plain(slot: Slot) -> bool:
    code = "Q" if slot.value is None else slot.value.code
    return (slot.pointer or slot.value is not None) and code in _STORABLE


def _cell(signature: Signature) -> tuple[Any, ...]:
    """A new block as the function uses it: its pointers, a view for each format, and its owner."""
    block = new_block(signature)
    data: Any = block.data
    formats = dict.fromkeys(slot.format for slot in signature.slots)
    return (block.pointers, *(data.cast(code) for code in formats), block)


@functools.lru_cache(maxsize=256)
def _maker(
    sections: tuple[tuple[str, str], ...], slots: tuple[Slot, ...], values: tuple[str, ...]
) -> Any:
    """What makes the function for parameters like these and arrays of these kinds.

    A section is the name of a library, or "own", and how its tensors are read.
    """
    given = [f"a{n}" for n in range(len(slots))]
    text = _FUNCTION.format(
        values=", ".join(values),
        parameters="".join(f"{name}=missing, " for name in given) + ("/, " if given else ""),
        sections="".join(_section(*each, slots, first=each is sections[0]) for each in sections),
        given="".join(f"{name}, " for name in given),
    )
    scope: dict[str, Any] = {
        "Unfit": (LookupError, AttributeError, TypeError, ValueError, OverflowError, RuntimeError),
        "missing": object(),
    }
    exec(compile(text, f"{__file__}: generated", "exec"), scope)
    return scope["make"]


def _section(name: str, api: str, slots: Sequence[Slot], *, first: bool) -> str:
    section = _SECTIONS[api] if api else _OWN
    tests = [*([] if first else ["go is None"]), "context.alert is None", "not more", "not named"]
    stores, element = [], 0
    for position, slot in enumerate(slots):
        given = f"a{position}"
        elements = [f"{name}{element + n}" for n in range(len(slot.dtypes or ()))]
        element += len(elements)
        is_number = _number_test(slot, given)
        is_array = _array_test(section, slot, given, elements)
        address, test = section.address.format(given), is_array
        if slot.value is not None and not slot.pointer:
            test, address = is_number, given
        elif slot.value is not None and not api:  # an untyped word
            test = f"({is_number} or {is_array})"
            address = f"{given} if {is_number} else {address}"
        tests.append(test)
        at = slot.parameter.offset // slot.parameter.size
        stores.append(f"v{slot.format}[{at}] = {address}")
    views = "".join(f"v{code}, " for code in dict.fromkeys(slot.format for slot in slots))
    return _SECTION.format(
        tests=" and ".join(tests),
        views=views,
        stores="; ".join(stores) or "pass",
        go=section.submit.format(name),
    )


def _number_test(slot: Slot, given: str) -> str:
    if slot.value is not None and slot.value.real:
        return f"(type({given}) is float or type({given}) is int)"
    kind = "bool" if slot.value is not None and slot.value.truth else "int"
    return f"type({given}) is {kind}"


def _array_test(section: _Section, slot: Slot, given: str, elements: Sequence[str]) -> str:
    """Python that tells whether `given` is memory that can go straight into the stream."""
    tests = [(section.written if slot.writes else section.read).format(given)]
    if elements:  # Without them any type will do.
        fits = " or ".join(section.element.format(given, element) for element in elements)
        tests.insert(0, fits if len(elements) == 1 else f"({fits})")
    if section.complex and (slot.dtypes is None or any(each.complex for each in slot.dtypes)):
        tests.append(section.complex.format(given))
    return " and ".join(tests)


_SECTION = """
        try:
            if {tests}:
                pointers, {views}owner = cell = take()
                {stores}
                go = {go}
        except Unfit:
            if cell is not None:
                give(cell)
                cell = None
"""
_FUNCTION = """\
def make(launch, submit, stream, new_cell, {values}):
    context, submits, number = launch.context, launch.submits, stream.id
    index = context.device.dlpack[1]
    cells = [new_cell()]  # a launch takes one, so that two threads never share it
    take, give = cells.pop, cells.append
    run, complain = launch.run, launch.complain
    def quick({parameters}*more, **named):
        go = cell = None
{sections}
        if go is None:
            if not cells:  # They are all in use by other threads, or lost to interrupts.
                give(new_cell())
            return run(*[a for a in ({given}) if a is not missing], *more, **named)
        status = go(pointers, 0)
        give(cell)
        if status[0]:
            complain(status)
    return quick
"""
