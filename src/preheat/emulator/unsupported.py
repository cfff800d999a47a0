"""The error for unsupported instructions: what and where it is, and what to do instead."""

from __future__ import annotations

from typing import NamedTuple

from preheat.emulator.decode import Op
from preheat.errors import UnsupportedInstructionError

__all__ = ["unsupported"]

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
