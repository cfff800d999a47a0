"""Fast launches: one generated Python function for the arguments that most launches have.

Apart from the driver's own call, the cost of a launch is Python code. A repeated launch therefore gets
its own function: one `if` that tests everything that `Launch.run` would test, assignments into the
parameter buffer, and the driver's call. Arguments that fail the test go to `Launch.run`, which handles
them or says what is wrong. The function for saxpy(float, float const*, float*, int):

    def fast_launch(a0=missing, a1=missing, a2=missing, a3=missing, /, *more, **named):
        submit = buffer = None
        try:
            if (
                context.lost_or_capturing is None and not more and not named
                and (type(a0) is float or type(a0) is int)
                and a1.dtype is own0 and (a1.uses.writer is stream or number in a1.uses.readers)
                and a2.dtype is own1 and a2.uses.writer is stream and type(a3) is int
            ):
                pointers, vf, vQ, vi, owner = buffer = take()
                vf[0] = a0; vQ[1] = a1.address; vQ[2] = a2.address; vi[6] = a3
                submit = own_submit
        except Unfit:
            …
        status = submit(pointers, 0)

`uses.writer` is the stream that may use the memory without waiting, and `uses.readers` are the streams
that may read it: see `preheat.runtime.uses`. Tensors of torch and CuPy have a branch each like the one
shown; their launches go to the current stream of the library. In a thread that captures, arrays are not
ordered, because the replay is, and the packed parameters go to `Launch.record`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from preheat.artifact import Parameter
from preheat.errors import PreheatError
from preheat.runtime.arguments import ParamSpec, Signature, new_param_buffer, param_specs
from preheat.runtime.launch import Launch
from preheat.runtime.libraries import LIBRARIES
from preheat.runtime.operands import tensor_kind
from preheat.tracebacks import shorten_traceback

__all__ = ["can_be_fast", "fast_launch"]

_STORABLE = "bBhHiIqQfd"  # struct formats in which a memory view can be assigned


class _Templates(NamedTuple):
    """Templates for the arrays of one library: how they are tested, addressed and submitted.

    `written` tests whether the kernel may write an array in this stream, and `read` whether it may read
    one. `element` tests the element type.
    """

    written: str
    read: str
    element: str
    address: str
    submit: str
    complex: str = ""  # a further test for arrays that may hold complex numbers


_OWN = _Templates(
    "{0}.uses.writer is stream",
    "({0}.uses.writer is stream or number in {0}.uses.readers)",
    "{0}.dtype is {1}",
    "{0}.address",
    "own_submit",
)
# For a launch that becomes part of a capture. It waits for nothing, because the replay is ordered.
# Shared memory is excluded, because another library may use it in another stream of the capture.
_OPEN = (
    "{0}.buffer.context is context and {0}.buffer.open and {0}.uses is {0}.buffer.uses"
    " and not {0}.uses.shared"
)
_RECORDED = _Templates(
    _OPEN,
    _OPEN,
    "{0}.dtype is {1}",
    "{0}.address",
    "",
)
_TORCH = "{0}.get_device() == index and {0}.is_contiguous() and not {0}.is_neg()"
_CUPY = "{0}.data.device_id == index and {0}._c_contiguous"
_CURRENT = "submits[{0}.current(index)]"
# By the API of the library.
_TEMPLATES = {
    "torch": _Templates(
        _TORCH, _TORCH, "{0}.dtype in {1}", "{0}.data_ptr()", _CURRENT, "not {0}.is_conj()"
    ),
    "cupy": _Templates(_CUPY, _CUPY, "{0}.dtype in {1}", "{0}.data.ptr", _CURRENT),
}


def fast_launch(launch: Launch, args: Sequence[Any]) -> Callable[..., None]:
    """Return the function for launches with arguments like `args`, or `launch.run` without one."""
    if not can_be_fast(launch):
        return launch.run
    params = launch.signature.params
    context = launch.context
    stream = launch.stream or context.stream
    used = {kind.library for kind in map(tensor_kind, args) if kind is not None}
    where = context.device.dlpack[0]
    by_name = {
        library.name: library
        for library in LIBRARIES.values()
        if library.device_type == where and library.api in _TEMPLATES
    }
    # The libraries of `args` are tested first.
    names = sorted(["own", *by_name], key=lambda name: name not in used)
    if launch.stream is not None:
        names = ["own"]
    dtypes = [dtype for param in params for dtype in param.dtypes or ()]
    values: dict[str, Any] = {name: by_name[name] for name in names if name in by_name}
    for name in names:
        elements = [by_name[name].elements[each] for each in dtypes] if name in by_name else dtypes
        values |= {f"{name}{n}": element for n, element in enumerate(elements)}
    libraries = tuple((name, by_name[name].api if name in by_name else "") for name in names)
    make = _maker(libraries, params, tuple(values), recording=launch.stream is None)
    new_buffer = functools.partial(_buffer, launch.signature)
    function: Callable[..., None] = make(launch, launch.prepared(stream), stream, new_buffer, **values)
    return function


def can_be_fast(launch: Launch) -> bool:
    """Return True if the fast functions can make such a launch with arguments that fit."""
    order = launch.context.order
    # In a stream of another library, a mark must follow every use of an array: see `Timeline`.
    in_own_stream = launch.stream is None or order.owns(launch.stream)
    return in_own_stream and not launch.blocking and _can_store(launch.signature.parameters)


@functools.lru_cache(maxsize=1024)
def _can_store(parameters: tuple[Parameter, ...]) -> bool:
    for param in param_specs(parameters):
        code = "Q" if param.value is None else param.value.code
        if not (param.pointer or param.value is not None) or code not in _STORABLE:
            return False
    return True


def _buffer(signature: Signature) -> tuple[Any, ...]:
    """Return a parameter buffer as the function uses it: pointers, a view for each format, owner."""
    buffer = new_param_buffer(signature)
    data: Any = buffer.data
    formats = dict.fromkeys(param.format for param in signature.params)
    return (buffer.pointers, *(data.cast(code) for code in formats), buffer)


@functools.lru_cache(maxsize=256)
def _maker(
    libraries: tuple[tuple[str, str], ...],
    params: tuple[ParamSpec, ...],
    values: tuple[str, ...],
    *,
    recording: bool,
) -> Any:
    """Return a maker of functions for such parameters and for arrays of these libraries.

    A library is given as its name and the name of its API, ours as "own" and an empty text. With
    `recording`, the function also records launches with arrays of preheat into captures.
    """
    arguments = [f"a{n}" for n in range(len(params))]
    text = _FUNCTION.format(
        values=", ".join(values),
        parameters="".join(f"{name}=missing, " for name in arguments) + ("/, " if arguments else ""),
        branches="".join(_branch(*each, params, first=each is libraries[0]) for each in libraries),
        record=_record(params) if recording else "",
        given="".join(f"{name}, " for name in arguments),
    )
    scope: dict[str, Any] = {
        "Unfit": (LookupError, AttributeError, TypeError, ValueError, OverflowError, RuntimeError),
        "missing": object(),
        "PreheatError": PreheatError,
        "shorten_traceback": shorten_traceback,
    }
    exec(compile(text, f"{__file__}: generated", "exec"), scope)
    return scope["make"]


def _branch(name: str, api: str, params: Sequence[ParamSpec], *, first: bool) -> str:
    templates = _TEMPLATES[api] if api else _OWN
    conditions = ["context.lost_or_capturing is None", "not more", "not named"]
    if not first:
        conditions.insert(0, "submit is None")
    tests, stores = _tests_and_stores(templates, name, api, params)
    return _BRANCH.format(
        tests=" and ".join(conditions + tests),
        views=_views(params),
        stores=stores,
        submit=templates.submit.format(name),
    )


def _record(params: Sequence[ParamSpec]) -> str:
    if any(param.untyped for param in params):
        return ""  # Only a call shows whether an untyped word is an array.
    tests, stores = _tests_and_stores(_RECORDED, "own", "", params)
    conditions = ["context.lost is None", "capture.graph() is not None", "not capture.interrupted"]
    conditions += ["not more", "not named"]
    return _RECORD.format(
        tests=" and ".join(conditions + tests),
        views=_views(params),
        stores=stores,
        given="".join(f"a{n}, " for n in range(len(params))),
    )


def _views(params: Sequence[ParamSpec]) -> str:
    """Return the names of the views of a parameter buffer, one for each format."""
    return "".join(f"v{code}, " for code in dict.fromkeys(param.format for param in params))


def _tests_and_stores(
    templates: _Templates, name: str, api: str, params: Sequence[ParamSpec]
) -> tuple[list[str], str]:
    """Return expressions that test every argument, and the statements that store them."""
    tests = []
    stores = []
    element = 0
    for position, param in enumerate(params):
        given = f"a{position}"
        elements = [f"{name}{element + n}" for n in range(len(param.dtypes or ()))]
        element += len(elements)
        is_number = _number_test(param, given)
        is_array = _array_test(templates, param, given, elements)
        address = templates.address.format(given)
        test = is_array
        if param.value is not None and not param.pointer:
            address = given
            test = is_number
        elif param.value is not None and not api:  # An untyped word accepts numbers and arrays.
            test = f"({is_number} or {is_array})"
            address = f"{given} if {is_number} else {address}"
        tests.append(test)
        at = param.parameter.offset // param.parameter.size
        stores.append(f"v{param.format}[{at}] = {address}")
    return tests, "; ".join(stores) or "pass"


def _number_test(param: ParamSpec, given: str) -> str:
    if param.value is not None and param.value.real:
        return f"(type({given}) is float or type({given}) is int)"
    kind = "bool" if param.value is not None and param.value.boolean else "int"
    return f"type({given}) is {kind}"


def _array_test(templates: _Templates, param: ParamSpec, given: str, elements: Sequence[str]) -> str:
    """Return an expression that is true when `given` can be used in the stream without waiting."""
    tests = [(templates.written if param.writes else templates.read).format(given)]
    if elements:  # Without them the parameter accepts any type.
        fits = " or ".join(templates.element.format(given, element) for element in elements)
        tests.insert(0, fits if len(elements) == 1 else f"({fits})")
    if templates.complex and (param.dtypes is None or any(each.complex for each in param.dtypes)):
        tests.append(templates.complex.format(given))
    return " and ".join(tests)


_BRANCH = """
        try:
            if {tests}:
                pointers, {views}owner = buffer = take()
                {stores}
                submit = {submit}
        except Unfit:
            if buffer is not None:
                give(buffer)
                buffer = None
"""
_RECORD = """
            capture = thread_state.capture
            if capture is not None:
                try:
                    if {tests}:
                        pointers, {views}owner = buffer = take()
                        {stores}
                except Unfit:
                    if buffer is not None:
                        give(buffer)
                        buffer = None
                if buffer is not None:
                    try:
                        return record(capture, owner, ({given}))
                    except PreheatError as error:
                        shorten_traceback(error)
                        raise
                    finally:
                        give(buffer)
"""
_FUNCTION = """\
def make(launch, own_submit, stream, new_buffer, {values}):
    context, submits, number = launch.context, launch.submits, stream.id
    index = context.device.dlpack[1]
    buffers = [new_buffer()]  # A launch takes one, so that two threads never share it.
    take, give = buffers.pop, buffers.append
    run, record, raise_for_status = launch.run, launch.record, launch.raise_for_status
    thread_state = context.thread_state
    def fast_launch({parameters}*more, **named):
        submit = buffer = None
{branches}
        if submit is None:
{record}
            if not buffers:  # Other threads use them all, or interrupts lost them.
                give(new_buffer())
            try:
                return run(*[a for a in ({given}) if a is not missing], *more, **named)
            except PreheatError as error:
                shorten_traceback(error)
                raise
        try:
            status = submit(pointers, 0)
            give(buffer)
            if status[0]:
                raise_for_status(status)
        except PreheatError as error:
            shorten_traceback(error)
            raise
    return fast_launch
"""
