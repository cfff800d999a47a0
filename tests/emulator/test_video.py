"""Packed arithmetic on halves and bytes: parts that operands choose, on every device."""

from __future__ import annotations

import numpy as np
import pytest

from preheat.errors import UnsupportedInstructionError
from preheat.gpu import Gpu
from tests.emulator.instruction_oracles import VIDEO, clamp, parts
from tests.emulator.support import Machine, entry

# Opcode, mask of the result, parts of either operand; an empty text leaves a choice to its default.
ROWS = (
    ("vadd2.s32.s32.s32.sat", "", "", ""),
    ("vadd2.u32.u32.s32", "h0", "h01", "h32"),
    ("vsub2.s32.u32.s32.add", "h1", "h33", "h00"),
    ("vsub4.u32.u32.u32.sat", "", "", ""),
    ("vsub4.s32.u32.u32.add", "", "", ""),
    ("vavrg4.u32.u32.u32", "b31", "b0123", "b4567"),
    ("vavrg2.s32.s32.s32", "", "h10", "h23"),
    ("vabsdiff4.u32.u32.u32", "", "", ""),
    ("vabsdiff4.u32.u32.u32.add", "", "", ""),
    ("vabsdiff4.s32.s32.s32.add", "b210", "b7700", "b3210"),
    ("vabsdiff2.u32.s32.s32", "", "", ""),
    ("vabsdiff2.s32.s32.s32.sat", "", "", ""),
    ("vmin4.s32.s32.s32", "", "", ""),
    ("vmax2.u32.u32.u32", "h10", "", "h22"),
    ("vset4.u32.u32.ge", "", "", ""),
    ("vset2.s32.s32.lt.add", "h1", "", "h23"),
)


def expected(row: tuple[str, str, str, str], a: int, b: int, c: int) -> int:
    """Return the result by the text of the PTX manual, part by part."""
    opcode, mask, *orders = row
    name, *words = opcode.split(".")
    size = 16 if name.endswith("2") else 8
    count = 32 // size
    defaults = [range(count - 1, -1, -1), range(2 * count - 1, count - 1, -1)]
    kinds = words[:2] if name.startswith("vset") else words[1:3]
    fields = []
    for order, default, kind in zip(orders, defaults, kinds, strict=True):
        both = parts(a, size, kind == "s32") + parts(b, size, kind == "s32")
        digits = [int(digit) for digit in order[1:]] or default
        fields.append([both[digit] for digit in digits][::-1])
    results = []
    for x, y in zip(*fields, strict=True):
        found = int({"lt": x < y, "ge": x >= y}[words[2]]) if "vset" in name else VIDEO[name[:-1]](x, y)
        results.append(clamp(found, f"{words[0][0]}{size}") if "sat" in words else found)
    chosen = [int(digit) for digit in mask[1:]] or range(count)
    if "add" in words:
        return (c + sum(results[i] for i in chosen)) % 2**32
    merged = [results[i] if i in chosen else field for i, field in enumerate(parts(c, size, False))]
    return sum(value % (1 << size) << size * i for i, value in enumerate(merged))


def statement(row: tuple[str, str, str, str]) -> str:
    opcode, *chosen = row
    operands = (f"{r}.{c}" if c else r for r, c in zip(("%r4", "%r1", "%r2"), chosen, strict=True))
    return f"{opcode} {', '.join(operands)}, %r3;"


def test_operands_choose_their_parts_and_results_are_merged(device: Gpu) -> None:
    steps = "\n".join(
        f"{statement(row)} st.global.u32 [%d2+{4 * at}], %r4;" for at, row in enumerate(ROWS)
    )
    text = entry(
        ".param .u64 in, .param .u64 out",
        f"""
        mov.u32 %r9, %tid.x; ld.param.u64 %d1, [in]; ld.param.u64 %d2, [out];
        mad.wide.u32 %d1, %r9, 12, %d1; mad.wide.u32 %d2, %r9, {4 * len(ROWS)}, %d2;
        ld.global.u32 %r1, [%d1]; ld.global.u32 %r2, [%d1+4]; ld.global.u32 %r3, [%d1+8];
        {steps}
        ret;""",
    )
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**32, (96, 3), dtype=np.uint32)
    edges = rng.choice(np.array([0, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000], np.uint32), (32, 3))
    words[:32] = edges | edges[::-1] << np.uint32(16)
    out = device.zeros((96, len(ROWS)), "uint32")
    device.kernel(text, "k")[1, 96](device.array(words), out)
    for at, row in enumerate(ROWS):
        wanted = [expected(row, *numbers) for numbers in words.tolist()]
        assert out.numpy()[:, at].tolist() == wanted, statement(row)


@pytest.mark.parametrize(
    "text",
    ["vadd2.s32.s32.s32 %r1.h2, %r2, %r3, %r4;", "vadd4.s32.s32.s32 %r1, %r2.h10, %r3, %r4;",
     "vadd4.s32.s32.s32 %r1, -%r2, %r3, %r4;", "vadd4.s32.s32.s32 %r1.b01, %r2, %r3, %r4;",
     "vadd2.s32.s32.s32.sat.add %r1, %r2, %r3, %r4;", "vadd4.s32.s32.s32 %r1, %r2, %r3;",
     "vmad.s32.s32.u32 %r1, -%r2.b0, %r3.h1, %r4;"],
)  # fmt: skip
def test_other_forms_are_refused_by_name(text: str) -> None:
    with pytest.raises(UnsupportedInstructionError, match=f"not support .*{text.split()[0]}"):
        Machine(entry("", f"{text} ret;"))(1, 1)
