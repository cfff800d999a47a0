"""Entry points of a compiled program: layout from its PTX, C++ types from its mangled names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from preheat.artifact import EntryPoint, Parameter, Resources
from preheat.program import Program, without_comments
from preheat.toolchain import ptx
from preheat.toolchain.text import split_commas

__all__ = ["PROBE", "entry_points", "probe_names", "probes"]

#: Appended to a program: instantiated with a function's type, its mangled name spells that type out,
#: which `extern "C"` names do not.
PROBE = "\ntemplate<class T> __device__ char __preheat_sig;\n"
_PROBE_NAME = "__preheat_sig"
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_WORDS = rf"(?:[\w\s]|__\w+__\s*{_NESTED})*?"  # `__launch_bounds__(128, 2)` may stand anywhere
_NAME = r"\b(?!__\w+__\s*\()(\w+)\s*\("
_EXTERN_C = re.compile(r'extern\s*"C"\s*(\{)?')
_KERNEL = re.compile(
    rf"__global__{_WORDS}\bvoid\b{_WORDS}{_NAME}|\bvoid\s{_WORDS}__global__{_WORDS}{_NAME}"
)


def probe_names(program: Program) -> tuple[str, ...]:
    """Functions whose C++ types only a probe can tell: `extern "C"` kernels and name expressions.

    Found by reading the source, so it may guess wrong; the caller compiles without probes then.
    """
    found = dict.fromkeys(program.names)
    text = program.source
    if "__global__" in text:
        text = without_comments(text, strings=True)
        for opening in _EXTERN_C.finditer(text):
            start = opening.end()
            end = _block_end(text, start) if opening[1] else _declaration_end(text, start)
            found.update(dict.fromkeys(m[1] or m[2] for m in _KERNEL.finditer(text, start, end)))
    return tuple(found)


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


def _block_end(text: str, start: int) -> int:
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return len(text)


def _declaration_end(text: str, start: int) -> int:
    found = re.compile(r"[{;]").search(text, start)
    return found.start() if found else len(text)


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
