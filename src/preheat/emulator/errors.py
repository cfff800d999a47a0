"""The errors of the emulator: error codes of a GPU's driver, invalid PTX, unsupported instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from preheat.errors import DriverError, InvalidCodeError, UnsupportedInstructionError

if TYPE_CHECKING:
    from preheat.emulator.decode import Op

__all__ = ["driver_error", "error_of", "invalid_ptx", "unsupported"]

_NAMES = {
    1: ("INVALID_VALUE", "memory of a graph is allocated still, or the capture of an event is over"),
    400: ("INVALID_HANDLE", "there is no such stream"),
    401: ("ILLEGAL_STATE", "the stream is not in a state for this"),
    600: ("NOT_READY", "the event has not happened yet"),
    900: ("STREAM_CAPTURE_UNSUPPORTED", "no capture can hold this"),
    901: ("STREAM_CAPTURE_INVALIDATED", "an earlier call made this capture invalid"),
    902: ("STREAM_CAPTURE_MERGE", "a wait would join two captures"),
    903: ("STREAM_CAPTURE_UNMATCHED", "the capture began in another stream"),
    904: ("STREAM_CAPTURE_UNJOINED", "a stream that was forked from the captured one was not joined"),
    905: ("STREAM_CAPTURE_ISOLATION", "captured work cannot wait for work that is not captured"),
    906: ("STREAM_CAPTURE_IMPLICIT", "the legacy default stream cannot take part in a capture"),
    907: ("CAPTURED_EVENT", "a captured event never happens by itself"),
    908: ("STREAM_CAPTURE_WRONG_THREAD", "another thread began this capture"),
}


def driver_error(call: str, code: int) -> DriverError:
    """Return the error of an emulator call with a code of the driver."""
    return error_of(f"emulator {call}", code)


def error_of(call: str, code: int) -> DriverError:
    """Return the error for a status."""
    name, meaning = _NAMES.get(code, ("ERROR", "the emulator gives no such status"))
    return DriverError(call, code, f"EMULATOR_{name}", meaning)


def invalid_ptx(meaning: str) -> InvalidCodeError:
    """Return the error for PTX that cannot be loaded."""
    return InvalidCodeError("emulator load", 200, "EMULATOR_INVALID_PTX", meaning)


# Unsupported instructions: what and where they are, and what to do instead

_COVERAGE = "`preheat emulate --coverage FILE` lists the instructions that are not supported"


class _Family(NamedTuple):
    name: str
    prefixes: tuple[str, ...]  # Of the opcodes in this category.
    instead: str


_FAMILIES = (
    _Family("textures", ("tex.", "tld4.", "txq.", "istypep."), "read global memory"),
    _Family("surfaces", ("suld.", "sust.", "sured.", "suq."), "read and write global memory"),
    _Family(
        "tensor copies",
        ("cp.async.bulk.tensor", "cp.async.bulk.prefetch.tensor", "cp.reduce.async.", "tensormap."),
        "use cp.async, cp.async.bulk, or loads and stores",
    ),
    _Family(
        "tensor-core instructions",
        ("wmma.", "mma.", "wgmma.", "tcgen05.", "ldmatrix.", "stmatrix.", "movmatrix."),
        "use fma, mma.sync of f16 or bf16, or dp4a for bytes",
    ),
    _Family(
        "asynchronous stores to other blocks of a cluster",
        ("red.async", "st.async"),
        "use st or red with .shared::cluster, and then mbarrier.arrive or barrier.cluster",
    ),
    _Family("cluster launch control", ("clusterlaunchcontrol.",), "launch one block for each tile"),
)


def unsupported(
    function: str, op: Op, what: str | None = None, *, other_variants: bool = False
) -> UnsupportedInstructionError:
    """Return the error for an operation. `other_variants` is True if its mnemonic is supported."""
    hint = f"run this kernel on a GPU; {_COVERAGE}"
    family = next((family for family in _FAMILIES if op.opcode.startswith(family.prefixes)), None)
    if what is None and family is not None:
        what = f"{family.name}: {op.opcode}"
        hint = f"{family.instead} instead, or run this kernel on a GPU"
    elif what is None and other_variants:
        name = "cp.async" if op.opcode.startswith("cp.async") else op.mnemonic
        what = f"this form of {name}: {op.opcode}"
    message = f"the emulator does not support {what or op.opcode}"
    return UnsupportedInstructionError(function, message, line=op.line, text=op.text, hint=hint)
