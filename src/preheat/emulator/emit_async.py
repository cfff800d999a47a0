"""Emit asynchronous copies and the mbarriers that they arrive on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from preheat.emulator import mbarrier
from preheat.emulator.decode import Immediate, Negated, Op, Operand, Register
from preheat.emulator.integer import choose
from preheat.emulator.writer import BOOL, I64, U32, Writer

__all__ = ["emit_copy", "emit_mbarrier"]

_HINT = r"(?P<hint>\.L2::cache_hint)?"
_SHARED = r"(?P<space>\.shared(?:::cta|::cluster)?)?"
_COPY = re.compile(
    rf"cp\.async\.(?P<cache>ca|cg)\.shared(?:::cta)?\.global{_HINT}(?:\.L2::(?:64|128|256)B)?"
)
_BULK = re.compile(
    r"cp\.async\.bulk\.(?:(?P<inward>shared::cta\.global|shared::cluster\.(?:global|shared::cta))"
    r"\.mbarrier::complete_tx::bytes"
    rf"|global\.shared::cta\.bulk_group){_HINT}"
)
# Copies complete immediately, so groups of them are always complete, and prefetching has no effect.
_NO_EFFECT = re.compile(
    r"cp\.async\.(?:(?:bulk\.)?commit_group|wait_all|(?:bulk\.)?wait_group|bulk\.wait_group\.read"
    r"|bulk\.prefetch\.L2\.global(?:\.L2::cache_hint)?)"
)
_ARRIVE = re.compile(rf"cp\.async\.mbarrier\.arrive(?P<counted>\.noinc)?{_SHARED}\.b64")
_MBARRIER = re.compile(
    r"mbarrier\.(?:(?P<set>init|inval|expect_tx|complete_tx)|(?P<count>pending_count)"
    r"|(?P<arrive>arrive(?:_drop)?)(?P<bytes>\.expect_tx)?(?P<partial>\.noComplete)?"
    r"|(?P<wait>test_wait|try_wait)(?P<parity>\.parity)?)"
    rf"(?:\.(?:release|acquire|relaxed)\.(?:cta|cluster))?{_SHARED}\.b64"
)


def emit_copy(w: Writer, op: Op) -> None:
    """Emit every variant of `cp.async` except tensor copies."""
    if _NO_EFFECT.fullmatch(op.opcode):
        return
    if found := _COPY.fullmatch(op.opcode):
        _copy(w, op, found)
    elif found := _BULK.fullmatch(op.opcode):
        _copy_bulk(w, op, found)
    elif (found := _ARRIVE.fullmatch(op.opcode)) and len(op.operands) == 1:
        # An arrival that was not counted in advance is added to the number that the phase expects.
        arrivals = int(bool(found["counted"]))
        w.lines.append(_call(w, mbarrier.arrive, op.operands[0], found, f"arrivals={arrivals}"))
    else:
        raise w.unsupported()


def _copy(w: Writer, op: Op, found: re.Match[str]) -> None:
    """Emit a copy of 4, 8 or 16 bytes. A fourth operand is the number of bytes to read."""
    target, source, size, *rest = _operands(w, op, found, 3, 4)
    count = int(w.immediate(size, U32)) if isinstance(size, Immediate) else 0
    if count not in ((16,) if found["cache"] == "cg" else (4, 8, 16)):
        raise w.unsupported()
    given = w.constant(np.uint32(count))
    if rest and _is_predicate(rest[0]):
        zero = w.constant(np.uint32(0))
        given = f"{w.constant(choose)}({w.read(rest[0], BOOL)}, {zero}, {given})"
    elif rest:
        given = w.read(rest[0], U32)
    operands = f"{_address(w, target, 'shared')}, {_address(w, source, 'global')}"
    w.lines.append(f"copy_each(G, {operands}, {count}, {given}, {w.site()})")


def _copy_bulk(w: Writer, op: Op, found: re.Match[str]) -> None:
    """Emit a copy of any multiple of 16 bytes."""
    inward = found["inward"] or ""
    target, source, size, *barrier = _operands(w, op, found, 3 + bool(inward), 3 + bool(inward))
    to = ("cluster" if "cluster" in inward else "shared") if inward else "global"
    of = "global" if inward.endswith("global") else "shared"
    operands = f"{_address(w, target, to)}, {_address(w, source, of)}"
    arrival = f", {_address(w, barrier[0], to)}" if barrier else ""
    w.lines.append(f"copy_bulk(G, {operands}, {w.read(size, U32)}, {w.site()}{arrival})")


def _operands(w: Writer, op: Op, found: re.Match[str], least: int, limit: int) -> list[Operand | None]:
    """Return the operands without the cache policy that a hint adds."""
    operands = list(op.operands[:-1] if found["hint"] else op.operands)
    if not least <= len(operands) <= limit:
        raise w.unsupported()
    return operands


def _address(w: Writer, operand: Operand | None, space: str) -> str:
    addresses, offset = w.address(operand, space)
    return f"({addresses}, {offset})"


def _is_predicate(operand: Operand | None) -> bool:
    register = operand.register if isinstance(operand, Negated) else operand
    return isinstance(register, Register) and register.kind == "pred"


def emit_mbarrier(w: Writer, op: Op) -> None:
    """Emit every variant of `mbarrier`."""
    found = _MBARRIER.fullmatch(op.opcode)
    operands = op.operands
    if found is None:
        raise w.unsupported()
    if found["set"] and len(operands) == 1 + (found["set"] != "inval"):
        w.lines.append(_mbarrier_update(w, found, *operands))
    elif found["count"] and len(operands) == 2:
        w.write(
            operands[0], w.assign(f"{w.constant(mbarrier.pending)}({w.read(operands[1], I64)})"), I64
        )
    elif found["arrive"] and len(operands) in (2, 3):
        w.write(operands[0], w.assign(_arrive(w, found, *operands[1:])), I64)
    elif found["wait"] and len(operands) in (3, 4):  # The fourth operand is a time limit.
        parity = f"{w.read(operands[2], U32)} & 1"
        if not found["parity"]:
            parity = f"{w.constant(mbarrier.phase)}({w.read(operands[2], I64)})"
        w.write(operands[0], w.assign(_call(w, mbarrier.waited, operands[1], found, parity)), BOOL)
    else:
        raise w.unsupported()


def _mbarrier_update(
    w: Writer, found: re.Match[str], at: Operand | None, number: Operand | None = None
) -> str:
    if found["set"] == "inval":
        return _call(w, mbarrier.invalidate, at, found)
    if found["set"] == "init":
        addresses, offset = w.address(at, _space(found))
        return f"initialise(G, {addresses}, {offset}, {w.site()}, {w.read(number, U32)})"
    sign = "-" if found["set"] == "complete_tx" else ""
    return _call(w, mbarrier.arrive, at, found, f"transfer={sign}{_signed(w, number)}")


def _arrive(w: Writer, found: re.Match[str], at: Operand | None, number: Operand | None = None) -> str:
    """Return the call for one arrival or for `number`; with `.expect_tx`, `number` counts bytes."""
    arrivals = w.constant(np.int64(1))
    transfer = "0"
    if found["bytes"]:
        transfer = _signed(w, number)
    elif number is not None:
        arrivals = _signed(w, number)
    drop = found["arrive"] == "arrive_drop"
    completes = not found["partial"]
    counted = f"arrivals={arrivals}, transfer={transfer}, drop={drop}, completes={completes}"
    return _call(w, mbarrier.arrive, at, found, counted)


def _call(
    w: Writer, run: Callable[..., Any], at: Operand | None, found: re.Match[str], *arguments: str
) -> str:
    """Return the call of a function that takes the addresses of an mbarrier."""
    addresses, offset = w.address(at, _space(found))
    return f"{w.constant(run)}({', '.join(('G', addresses, str(offset), str(w.site()), *arguments))})"


def _space(found: re.Match[str]) -> str:
    """Return the space of an mbarrier's address: of the block, of the cluster, or generic."""
    return {None: "generic", ".shared::cluster": "cluster"}.get(found["space"], "shared")


def _signed(w: Writer, operand: Operand | None) -> str:
    return f"{w.read(operand, U32)}.astype({w.constant(I64)})"
