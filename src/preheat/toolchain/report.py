"""Parse the logs of compilers: diagnostics, resource usage and timing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from preheat.errors import Diagnostic
from preheat.model.artifact import Resources
from preheat.model.program import Program

__all__ = [
    "diagnostics", "localize", "rejected_expressions", "rejected_names", "resources", "split_timing",
]  # fmt: skip

_FRONT = re.compile(
    r"(?P<file>\S.*?)\((?P<line>\d+)\): (?P<severity>[\w ]*?error|warning)(?: #[\w-]+)?: "
    r"(?P<message>.*)"
)
_PTX_LINE = re.compile(
    r"ptxas (?P<file>.+?), line (?P<line>\d+); (?P<severity>error|fatal|warning)\s*: (?P<message>.*)"
)
_PLAIN = re.compile(r"(?P<file>nvrtc|ptxas)\s*:?\s+(?P<severity>error|fatal)\s*: (?P<message>.*)")
_NOTE = re.compile(r".*?\(\d+\): note(?: #[\w-]+)?: (?P<message>.*)")
_INSTANCE = re.compile(r'\s+(?:detected during )?instantiation of "(?P<name>.*)"(?P<at> at line \d+)?')
_CARET = re.compile(r"\s*\^")
_ROOT = re.compile(r"(?<![\w/])@(\w+)/")
_PROGRAM = re.compile(r"(?<![\w/.-])/preheat/")
_NAME_MAP = "__nv_name_map"  # The file in which NVRTC places name expressions.
_ECHO = ". Input name expression was:"  # The rest repeats the expression.
_UNINFORMATIVE = "Error in parsing name expression for lowered name lookup"
_TIMING = re.compile(r"^ptxas info\s*: Compile time = .*\n?", re.M)

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_PROPERTIES = re.compile(r"Function properties for '?([^'\s]+)")
_FIELDS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "barriers": re.compile(r"used (\d+) barriers"),
    "shared": re.compile(r"(\d+)(?:\+\d+)? bytes smem"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
}


def diagnostics(log: str, program: Program) -> tuple[Diagnostic, ...]:
    """Return the errors and warnings in a compiler's log, each with the source line below it.

    The log of the assembler contains no source. The line is taken from the program if that is PTX.
    """
    rows = []
    lines = log.split("\n")
    for index, line in enumerate(lines):
        match = _FRONT.match(line) or _PTX_LINE.match(line) or _PLAIN.match(line)
        if match is None:
            continue
        fields = match.groupdict()
        number = int(fields["line"]) if fields.get("line") else None
        source, column = _find_source_and_caret(lines, index + 1)
        if match.re is _PTX_LINE and program.language == "ptx":
            fields["file"] = program.label
            source = _line_of(program.source, number)
        elif match.re is _PTX_LINE:
            fields["file"] = f"PTX of {program.label}"
        rows.append(
            Diagnostic(
                file=fields["file"],
                line=number,
                severity=fields["severity"],
                message=fields["message"].strip(),
                source=source,
                column=column,
                context=tuple(_context(lines[at] for at in range(index + 1, len(lines)))),
            )
        )
    return tuple(rows)


def _context(lines: Iterable[str]) -> Iterator[str]:
    """Yield the notes and instantiations in the lines below a diagnostic."""
    for line in lines:
        if _FRONT.match(line) or not line:
            return
        if note := _NOTE.match(line):
            yield f"note: {note['message']}"
        elif instance := _INSTANCE.match(line):
            yield f"in the instantiation of {instance['name']}{instance['at'] or ''}"


def _line_of(text: str, number: int | None) -> str | None:
    lines = text.split("\n")
    return lines[number - 1].strip() if number and number <= len(lines) else None


def rejected_expressions(rows: Iterable[Diagnostic]) -> dict[str, list[str]]:
    """Return the messages of the compiler about name expressions, by expression.

    The result is empty if there are other errors, which may be the reason why expressions are rejected.
    """
    errors = [row for row in rows if row.severity != "warning"]
    if any(row.file != _NAME_MAP for row in errors):
        return {}
    messages: dict[str, list[str]] = {}
    for row in errors:
        expression = (row.source or "").removeprefix("#pragma nv_mangled_name").strip()
        messages.setdefault(expression, []).append(row.message.partition(_ECHO)[0])
    return messages


def rejected_names(
    rows: Iterable[Diagnostic], names: Iterable[str], probes: Mapping[str, str]
) -> dict[str, str]:
    """Return why the compiler rejected name expressions: its messages, by name.

    If two expressions have the same error, the compiler explains only one. So the message about the
    probe of a name is used for the name. The result is empty if there are other errors.
    """
    messages = rejected_expressions(rows)
    faults = {}
    for name in names:
        if name in messages:
            unique = dict.fromkeys([*messages.get(probes.get(name, ""), ()), *messages[name]])
            faults[name] = "; ".join(text for text in unique if text != _UNINFORMATIVE)
    return faults


def _find_source_and_caret(lines: list[str], start: int) -> tuple[str | None, int | None]:
    """Return the source line and the column of the caret that NVRTC prints under a diagnostic."""
    for index in range(start, min(start + 8, len(lines) - 1)):
        source, caret = lines[index], lines[index + 1]
        if _FRONT.match(source):
            break
        if source.startswith("  ") and _CARET.fullmatch(caret.rstrip()):
            return source[2:].rstrip(), max(caret.index("^") - 2, 0) + 1
    return None, None


def localize(log: str, roots: Mapping[str, str]) -> str:
    """Return a log in which `@0/x.h` and `/preheat/k.cu` are replaced by the user's names."""

    def directory(match: re.Match[str]) -> str:
        return f"{roots[match[1]]}/" if match[1] in roots else match[0]

    return _ROOT.sub(directory, _PROGRAM.sub("", log))


def split_timing(log: str) -> tuple[str, str]:
    """Return a log without its timing lines, which differ between runs, and these lines."""
    return _TIMING.sub("", log), "".join(_TIMING.findall(log))


def resources(log: str) -> dict[str, Resources]:
    """Return registers, memory and spills of each entry, from the output of `ptxas -v`."""
    entry = about = ""
    usage: dict[str, dict[str, int]] = {}
    for line in log.split("\n"):
        if match := _ENTRY.search(line):
            entry = about = match[1]
            usage[entry] = {}
        elif match := _PROPERTIES.search(line):
            about = match[1]
        elif entry and (about == entry or "registers" in line):
            for field, pattern in _FIELDS.items():
                if number := pattern.search(line):
                    usage[entry].setdefault(field, int(number[1]))
    return {name: Resources(**fields) for name, fields in usage.items()}
