"""Entry points of a compiled program: parameter layout from PTX, C++ types from mangled names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from preheat.artifact import EntryPoint, Parameter, Resources
from preheat.lexer import stripped
from preheat.program import Program
from preheat.toolchain import ptx
from preheat.toolchain.text import split_commas

__all__ = [
    "PROBE", "declared", "entry_points", "kernel_names", "parameter_types", "probe_names", "probes",
    "qualified_name",
]  # fmt: skip

#: Appended to a program. Instantiated with the type of a function, its mangled name contains that type,
#: which the names of `extern "C"` functions do not.
PROBE = "\ntemplate<class T> __device__ char __preheat_sig;\n"
_PROBE_NAME = "__preheat_sig"
_TOKEN = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|\w+|::|[(){};<>]')
_KERNEL = {"__global__", "void"}  # In either order.
_ATTRIBUTE = re.compile(r"__\w+__")  # Such as `__launch_bounds__`, which takes arguments as well.


def probe_names(program: Program) -> tuple[str, ...]:
    """Return the functions whose C++ types need a probe: `extern "C"` kernels and name expressions.

    The source is only scanned, so the result may be wrong. Then the caller compiles without probes.
    """
    found = dict.fromkeys(program.names)
    if '"C"' in program.source:
        found.update({k.name: None for k in _kernels(program.source) if k.extern_c})
    return tuple(found)


def declared(program: Program) -> tuple[list[str], list[str]]:
    """Return the kernels and the kernel templates that the texts of `program` declare, for messages.

    Templates include their parameters: `ns::tk<class T, int N>`. Declarations in header files or by
    macros are not found.
    """
    texts = (program.source, *(text for _, text in program.headers))
    found = dict.fromkeys(kernel for text in texts for kernel in _kernels(text))
    kernels = [kernel.name for kernel in found if kernel.template is None]
    return kernels, [f"{k.name}<{k.template}>" for k in found if k.template is not None]


def kernel_names(source: str) -> list[str]:
    """Return the kernels and the kernel templates that a text declares, each once."""
    return list(dict.fromkeys(kernel.name for kernel in _kernels(source)))


class _Kernel(NamedTuple):
    """A declared kernel. `template` contains the parameters of a template."""

    name: str
    template: str | None
    extern_c: bool


class _Block(NamedTuple):
    """An open block: the qualifier and the linkage of the declarations in it."""

    qualifier: str = ""  # Such as `outer::inner::`.
    extern_c: bool = False


@functools.lru_cache(maxsize=128)  # One compile asks several times, and many run at the same time.
def _kernels(source: str) -> tuple[_Kernel, ...]:
    """Return the kernels that a text declares."""
    return tuple(_scan(source))


def _scan(source: str) -> Iterator[_Kernel]:
    """Yield the kernels that a text declares, in one pass over its tokens."""
    if "__global__" not in source:
        return
    text = stripped(source, strings=True)
    blocks = [_Block()]
    declaration = _Declaration()
    parentheses = angles = opened = 0
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token == "(":
            parentheses += 1
            if parentheses == 1 and not angles and declaration.names_kernel:
                yield declaration.kernel(blocks[-1])
                declaration = _Declaration()  # Nothing else is declared before the body.
        elif token == ")":
            parentheses = max(parentheses - 1, 0)
        elif token in "{};":
            if token == "{":
                blocks.append(declaration.block(blocks[-1]))
            elif token == "}" and len(blocks) > 1:
                blocks.pop()
            declaration = _Declaration()
            parentheses = angles = 0
        elif parentheses:
            continue
        elif token == "<" and (angles or declaration.takes_arguments):
            angles += 1
            opened = found.end() if angles == 1 else opened
        elif token == ">" and angles:
            angles -= 1
            if not angles:
                declaration.add_arguments(" ".join(text[opened : found.start()].split()))
        elif not angles and token not in "<>":
            declaration.add(token)


class _Declaration:
    """A declaration that has been read up to some word."""

    def __init__(self) -> None:
        self.last = ""
        self.extern_c = False
        self._before: set[str] = set()  # The words of `_KERNEL` before the last word.
        self._template: str | None = None  # The parameters of a template.
        self._namespace: str | None = None  # The name of the namespace that is opened here.

    def add(self, word: str) -> None:
        """Read one more word."""
        if self._namespace is not None:
            self._namespace += word
        elif word == "namespace":
            self._namespace = ""
        if self.last in _KERNEL:
            self._before.add(self.last)
        self.extern_c = self.extern_c or (self.last, word) == ("extern", '"C"')
        self.last = word

    def add_arguments(self, inside: str) -> None:
        """Read the text in angle brackets: parameters of a template or arguments of an instance."""
        if self.last == "template":
            self._template = inside or None  # `template <>` specialises and declares one kernel.
        else:
            self.last += f"<{inside}>"

    @property
    def takes_arguments(self) -> bool:
        """Whether angle brackets may follow the last word."""
        return self.last == "template" or self.names_kernel

    @property
    def names_kernel(self) -> bool:
        """Whether the last word is the name of a kernel, provided that a parenthesis follows."""
        return self._before == _KERNEL and not _ATTRIBUTE.fullmatch(self.last)

    def kernel(self, block: _Block) -> _Kernel:
        """Return the kernel that is declared here, in `block`."""
        extern_c = self.extern_c or block.extern_c
        name = self.last if extern_c else f"{block.qualifier}{self.last}"
        return _Kernel(name, self._template, extern_c)

    def block(self, outer: _Block) -> _Block:
        """Return the block that begins here, in `outer`."""
        inner = f"{self._namespace}::" if self._namespace else ""
        return _Block(outer.qualifier + inner, outer.extern_c or self.extern_c)


def probes(names: Iterable[str]) -> dict[str, str]:
    """Return the name expression that probes each function."""
    return {name: f"&{_PROBE_NAME}<decltype({name})>" for name in names}


def entry_points(
    module: ptx.Module,
    demangled: Mapping[str, str],
    signatures: Mapping[str, str],
    resources: Mapping[str, Resources],
) -> tuple[EntryPoint, ...]:
    """Return the kernels of a module.

    `demangled` maps mangled names to C++ names, `signatures` maps entry names to demangled probes.
    """
    found = []
    for name, function in module.entries.items():
        spelled = signatures.get(name) or demangled.get(name)
        types: Sequence[str | None] = parameter_types(spelled) if spelled else ()
        if len(types) != len(function.params):
            types = [None] * len(function.params)
        found.append(
            EntryPoint(
                name=name,
                parameters=tuple(
                    Parameter(p.offset, p.size, p.align, p.kind, p.pointer, t)
                    for p, t in zip(function.params, types, strict=True)
                ),
                cpp=qualified_name(demangled[name]) if name in demangled else None,
                resources=resources.get(name),
                directives=function.directives,
            )
        )
    return tuple(found)


def parameter_types(spelled: str) -> tuple[str, ...]:
    """Return the types in the last parentheses of a demangled function or probe, if any."""
    if spelled.startswith(f"{_PROBE_NAME}<"):
        spelled = spelled.removeprefix(f"{_PROBE_NAME}<").removesuffix(">")
    if not spelled.endswith(")"):
        return ()
    inside = spelled[_opening(spelled) + 1 : -1]
    return () if inside in ("", "void") else tuple(split_commas(inside))


def qualified_name(spelled: str) -> str:
    """Return `ns::inner` for `ns::inner(int)`, and `tk<float, 3>` for `void tk<float, 3>(float*)`."""
    if not spelled.endswith(")"):
        return spelled
    return spelled[: _opening(spelled)].removeprefix("void ").strip()


def _opening(spelled: str) -> int:
    """Return where the last parenthesis of a text was opened, if the text ends with it."""
    depth = 0
    for at in range(len(spelled) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(spelled[at], 0)
        if depth == 0:
            return at
    return 0
