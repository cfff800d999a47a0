"""A request for a module: the arguments of `gpu.kernel` and `gpu.module` as one value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from preheat.device.given import CompiledCode, ObjectCode, given_code
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.program import NONE, Program, file_of, header_rows, list_argument

__all__ = ["ModuleRequest", "ObjectCode", "Source"]

Source = str | Path | Program


class ModuleRequest(NamedTuple):
    """The arguments of a call, each in one form. Equal requests mean the same module.

    `directory` is the current directory where an include directory is relative to it, and empty
    otherwise, so that after a chdir the request is another one.
    """

    source: Source | CompiledCode
    label: str | None
    options: tuple[str, ...]
    include: tuple[str | os.PathLike[str], ...]
    headers: tuple[tuple[str, str], ...] | None
    names: tuple[str, ...]
    arch: Arch | None
    strict: bool
    directory: str = ""

    @classmethod
    def of(
        cls,
        source: Source | bytes | ObjectCode,
        label: str | None = None,
        options: Sequence[str] | None = (),
        include: Iterable[str | os.PathLike[str]] | None = (),
        headers: Mapping[str, str] | None = None,
        names: Iterable[str] | None = (),
        arch: Arch | str | None = None,
        strict: bool = False,
    ) -> ModuleRequest:
        """Check the arguments of a call; `InputError` says which of them is wrong."""
        if not isinstance(label, str | None):
            raise InputError(f"label must be text, not {type(label).__name__}: {label!r}")
        if not isinstance(source, str | os.PathLike | Program):
            given = given_code(
                source, options=options, include=include, headers=headers, names=names, arch=arch
            )
            return cls(given, label, (), (), None, (), None, bool(strict))
        path = file_of(source)
        request = cls(
            # A whole path, so that after a chdir a relative one means another file.
            source if path is None else Path(os.path.abspath(path)),
            label,
            () if options is NONE else list_argument("options", options),
            () if include is NONE else list_argument("include", include),
            None if headers is None else header_rows(headers) or None,
            () if names is NONE else list_argument("names", names),
            None if arch is None else Arch.parse(arch),
            bool(strict),
        )
        if (options or include) and request._has_relative_include():
            return request._replace(directory=os.getcwd())
        return request

    def _has_relative_include(self) -> bool:
        """Return True when an include directory may be relative to the current directory."""
        in_options = any(option.startswith(("-I", "--include-path")) for option in self.options)
        return in_options or not all(map(os.path.isabs, self.include))

    def program(self) -> Program:
        """Read the program from its source. Raises `InputError` for code that is compiled already."""
        if isinstance(self.source, CompiledCode):
            raise InputError(
                "compiled code is not a program", hint="load it by gpu.module(code), and wait for it"
            )
        headers = None if self.headers is None else dict(self.headers)
        if type(self.source) is str:  # It is source text: `of` has made paths of file names.
            return Program.of(
                self.source, label=self.label, options=self.options, include=self.include,
                headers=headers, names=self.names,
            )  # fmt: skip
        return Program.read(
            self.source, label=self.label, options=self.options, include=self.include,
            headers=headers, names=self.names,
        )  # fmt: skip
