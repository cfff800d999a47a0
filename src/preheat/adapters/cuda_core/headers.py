"""A digest of the files that a program may include, which the key of cuda.core does not contain.

All includes of the texts are followed, also those in branches that are not taken. For each include,
every directory that is searched counts, so that a file that hides another one changes the digest.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from preheat.adapters.base import NotKeyableError
from preheat.model.program import clock_macro
from preheat.toolchain.headers.includes import (
    QUERIES,
    Include,
    has_include_macros,
    has_include_queries,
    includes,
)

__all__ = ["headers_digest"]

_MAX_FILES = 5000
_MAX_BYTES = 1 << 26  # of one file; a larger file is not a header
_ABSENT = "absent"


class _Text(NamedTuple):
    """A text with includes, the directory that its quoted includes search first, and its file.

    Files of the toolkit are long, so they are scanned with their comments.
    """

    text: str
    directory: str
    path: str = ""
    toolkit: bool = False


def headers_digest(source: str | bytes, options: Any) -> str:
    """Return a digest of all files that `source` may include; empty when there are none.

    Raises `NotKeyableError` when the texts do not show which files these are.
    """
    text = source if isinstance(source, str) else source.decode(errors="replace")
    if macro := clock_macro(text):
        raise NotKeyableError(f"it uses {macro}, which reads the clock")
    before = [Include(str(name)) for name in _list(options.pre_include)]
    if not before and not any(
        True for each in (includes(text), has_include_queries(text)) for _ in each
    ):
        return ""
    # NVRTC searches the directory of the program's name, which is the current one for a plain name.
    beside = os.path.dirname(str(options.name))
    found = _Headers([str(path) for path in _list(options.include_path)])
    found.follow(_Text(text, beside), before)
    return found.digest()


def _list(value: object) -> Sequence[object]:
    """Return an option that is a text or a sequence of them as a sequence."""
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, Sequence) else ()


class _Headers:
    """The files that includes lead to, in the order in which they are found."""

    def __init__(self, directories: Sequence[str]) -> None:
        self._directories = directories
        self._toolkit = tuple(f"{each}/" for each in directories if _is_toolkit(each))
        self._digests: dict[str, str] = {}  # of the files, by path
        self._texts: list[_Text] = []
        self._queue: deque[_Text] = deque()
        self._found = hashlib.sha256()

    def follow(self, start: _Text, before: Sequence[Include]) -> None:
        """Follow the includes of a program, and those that come before it."""
        for include in before:
            self._include(include, start)
        self._queue.append(start)
        while self._queue:
            text = self._queue.popleft()
            self._texts.append(text)
            for include in _includes_of(text):
                self._include(include, text)

    def digest(self) -> str:
        """Return the digest of everything that was found, and of the names that were tested."""
        self._add_queries()
        return self._found.hexdigest()

    def _include(self, include: Include, text: _Text) -> None:
        if include.name is None:
            where = text.path or "the program"
            raise NotKeyableError(f"{where} includes a file whose name is a macro")
        self._add(include.name)
        for path in self._candidates(include, text.directory):
            self._add(self._file(path))

    def _candidates(self, include: Include, beside: str) -> Iterator[str]:
        assert include.name is not None
        if include.quoted:
            yield os.path.join(beside, include.name)
        for directory in self._directories:
            yield os.path.join(directory, include.name)

    def _file(self, path: str) -> str:
        """Return the digest of a file, and follow its includes when it is new."""
        if path in self._digests:
            return self._digests[path]
        if not os.path.isfile(path):
            return _ABSENT
        if len(self._digests) >= _MAX_FILES:
            raise NotKeyableError(f"it includes more than {_MAX_FILES} headers")
        content = _content(path)
        digest = self._digests[path] = hashlib.sha256(content).hexdigest()
        text = content.decode(errors="replace")
        toolkit = path.startswith(self._toolkit)
        self._queue.append(_Text(text, os.path.dirname(path), path, toolkit))
        return digest

    def _add_queries(self) -> None:
        """Add the results of `__has_include`, also where a macro wraps it."""
        macros: set[str] = set()
        for each in self._texts:
            macros |= has_include_macros(each.text, [*QUERIES, *macros])
        operators = [*QUERIES, *macros]
        for text in self._texts:
            if not text.toolkit or any(name in text.text for name in operators):
                self._add_queries_of(text, operators)

    def _add_queries_of(self, text: _Text, operators: Sequence[str]) -> None:
        where = text.path or "the program"
        if not text.toolkit and (macro := clock_macro(text.text)):
            raise NotKeyableError(f"{where} uses {macro}, which reads the clock")
        queries = list(has_include_queries(text.text, operators))
        # The definition of a macro that wraps the operator has no name of a file.
        if queries.count(None) > len(has_include_macros(text.text, operators)):
            raise NotKeyableError(f"{where} tests for a file whose name is a macro")
        for name in filter(None, queries):
            paths = self._candidates(Include(name), text.directory)
            self._add(f"{name} {[os.path.isfile(each) for each in paths]}")

    def _add(self, text: str) -> None:
        # With the lengths, two lists with the same joined text have different digests.
        data = text.encode(errors="surrogateescape")
        self._found.update(len(data).to_bytes(8, "big") + data)


def _is_toolkit(directory: str) -> bool:
    """Return whether an include directory is one of the CUDA toolkit."""
    names = ("cuda_runtime_api.h", "cuda/std/version")
    return any(os.path.isfile(os.path.join(directory, name)) for name in names)


def _includes_of(text: _Text) -> Iterator[Include]:
    """Yield the includes of a text. Comments are removed where they matter, which takes longer."""
    rough = list(includes(text.text, exact=False))
    exact = any(include.name is None for include in rough)
    yield from includes(text.text) if exact else rough


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as fault:
        raise NotKeyableError(f"header {path} cannot be read: {fault}") from None
    if len(content) > _MAX_BYTES:
        raise NotKeyableError(f"header {path} is too large")
    return content
