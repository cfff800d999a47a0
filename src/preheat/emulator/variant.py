"""The variants of instructions: their syntax, and how opcodes match it.

The syntax is NVIDIA's, of the PTX ISA: a modifier in braces is optional, and a name from `MODIFIERS`
stands for one of several modifiers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from preheat.emulator.integer import ArrayFunction

Modifiers = dict[str, str]

BOOL = np.dtype(np.bool_)
U16, U32, U64 = (np.dtype(t) for t in (np.uint16, np.uint32, np.uint64))
S32, S64 = (np.dtype(t) for t in (np.int32, np.int64))
F16, F32, F64 = (np.dtype(t) for t in (np.float16, np.float32, np.float64))
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

#: The modifiers that each name in a syntax stands for.
MODIFIERS: dict[str, tuple[str, ...]] = {
    name: tuple(members.split())
    for name, members in {
        "int": "u16 u32 u64 s16 s32 s64",
        "sint": "s16 s32 s64",
        "uint": "u16 u32 u64",
        "narrow": "u16 s16 u32 s32",
        "word": "u32 s32",
        "dtype": "u32 s32",
        "atype": "u32 s32",
        "btype": "u32 s32",
        "op2": "sat add",
        "f16type": "f16 bf16",
        "long": "u32 u64 s32 s64",
        "bits": "b16 b32 b64",
        "untyped": "b32 b64",
        "logical": "pred b16 b32 b64",
        "any": "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64",
        "to": "u8 u16 u32 u64 s8 s16 s32 s64",
        "from": "u8 u16 u32 u64 s8 s16 s32 s64",
        "int16": "u16 s16",
        "int8": "u8 s8",
        "int16x2": "u16x2 s16x2",
        "float": "f32 f64",
        "half": "f16 f16x2",
        "bfloat16": "bf16 bf16x2",
        "fp8": "e4m3x2 e5m2x2",
        "settype": "u32 s32 f32",
        "settypeh": "f16 u16 s16 u32 s32",
        "settypeb": "bf16 u16 s16 u32 s32",
        "rnd": "rn rz rm rp",
        "rnz": "rn rz",
        "rdir": "rm rp",
        "irnd": "rni rzi rmi rpi",
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

    `run` takes arrays and NumPy scalars of the dtypes in `sources`. It returns one result, or a tuple
    of several, of the dtypes in `results`. It never changes an operand, but may return one. It must run
    under `np.errstate(all="ignore")`. The error of an instruction that is not `exact` is within the
    bound of its variant.
    """

    results: tuple[np.dtype[Any], ...]
    sources: tuple[np.dtype[Any], ...]
    run: ArrayFunction
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Variant:
    """The opcodes of one syntax, what builds their instructions, and the bound of the error, if any."""

    syntax: str
    build: Callable[[Modifiers], Instruction]
    bound: str = ""

    @property
    def mnemonic(self) -> str:
        """The first part of the opcodes: `add` in `add{.rnd}.f64`."""
        return re.split(r"[.{]", self.syntax, maxsplit=1)[0]

    def opcodes(self) -> Iterator[str]:
        """Return every opcode of this variant."""
        choices = (
            (*spellings, *[""] * optional) for _, spellings, optional in _modifier_choices(self.syntax)
        )
        return ("".join((self.mnemonic, *chosen)) for chosen in itertools.product(*choices))

    def modifiers(self, opcode: str) -> Modifiers | None:
        """Return the modifiers of `opcode` by the names in the syntax, or None if it does not match."""
        match = _opcode_pattern(self.syntax).fullmatch(opcode)
        if match is None:
            return None
        names = (name for name, _, _ in _modifier_choices(self.syntax))
        return {
            name: text.lstrip(".") for name, text in zip(names, match.groups(), strict=True) if text
        }


def _modifier_choices(syntax: str) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Yield the name of each modifier, its spellings, and whether it is optional."""
    for brace, name in re.findall(r"(\{?)\.?(\w+(?:\.abs)?|\|)", syntax)[1:]:
        spellings = (
            ("|",) if name == "|" else tuple(f".{member}" for member in MODIFIERS.get(name, (name,)))
        )
        yield name.replace("|", "both").removesuffix(".abs"), spellings, bool(brace)


@cache
def _opcode_pattern(syntax: str) -> re.Pattern[str]:
    pattern = re.split(r"[.{]", syntax, maxsplit=1)[0]
    for _, spellings, optional in _modifier_choices(syntax):
        pattern += f"({'|'.join(map(re.escape, spellings))}){'?' * optional}"
    return re.compile(pattern)
