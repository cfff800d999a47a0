"""The input of a compile: source text, options, headers and names, as one frozen value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from preheat.errors import InputError, short_repr
from preheat.model.portable_paths import spell
from preheat.process.callsite import call_site
from preheat.process.files import read_whole
from preheat.process.lazy import LazyModule, lazy
from preheat.process.messages import printable

if TYPE_CHECKING:
    from preheat.model import lexer
else:
    lexer = LazyModule("preheat.model.lexer")  # Most hits do not need its patterns.

__all__ = ["HEADER_DIRECTORY", "SOURCE_DIRECTORY", "Program"]

#: The directories of sources and of headers in debug information, which `toolchain/worker.py` gives
#: to the compiler.
SOURCE_DIRECTORY = "/preheat"
HEADER_DIRECTORY = "/proc/self/cwd"

NONE: tuple[()] = ()  # The default of list arguments. Python has only one empty tuple.
_PTX_START = re.compile(r"\.\w")  # No C++ text starts with a dot.
# A header of the compiler itself, which shows that a trace is complete.
_CANARY = "__nv_nvrtc_builtin_header.h"
_CLOCK = ("__DATE__", "__TIME__", "__TIMESTAMP__")

# Options whose effect cannot be part of a cache key, and the reason that the `uncached` event reports.
_UNKEYED = (
    (r"-{1,2}(?:fdevice-)?time(?:-trace)?(?:=.*)?", "{} writes a time trace"),
    (r"-{1,2}pch(?:-.*)?(?:=.*)?", "{} uses a precompiled header, which cannot be tracked"),
    (r"-{1,2}(?:create|use)-pch(?:=.*)?", "{} uses a precompiled header, which cannot be tracked"),
    (r"-{1,2}use-bundled-headers(?:=.*)?", "{} brings headers that cannot be tracked"),
    (r".*(?:-options-file|-optf).*", "{} reads options from a file"),
)
# Compiled when they are first used: most programs have no options.
_ARCH_OPTION = r"-{1,2}(?:gpu-architecture|arch)(?:=.*)?"
_INCLUDE_OPTION = r"(?s)(?:-I|--include-path)(=?)(.*)"
_UNLINKED = (
    r"(?:-rdc|--relocatable-device-code)[= ]true|-dc|--device-c|-r"
    r"|-{1,2}(?:lto|dlto|device-link-time-opt|dlink-time-opt|gen-opt-lto)(?:=.*)?"
)


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that a compiler is given, except the architecture. Equal programs give equal code.

    Attributes:
        source: The text.
        label: A logical name such as `saxpy.cu`. It reaches the binary through `__FILE__`, so it is a
            part of the key and never a path.
        language: `"cuda"` or `"ptx"`.
        options: Options of the compiler.
        include: Directories to search. They are not part of the key. The contents of the headers that
            are found there are.
        headers: Headers in memory, as pairs of a name and a text. They are found before any file.
        names: Name expressions such as `"tk<float>"`. A plain kernel needs none.
        path: The file that `from_file` read.
        spellings: A portable path for each include directory; see `model.portable_paths`. Bundles
            distinguish two lists of directories by them.

    Examples:
        >>> program = preheat.Program.of(SAXPY, label="saxpy.cu", options=["-use_fast_math"])
        >>> gpu.kernel(program, "saxpy").name
        'saxpy'
    """

    source: str
    label: str = "program.cu"
    language: str = "cuda"
    options: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    path: str | None = field(default=None, compare=False)  # the file that `from_file` read
    spellings: tuple[tuple[str, str], ...] = ()  # (directory, spelling), completed from `path`
    #: The rows that a key has after the rows of the fields above. Programs that are linked have some.
    part_rows: ClassVar[tuple[tuple[str, bytes], ...]] = ()
    #: The options by which NVRTC makes code that still has to be linked, for a part of a link.
    form_options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of(
        cls,
        source: str,
        *,
        label: str | None = None,
        language: str | None = None,
        options: Sequence[str] | None = (),
        include: Iterable[str | os.PathLike[str]] | None = (),
        headers: Mapping[str, str] | None = None,
        names: Iterable[str] | None = (),
        path: str | None = None,
    ) -> Program:
        """Make a program from a text. Options that begin with `-I` move to `include`.

        Args:
            source: The text.
            label: The name of the program. The default depends on the language.
            language: `"cuda"` or `"ptx"`. By default, the text decides.
            options: Options of the compiler. None means an empty list.
            include: Directories with header files. None means an empty list.
            headers: Texts of header files by name.
            names: Name expressions of template instances. None means an empty list.
            path: The file that the text was read from.

        Raises:
            InputError: A value is one that no compile can use.

        Examples:
            >>> preheat.Program.of(SAXPY).language
            'cuda'
        """
        if path is None and (file := file_of(source)) is not None:
            hint = f"read the file: Program.from_file({os.fspath(file)!r})"
            raise InputError(f"{source!r} names a file, and Program.of takes source text", hint=hint)
        if not isinstance(source, str):
            raise InputError(
                f"source must be a path, source text or a Program, not {short_repr(source)}"
            )
        language = language or ("ptx" if _PTX_START.match(source, first_token(source)) else "cuda")
        if language not in ("cuda", "ptx"):
            raise InputError(f"language must be 'cuda' or 'ptx', not {language!r}")
        # Most programs have none of these, and then nothing has to be checked.
        others = () if options is NONE else list_argument("options", options)
        directories = () if include is NONE else list_argument("include", include)
        spellings: tuple[tuple[str, str], ...] = ()
        if others or directories:
            others, moved = _split_include_options(others)
            written = list(map(_path, (*directories, *moved)))
            directories = tuple(map(os.path.abspath, written))
            spelt = [spell(directory, path, _asking_file) for directory in written]
            spellings = tuple(zip(directories, spelt, strict=True))
        program = object.__new__(cls)
        # All fields at once: the constructor of a frozen class takes longer, one field at a time.
        program.__dict__.update(
            source=source,
            label=label if label is not None else f"program.{'ptx' if language == 'ptx' else 'cu'}",
            language=language,
            options=others,
            include=directories,
            spellings=spellings,
            headers=() if headers is None else header_rows(headers),
            names=() if names is NONE else list_argument("names", names),
            path=path,
        )
        program.__post_init__()
        return program

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **more: Any) -> Program:
        """Read a program from a `.cu` or `.ptx` file. Its directory is the first include directory.

        Args:
            path: The path of the file.
            more: The keyword arguments of `of`.

        Raises:
            InputError: The file cannot be read, or a value is one that no compile can use.

        Examples:
            >>> preheat.Program.from_file("saxpy.cu").label
            'saxpy.cu'
        """
        path = Path(path)
        raw = read_input(path)
        language = "ptx" if path.suffix == ".ptx" else "cuda"
        try:
            source = raw.decode("utf-8")
        except UnicodeDecodeError as bad:
            line = raw.count(b"\n", 0, bad.start) + 1
            raise InputError(
                f"{path}:{line}: byte 0x{raw[bad.start]:02x} is not UTF-8 text",
                hint=f"{path.name} must be CUDA C++ or PTX source, not a compiled file",
            ) from None
        include = [path.parent, *list_argument("include", more.pop("include", ()))]
        own = {"label": printable(path.name), "language": language, "path": os.path.abspath(path)}
        return cls.of(source, **{**own, **more}, include=include)

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Program, **more: Any) -> Program:
        """Return the program that `source` describes, as every function of preheat accepts it.

        Args:
            source: A path, or a one-line string that ends in `.cu` or `.ptx`, is a file. Any other
                string is source text. A `Program` is returned unchanged, and no other argument can be
                given with it.
            more: The keyword arguments of `of`.

        Raises:
            InputError: The file cannot be read, or a value is one that no compile can use.

        Examples:
            >>> preheat.Program.read("saxpy.cu") == preheat.Program.from_file("saxpy.cu")
            True
        """
        given = {name: value for name, value in more.items() if value is not None}
        if isinstance(source, Program):
            if any(given.values()):
                raise InputError(
                    "a Program already has its label, options, include, headers and names",
                    hint="change the program instead: dataclasses.replace(program, options=(…))",
                )
            return source
        path = file_of(source)
        if path is None:
            return cls.of(source, **given)  # type: ignore[arg-type]
        try:
            return cls.from_file(path, **given)
        except InputError as error:
            if isinstance(error.__context__, FileNotFoundError):
                error.hint = (
                    "a relative path begins at the current directory; for a file beside your module: "
                    f"Path(__file__).with_name({os.path.basename(path)!r})"
                )
            raise

    def __post_init__(self) -> None:
        if self.include or self.spellings:
            known = dict(reversed(self.spellings))  # The first spelling of a directory counts.
            complete = [
                (directory, known.get(directory) or spell(directory, self.path))
                for directory in dict.fromkeys(self.include)
            ]
            object.__setattr__(self, "spellings", tuple(complete))
        self._check_texts()
        if self.options:
            self._check_options()

    def _check_texts(self) -> None:
        """Raise `InputError` for a source, label, header or name that no compiler takes."""
        if not self.source.strip() and self.language == "cuda":
            raise InputError(f"{self.label}: the source is empty")
        label = self.label
        if type(label) is not str or not label or "/" in label or not label.isprintable():
            require_label(label)  # It says what is wrong. A valid label costs no call.
        headers = tuple(chain.from_iterable(self.headers)) if self.headers else ()
        everything = "".join((self.source, *self.options, *self.names, *headers))
        if "\0" in everything or not (everything.isascii() or _is_unicode(everything)):
            raise self._text_error(headers)
        if self.language == "ptx" and (self.headers or self.names):
            what = "headers" if self.headers else "names"
            raise InputError(f"{self.label}: PTX takes no {what}")

    def _text_error(self, headers: tuple[str, ...]) -> InputError:
        """Return the error for the first text that has a NUL byte or is not valid Unicode."""
        for what, texts in (
            ("source", (self.source,)),
            ("an option", self.options),
            ("a name", self.names),
            ("a header", headers),
        ):
            for text in texts:
                if "\0" in text:
                    return InputError(f"{self.label!r}: {what} contains a NUL byte")
                if not _is_unicode(text):
                    return InputError(f"{self.label!r}: {what} is not valid Unicode text")
        raise AssertionError("one of the texts has a NUL byte or is not valid Unicode")

    def _check_options(self) -> None:
        """Raise `InputError` for an option that contradicts what preheat does."""
        for option in self.options:
            if re.fullmatch(_ARCH_OPTION, option):
                raise InputError(
                    f"{self.label}: {option} cannot be an option of a program",
                    hint="the architecture is a separate argument: arch='sm_90'",
                )
        for option in (*self.options, *map(" ".join, pairwise(self.options))):
            if re.fullmatch(_UNLINKED, option):
                raise InputError(
                    f"{self.label}: {option} makes code that has to be linked",
                    hint="leave it out, and link the programs: preheat.link([…], arch) compiles its "
                    "parts in this way, with lto=True for link-time optimisation",
                )

    @property
    def include_spellings(self) -> tuple[str, ...]:
        """The spellings of the include directories; empty when the program includes no file."""
        known = dict(self.spellings)
        return tuple(known[directory] for directory in self.include) if self.may_include else ()

    @lazy
    def may_include(self) -> bool:
        """Return False if a compile certainly opens no file, and True if it may."""
        if self.language != "cuda":
            return False
        readings = chain.from_iterable(map(lexer.trigraph_variants, self.texts))
        return any("include" in lexer.join_lines(reading) for reading in readings)

    @lazy
    def uncacheable(self) -> str | None:
        """The reason why the program cannot be cached, or None when it can."""
        for option in self.options:
            for pattern, reason in _UNKEYED:
                if re.fullmatch(pattern, option):
                    return reason.format(option)
        if self.language == "cuda" and (macro := clock_macro(*self.texts)):
            return f"it uses {macro}, which reads the clock"
        return None

    @property
    def texts(self) -> tuple[str, ...]:
        """Return all text that the preprocessor reads: source, in-memory headers, options."""
        return (self.source, *(text for _, text in self.headers), *self.options)


def first_token(text: str) -> int:
    """Return the position of the first character that is neither white space nor in a comment."""
    at = 1 if text.startswith("\ufeff") else 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text.startswith("//", at):
            closing = text.find("\n", at)
            at = len(text) if closing < 0 else closing
        elif text.startswith("/*", at):
            closing = text.find("*/", at + 2)
            at = len(text) if closing < 0 else closing + 2
        else:
            break
    return at


def read_input(path: Path) -> bytes:
    """Return the content of a file; `InputError` if it cannot be read."""
    try:
        return read_whole(path)
    except (OSError, ValueError) as fault:  # ValueError for a path with a NUL byte
        why = getattr(fault, "strerror", None) or fault
        raise InputError(f"cannot read {path}: {why}") from None


def file_of(source: object) -> Path | None:
    """Return the file that `source` names, or None for source text or a program."""
    if isinstance(source, str):
        return Path(source) if source.endswith((".cu", ".ptx")) and "\n" not in source else None
    return Path(source) if isinstance(source, os.PathLike) else None


def require_label(label: object) -> None:
    """Raise `InputError` unless `label` can name a program: it is printable and has no slash."""
    name = label if isinstance(label, str) else _text("label", label)
    if "/" in name or not name:
        raise InputError(
            f"label {name!r} must be a plain name without '/'",
            hint="the label reaches the binary and the key: a path would differ per machine",
        )
    if not name.isprintable():
        raise InputError(
            f"label {name!r} must be a plain name without control characters",
            hint="messages and lists show the label on terminals",
        )


def list_argument(what: str, given: object) -> tuple[Any, ...]:
    """Return the values of the list argument `what`. A single text or path is an error."""
    if given is None or (type(given) is tuple and not given):
        return ()
    if isinstance(given, str | bytes | os.PathLike):
        hint = f"write {what}=[{os.fsdecode(given)!r}]"
        raise InputError(f"{what} must be a list, not one value: {given!r}", hint=hint)
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise InputError(f"{what} must be a list, not {type(given).__name__}: {given!r}")
    values = tuple(given)
    for value in values:
        if not isinstance(value, str | os.PathLike if what == "include" else str):
            raise InputError(
                f"include must hold paths, not {type(value).__name__}: {value!r}"
                if what == "include"
                else f"{what.removesuffix('s')} must be text, not {type(value).__name__}: {value!r}"
            )
    return values


def header_rows(headers: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return in-memory headers as pairs of name and text, sorted by name."""
    if headers is None:
        return ()
    if not isinstance(headers, Mapping):
        raise InputError(f"headers must be a mapping from name to text, not {type(headers).__name__}")
    for name in headers:
        parts = _text("header name", name).split("/")
        if name == _CANARY or name.startswith("/proc/") or any(part.startswith("@") for part in parts):
            raise InputError(
                f"a header in memory cannot be called {name!r}",
                hint="the compiler sees include directories and its own header under such names",
            )
    return tuple(sorted((name, _text(f"header {name}", text)) for name, text in headers.items()))


def clock_macro(*texts: str) -> str | None:
    """Return a macro in the code of `texts` whose value differs from compile to compile."""
    return lexer.find_name(texts, _CLOCK)


def _is_unicode(text: str) -> bool:
    """Return True if `text` can be encoded as UTF-8. A lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(what: str, value: object) -> str:
    if not isinstance(value, str):
        raise InputError(f"{what} must be text, not {type(value).__name__}: {value!r}")
    return value


def _path(directory: str | os.PathLike[str]) -> str:
    if not isinstance(path := os.fspath(directory), str):
        raise InputError(f"include must hold paths that are text, not {path!r}")
    if "\0" in path:
        raise InputError(f"include holds {path!r}, which is not a path: it contains a NUL byte")
    return path


def _asking_file() -> str | None:
    """Return the Python file of the call site, or None when the code has no file."""
    code, _ = call_site()
    name = "<unknown>" if code is None else code.co_filename
    return None if name.startswith("<") else os.path.abspath(name)


def _split_include_options(options: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Separate `-Idir`, `-I dir`, `-I=dir` and `--include-path=dir` from other options, in order."""
    others: list[str] = []
    moved: list[str] = []
    pending = iter(options)
    for option in pending:
        match = re.fullmatch(_INCLUDE_OPTION, option)
        if match is None:
            others.append(option)
            continue
        directory = match[2] or next(pending, "")
        if not directory:
            raise InputError(f"{option} needs a directory")
        moved.append(directory)
    return tuple(others), moved
