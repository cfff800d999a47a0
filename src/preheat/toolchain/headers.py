"""Track header files by content: which files a compile opened, and whether they are unchanged.

A `HeaderState` describes a compile by the files that it opened, each as (include root, name in it,
content hash), and by the names that would have been found first if they had been files. The result of
the compile is valid while those files are unchanged and those names are still not files.

The compiler's report decides which files were opened. The text of a program is read for two purposes
only: to learn at which names a new file would be found first, and to scan the files before the compile
(`survey.py`). A file counts as read by the compiler if it was the same before and after the compile.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from preheat.artifact import Header
from preheat.cache import codec
from preheat.program import clock_macro
from preheat.toolchain.absent_names import AbsentNames, Untrackable
from preheat.toolchain.evidence import FileHasher, Memo
from preheat.toolchain.survey import ABSOLUTE, Place, Survey

__all__ = [
    "HEADER_LIST",
    "TOOLKIT",
    "HeaderState",
    "Unexpected",
    "change",
    "decode_states",
    "encode_states",
    "mismatch",
    "observe",
]

#: The roots of the toolkit, as `worker.py` labels them.
TOOLKIT = frozenset({"cuda", "cccl"})

#: The beginning of the JSON part of a list of header states, whose keys are sorted.
HEADER_LIST = b'{"meta":{"kind":"headers",'


class Unexpected(Exception):  # noqa: N818  (The compile itself succeeded.)
    """The compiler opened files that had not been scanned before the compile. They have been now."""


@dataclass(frozen=True, slots=True)
class HeaderState:
    """The files that a compile depended on, and the names that would hide one of them.

    A name in `absent` must not be a file. A name that ends in "/" must not exist at all.
    """

    headers: tuple[Header, ...]
    absent: tuple[Place, ...]
    roots: tuple[str, ...] = ()  # Labels of the include roots, in search order.
    # The results of `files`, by the items of `roots`.
    _files: dict[tuple[tuple[str, str], ...], list[tuple[str, str, str]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def files(self, roots: Mapping[str, str]) -> list[tuple[str, str, str]]:
        """Return the path, directory and hash of every header whose include root is in `roots`."""
        key = tuple(roots.items())
        if key not in self._files:
            paths = [(_path(roots, root, name), digest) for root, name, digest in self.headers]
            self._files[key] = [
                (path, os.path.dirname(path), digest) for path, digest in paths if path is not None
            ]
        return self._files[key]

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """Yield the key parts that distinguish this state from others of the same program."""
        yield "roots", " ".join(self.roots).encode()
        for header in self.headers:
            yield f"file:{header.root}:{header.name}", header.digest.encode()


def pack_states(digest: str, label: str, states: Sequence[tuple[HeaderState, str]]) -> bytes:
    """Return the bytes of a header list, which maps header states to the entries with the code."""
    meta = {"kind": "headers", "label": label, "states": encode_states(states)}
    return codec.pack(digest, meta, {})


def is_header_list(front: bytes) -> bool:
    """Return whether an entry that begins with `front` is a header list."""
    return front.startswith(HEADER_LIST, codec.JSON_AT)


def encode_states(states: Sequence[tuple[HeaderState, str]]) -> list[dict[str, Any]]:
    """Return header states, each with the digest of its entry, in the form that is stored."""
    return [
        {"entry": digest, "headers": state.headers, "absent": state.absent, "roots": state.roots}
        for state, digest in states
    ]


def decode_states(meta: Mapping[str, Any]) -> list[tuple[HeaderState, str]]:
    """Return the states of a stored header list, or raise `DamagedEntryError`."""
    try:
        if type(meta["states"]) is not list:
            raise TypeError("its states are not a list")
        return [_decode_state(row) for row in meta["states"]]
    except (KeyError, TypeError, ValueError) as bad:
        raise codec.DamagedEntryError(f"not a header list: {bad!r:.200}") from None


def _decode_state(row: dict[str, Any]) -> tuple[HeaderState, str]:
    """Return one state and the digest of its entry. The fields are untrusted and checked."""
    headers = codec.rows(row["headers"], 3)
    absent = codec.rows(row["absent"], 2)
    (roots,) = codec.rows([row["roots"]], len(row["roots"]))
    if "\0" in "".join(chain.from_iterable((*headers, *absent))):
        raise ValueError("a name contains a NUL character")
    digest = codec.text(row["entry"])
    if not re.fullmatch("[0-9a-f]{64}", digest):  # The digest becomes a file name.
        raise ValueError(f"{digest!r} is not a digest")
    state = HeaderState(
        tuple(map(Header._make, headers)), tuple([(root, name) for root, name in absent]), tuple(roots)
    )
    return state, digest


# Checking a state


def change(state: HeaderState, roots: Mapping[str, str], memo: Memo) -> str | None:
    """Return what has changed since `state` was observed, or None if nothing has."""
    if tuple(roots) != state.roots:
        return "the include directories differ, and another one may hide a tracked header"
    view = FileHasher(memo)
    files = state.files(roots)
    if len(files) == len(state.headers) and view.proves(files):
        return _appeared(state, roots)
    for root, name, digest in state.headers:
        path = _path(roots, root, name)
        if path is None:
            return f"header {name}: its include directory is gone"
        try:
            if view.evidence(path).digest != digest:
                return f"header {name} changed"
        except OSError:
            return f"header {name} is gone"
    return _appeared(state, roots)


def mismatch(state: HeaderState, roots: Mapping[str, str], memo: Memo) -> str | None:
    """Return which header that a compile would find now differs from `state`, or None.

    A header that is not found at all is not a mismatch: this machine need not have it.
    """
    view = FileHasher(memo)
    for root, name, digest in state.headers:
        # With the same include roots, look where it was found: it may lie beside another header.
        same_root = root == ABSOLUTE or (tuple(roots) == state.roots and root in roots)
        candidates = [root] if same_root else list(roots)
        for candidate in candidates:
            path = _path(roots, candidate, name)
            if path is not None and os.path.isfile(path):
                try:
                    if view.evidence(path).digest != digest:
                        return f"header {name} changed"
                except OSError as fault:
                    return f"header {name} cannot be read: {fault}"
                break
    return _appeared(state, roots) if tuple(roots) == state.roots else None


def _appeared(state: HeaderState, roots: Mapping[str, str]) -> str | None:
    """Return a message about a new file that would hide a tracked header, or None."""
    for root, name in state.absent:
        path = _path(roots, root, name)
        if path is None:
            continue
        if name.endswith("/"):
            hides = os.path.lexists(path[:-1])
        else:
            hides = os.access(path, os.F_OK) and os.path.isfile(path)  # The first costs less.
        if hides:
            return f"a new {name} in {roots.get(root, root)} may hide a tracked header"
    return None


# Observing a compile


def observe(survey: Survey, opened: Iterable[str], memo: Memo) -> HeaderState:
    """Describe a finished compile by the files that it opened, under the compiler's names (`@0/x.h`).

    Raises `Untrackable` if no state describes the compile reliably, and `Unexpected` if one of the
    files had not been scanned before the compile. The survey then contains it, so a second compile
    can be described.
    """
    places = [_place(name, survey.roots) for name in opened if survey.is_real(name)]
    surprising = [place for place in places if place not in survey.files]
    if surprising:
        try:
            survey.add(surprising)
        except OSError as fault:
            raise Untrackable(f"header {surprising[0][1]} cannot be read back: {fault}") from None
        raise Unexpected(", ".join(name for _, name in surprising))
    names = AbsentNames(survey)
    headers = {place: Header(*place, survey.files[place].evidence.digest) for place in places}
    _require_no_clock_macro(survey, places)
    view = FileHasher(memo)
    for place in names.add_has_include_queries(places):
        if place not in headers:
            headers[place] = Header(*place, _digest(survey, place, view))
    names.add_includes(places)
    for place in headers:
        if place in survey.files and not _same(survey, place, view):
            raise Untrackable(f"header {place[1]} changed while the program was compiled")
    return HeaderState(tuple(headers.values()), tuple(sorted(names.absent)), tuple(survey.roots))


def _same(survey: Survey, place: Place, view: FileHasher) -> bool:
    """Return whether a file has the content and the identity that it had before the compile."""
    try:
        return view.evidence(survey.path(place)) == survey.files[place].evidence
    except OSError:
        return False


def _digest(survey: Survey, place: Place, view: FileHasher) -> str:
    """Return the content hash of a file whose existence `__has_include` tested."""
    try:
        return view.evidence(survey.path(place)).digest
    except OSError as fault:
        raise Untrackable(f"header {place[1]} cannot be read back: {fault}") from None


def _require_no_clock_macro(survey: Survey, places: Sequence[Place]) -> None:
    texts = {place: survey.files[place].text or "" for place in places if survey.is_user_file(place)}
    macro = clock_macro(*texts.values(), *survey.program.texts)
    if macro is not None:
        where = next((name for (_, name), text in texts.items() if clock_macro(text)), "a header")
        raise Untrackable(f"header {where} uses {macro}, which reads the clock")


def _place(spelled: str, roots: Mapping[str, str]) -> Place:
    """Return `@0/sub/x.h` as ("0", "sub/x.h"), and an absolute path under the root "/"."""
    if spelled.startswith("/"):
        return ABSOLUTE, spelled.lstrip("/")
    label, _, name = spelled.removeprefix("@").partition("/")
    if not spelled.startswith("@") or label not in roots:
        raise Untrackable(f"the compiler opened {spelled}, which is in no include directory")
    return label, name


def _path(roots: Mapping[str, str], root: str, name: str) -> str | None:
    if root == ABSOLUTE:
        return f"/{name}"
    return f"{roots[root]}/{name}" if root in roots else None
