"""Entry points of a compiled program: layout from its PTX, C++ types from its mangled names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from preheat.artifact import EntryPoint, Parameter, Resources
from preheat.lexer import stripped
from preheat.program import Program
from preheat.toolchain import ptx
from preheat.toolchain.text import split_commas

__all__ = ["PROBE", "entry_points", "probe_names", "probes"]

#: Appended to a program: instantiated with a function's type, its mangled name spells that type out,
#: which `extern "C"` names do not.
PROBE = "\ntemplate<class T> __device__ char __preheat_sig;\n"
_PROBE_NAME = "__preheat_sig"
_TOKEN = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|\w+|[(){};]')
_KERNEL = {"__global__", "void"}  # in either order
_ATTRIBUTE = re.compile(r"__\w+__")  # such as `__launch_bounds__`, which takes arguments as well


def probe_names(program: Program) -> tuple[str, ...]:
    """Functions whose C++ types only a probe can tell: `extern "C"` kernels and name expressions.

    Found by reading the source, so it may guess wrong; the caller compiles without probes then.
    """
    found = dict.fromkeys(program.names)
    if "__global__" in program.source and '"C"' in program.source:
        found.update(dict.fromkeys(_extern_c_kernels(program.source)))
    return tuple(found)


def _extern_c_kernels(source: str) -> Iterator[str]:
    """The names of kernels declared `extern "C"`, alone or in a block, in one pass over the tokens."""
    blocks = [False]  # for each block that is open: whether it is inside `extern "C" { … }`
    declaration, depth = _Declaration(), 0
    for token in _TOKEN.findall(stripped(source, strings=True)):
        if token == "(":
            depth += 1
            if depth == 1 and declaration.names_kernel(extern_c=blocks[-1]):
                yield declaration.last
                declaration = _Declaration()  # up to the body nothing else is declared
        elif token == ")":
            depth = max(depth - 1, 0)
        elif token in "{};":
            if token == "{":
                blocks.append(blocks[-1] or declaration.extern_c)
            elif token == "}" and len(blocks) > 1:
                blocks.pop()
            declaration, depth = _Declaration(), 0
        elif depth == 0:
            declaration.add(token)


class _Declaration:
    """What is known of a declaration that has been read up to some word."""

    def __init__(self) -> None:
        self.last = ""
        self.extern_c = False
        self._before: set[str] = set()  # those of `_KERNEL` that came before the last word

    def add(self, word: str) -> None:
        """Read one word more."""
        if self.last in _KERNEL:
            self._before.add(self.last)
        self.extern_c = self.extern_c or (self.last, word) == ("extern", '"C"')
        self.last = word

    def names_kernel(self, *, extern_c: bool) -> bool:
        """Whether the last word, which a parenthesis follows, is the name of an `extern "C"` kernel."""
        known = self._before == _KERNEL and not _ATTRIBUTE.fullmatch(self.last)
        return known and (extern_c or self.extern_c)


def probes(names: Iterable[str]) -> dict[str, str]:
    """The name expression that probes each function."""
    return {name: f"&{_PROBE_NAME}<decltype({name})>" for name in names}


def entry_points(
    module: ptx.Module,
    demangled: Mapping[str, str],
    signatures: Mapping[str, str],
    resources: Mapping[str, Resources],
) -> tuple[EntryPoint, ...]:
    """The kernels of a module.

    `demangled` gives C++ spellings by mangled name, `signatures` demangled probes by entry name.
    """
    found = []
    for name, function in module.entries.items():
        spelled = signatures.get(name) or demangled.get(name)
        types: Sequence[str | None] = _parameter_types(spelled) if spelled else ()
        if len(types) != len(function.params):
            types = [None] * len(function.params)
        found.append(
            EntryPoint(
                name=name,
                parameters=tuple(
                    Parameter(p.offset, p.size, p.align, p.kind, p.pointer, t)
                    for p, t in zip(function.params, types, strict=True)
                ),
                cpp=_qualified_name(demangled[name]) if name in demangled else None,
                resources=resources.get(name),
                directives=function.directives,
            )
        )
    return tuple(found)


def _parameter_types(spelled: str) -> tuple[str, ...]:
    """The types in the last parenthesis of a demangled function or probe; none when it has none."""
    if spelled.startswith(f"{_PROBE_NAME}<"):
        spelled = spelled.removeprefix(f"{_PROBE_NAME}<").removesuffix(">")
    if not spelled.endswith(")"):
        return ()
    inside = spelled[_opening(spelled) + 1 : -1]
    return () if inside in ("", "void") else tuple(split_commas(inside))


def _qualified_name(spelled: str) -> str:
    """`ns::inner` of `ns::inner(int)`, `tk<float, 3>` of `void tk<float, 3>(float*)`."""
    if not spelled.endswith(")"):
        return spelled
    return spelled[: _opening(spelled)].removeprefix("void ").strip()


def _opening(spelled: str) -> int:
    """Where the last parenthesis of a text that ends in one was opened."""
    depth = 0
    for at in range(len(spelled) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(spelled[at], 0)
        if depth == 0:
            return at
    return 0
