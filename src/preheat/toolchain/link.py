"""One link: make the request to a worker and interpret its reply."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from preheat.errors import LinkedSymbol, LinkError, TargetError, ToolchainError
from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.linked_program import BinaryPart, LinkedProgram
from preheat.model.program import Program
from preheat.toolchain import lint, ptx_merge, report, signature
from preheat.toolchain.pool import WorkerPool
from preheat.toolchain.ptx_merge import PtxPart
from preheat.toolchain.translate import Compiled, assembler_target, require_loadable

__all__ = ["link"]

#: The statuses with which nvJitLink rejects inputs or options. Any other one is a failure of nvJitLink.
_REJECTED = {
    "ERROR_UNRECOGNIZED_OPTION",
    "ERROR_PTX_COMPILE",
    "ERROR_NVVM_COMPILE",
    "ERROR_INVALID_INPUT",
    "ERROR_UNRECOGNIZED_INPUT",
    "ERROR_INCORRECT_INPUT_TYPE",
    "ERROR_UNSUPPORTED_ARCH",
    "ERROR_UNRECOGNIZED_ARCH",
}
# The messages also name parts. If there are several parts, they name the wrong one.
_UNDEFINED = re.compile(r"(?:Undefined reference to|Unresolved extern (?:function|variable)) '([^']+)'")
_MULTIPLE = re.compile(r"(?:Multiple definition of|Linking globals named) '([^']+)'")
#: Functions of the CUDA runtime that PTX declares and no part defines.
_RUNTIME = frozenset({"vprintf", "malloc", "free", "__assertfail"})
_WORD = r"(?<![\w$]){}(?![\w$])"


@dataclass(frozen=True, slots=True)
class _Part:
    """An input of the linker: its kind, its name in messages, its bytes, and its PTX if it has one."""

    kind: str
    name: str
    data: bytes
    ptx: PtxPart | None = None
    source: str = ""  # The CUDA C++ text.


def link(
    pool: WorkerPool, program: LinkedProgram, arch: Arch, compiled: Mapping[int, Artifact]
) -> Compiled:
    """Link the parts of a program for one architecture. `compiled` has the CUDA C++ parts by index.

    Raises `LinkError` if the linker rejects them, `PtxError` or `TargetError` for a wrong PTX part,
    and `ToolchainError` if the linker fails itself.
    """
    parts = _parts(program, arch, compiled)
    failed = partial(_error, pool, program, arch, parts)
    if twice := _defined_twice(parts):  # nvJitLink accepts some of these, and crashes at others.
        raise failed("", multiple=twice)
    probes, unknown = _probes(program, compiled)
    entries = [name for part in parts if part.ptx is not None for name in part.ptx.module.entries]
    message = {
        "do": "link",
        "arch": str(arch),
        "options": program.options,
        "inputs": [(part.kind, part.name) for part in parts],
        "symbols": [*entries, *probes.values()],
    }
    reply, made = pool.call(message, {str(index): part.data for index, part in enumerate(parts)})
    log = _accept(reply, failed, made["ptx"])
    require_loadable(program, made["cubin"])
    text = _merge(parts, made["ptx"])
    demangled = reply["demangled"]
    sources = {index: compiled[index] for index in program.sources}
    logs = "\n".join([*(artifact.log for artifact in sources.values()), log])
    kept, timing = report.split_timing(log)
    return Compiled(
        cubin=made["cubin"],
        ptx=text.encode(),
        entries=signature.entry_points(
            ptx.parse(text),
            demangled,
            {entry: demangled.get(probe, "") for entry, probe in probes.items()},
            report.resources(logs),
            unknown,
        ),
        names=_names(program, compiled),
        log=kept,
        timing=timing,
        seconds=reply["seconds"],
        build=reply["build"],
        opened=(),
        templates=tuple(dict.fromkeys(name for each in sources.values() for name in each.templates)),
        parts_seconds=sum(artifact.provenance.seconds for artifact in sources.values()),
    )


# The inputs


def _parts(program: LinkedProgram, arch: Arch, compiled: Mapping[int, Artifact]) -> list[_Part]:
    labels = [part.label for part in program.parts]
    made = []
    for index, part in enumerate(program.parts):
        name = part.label if labels.count(part.label) == 1 else f"{part.label} (part {index})"
        if isinstance(part, BinaryPart):
            made.append(_Part(part.kind, name, part.data))
        elif index in program.sources:
            code = compiled[index]
            kind = "ltoir" if program.lto else "cubin"
            parsed = PtxPart.of(name, code.ptx.decode()) if code.ptx else None
            made.append(_Part(kind, name, code.cubin, parsed, part.source))
        else:
            made.append(_ptx_part(part, name, arch))
    return made


def _ptx_part(part: Program, name: str, arch: Arch) -> _Part:
    module = lint.check(part.source, part.label)
    target = assembler_target(module, arch, part.label)
    if target != arch:
        why = f"all parts of a link are for one architecture; link for {target}"
        raise TargetError(part.label, str(target), str(arch), why)
    return _Part("ptx", name, part.source.encode(), PtxPart(name, part.source, module))


def _probes(
    program: LinkedProgram, compiled: Mapping[int, Artifact]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the mangled probe of each kernel that has one, by the name of the kernel in the code.

    The second table says why the C++ types of other kernels are unknown.
    """
    symbols = {}
    unknown = {}
    for index, part in program.sources.items():
        lowered = compiled[index].names
        for name, probes in signature.all_probes(part).items():
            accepted = [lowered[probe] for probe in probes if probe in lowered]
            if accepted:
                symbols[lowered.get(name, name)] = accepted[0]
            else:
                unknown[name] = signature.REJECTED
    return symbols, unknown


def _names(program: LinkedProgram, compiled: Mapping[int, Artifact]) -> dict[str, str]:
    sources = program.sources.items()
    return {name: compiled[index].names[name] for index, part in sources for name in part.names}


def _merge(parts: Sequence[_Part], optimised: bytes) -> str:
    """Return the PTX of all parts that have PTX; `optimised` is the PTX of the LTO-IR among them."""
    texts = [part.ptx for part in parts if part.ptx is not None]
    if optimised:
        texts.insert(0, PtxPart.of("LTO", optimised.decode()))
    return ptx_merge.merge(texts)


# Errors


def _defined_twice(parts: Sequence[_Part]) -> list[str]:
    """Return the symbols that several parts define, other than weakly."""
    modules = [part.ptx for part in parts if part.ptx is not None]
    symbols = [symbol for module in modules for symbol in ptx_merge.definitions(module)]
    strong = (name for name, linkage in symbols if linkage == "visible")
    return [name for name, number in Counter(strong).items() if number > 1]


def _accept(reply: Mapping[str, Any], failed: Any, optimised: bytes) -> str:
    """Return the log of a link that succeeded, or raise the error of one that did not."""
    status, log = reply["status"], str(reply["log"])
    undefined = _UNDEFINED.findall(log)
    if undefined and optimised:  # Its assembler reports only the first one.
        undefined += _extern(ptx.parse(optimised.decode()))
    multiple = _MULTIPLE.findall(log)
    if undefined or multiple or status in _REJECTED:
        raise failed(log, undefined=undefined, multiple=multiple)
    if status != "SUCCESS":
        raise ToolchainError(f"nvJitLink failed with {status}\n{log}".rstrip())
    return log


def _extern(module: ptx.Module) -> Iterator[str]:
    """Yield the symbols that PTX declares and does not define."""
    for function in module.functions:
        if ".extern" in function.linkage and function.name not in {*_RUNTIME, *module.bodies}:
            yield function.name
    for variable in module.variables.values():
        if ".extern" in variable.linkage and variable.space != "shared":
            yield variable.name


def _error(
    pool: WorkerPool,
    program: LinkedProgram,
    arch: Arch,
    parts: Sequence[_Part],
    log: str,
    *,
    undefined: Iterable[str] = (),
    multiple: Iterable[str] = (),
) -> LinkError:
    """Return the error of a link, with C++ names and the parts that are concerned."""
    symbols = _Symbols(pool, parts, {*undefined, *multiple})
    return LinkError(
        program.label,
        str(arch),
        program.options,
        log,
        undefined=[symbols.undefined(name) for name in dict.fromkeys(undefined)],
        multiple=[symbols.multiple(name) for name in dict.fromkeys(multiple)],
    )


class _Symbols:
    """What parts define and use, with C++ names, for the error of a link."""

    def __init__(self, pool: WorkerPool, parts: Sequence[_Part], requested: set[str]) -> None:
        self._parts = parts
        self._defined = {
            part.name: [name for name, linkage in ptx_merge.definitions(part.ptx) if linkage]
            for part in parts
            if part.ptx is not None
        }
        everything = requested.union(*self._defined.values())
        self._titles = pool.call({"do": "demangle", "names": sorted(everything)}).message["names"]

    def undefined(self, name: str) -> LinkedSymbol:
        """Return a symbol that no part defines, with the parts that use it."""
        users = [p.name for p in self._parts if p.ptx is not None and name in _extern(p.ptx.module)]
        base = _base(self._title(name))
        similar = [
            f"{part} defines {self._title(other)}"
            for part, names in self._defined.items()
            for other in names
            if other != name and _base(self._title(other)) == base
        ]
        return self._symbol(name, users, similar)

    def multiple(self, name: str) -> LinkedSymbol:
        """Return a symbol that several parts define, with these parts."""
        return self._symbol(name, [part for part, names in self._defined.items() if name in names])

    def _symbol(self, name: str, parts: list[str], similar: Sequence[str] = ()) -> LinkedSymbol:
        title = self._title(name)
        word = re.compile(_WORD.format(re.escape(_base(title))))
        mentioned = [part.name for part in self._parts if word.search(part.source)]
        return LinkedSymbol(name, title, tuple(parts), tuple(mentioned), tuple(similar))

    def _title(self, name: str) -> str:
        return str(self._titles.get(name, name))


def _base(title: str) -> str:
    """Return `helper` for `ns::helper<float>(float, int)`."""
    return title.partition("(")[0].partition("<")[0].rpartition("::")[2].rpartition(" ")[2]
