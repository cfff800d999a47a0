"""Every error preheat raises, in one tree.

    PreheatError
      InputError                 a program, name, option or path that cannot be used as given
        UnknownEntryError        no such kernel in the program; carries what there is
        TargetError              PTX made for another architecture than the one asked for
        BundleError              a file that is not a sound bundle, or cannot be made one; names it
        PtxError                 PTX text that breaks a rule; carries line and text
        LaunchError              a launch that cannot be: wrong arguments or geometry; names the kernel
          StaleBufferError       memory that was freed, or that a reset took away
      ConfigError                an environment variable with a value that cannot be read
      CompileError               the compiler rejected the program; carries its whole log
      SealedError                a sealed process would have to compile; says what, for whom and why
      WarmError                  not everything could be warmed; lists what, and carries the report
      ToolchainError             the compiler could not be used
        ToolchainNotFoundError   its library is not installed
        CompilerCrashError       it died: that compile is lost, the process is not
        CompilerTimeoutError     it did not finish in the time allowed
        ToolchainChangedError    it was replaced while in use; the builder looks again by itself
      DeviceError                a device could not do what it was asked
        NoGpuError               there is no GPU; says what was looked for
        DriverError              a driver call failed; carries call, code, name and meaning
          InvalidCodeError       the driver does not take this binary
          OutOfMemoryError       device memory is used up
        ContextLostError         the device's context died: an earlier fault, a reset, or a fork
        GraphError               a graph cannot be made or replayed
          CaptureError           something that no capture can hold, or a capture used wrongly
          StaleGraphError        memory the graph uses was freed; names kernel and argument
          BakedError             a replay would use values that were captured for another call
          PoolSealedError        a sealed pool was asked for memory
        EmulatorFault            the emulated kernel did something wrong; carries source line and thread
          UnsupportedInstructionError   the emulator does not support this instruction

`CaptureWarning` is the one warning: a step that cannot be captured runs without a graph.

Cache faults are not here: they are events (`preheat.events`), because a caller with a good compile in
hand should never lose it to a full disk.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeVar

__all__ = [
    "BakedError",
    "BundleError",
    "CaptureError",
    "CaptureWarning",
    "CompileError",
    "CompilerCrashError",
    "CompilerTimeoutError",
    "ConfigError",
    "ContextLostError",
    "DeviceError",
    "Diagnostic",
    "DriverError",
    "EmulatorFault",
    "GraphError",
    "InputError",
    "InvalidCodeError",
    "LaunchError",
    "NoGpuError",
    "OutOfMemoryError",
    "PoolSealedError",
    "PreheatError",
    "PtxError",
    "SealedError",
    "SourceLine",
    "StaleBufferError",
    "StaleGraphError",
    "TargetError",
    "ToolchainChangedError",
    "ToolchainError",
    "ToolchainNotFoundError",
    "UnknownEntryError",
    "UnsupportedInstructionError",
    "WarmError",
    "brief",
    "did_you_mean",
    "fresh",
]


class PreheatError(Exception):
    """Base of every error raised on purpose. `hint`, where there is one, says what to do next."""

    _hint: str | None = None

    @property
    def hint(self) -> str | None:
        """What to do next; a traceback has it below the message."""
        return self._hint

    @hint.setter
    def hint(self, text: str | None) -> None:
        others = [note for note in getattr(self, "__notes__", ()) if note != f"hint: {self._hint}"]
        self.__notes__ = [*others, f"hint: {text}"] if text else others
        self._hint = text

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is: making it again would take the arguments of its class, not its message."""
        return _restored, (type(self), self.args, self.__dict__)


class InputError(PreheatError, ValueError):
    """Something handed to preheat cannot be used as given."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UnknownEntryError(InputError):
    """The program has no such kernel.

    `known` lists those it has, `templates` those that it could have: `tk<class T, int N>`. `reason` has
    the compiler's words where it rejected a name expression.
    """

    def __init__(
        self,
        name: str,
        program: str,
        known: Iterable[str],
        *,
        templates: Iterable[str] = (),
        reason: str | None = None,
    ) -> None:
        self.name, self.program, self.known = name, program, tuple(dict.fromkeys(known))
        self.templates, self.reason = tuple(dict.fromkeys(templates)), reason
        why = f": {reason}" if reason else ""
        have = [", ".join(self.known)] if self.known else []
        if self.templates:
            have.append(f"the template{'s' * (len(self.templates) > 1)} {', '.join(self.templates)}")
        if not have and not reason:
            have = ["no kernels at all"]
        has = f"; it has: {' and '.join(have)}" if have else ""
        hint = _kernel_hint(name, self.known, self.templates, rejected=reason is not None)
        super().__init__(f"{program} has no kernel {name!r}{why}{has}", hint=hint)


def _kernel_hint(
    name: str, known: Iterable[str], templates: Iterable[str], *, rejected: bool
) -> str | None:
    """What to ask for instead of `name`, which the compiler has rejected or was not asked for."""
    base, angle, rest = name.removeprefix("&").partition("<")
    named = {template.partition("<")[0]: template for template in templates}
    if base in named and angle and not rejected:
        return f"an instance is named when the program is compiled: names=[{name!r}]"
    if base in named:
        return f"name an instance of the template {named[base]}"
    candidates = (*known, *named)
    spelled = {one.partition("<")[0].rpartition("::")[2]: one for one in reversed(candidates)}
    spelled |= {one: one for one in candidates}
    close = closest(name, spelled) or closest(base, spelled)
    if close is None:
        return None
    meant = spelled[close]
    if meant in named:
        meant = f"{meant}{angle}{rest}" if angle else named[meant]
    return f"did you mean {meant!r}?"


class TargetError(InputError):
    """PTX says it was made for `target`; it cannot run on `arch`."""

    def __init__(self, program: str, target: str, arch: str, why: str) -> None:
        self.program, self.target, self.arch = program, target, arch
        super().__init__(f"{program} targets {target} and cannot run on {arch}: {why}")


class PtxError(InputError):
    """PTX text that breaks a rule, found before the assembler saw it."""

    def __init__(self, program: str, rule: str, message: str, line: int, text: str) -> None:
        self.program, self.rule, self.line, self.text = program, rule, line, text
        shown = f"\n    {text.strip()}" if text.strip() else ""
        super().__init__(f"{program}:{line}: {message}{shown}")


class BundleError(InputError):
    """A file is not a sound bundle, or a bundle cannot be written there."""


class ConfigError(PreheatError):
    """An environment variable holds a value that cannot be read."""

    def __init__(self, variable: str, value: str, expected: str) -> None:
        self.variable, self.value = variable, value
        super().__init__(f"{variable}={value!r} is not {expected}")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One row of a compiler's log."""

    file: str
    line: int | None
    severity: str
    message: str
    source: str | None = None  # the offending line, where the compiler showed it
    column: int | None = None  # of the caret under that line, counted from 1
    context: tuple[str, ...] = ()  # notes, and the instances of templates that it is about

    def __str__(self) -> str:
        where = ":".join(str(p) for p in (self.file, self.line, self.column) if p is not None)
        shown = [f"{where}: {self.severity}: {self.message}"]
        if self.source is not None:
            shown.append(self.source)
            if self.column is not None:
                lead = ("\t" if c == "\t" else " " for c in self.source[: self.column - 1])
                shown.append("".join((*lead, "^")))
        return "\n    ".join((*shown, *self.context))


class CompileError(PreheatError):
    """The compiler rejected the program. `log` is its own text, whole; `rows` the parsed lines."""

    SHOWN = 8

    def __init__(
        self,
        program: str,
        arch: str,
        options: Sequence[str],
        log: str,
        rows: Sequence[Diagnostic] = (),
    ) -> None:
        self.program, self.arch, self.options = program, arch, tuple(options)
        self.log, self.rows = log, tuple(rows)
        self.count = 1  # how often this failure was asked for; see Builder.failures
        if "Unsupported .version" in log:
            self.hint = "this PTX is newer than nvJitLink: pip install -U nvidia-nvjitlink"
        with_options = f" with {' '.join(options)}" if options else ""
        super().__init__(f"{program} does not compile for {arch}{with_options}\n{self._evidence()}")

    def _evidence(self) -> str:
        errors = [row for row in self.rows if row.severity != "warning"]
        if not errors:
            return self.log.rstrip() or "the compiler gave no reason"
        shown = "\n".join(str(row) for row in errors[: self.SHOWN])
        rest = len(errors) - self.SHOWN
        return shown if rest <= 0 else f"{shown}\n… and {rest} more errors; error.log has all of them"


class SealedError(PreheatError):
    """A sealed process would have to compile.

    `program`, `entry`, `arch` and `caller` say what was asked for, and by which line; `reason` why
    nothing stored answers it; `nearest` what is stored instead, and `differences` in which parts.
    """

    def __init__(
        self,
        *,
        program: str,
        arch: str,
        reason: str,
        caller: str,
        entry: str | None = None,
        nearest: str | None = None,
        differences: tuple[str, ...] = (),
    ) -> None:
        self.program, self.arch, self.entry, self.caller = program, arch, entry, caller
        self.reason, self.nearest, self.differences = reason, nearest, differences
        what = program if entry is None else f"{entry} of {program}"
        lines = [f"{caller}: {what} for {arch} would have to be compiled: {reason}"]
        if nearest is not None:
            lines.append(f"the nearest there is: {nearest}{', in which' if differences else ''}")
        super().__init__("\n  ".join([*lines, *(f"  {line}" for line in differences)]))
        self.hint = (
            "this process is sealed: record and bake what it needs, or let it compile with "
            "PREHEAT_SEALED=warn"
        )

    def naming(self, entry: str) -> SealedError:
        """The same error for one kernel of the program."""
        return SealedError(
            program=self.program, arch=self.arch, reason=self.reason, caller=self.caller, entry=entry,
            nearest=self.nearest, differences=self.differences,
        )  # fmt: skip


class WarmError(PreheatError):
    """Not everything could be warmed.

    `failures` are pairs of what failed and its error, `report` says what was done nevertheless.
    """

    def __init__(self, failures: Iterable[tuple[str, Exception]], report: Any) -> None:
        self.failures, self.report = tuple(failures), report
        count = f"{len(self.failures)} failure{'' if len(self.failures) == 1 else 's'} in warming up:"
        super().__init__("\n  ".join([count, *(_line(*failure) for failure in self.failures)]))


def _line(what: str, error: Exception) -> str:
    """A failure in one line: what, why, and what to do."""
    shown = 2 if isinstance(error, CompileError) else 1  # of which the second is the compiler's first
    text = ": ".join(line.strip() for line in str(error).splitlines()[:shown])
    if not isinstance(error, PreheatError):
        text = f"{type(error).__name__}: {text}"
    hint = getattr(error, "hint", None)
    return f"{'' if text.startswith(what) else f'{what}: '}{text}{f' (hint: {hint})' if hint else ''}"


class ToolchainError(PreheatError):
    """The compiler could not be used; nothing is known about the program."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ToolchainNotFoundError(ToolchainError):
    """A compiler library is not installed where preheat looks."""


class ToolchainChangedError(ToolchainError):
    """The compiler that ran is another build than the one the key was made for."""


class CompilerCrashError(ToolchainError):
    """The compiler process died. Never remembered: the next request tries again.

    `killed` says that a signal from outside ended it, such as one of the kernel when memory runs out.
    """

    def __init__(self, message: str, *, killed: bool = False, hint: str | None = None) -> None:
        self.killed = killed
        super().__init__(message, hint=hint)


class CompilerTimeoutError(ToolchainError):
    """The compiler did not finish in the time allowed. Never remembered."""


class LaunchError(InputError):
    """A launch that cannot be. `argument` is the position of the argument at fault, from 0."""

    def __init__(
        self, kernel: str, message: str, *, argument: int | None = None, hint: str | None = None
    ) -> None:
        self.kernel, self.argument = kernel, argument
        where = "" if argument is None else f", argument {argument}"
        super().__init__(f"{kernel}{where}: {message}", hint=hint)


class StaleBufferError(LaunchError):
    """Memory is used that was freed, or that a reset of its device took away."""


class DeviceError(PreheatError):
    """A device could not do what it was asked."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class NoGpuError(DeviceError):
    """There is no GPU to use."""


class DriverError(DeviceError):
    """A CUDA driver call failed. `sticky` errors end the context: nothing works in it from then on."""

    def __init__(
        self,
        call: str,
        code: int,
        name: str,
        meaning: str,
        *,
        sticky: bool = False,
        hint: str | None = None,
    ) -> None:
        self.call, self.code, self.name, self.meaning, self.sticky = call, code, name, meaning, sticky
        super().__init__(f"{call} failed: {name} ({code}): {meaning}", hint=hint)


class InvalidCodeError(DriverError):
    """The driver does not take this binary: damaged, or not made for this device."""


class OutOfMemoryError(DriverError, MemoryError):
    """Device memory is used up."""


class ContextLostError(DeviceError):
    """The context that this belonged to is gone: after a fault on the device, a reset, or a fork."""


class GraphError(DeviceError):
    """A graph cannot be made or replayed."""


class CaptureError(GraphError):
    """A capture was used wrongly, or met something that no capture can hold.

    `where` is the line of the program that did it.
    """

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.where = where
        super().__init__(message if where is None else f"{where}: {message}", hint=hint)


class CaptureWarning(RuntimeWarning):
    """A step could not be captured and runs without a graph: correct, and slower than a replay."""


class StaleGraphError(GraphError):
    """Memory that a graph uses was freed: replaying it would use somebody else's."""


class BakedError(GraphError):
    """A replay would use values that were captured for another call. `changes` says which."""

    def __init__(self, message: str, changes: Sequence[str], *, hint: str | None = None) -> None:
        self.changes = tuple(changes)
        super().__init__("\n  ".join((message, *changes)), hint=hint)


class PoolSealedError(GraphError):
    """A sealed pool was asked for memory."""


class SourceLine(NamedTuple):
    """A line of CUDA source; `text` is None where the file is not at hand any more, or has changed."""

    file: str
    line: int
    text: str | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class EmulatorFault(DeviceError):  # noqa: N818  (what it is: the emulated kernel's fault, not ours)
    """The emulated kernel did something a GPU would not survive.

    `line` is the line of the PTX, `block` and `thread` the first thread that did it, `address` the
    memory it touched, where it was about memory. `source` is the line of the CUDA source, followed by
    those of the calls around it; it is empty where nothing is known about them.
    """

    SHOWN = 8
    plain: EmulatorFault | None = None  # the same fault before its source was known

    def __init__(
        self,
        kernel: str,
        message: str,
        *,
        line: int | None = None,
        text: str = "",
        block: tuple[int, int, int] | None = None,
        thread: tuple[int, int, int] | None = None,
        address: int | None = None,
        source: Sequence[SourceLine] = (),
        hint: str | None = None,
    ) -> None:
        self.kernel, self.message, self.line, self.text = kernel, message, line, text
        self.block, self.thread, self.address = block, thread, address
        self.source = tuple(source)
        where = "".join(f", {place}" for place in self.source[:1])
        where += "" if line is None else f", PTX line {line}"
        who = "" if thread is None else f" (block {block}, thread {thread})"
        head = f"{kernel}{where}{who}: {message}"
        super().__init__("\n    ".join([head, *self._evidence()]), hint=hint)

    def located(self, source: Sequence[SourceLine], *, hint: str | None = None) -> Self:
        """The same fault with the lines of its source; `hint` where it has none of its own."""
        made = type(self)(
            self.kernel, self.message, line=self.line, text=self.text, block=self.block,
            thread=self.thread, address=self.address, source=source, hint=self.hint or hint,
        )  # fmt: skip
        made.plain = self
        return made

    def _evidence(self) -> Iterator[str]:
        """The text of the source line, the calls around it, and the text of the PTX."""
        for depth, place in enumerate(self.source[: self.SHOWN]):
            where, text = f"called from {place}" if depth else "", place.text or ""
            if where or text:
                yield ": ".join(filter(None, (where, text)))
        if len(self.source) > self.SHOWN:
            yield f"… and {len(self.source) - self.SHOWN} more calls in .source"
        if self.text:
            yield self.text


class UnsupportedInstructionError(EmulatorFault):
    """The emulator does not support this instruction, or this form of it."""


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """A hint naming the closest known name, or None when nothing is close."""
    close = closest(name, known)
    return None if close is None else f"did you mean {close!r}?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`; None when nothing is close."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


class _Brief(reprlib.Repr):
    """Reprs of values that a caller gave, none of them longer than a line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60
        self.fillvalue = "…"

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 256:  # Python refuses to write out very long ones.
            return f"an integer of {value.bit_length()} bits"
        return super().repr_int(value, level)


_brief = _Brief()


def brief(value: object) -> str:
    """A value in an error message: its repr, with the middle or the end left out where it is long."""
    return _brief.repr(value)


E = TypeVar("E", bound=Exception)


def fresh(error: E, **changes: Any) -> E:
    """The same error as a new object: raising one object in several places mixes their tracebacks."""
    copy = _restored(type(error), error.args, error.__dict__)
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


def _restored(kind: type[E], args: tuple[Any, ...], state: Mapping[str, Any]) -> E:
    # Ours are plain exceptions underneath; what the class itself finds may be MemoryError's.
    base = Exception if issubclass(kind, PreheatError) else kind
    error: E = base.__new__(kind)
    error.__dict__.update(state)
    if "__notes__" in state:
        error.__notes__ = [*state["__notes__"]]  # a note on one of them is none on the other
    error.args = args
    return error
