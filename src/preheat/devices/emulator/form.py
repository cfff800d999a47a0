"""The rows of the instruction table: their syntax and how opcodes match it.

The syntax of a row is that of NVIDIA's PTX ISA: a modifier in braces is optional, and a name from
`CLASSES` stands for one of several modifiers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from preheat.devices.emulator.integer import Run

Modifiers = dict[str, str]

BOOL = np.dtype(np.bool_)
U16, U32, U64 = np.dtype(np.uint16), np.dtype(np.uint32), np.dtype(np.uint64)
S32, S64 = np.dtype(np.int32), np.dtype(np.int64)
F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
TYPES: dict[str, np.dtype[Any]] = {
    **{
        f"{letter}{8 * size}": np.dtype(f"{kind}{size}")
        for letter, kind in ("uu", "si", "bu")
        for size in (1, 2, 4, 8)
    },
    "f16": F16,
    "f32": F32,
    "f64": F64,
    "bf16": U16,
    "f16x2": U32,
    "bf16x2": U32,
    "s16x2": U32,
    "u16x2": U32,
    "f32x2": U64,
    "pred": BOOL,
}

CLASSES: dict[str, tuple[str, ...]] = {
    name: tuple(members.split())
    for name, members in {
        "int": "u16 u32 u64 s16 s32 s64",
        "sint": "s16 s32 s64",
        "uint": "u16 u32 u64",
        "narrow": "u16 s16 u32 s32",
        "word": "u32 s32",
        "wordb": "u32 s32",
        "wordc": "u32 s32",
        "second": "sat add",
        "short": "f16 bf16",
        "long": "u32 u64 s32 s64",
        "bits": "b16 b32 b64",
        "untyped": "b32 b64",
        "logical": "pred b16 b32 b64",
        "any": "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64",
        "to": "u8 u16 u32 u64 s8 s16 s32 s64",
        "from": "u8 u16 u32 u64 s8 s16 s32 s64",
        "packed": "u16 s16",
        "octet": "u8 s8",
        "pair": "u16x2 s16x2",
        "float": "f32 f64",
        "half": "f16 f16x2",
        "bfloat16": "bf16 bf16x2",
        "byte": "e4m3x2 e5m2x2",
        "mark": "u32 s32 f32",
        "markh": "f16 u16 s16 u32 s32",
        "markb": "bf16 u16 s16 u32 s32",
        "rnd": "rn rz rm rp",
        "rnz": "rn rz",
        "integral": "rni rzi rmi rpi",
        "mode": "clamp wrap",
        "part": "lo hi",
        "permutation": "f4e b4e rc8 ecl ecr rc16",
        "cmp": "eq ne lt le gt ge",
        "ucmp": "eq ne lt le gt ge lo ls hi hs",
        "bcmp": "eq ne",
        "fcmp": "eq ne lt le gt ge equ neu ltu leu gtu geu num nan",
        "bool": "and or xor",
        "property": "finite infinite number notanumber normal subnormal",
    }.items()
}


@dataclass(frozen=True, slots=True)
class Instruction:
    """The operand and result types of one opcode, and the function that computes it.

    `run` takes arrays and NumPy scalars of the dtypes in `sources` and returns one result, or a tuple
    of several, of the dtypes in `results`. It never changes an operand, but may return one. It must run
    under `np.errstate(all="ignore")`. An instruction that is not `exact` keeps the bound of its row.
    """

    results: tuple[np.dtype[Any], ...]
    sources: tuple[np.dtype[Any], ...]
    run: Run
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Form:
    """One row: the opcodes of one syntax, what they compute, and the error bound of the result."""

    syntax: str
    meaning: str
    build: Callable[[Modifiers], Instruction]
    bound: str = ""

    @property
    def mnemonic(self) -> str:
        return re.split(r"[.{]", self.syntax, maxsplit=1)[0]

    def opcodes(self) -> Iterator[str]:
        """Return every opcode of this row."""
        choices = ((*spellings, *[""] * optional) for _, spellings, optional in _slots(self.syntax))
        return ("".join((self.mnemonic, *chosen)) for chosen in itertools.product(*choices))

    def modifiers(self, opcode: str) -> Modifiers | None:
        """Return the modifiers of `opcode` by the names in the syntax, or None if it does not match."""
        match = _pattern(self.syntax).fullmatch(opcode)
        if match is None:
            return None
        names = (name for name, _, _ in _slots(self.syntax))
        return {
            name: text.lstrip(".") for name, text in zip(names, match.groups(), strict=True) if text
        }


def _slots(syntax: str) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield name, spellings and optionality of each modifier in order."""
    for brace, name in re.findall(r"(\{?)\.?(\w+(?:\.abs)?|\|)", syntax)[1:]:
        spellings = (
            ("|",) if name == "|" else tuple(f".{member}" for member in CLASSES.get(name, (name,)))
        )
        yield name.replace("|", "both").removesuffix(".abs"), spellings, bool(brace)


@cache
def _pattern(syntax: str) -> re.Pattern[str]:
    pattern = re.split(r"[.{]", syntax, maxsplit=1)[0]
    for _, spellings, optional in _slots(syntax):
        pattern += f"({'|'.join(map(re.escape, spellings))}){'?' * optional}"
    return re.compile(pattern)
