"""Every error that preheat raises, in one tree.

    PreheatError
      InputError                 a program, name, option or path is invalid
        UnknownEntryError        the program has no such kernel; lists the kernels it has
        TargetError              PTX cannot run on the requested architecture
        BundleError              a file is not a valid bundle, or a bundle cannot be written there
        KeyFileError             a file of keys cannot be used or written
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
        CompilerCrashError       it crashed; the calling process continues
        CompilerTimeoutError     it did not finish in the time allowed
        ToolchainChangedError    it was replaced while in use; the builder retries
        LostJobError             workers of a bake died while they compiled a program
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

Cache faults are events (`preheat.model.events`) and not errors: a full disk must not discard a compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

from preheat.process import messages
from preheat.process.messages import (
    Diagnostic,
    LinkedSymbol,
    SourceLine,
    count,
    did_you_mean,
    kernel_hint,
    short_repr,
)

__all__ = [
    "AdapterError", "BakedError", "BundleError", "CaptureError", "CaptureWarning", "CompileError",
    "CompilerCrashError", "CompilerTimeoutError", "ConfigError", "ContextLostError", "DeviceError",
    "Diagnostic", "DriverError", "EmulatorFault", "GraphError", "InputError", "InvalidCodeError",
    "KeyFileError", "LaunchError", "LinkError", "LinkedSymbol", "LostJobError", "NoGpuError",
    "OutOfMemoryError", "PoolSealedError", "PreheatError", "PtxError", "SealedError", "SourceLine",
    "StaleBufferError", "StaleGraphError", "TargetError", "ToolchainChangedError", "ToolchainError",
    "ToolchainNotFoundError", "UnknownEntryError", "UnsupportedInstructionError", "WarmError",
    "copy_error", "did_you_mean", "short_repr",
]  # fmt: skip


class PreheatError(Exception):
    """The base of every error that preheat raises.

    Catch it to handle all of them. The page Errors of the reference has the cause and the cure of each.

    Attributes:
        others: The other errors of a call that does many things, such as `Gpu.kernels`.

    Examples:
        >>> try:
        ...     gpu.kernel(SAXPY, "saxp")
        ... except preheat.PreheatError as error:
        ...     print(error.hint)
        did you mean 'saxpy'?
    """

    _hint: str | None = None
    others: tuple[PreheatError, ...] = ()

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def hint(self) -> str | None:
        """A next step, or None. A traceback shows it below the message."""
        return self._hint

    @hint.setter
    def hint(self, text: str | None) -> None:
        others = [note for note in getattr(self, "__notes__", ()) if note != f"hint: {self._hint}"]
        self.__notes__ = [*others, f"hint: {text}"] if text else others
        self._hint = text

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes, because the class takes other arguments than the message."""
        return _restored, (type(self), self.args, self.__dict__)


class AdapterError(PreheatError):
    """The adapter for another library cannot be used, or cannot make what was recorded.

    Install a version of the library that the adapter knows, or record again with the version that is
    installed. The message names both.
    """


class InputError(PreheatError, ValueError):
    """An argument, an option, a path or a file is invalid.

    The message names it, and `hint` says what is valid. It is also a `ValueError`.
    """


class UnknownEntryError(InputError):
    """The program has no kernel of this name.

    Use one of the names in `known`. A kernel template needs arguments, such as `"tk<float>"`.

    Attributes:
        name: The name that was requested.
        program: The label of the program.
        known: The kernels that the program has.
        templates: Its kernel templates, such as `tk<class T, int N>`.
        reason: The message of the compiler, if it rejected a name expression.
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
    """PTX for one architecture cannot run on another one.

    Compile for an architecture that runs the PTX, or generate the PTX for an older architecture.

    Attributes:
        program: The label of the program.
        target: The `.target` of the PTX.
        arch: The architecture that was requested.
    """

    def __init__(self, program: str, target: str, arch: str, why: str) -> None:
        self.program = program
        self.target = target
        self.arch = arch
        super().__init__(f"{program} targets {target} and cannot run on {arch}: {why}")


class PtxError(InputError):
    """PTX text breaks a rule. The error is found before the assembler runs.

    Correct the line that the message shows.

    Attributes:
        program: The label of the program.
        rule: The name of the rule.
        line: The number of the line.
        text: The line.
    """

    def __init__(self, program: str, rule: str, message: str, line: int, text: str) -> None:
        self.program = program
        self.rule = rule
        self.line = line
        self.text = text
        excerpt = f"\n    {text.strip()}" if text.strip() else ""
        super().__init__(f"{program}:{line}: {message}{excerpt}")


class BundleError(InputError):
    """A file is not a valid bundle, cannot be trusted or written, or has no code for the device.

    Copy or bake the bundle again, and check it with `preheat bundle verify FILE`. In a sealed process,
    every request raises it until each bundle of the settings can be used.
    """


class KeyFileError(InputError):
    """A file of keys cannot be read or written, must not be used, or has other content.

    The message says why. `preheat keys new FILE` makes a key, and `chmod 600 FILE` keeps it private.

    Attributes:
        path: The file.
    """

    def __init__(self, path: str | PathLike[str], why: str, *, hint: str | None = None) -> None:
        self.path = Path(path)
        super().__init__(f"key file {path}: {why}", hint=hint)


class ConfigError(PreheatError):
    """An environment variable has an invalid value.

    Set the variable to a value that the message describes, or unset it.

    Attributes:
        variable: The name of the variable.
        value: Its value.
    """

    def __init__(self, variable: str, value: str, expected: str) -> None:
        self.variable = variable
        self.value = value
        super().__init__(f"{variable}={value!r} is not {expected}")


class CompileError(PreheatError):
    """The compiler rejected the program.

    Correct the source at the lines that the message shows.

    Attributes:
        program: The label of the program.
        arch: The architecture.
        options: The options of the compiler.
        log: The whole output of the compiler.
        rows: The messages in it, as `Diagnostic` objects.
        count: The number of requests that met this failure.
    """

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


class LinkError(CompileError):
    """The linker rejected the parts of a program.

    Add the part that defines a missing symbol, or define a symbol in one part only.

    Attributes:
        undefined: The symbols that no part defines, as `LinkedSymbol` objects.
        multiple: The symbols that several parts define.
        log: The output of the linker.
    """

    def __init__(
        self,
        program: str,
        arch: str,
        options: Sequence[str],
        log: str,
        *,
        undefined: Sequence[LinkedSymbol] = (),
        multiple: Sequence[LinkedSymbol] = (),
    ) -> None:
        self.undefined = tuple(undefined)
        self.multiple = tuple(multiple)
        super().__init__(program, arch, options, log)
        with_options = f" with {' '.join(options)}" if options else ""
        text = "\n".join(messages.symbol_lines(self.undefined, self.multiple, self.SHOWN))
        text = text or log.rstrip() or "the linker gave no reason"
        self.args = (f"{program} does not link for {arch}{with_options}\n{text}",)
        if any(symbol.similar for symbol in undefined):
            self.hint = 'compare the types and namespaces of the two, and whether both are extern "C"'
        elif undefined:
            self.hint = "add the part that defines it"
        elif multiple:
            self.hint = "define it in one part and declare it extern in the others, or make it static"


class SealedError(PreheatError):
    """A sealed process would have to compile a program.

    Record and bake what the process needs, or let it compile in the mode "warn". The hint says how to
    set this mode: `preheat run --sealed warn` for a command of `preheat run --sealed`,
    `preheat.seal("warn")` after `preheat.seal()`, `preheat.sealed("warn")` in a block, and otherwise
    `PREHEAT_SEALED=warn`. `preheat check` finds missing programs before a process starts.

    Attributes:
        program: The label of the program.
        arch: The architecture.
        entry: The kernel that was requested, or None.
        caller: The line that requested it.
        reason: The reason why no stored program can be used.
        evidence: What is known about the reason, such as the line that includes a changed header.
        nearest: The most similar stored program, or None.
        differences: The parts in which the request differs from it.
    """

    def __init__(
        self,
        *,
        program: str,
        arch: str,
        reason: str,
        caller: str,
        entry: str | None = None,
        evidence: tuple[str, ...] = (),
        nearest: str | None = None,
        differences: tuple[str, ...] = (),
        hint: str = "record and bake what the process needs",
    ) -> None:
        self.program, self.arch, self.entry = program, arch, entry
        self.caller, self.reason, self.evidence = caller, reason, evidence
        self.nearest, self.differences = nearest, differences
        kind = reason.partition(": ")[0]
        if kind in ("damaged", "unreadable"):
            hint = "copy the bundle again, and check it: preheat bundle verify FILE"
        elif kind == "unmeasured":
            hint = f"record a launch with these values on a GPU of {arch}, and bake"
        what = f"{program} ({arch})" if entry is None else f"{entry} ({program}, {arch})"
        text = messages.sealed_message(caller, what, reason, evidence, nearest, differences)
        super().__init__(text, hint=hint)

    def naming(self, entry: str) -> SealedError:
        """Return the same error for one kernel of the program."""
        return SealedError(
            program=self.program, arch=self.arch, reason=self.reason, caller=self.caller, entry=entry,
            evidence=self.evidence, nearest=self.nearest, differences=self.differences,
            hint=str(self.hint),
        )  # fmt: skip


class WarmError(PreheatError):
    """A part of a warm-up failed. Everything else is warm.

    Correct each failure, and call `gpu.warm` again: it does only what is missing.

    Attributes:
        failures: Pairs of a name and an error.
        report: The work that was done, as a `WarmReport`.
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
    """The compiler cannot be used. The program itself may be correct.

    Run `preheat doctor`, which tests the compilers and names missing packages.
    """


class ToolchainNotFoundError(ToolchainError):
    """A compiler library is not installed where preheat searches.

    Install it with `pip install 'preheat[cu13]'`, or use a bundle, which needs no compiler.
    """


class ToolchainChangedError(ToolchainError):
    """The compiler that ran is not the build that the cache key names.

    This happens when a package is replaced while a process compiles. The builder tries again by itself.
    If the error reaches you, start the process again.
    """


class CompilerCrashError(ToolchainError):
    """The compiler process crashed. The failure is not remembered, so the next request tries again.

    If it was killed, give the machine more memory or compile fewer programs at once. Otherwise simplify
    the program, or try another version of the compiler.

    Attributes:
        killed: True if an external signal ended it, such as one of the out-of-memory killer.
    """

    def __init__(self, message: str, *, killed: bool = False, hint: str | None = None) -> None:
        self.killed = killed
        super().__init__(message, hint=hint)


class CompilerTimeoutError(ToolchainError):
    """The compiler did not finish within the time limit. The failure is not remembered.

    Raise the limit with `PREHEAT_COMPILE_TIMEOUT`, or split the program.
    """


class LostJobError(ToolchainError):
    """Workers of a bake died while they compiled one program. The other programs are baked.

    The workers may have had too little memory. See their logs, or bake the program locally.

    Attributes:
        deaths: The number of workers that died.
    """

    def __init__(self, job: object, deaths: int) -> None:
        self.deaths = deaths
        super().__init__(
            f"{job} was not baked: {count(deaths, 'worker')} died, the last while running it alone",
            hint="the workers may have too little memory: see their logs, or bake it locally",
        )


class LaunchError(InputError):
    """A launch is invalid: an argument, the grid or the block does not fit. The driver was not called.

    Correct the argument that the message names. `hint` often has the call that was meant.

    Attributes:
        kernel: The name of the kernel.
        argument: The position of the wrong argument, counted from 0, or None.
    """

    def __init__(
        self, kernel: str, message: str, *, argument: int | None = None, hint: str | None = None
    ) -> None:
        self.kernel = kernel
        self.argument = argument
        where = "" if argument is None else f", argument {argument}"
        super().__init__(f"{kernel}{where}: {message}", hint=hint)


class StaleBufferError(LaunchError):
    """A launch or a copy uses memory that was freed, or that was lost in a reset of its device.

    Keep the array open until its last use, and make arrays again after a reset.
    """


class DeviceError(PreheatError):
    """A device operation failed.

    Most are of a class below this one. A fault of a kernel makes an emulator unusable until
    `gpu.reset()`, and a GPU for the rest of the process.
    """


class NoGpuError(DeviceError):
    """There is no GPU to use.

    Use `preheat.device("emulator")` or `preheat.device("auto")`, or check the driver with `preheat
    doctor`.
    """


class DriverError(DeviceError):
    """A call of the CUDA driver failed.

    If the error is sticky, start a new process. `PREHEAT_BLOCKING=1` finds the kernel that caused it.

    Attributes:
        call: The name of the call.
        code: The number of the error.
        name: The name of the error, such as `CUDA_ERROR_INVALID_VALUE`.
        meaning: The text of the driver for it.
        sticky: True if the context is unusable.
    """

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
    """The driver rejects this binary: it is damaged, or made for another device.

    preheat replaces stored code by itself. For code of your own, compile it for the architecture of the
    device.
    """


class OutOfMemoryError(DriverError, MemoryError):
    """Device memory is exhausted. It is also a `MemoryError`.

    Close arrays and graphs that are no longer used, use a pool for captures, or use smaller batches.
    """


class ContextLostError(DeviceError):
    """The context of the object was lost in a fault of the device, a reset, or a fork.

    On the emulator, call `gpu.reset()` after a fault, and make arrays, kernels and streams again. After
    a fault on a GPU, start a new process. A forked child cannot use a GPU of its parent: start such
    processes with the method `spawn`.
    """


class GraphError(DeviceError):
    """A graph cannot be captured or replayed.

    The message says why, and `hint` says what to do. A graph that was not captured cannot be replayed.
    """


class CaptureError(GraphError):
    """A capture is misused, or an operation cannot be captured.

    Move the operation before or after the capture. The most frequent cases are copies to the host and
    allocations.

    Attributes:
        where: The line of the program that caused it, or None.
    """

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.where = where
        super().__init__(message if where is None else f"{where}: {message}", hint=hint)


class CaptureWarning(RuntimeWarning):
    """A step cannot be captured and runs without a graph. It is correct, but slower than a replay.

    The message has the line of the step. Correct it as for a `CaptureError`.
    """


class StaleGraphError(GraphError):
    """Memory that a graph uses was freed. A replay would use memory of other arrays.

    Capture again, or keep the arrays open as long as the graph.
    """


class BakedError(GraphError):
    """A replay would use values that were captured for another call.

    Make the value a part of the key, or pass it as a `gpu.scalar`, which a replay can set.

    Attributes:
        changes: The values that differ.
    """

    def __init__(self, message: str, changes: Sequence[str], *, hint: str | None = None) -> None:
        self.changes = tuple(changes)
        super().__init__("\n  ".join((message, *changes)), hint=hint)


class PoolSealedError(GraphError):
    """Memory was requested from a sealed pool.

    Measure all bodies before `pool.seal()`, or call `pool.unseal()`.
    """


class EmulatorFault(DeviceError):  # noqa: N818  (the fault is in the emulated kernel)
    """The emulated kernel did something that is an error on a GPU.

    Correct the kernel at the line that the message shows.

    Attributes:
        kernel: The name of the kernel.
        message: The fault.
        line: The line of the PTX.
        text: The instruction.
        block: The block of the first thread at fault.
        thread: This thread.
        address: The memory that it accessed, if the fault is about memory.
        source: The line of the CUDA source, followed by the lines of the calls around it. It is empty
            if these are not known.
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
        evidence = messages.source_lines(self.source, self.SHOWN)
        super().__init__("\n    ".join([head, *evidence, *filter(None, [text])]), hint=hint)

    def located(self, source: Sequence[SourceLine], *, hint: str = "", message: str = "") -> Self:
        """Return the same fault with the lines of its source, and with `message` if it is given.

        `hint` is used where the fault has none.
        """
        made = type(self)(
            self.kernel, message or self.message, line=self.line, text=self.text, block=self.block,
            thread=self.thread, address=self.address, source=source, hint=self.hint or hint or None,
        )  # fmt: skip
        made.plain = self
        return made


class UnsupportedInstructionError(EmulatorFault):
    """The emulator does not support this instruction, or this form of it.

    Run the kernel on a GPU. The page "What the emulator supports" of the reference lists the
    instructions.
    """


E = TypeVar("E", bound=Exception)


def with_others(errors: Sequence[PreheatError]) -> PreheatError:
    """Return a copy of the first error, with the others in `others` and in a note."""
    first, *rest = errors
    if not rest:
        return first
    error = copy_error(first, others=tuple(rest))
    lines = [f"{count(len(rest), 'other failure')}:", *(_line("", each) for each in rest)]
    error.add_note("\n  ".join(lines))
    return error


def copy_error(error: E, **changes: Any) -> E:
    """Return a copy of an error. Raising one object in several places would mix their tracebacks."""
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
        error.__notes__ = [*state["__notes__"]]  # The copy gets its own list.
    error.args = args
    return error
