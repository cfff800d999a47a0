"""Every error that preheat raises, in one tree.

    PreheatError
      InputError                 a program, name, option or path is invalid
        UnknownEntryError        the program has no such kernel; lists the kernels it has
        TargetError              PTX targets another architecture than the requested one
        BundleError              a file is not a valid bundle, or a bundle cannot be written there
        KeyFileError             a file of keys cannot be used or written (preheat.signing)
        PtxError                 PTX text breaks a rule; has line and text
        LaunchError              a launch has invalid arguments or geometry; names the kernel
          StaleBufferError       memory was freed, or lost in a reset
      ConfigError                an environment variable has an invalid value
      CompileError               the compiler rejected the program; has the complete log
        LinkError                the linker rejected its parts; has the symbols
      SealedError                a sealed process would have to compile a program
      AdapterError               the adapter for another library cannot be used
      WarmError                  a warm-up failed in part; has the failures and the report
      ToolchainError             the compiler cannot be used
        ToolchainNotFoundError   its library is not installed
        CompilerCrashError       it crashed; the calling process goes on
        CompilerTimeoutError     it did not finish in the time allowed
        ToolchainChangedError    it was replaced while in use; the builder retries
      DeviceError                a device operation failed
        NoGpuError               there is no GPU
        DriverError              a driver call failed; has call, code, name and meaning
          InvalidCodeError       the driver rejects this binary
          OutOfMemoryError       device memory is exhausted
        ContextLostError         the context was lost: an earlier fault, a reset, or a fork
        GraphError               a graph cannot be captured or replayed
          CaptureError           an operation cannot be captured, or a capture is misused
          StaleGraphError        memory that the graph uses was freed
          BakedError             a replay would use values of another call
          PoolSealedError        an allocation from a sealed pool
        EmulatorFault            an emulated kernel failed; has source line and thread
          UnsupportedInstructionError   the emulator does not support this instruction

`CaptureWarning` is the only warning: a step that cannot be captured runs without a graph.

Cache faults are events (`preheat.events`) and not errors: a full disk must not discard a compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from preheat.messages import Diagnostic, SourceLine, count, did_you_mean, kernel_hint, short_repr

__all__ = [
    "AdapterError",
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
    "copy_error",
    "did_you_mean",
    "short_repr",
]


class PreheatError(Exception):
    """Base of every error that preheat raises. `hint` says what to do next, or is None."""

    _hint: str | None = None
    others: tuple[PreheatError, ...] = ()
    """The other errors of a call that does many things, such as `Gpu.kernels`."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def hint(self) -> str | None:
        """What to do next. A traceback shows it below the message."""
        return self._hint

    @hint.setter
    def hint(self, text: str | None) -> None:
        others = [note for note in getattr(self, "__notes__", ()) if note != f"hint: {self._hint}"]
        self.__notes__ = [*others, f"hint: {text}"] if text else others
        self._hint = text

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the state: the arguments of the class are not those of the message."""
        return _restored, (type(self), self.args, self.__dict__)


class AdapterError(PreheatError):
    """The adapter for another library cannot be used, or cannot make what was recorded."""


class InputError(PreheatError, ValueError):
    """An argument, an option, a path or a file is invalid."""


class UnknownEntryError(InputError):
    """The program has no such kernel.

    `known` lists the kernels it has, `templates` the templates, such as `tk<class T, int N>`. `reason`
    is the message of the compiler where it rejected a name expression.
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
        self.name = name
        self.program = program
        self.known = tuple(dict.fromkeys(known))
        self.templates = tuple(dict.fromkeys(templates))
        self.reason = reason
        why = f": {reason}" if reason else ""
        have = [", ".join(self.known)] if self.known else []
        if self.templates:
            have.append(f"the template{'s' * (len(self.templates) > 1)} {', '.join(self.templates)}")
        if not have and not reason:
            have = ["no kernels at all"]
        has = f"; it has: {' and '.join(have)}" if have else ""
        hint = kernel_hint(name, self.known, self.templates, rejected=reason is not None)
        super().__init__(f"{program} has no kernel {name!r}{why}{has}", hint=hint)


class TargetError(InputError):
    """PTX that targets `target` cannot run on `arch`."""

    def __init__(self, program: str, target: str, arch: str, why: str) -> None:
        self.program = program
        self.target = target
        self.arch = arch
        super().__init__(f"{program} targets {target} and cannot run on {arch}: {why}")


class PtxError(InputError):
    """PTX text breaks a rule. The error is found before the assembler runs."""

    def __init__(self, program: str, rule: str, message: str, line: int, text: str) -> None:
        self.program = program
        self.rule = rule
        self.line = line
        self.text = text
        excerpt = f"\n    {text.strip()}" if text.strip() else ""
        super().__init__(f"{program}:{line}: {message}{excerpt}")


class BundleError(InputError):
    """A file is not a valid bundle, or a bundle cannot be written there."""


class ConfigError(PreheatError):
    """An environment variable has an invalid value."""

    def __init__(self, variable: str, value: str, expected: str) -> None:
        self.variable = variable
        self.value = value
        super().__init__(f"{variable}={value!r} is not {expected}")


class CompileError(PreheatError):
    """The compiler rejected the program. `log` is its output, `rows` the parsed diagnostics."""

    SHOWN = 8

    def __init__(
        self, program: str, arch: str, options: Sequence[str], log: str, rows: Sequence[Diagnostic] = ()
    ) -> None:
        self.program = program
        self.arch = arch
        self.options = tuple(options)
        self.log = log
        self.rows = tuple(rows)
        self.count = 1  # number of requests that met this failure; see Builder.failures
        newer_ptx = "this PTX is newer than nvJitLink: pip install -U nvidia-nvjitlink"
        with_options = f" with {' '.join(options)}" if options else ""
        message = f"{program} does not compile for {arch}{with_options}\n{self._evidence()}"
        super().__init__(message, hint=newer_ptx if "Unsupported .version" in log else None)

    def _evidence(self) -> str:
        errors = [row for row in self.rows if row.severity != "warning"]
        if not errors:
            return self.log.rstrip() or "the compiler gave no reason"
        text = "\n".join(str(row) for row in errors[: self.SHOWN])
        rest = len(errors) - self.SHOWN
        return text if rest <= 0 else f"{text}\n… and {rest} more errors; error.log has all of them"


class SealedError(PreheatError):
    """A sealed process would have to compile a program.

    `program`, `entry` and `arch` identify the request, and `caller` is the line that made it. `reason`
    says why no stored program answers it. `nearest` is the most similar stored program, and
    `differences` lists the parts in which the request differs from it.
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
        self.program = program
        self.arch = arch
        self.entry = entry
        self.caller = caller
        self.reason = reason
        self.nearest = nearest
        self.differences = differences
        what = f"{program} ({arch})" if entry is None else f"{entry} ({program}, {arch})"
        kind, _, why = reason.partition(": ")  # The word before the colon is for counters and events.
        lines = [f"{caller}: {what} cannot be compiled in this sealed process: {why or reason}"]
        if nearest is not None:
            lines.append(f"most similar: {nearest}{'; the request differs in' if differences else ''}")
        hint = "record and bake what the process needs, or let it compile with PREHEAT_SEALED=warn"
        if kind in ("damaged", "unreadable"):
            hint = "copy the bundle again, and check it: preheat bundle verify FILE"
        super().__init__("\n  ".join([*lines, *(f"  {line}" for line in differences)]), hint=hint)

    def naming(self, entry: str) -> SealedError:
        """Return the same error for one kernel of the program."""
        return SealedError(
            program=self.program, arch=self.arch, reason=self.reason, caller=self.caller, entry=entry,
            nearest=self.nearest, differences=self.differences,
        )  # fmt: skip


class WarmError(PreheatError):
    """A warm-up failed in part.

    `failures` are pairs of a name and an error. `report` says what was done nevertheless.
    """

    def __init__(self, failures: Iterable[tuple[str, Exception]], report: Any) -> None:
        self.failures = tuple(failures)
        self.report = report
        head = f"{count(len(self.failures), 'failure')} in warming up:"
        super().__init__("\n  ".join([head, *(_line(*failure) for failure in self.failures)]))


def _line(what: str, error: Exception) -> str:
    """Return a failure as one line with its name, its message and its hint."""
    # The second line of a `CompileError` is the first error of the compiler.
    lines = str(error).splitlines()[: 2 if isinstance(error, CompileError) else 1]
    text = ": ".join(line.strip() for line in lines)
    if not isinstance(error, PreheatError):
        text = f"{type(error).__name__}: {text}"
    hint = getattr(error, "hint", None)
    return f"{'' if text.startswith(what) else f'{what}: '}{text}{f' (hint: {hint})' if hint else ''}"


class ToolchainError(PreheatError):
    """The compiler cannot be used. This says nothing about the program."""


class ToolchainNotFoundError(ToolchainError):
    """A compiler library is not installed where preheat searches."""


class ToolchainChangedError(ToolchainError):
    """The compiler that ran is not the build that the cache key names."""


class CompilerCrashError(ToolchainError):
    """The compiler process crashed. The failure is not remembered, so the next request tries again.

    `killed` is True when an external signal ended it, such as one of the out-of-memory killer.
    """

    def __init__(self, message: str, *, killed: bool = False, hint: str | None = None) -> None:
        self.killed = killed
        super().__init__(message, hint=hint)


class CompilerTimeoutError(ToolchainError):
    """The compiler did not finish within the time limit. The failure is not remembered."""


class LaunchError(InputError):
    """A launch is invalid. `argument` is the position of the wrong argument, counted from 0."""

    def __init__(
        self, kernel: str, message: str, *, argument: int | None = None, hint: str | None = None
    ) -> None:
        self.kernel = kernel
        self.argument = argument
        where = "" if argument is None else f", argument {argument}"
        super().__init__(f"{kernel}{where}: {message}", hint=hint)


class StaleBufferError(LaunchError):
    """A launch or a copy uses memory that was freed, or that was lost in a reset of its device."""


class DeviceError(PreheatError):
    """A device operation failed."""


class NoGpuError(DeviceError):
    """There is no GPU to use."""


class DriverError(DeviceError):
    """A CUDA driver call failed. A `sticky` error makes the context unusable."""

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
        self.call = call
        self.code = code
        self.name = name
        self.meaning = meaning
        self.sticky = sticky
        super().__init__(f"{call} failed: {name} ({code}): {meaning}", hint=hint)


class InvalidCodeError(DriverError):
    """The driver rejects this binary: it is damaged, or made for another device."""


class OutOfMemoryError(DriverError, MemoryError):
    """Device memory is exhausted."""


class ContextLostError(DeviceError):
    """The context of the object was lost in a fault of the device, a reset, or a fork."""


class GraphError(DeviceError):
    """A graph cannot be captured or replayed."""


class CaptureError(GraphError):
    """A capture is misused, or an operation cannot be captured.

    `where` is the line of the program that caused it.
    """

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.where = where
        super().__init__(message if where is None else f"{where}: {message}", hint=hint)


class CaptureWarning(RuntimeWarning):
    """A step cannot be captured and runs without a graph: correct, and slower than a replay."""


class StaleGraphError(GraphError):
    """Memory that a graph uses was freed. A replay would use memory of other arrays."""


class BakedError(GraphError):
    """A replay would use values that were captured for another call. `changes` lists them."""

    def __init__(self, message: str, changes: Sequence[str], *, hint: str | None = None) -> None:
        self.changes = tuple(changes)
        super().__init__("\n  ".join((message, *changes)), hint=hint)


class PoolSealedError(GraphError):
    """A sealed pool does not allocate."""


class EmulatorFault(DeviceError):  # noqa: N818  (the fault is in the emulated kernel)
    """The emulated kernel did something that is an error on a GPU.

    `line` is the line of the PTX. `block` and `thread` identify the first thread at fault, and
    `address` the memory it accessed, where the fault is about memory. `source` is the line of the CUDA
    source, followed by the lines of the calls around it. It is empty where these are not known.
    """

    SHOWN = 8
    plain: EmulatorFault | None = None  # the same fault without its source

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
        self.kernel = kernel
        self.message = message
        self.line = line
        self.text = text
        self.block = block
        self.thread = thread
        self.address = address
        self.source = tuple(source)
        where = "".join(f", {place}" for place in self.source[:1])
        where += "" if line is None else f", PTX line {line}"
        who = "" if thread is None else f" (block {block}, thread {thread})"
        head = f"{kernel}{where}{who}: {message}"
        super().__init__("\n    ".join([head, *self._evidence()]), hint=hint)

    def located(self, source: Sequence[SourceLine], *, hint: str | None = None) -> Self:
        """Return the same fault with the lines of its source. `hint` is used where it has none."""
        made = type(self)(
            self.kernel, self.message, line=self.line, text=self.text, block=self.block,
            thread=self.thread, address=self.address, source=source, hint=self.hint or hint,
        )  # fmt: skip
        made.plain = self
        return made

    def _evidence(self) -> Iterator[str]:
        """Yield the text of the source line, the calls around it, and the text of the PTX."""
        for depth, place in enumerate(self.source[: self.SHOWN]):
            parts = (f"called from {place}" if depth else "", place.text)
            if text := ": ".join(filter(None, parts)):
                yield text
        if len(self.source) > self.SHOWN:
            yield f"… and {len(self.source) - self.SHOWN} more calls in .source"
        if self.text:
            yield self.text


class UnsupportedInstructionError(EmulatorFault):
    """The emulator does not support this instruction, or this form of it."""


E = TypeVar("E", bound=Exception)


def with_others(errors: Sequence[PreheatError]) -> PreheatError:
    """Return a copy of the first error that has the others in `others`, and in a note one line each."""
    first, *rest = errors
    if not rest:
        return first
    error = copy_error(first, others=tuple(rest))
    lines = [f"{count(len(rest), 'other failure')}:", *(_line("", each) for each in rest)]
    error.add_note("\n  ".join(lines))
    return error


def copy_error(error: E, **changes: Any) -> E:
    """Return a copy of an error: raising one object in several places mixes their tracebacks."""
    copy = _restored(type(error), error.args, error.__dict__)
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


def _restored(kind: type[E], args: tuple[Any, ...], state: Mapping[str, Any]) -> E:
    # Errors of preheat are made by Exception: __new__ of the class may be that of MemoryError.
    base = Exception if issubclass(kind, PreheatError) else kind
    error: E = base.__new__(kind)
    error.__dict__.update(state)
    if "__notes__" in state:
        error.__notes__ = [*state["__notes__"]]  # The copy gets a list of its own.
    error.args = args
    return error
