"""Entry points of a compiled program: parameter layout from PTX, C++ types from mangled names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from preheat.model import ptx
from preheat.model.artifact import EntryPoint, Parameter, Resources
from preheat.model.lexer import split_commas, strip_comments
from preheat.model.program import Program

__all__ = [
    "PROBE", "REJECTED", "UNSEEN", "all_probes", "cast_probes", "declared_kernels", "entry_points",
    "explain_unknown", "kernel_names", "parameter_types", "probes", "qualified_name",
]  # fmt: skip

#: Appended to a program. Instantiated with the type of a function, the mangled name of `__preheat_sig`
#: contains that type, which the names of `extern "C"` functions do not. `__preheat_kernel` selects the
#: only function of an overload set that returns void, as kernels do. The empty line ends a comment
#: whose last character is a backslash.
PROBE = (
    "\n\ntemplate<class T> __device__ char __preheat_sig;\n"
    "template<class... A> struct __preheat_function { typedef void type(A...); };\n"
    "template<class... A> __device__ __preheat_function<A...> __preheat_kernel(void (*)(A...));\n"
)
_PROBE_NAME = "__preheat_sig"
#: Why types are unknown: the compiler has rejected the probe of a kernel.
REJECTED = (
    "its name is also the name of other functions, or hidden in another scope; "
    "rename the kernel, or declare it outside other scopes"
)
#: Why types are unknown: the source has no declaration of the kernel, and so there is no probe.
UNSEEN = (
    "its declaration comes from a macro or a header file; "
    'declare it in the source, in the form `extern "C" __global__ void name(…);`'
)
_TOKEN = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|\w+|::|[(){};<>]')
_KERNEL = {"__global__", "void"}  # In either order.
_PARENTHESIS = re.compile(r"[(){};]")
_NOT_A_TYPE = re.compile(r"""[#"']|\b__grid_constant__\b""")
_ATTRIBUTE = re.compile(r"__\w+__")  # Such as `__launch_bounds__`, which takes arguments as well.


def probes(program: Program) -> dict[str, str]:
    """Return the name expression that probes each kernel whose C++ types need one, by its name.

    These kernels are name expressions and `extern "C"` kernels. The source is only scanned, so that the
    compiler may reject a probe. Then the caller tries `cast_probes`, and finally no probe.
    """
    expressions = {}
    for name in program.names:
        expressions[name] = f"&{_PROBE_NAME}<decltype({name})>"
    if '"C"' in program.source:
        for kernel in _kernels(program.source):
            if kernel.extern_c and kernel.name not in expressions:
                name = kernel.qualifier + kernel.name
                expressions[kernel.name] = f"&{_PROBE_NAME}<decltype(__preheat_kernel({name}))::type>"
    return expressions


def cast_probes(program: Program) -> dict[str, str]:
    """Return expressions that select `extern "C"` kernels by their parameters, as the source has them.

    They probe kernels among functions that return void, and among templates.
    """
    text = strip_comments(program.source, strings=True)
    expressions: dict[str, str] = {}
    for kernel in _kernels(program.source):
        if kernel.extern_c and kernel.name not in expressions:
            parameters = _parameter_text(text, kernel.opened)
            if parameters is not None:
                cast = f"static_cast<void (*)({parameters})>({kernel.qualifier}{kernel.name})"
                expressions[kernel.name] = f"&{_PROBE_NAME}<decltype({cast})>"
    return expressions


def all_probes(program: Program) -> dict[str, tuple[str, ...]]:
    """Return every expression that may have probed each kernel of a program, by its name.

    The last one is in stored artifacts that were compiled before `__preheat_kernel` existed.
    """
    casts = cast_probes(program)
    return {
        name: (probe, casts.get(name, ""), f"&{_PROBE_NAME}<decltype({name})>")
        for name, probe in probes(program).items()
    }


def explain_unknown(name: str, messages: Iterable[str]) -> str:
    """Return why the types of a kernel are unknown, from messages of the compiler, and what to do."""
    if any("is undefined" in message for message in messages):
        return f"the end of the program cannot refer to {name}; declare {name} outside other scopes"
    return f"{name} is also the name of other functions; rename the kernel or these functions"


def declared_kernels(program: Program) -> tuple[list[str], list[str]]:
    """Return the kernels and the kernel templates that the texts of `program` declare, for messages.

    Templates include their parameters: `ns::tk<class T, int N>`. Declarations in header files or by
    macros are not found.
    """
    texts = (program.source, *(text for _, text in program.headers))
    declarations = dict.fromkeys([kernel for text in texts for kernel in _kernels(text)])
    kernels = dict.fromkeys([kernel.name for kernel in declarations if kernel.template is None])
    return list(kernels), [f"{k.name}<{k.template}>" for k in declarations if k.template is not None]


def kernel_names(source: str) -> list[str]:
    """Return the kernels and the kernel templates that a text declares, each once."""
    return list(dict.fromkeys(kernel.name for kernel in _kernels(source)))


class _Kernel(NamedTuple):
    """A declared kernel. `template` contains the parameters of a template.

    The name of an `extern "C"` kernel is its symbol, and does not contain `qualifier`. `opened` is the
    place of its parameters in the text without comments.
    """

    name: str
    template: str | None
    extern_c: bool
    qualifier: str = ""
    opened: int = 0


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
    text = strip_comments(source, strings=True)
    blocks = [_Block()]
    declaration = _Declaration()
    parentheses = angles = opened = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "(":
            parentheses += 1
            if parentheses == 1 and not angles and declaration.names_kernel:
                yield declaration.kernel(blocks[-1], match.end())
                declaration = _Declaration()  # The declaration ends where the body begins.
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
            opened = match.end() if angles == 1 else opened
        elif token == ">" and angles:
            angles -= 1
            if not angles:
                declaration.add_arguments(" ".join(text[opened : match.start()].split()))
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

    def kernel(self, block: _Block, opened: int) -> _Kernel:
        """Return the kernel that is declared here, in `block`. Its parameters begin at `opened`."""
        if not (self.extern_c or block.extern_c):
            return _Kernel(f"{block.qualifier}{self.last}", self._template, extern_c=False)
        return _Kernel(self.last, self._template, True, block.qualifier, opened)

    def block(self, outer: _Block) -> _Block:
        """Return the block that begins here, in `outer`."""
        inner = f"{self._namespace}::" if self._namespace else ""
        return _Block(outer.qualifier + inner, outer.extern_c or self.extern_c)


def _parameter_text(text: str, opened: int) -> str | None:
    """Return the parameters whose parenthesis was opened before `opened`, without default arguments.

    The result is None if the parenthesis is not closed, or if there are directives or literals in it.
    """
    depth = 1
    for mark in _PARENTHESIS.finditer(text, opened):
        if mark[0] in "{};":
            return None
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            inside = text[opened : mark.start()]
            if _NOT_A_TYPE.search(inside):
                return None
            parts = (part.partition("=")[0].strip() for part in split_commas(inside))
            return ", ".join(" ".join(part.split()) for part in parts)
    return None


def entry_points(
    module: ptx.Module,
    demangled: Mapping[str, str],
    signatures: Mapping[str, str],
    resources: Mapping[str, Resources],
    unknown: Mapping[str, str] | None = None,
) -> tuple[EntryPoint, ...]:
    """Return the kernels of a module.

    `demangled` maps mangled names to C++ names, `signatures` maps entry names to demangled probes.
    `unknown` says why the types of a kernel are unknown, for kernels that C++ declares.
    """
    points = []
    for name, function in module.entries.items():
        spelled = signatures.get(name) or demangled.get(name)
        types: Sequence[str | None] = parameter_types(spelled) if spelled else ()
        untyped = None
        if len(types) != len(function.params):
            types = [None] * len(function.params)
            untyped = (unknown or {}).get(name)
        points.append(
            EntryPoint(
                name=name,
                parameters=tuple(
                    [
                        Parameter(p.offset, p.size, p.align, p.kind, p.pointer, t)
                        for p, t in zip(function.params, types, strict=True)
                    ]
                ),
                cpp=qualified_name(demangled[name]) if name in demangled else None,
                resources=resources.get(name),
                directives=function.directives,
                untyped=untyped,
            )
        )
    return tuple(points)


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
