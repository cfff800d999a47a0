"""Generates the tables of the CPU driver from the headers of the CUDA toolkit.

    python -m tests.driver.headers

The tables have facts alone: names, versions, kinds of arguments, and numbers. The i-th version of a
function is exported as `name`, `name_v2`, `name_v3`. A function for the per-thread default stream has
the suffix of its type definition.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "src" / "preheat" / "driver" / "native"
HEADERS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include"

_TYPEDEF = re.compile(
    r"typedef CUresult ?\(CUDAAPI \*PFN_(\w+?)_v(\d+)(_ptsz|_ptds)?\)\((.*?)\);", re.S
)
#: The private tables that this function returns are not part of the documented interface, so that the
#: headers with the type definitions do not have it. Programs call it nevertheless.
_ADDED = {("cuGetExportTable", 3000, ""): "QQ"}

_FUNCTIONS = {
    "CUstreamCallback", "CUhostFn", "CUoccupancyB2DSize", "CUasyncCallback", "CUlogsCallback",
    "CUgraphRecaptureCallback",
}  # fmt: skip
_WORDS = {
    "size_t", "unsigned long long", "cuuint64_t", "CUdeviceptr", "CUtexObject", "CUsurfObject",
    "CUmemGenericAllocationHandle", "CUmemLocation", "CUgraphConditionalHandle", "CUgraphDeviceNode",
    "CUcoredumpCallbackHandle",
}  # fmt: skip
_KINDS = {
    "unsigned int": "I", "unsigned": "I", "cuuint32_t": "I", "GLenum": "I", "GLuint": "I",
    "VdpSurface": "I", "CUlogIterator": "I", "unsigned char": "B", "unsigned short": "H", "float": "f",
    "CUipcMemHandle": "S", "CUipcEventHandle": "S",
}  # fmt: skip


def entry_points(headers: Path = HEADERS) -> str:
    """Return the table of all versions of all functions, one in each line, ordered by name."""
    files = ("cudaTypedefs.h", "cudaProfilerTypedefs.h")
    text = "".join(_without_comments((headers / name).read_text()) for name in files)
    handles = set(re.findall(r"typedef struct \w+ ?\* ?(\w+);", (headers / "cuda.h").read_text()))
    found = {
        (name, int(version), suffix): _kinds(arguments, handles)
        for name, version, suffix, arguments in _TYPEDEF.findall(text)
    }
    found |= _ADDED
    lines = []
    for name, version, suffix in sorted(found):
        plain = {at for other, at, end in found if other == name and not end}
        place = sum(at <= version for at in plain)
        symbol = name + (f"_v{place}" if place > 1 else "") + suffix
        per_thread = int(bool(suffix))
        lines.append(f"E({name},{version},{per_thread},{symbol},{found[name, version, suffix]})\n")
    return "".join(lines)


def _kinds(arguments: str, handles: set[str]) -> str:
    return "".join(_kind(each, handles) for each in arguments.split(",") if each.strip() != "void")


def _kind(argument: str, handles: set[str]) -> str:
    """Return the kind of one argument.

    `Q` has 64 bits, `i` and `I` have 32, and `S` is a structure of 64 bytes that is passed by value.
    """
    if "*" in argument or "[" in argument:
        return "Q"
    words = argument.replace("const ", "").split()
    if len(words) > 1 and words[-1] not in ("int", "char", "short", "long"):
        words.pop()
    base = re.sub(r"_v\d+$", "", " ".join(words))
    if base in handles | _FUNCTIONS | _WORDS:
        return "Q"
    return _KINDS.get(base, "i")  # An enumeration, or `int`.


def errors(headers: Path = HEADERS) -> str:
    """Return the table of the status codes."""
    enum = re.search(r"typedef enum cudaError_enum \{(.*?)\} CUresult;", _cuda(headers), re.S)
    assert enum is not None
    return "".join(f"E({name},{code})\n" for name, code in _members(enum[1]))


def attributes(headers: Path = HEADERS) -> dict[str, int]:
    """Return the number of each attribute of a device."""
    found = re.findall(r"CU_DEVICE_ATTRIBUTE_(\w+)\s*=\s*(\d+)", _cuda(headers))
    return {name: int(number) for name, number in found}


def version(headers: Path = HEADERS) -> int:
    """Return the version of CUDA that headers are of."""
    found = re.search(r"#define CUDA_VERSION (\d+)", (headers / "cuda.h").read_text())
    assert found is not None
    return int(found[1])


def declared_symbols(headers: Path = HEADERS) -> set[str]:
    """Return the names that the newest versions of the functions have in the library."""
    text = _cuda(headers)
    macro = r"#\s*define (cu\w+)\s+(?:__CUDA_API_PT\w+\()?(cu\w+?)\)?\s*$"
    renamed = dict(re.findall(macro, text, re.M))
    declared = re.findall(r"CUresult CUDAAPI (cu\w+)\(", text)
    return {renamed.get(name, name) for name in declared}


def _members(enum: str) -> Iterator[tuple[str, int]]:
    for name, number in re.findall(r"(\w+)\s*=\s*(\w+)", enum):
        yield name, int(number, 0)


def _cuda(headers: Path) -> str:
    return _without_comments((headers / "cuda.h").read_text())


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)


if __name__ == "__main__":
    (NATIVE / "entry_points.def").write_text(entry_points())
    (NATIVE / "errors.def").write_text(errors())
