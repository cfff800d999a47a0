"""A PTX text whose functions are compiled when first needed, shared by all loads of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from preheat.emulator import builtin
from preheat.emulator.errors import unsupported
from preheat.emulator.generate import CompiledFunction, generate
from preheat.emulator.memory import align_up
from preheat.emulator.special_registers import RESERVED
from preheat.errors import UnsupportedInstructionError
from preheat.model import ptx

__all__ = ["ADDRESS", "Image", "Kernel", "image"]

#: How an initial value refers to a variable or function: `name`, `generic(name)+4`, `0xFF00(name)`.
ADDRESS = re.compile(
    r"(?:(0[xX][0-9a-fA-F]+)\s*\()?(?:generic\s*\(\s*)?([A-Za-z_$%][\w$]*)[\s)]*(?:\+\s*(-?\w+))?[\s)]*"
)


class Kernel(NamedTuple):
    """An entry with all functions that it calls, and the layout of its shared memory."""

    functions: dict[str, CompiledFunction]
    missing: dict[str, UnsupportedInstructionError]  # Functions that cannot run, and why.
    shared: dict[str, int]  # The offset of each variable.
    shared_bytes: int  # Without dynamic shared memory.
    reserved: int  # The first of those, which are not for variables.


class Image:
    """The functions of one PTX text. They do not depend on addresses, so all loads share them."""

    def __init__(self, text: str, *, sanitize: bool = False) -> None:
        self.module = ptx.parse(text)
        self.sanitize = sanitize
        self.bodies = self.module.bodies
        self.handles = {name: (1 << 60) + 16 * i for i, name in enumerate(self.bodies, 1)}
        self._code: dict[str, CompiledFunction] = {}
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        """Return a compiled entry, or raise `UnsupportedInstructionError`."""
        if name not in self._kernels:
            functions, missing = self._reachable(name)
            special = [name for code in functions.values() for _, name in code.special_slots]
            reserved = RESERVED if any(name.startswith("%reserved_smem") for name in special) else 0
            shared, size = self._shared_layout(functions, reserved)
            self._kernels[name] = Kernel(functions, missing, shared, size, reserved)
        return self._kernels[name]

    def code(self, name: str) -> CompiledFunction:
        """Return one compiled function."""
        if name not in self._code:
            self._code[name] = generate(self.bodies[name], sanitize=self.sanitize)
        return self._code[name]

    def _reachable(
        self, name: str
    ) -> tuple[dict[str, CompiledFunction], dict[str, UnsupportedInstructionError]]:
        """Return a function and all that it may call, also by pointers, and those that cannot run."""
        found = self._find_called(name)
        missing = dict[str, UnsupportedInstructionError]()
        while any(code.has_indirect_calls for code in found.values()):
            fresh = set(self._find_pointed_at(found)) - found.keys() - missing.keys()
            if not fresh:
                break
            for name in sorted(fresh):
                try:
                    found |= self._find_called(name)
                except UnsupportedInstructionError as error:
                    missing[name] = error
        return found, missing

    def _find_called(self, name: str) -> dict[str, CompiledFunction]:
        """Return a function and all functions that it calls by name."""
        found: dict[str, CompiledFunction] = {}
        waiting = [name]
        while waiting:
            if (name := waiting.pop()) not in found:
                code = found[name] = self.code(name)
                waiting += (callee for callee in sorted(code.callees) if self._callable(code, callee))
        return found

    def _callable(self, code: CompiledFunction, callee: str) -> bool:
        """Return whether the module defines a function. Raise if nothing does."""
        if callee not in self.bodies and callee not in builtin.FUNCTIONS:
            op = next(op for op in code.ops if op.mnemonic == "call" and callee in op.text)
            raise unsupported(code.name, op, f"the function {callee}, which this PTX does not define")
        return callee in self.bodies

    def _find_pointed_at(self, found: dict[str, CompiledFunction]) -> Iterator[str]:
        for variable in self.module.variables.values():
            named = filter(None, map(ADDRESS.fullmatch, variable.initial))
            yield from (match[2] for match in named if match[2] in self.bodies)
        for code in list(found.values()):
            yield from (name for _, name in code.symbol_slots if name in self.bodies)

    def _shared_layout(
        self, functions: dict[str, CompiledFunction], reserved: int
    ) -> tuple[dict[str, int], int]:
        """Return the offset of each variable in shared memory, and the total size."""
        variables: dict[str, ptx.Variable] = {}
        for code in functions.values():
            own = {
                f"{code.name}.{name}": v for name, v in code.variables.items() if v.space == "shared"
            }
            named = (self.module.variables.get(name) for _, name in code.symbol_slots)
            variables |= own | {v.name: v for v in named if v is not None and v.space == "shared"}
        offsets = {}
        top = reserved
        for name, variable in variables.items():
            if variable.size:
                offsets[name] = top = align_up(top, variable.align)
                top += variable.size
        dynamic = {name: variable.align for name, variable in variables.items() if not variable.size}
        step = max(dynamic.values(), default=1)  # All dynamic shared arrays have the same address.
        top = align_up(top, step)
        return offsets | dict.fromkeys(dynamic, top), top


@functools.lru_cache(maxsize=64)
def image(text: str, *, sanitize: bool = False) -> Image:
    """Return the image of a PTX text, with checks if `sanitize`, or raise `SyntaxFault`."""
    return Image(text, sanitize=sanitize)
