"""A PTX text that can run: its functions made ready when first needed, wherever it is loaded."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from preheat.devices.emulator import builtin
from preheat.devices.emulator.generate import Code, generate
from preheat.errors import UnsupportedInstructionError
from preheat.toolchain import ptx

__all__ = ["ADDRESS", "Image", "Kernel", "image"]

#: How a variable's first value names another or a function: `name`, `generic(name)+4`, `0xFF00(name)`.
ADDRESS = re.compile(
    r"(?:(0[xX][0-9a-fA-F]+)\s*\()?(?:generic\s*\(\s*)?([A-Za-z_$%][\w$]*)[\s)]*(?:\+\s*(-?\w+))?[\s)]*"
)


class Kernel(NamedTuple):
    """An entry with all it calls, and the layout of its shared memory."""

    functions: dict[str, Code]
    missing: dict[str, UnsupportedInstructionError]  # functions that pointers may lead to, and why not
    shared: dict[str, int]  # offset of each variable
    shared_bytes: int  # without what a launch adds


class Image:
    """The functions of one PTX text. Nothing here depends on addresses: all loads share it."""

    def __init__(self, text: str, *, sanitize: bool = False) -> None:
        self.module, self.sanitize = ptx.parse(text), sanitize
        self.bodies = {f.name: f for f in self.module.functions if f.body is not None}
        self.handles = {name: (1 << 60) + 16 * i for i, name in enumerate(self.bodies, 1)}
        self._code: dict[str, Code] = {}
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        """An entry, ready to run; `UnsupportedInstructionError` names what cannot."""
        if name not in self._kernels:
            functions, missing = self._reachable(name)
            self._kernels[name] = Kernel(functions, missing, *self._shared_layout(functions))
        return self._kernels[name]

    def code(self, name: str) -> Code:
        """One function."""
        if name not in self._code:
            self._code[name] = generate(self.bodies[name], sanitize=self.sanitize)
        return self._code[name]

    def _reachable(self, name: str) -> tuple[dict[str, Code], dict[str, UnsupportedInstructionError]]:
        """A function and all it may call, through pointers too, and what only those lead to in vain."""
        found, missing = self._called(name), dict[str, UnsupportedInstructionError]()
        while any(code.indirect for code in found.values()):
            fresh = set(self._pointed_at(found)) - found.keys() - missing.keys()
            if not fresh:
                break
            for name in sorted(fresh):
                try:
                    found |= self._called(name)
                except UnsupportedInstructionError as error:
                    missing[name] = error
        return found, missing

    def _called(self, name: str) -> dict[str, Code]:
        """A function and all it calls by name."""
        found: dict[str, Code] = {}
        waiting = [name]
        while waiting:
            if (name := waiting.pop()) not in found:
                code = found[name] = self.code(name)
                waiting += (callee for callee in sorted(code.callees) if self._callable(code, callee))
        return found

    def _callable(self, code: Code, callee: str) -> bool:
        """Whether a function is one of ours; `UnsupportedInstructionError` when it is nobody's."""
        if callee not in self.bodies and callee not in builtin.FUNCTIONS:
            op = next(op for op in code.sites if op.mnemonic == "call" and callee in op.text)
            message = f"the emulator does not know the function {callee}"
            raise UnsupportedInstructionError(code.name, message, line=op.line, text=op.text)
        return callee in self.bodies

    def _pointed_at(self, found: dict[str, Code]) -> Iterator[str]:
        for variable in self.module.variables.values():
            named = filter(None, map(ADDRESS.fullmatch, variable.initial))
            yield from (match[2] for match in named if match[2] in self.bodies)
        for code in list(found.values()):
            yield from (name for _, name in code.symbols if name in self.bodies)

    def _shared_layout(self, functions: dict[str, Code]) -> tuple[dict[str, int], int]:
        rows: dict[str, ptx.Variable] = {}
        for code in functions.values():
            own = {
                f"{code.name}.{name}": v for name, v in code.variables.items() if v.space == "shared"
            }
            named = (self.module.variables.get(name) for _, name in code.symbols)
            rows |= own | {v.name: v for v in named if v is not None and v.space == "shared"}
        offsets, top = {}, 0
        for name, variable in rows.items():
            if variable.size:
                offsets[name] = top = -(-top // variable.align) * variable.align
                top += variable.size
        dynamic = {name: variable.align for name, variable in rows.items() if not variable.size}
        step = max(dynamic.values(), default=1)  # what the launch adds has one address for all
        top = -(-top // step) * step
        return offsets | dict.fromkeys(dynamic, top), top


@functools.lru_cache(maxsize=64)
def image(text: str, *, sanitize: bool = False) -> Image:
    """The image of a PTX text, with checks to `sanitize`; `SyntaxFault` when it has no such shape."""
    return Image(text, sanitize=sanitize)
