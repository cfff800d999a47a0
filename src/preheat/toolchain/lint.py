"""Check PTX for mistakes that assemblers report badly, late or not at all."""

from __future__ import annotations

import re

from preheat.errors import PtxError
from preheat.model import ptx

__all__ = ["check"]

#: Special registers. A register declared with such a name hides the special register.
SPECIAL = frozenset(
    "%tid %ntid %laneid %warpid %nwarpid %ctaid %nctaid %smid %nsmid %gridid %clusterid %nclusterid "
    "%cluster_ctaid %cluster_nctaid %cluster_ctarank %cluster_nctarank %is_explicit_cluster "
    "%lanemask_eq %lanemask_le %lanemask_lt %lanemask_ge %lanemask_gt %clock %clock_hi %clock64 "
    "%globaltimer %globaltimer_lo %globaltimer_hi %total_smem_size %aggr_smem_size "
    "%dynamic_smem_size %reserved_smem_offset_begin %reserved_smem_offset_end "
    "%reserved_smem_offset_cap %current_graph_exec".split()
) | {
    name.format(i)
    for name, count in (
        ("%envreg{}", 32),
        ("%pm{}", 8),
        ("%pm{}_64", 8),
        ("%reserved_smem_offset_{}", 2),
    )
    for i in range(count)
}

_ROUNDED = {"rn", "rz", "rm", "rp", "approx", "full"}
_DECLARED = re.compile(r"(%[\w$]+)\s*(?:<\s*(\d{1,9})\s*>)?")


def check(text: str, program: str) -> ptx.Module:
    """Return the parsed module, or raise a `PtxError` with the line of the first violation."""
    lines = text.split("\n")

    def fault(rule: str, line: int, message: str) -> PtxError:
        shown = lines[line - 1] if 0 < line <= len(lines) else ""
        return PtxError(program, rule, message, line, shown)

    if text.startswith("\ufeff"):
        raise fault("bom", 1, "PTX must not start with a byte order mark")
    if not text.strip():
        raise fault("empty", 1, "the PTX text is empty")
    if not text.isascii():
        at = next(i for i, char in enumerate(text) if ord(char) > 127)
        line = text.count("\n", 0, at) + 1
        raise fault("ascii", line, f"PTX must be ASCII, comments too; found {text[at]!r}")
    try:
        module = ptx.parse(text)
    except ptx.SyntaxFault as bad:
        raise fault("syntax", bad.line, str(bad)) from None
    for function in module.functions:
        for statement in function.statements:
            if statement.opcode.startswith(".reg"):  # also `.reg.b32`
                if name := _find_shadowed_name(statement):
                    raise fault("shadow", statement.line, f"{name} hides the special register {name}")
            elif _lacks_rounding(statement.opcode):
                message = f"{statement.opcode} needs a rounding mode, .approx or .full"
                raise fault("rounding", statement.line, message)
    return module


def _find_shadowed_name(declaration: ptx.Statement) -> str | None:
    for name, count in _DECLARED.findall(declaration.text):
        if count:  # `%pm<3>` declares %pm0 to %pm2
            clash = min((s for s in SPECIAL if _is_numbered(s, name, int(count))), default=None)
        else:
            clash = name if name in SPECIAL else None
        if clash:
            return clash
    return None


def _is_numbered(special: str, base: str, count: int) -> bool:
    rest = special.removeprefix(base)
    return special.startswith(base) and rest.isdecimal() and int(rest) < count


def _lacks_rounding(opcode: str) -> bool:
    """Return whether this is a float division, square root or reciprocal without rounding mode."""
    base, *modifiers = opcode.split(".")
    floating = {"f32", "f64"} & set(modifiers)
    return base in ("div", "sqrt", "rcp") and bool(floating) and not _ROUNDED & set(modifiers)
