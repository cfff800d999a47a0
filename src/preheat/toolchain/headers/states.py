"""Track header files by content: the files that a compile opened, and whether they are unchanged.

A `HeaderState` describes a compile by the files that it opened, each as (include root, name in it,
content hash), and by the names that would have been found first if they had been files. The result of
the compile is valid while those files are unchanged and those names are still not files.

`observe.py` describes a compile in this way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from preheat.model import codec
from preheat.model.artifact import Header
from preheat.toolchain.headers.evidence import FileHasher, Memo

__all__ = [
    "ABSOLUTE",
    "HEADER_LIST",
    "TOOLKIT",
    "HeaderLists",
    "HeaderState",
    "Place",
    "change",
    "decode_states",
    "encode_states",
    "is_header_list",
    "is_toolkit",
    "join_states",
    "mismatch",
    "pack_states",
    "part_of",
    "path_of",
]

#: The root of names that were included by absolute path.
ABSOLUTE = "/"

Place = tuple[str, str]  # An include root and a name in it.

#: The roots of the toolkit, as `worker.py` labels them.
TOOLKIT = frozenset({"cuda", "cccl"})


def is_toolkit(root: str) -> bool:
    """Return whether an include root is one of the toolkit, for a program or a part of a link."""
    return root.rpartition(".")[2] in TOOLKIT


#: The beginning of the JSON part of a list of header states, whose keys are sorted.
HEADER_LIST = b'{"meta":{"kind":"headers",'
_MAX_STATES = 32  # The states of a merged list.


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
            paths = [(path_of(roots, root, name), digest) for root, name, digest in self.headers]
            self._files[key] = [
                (path, os.path.dirname(path), digest) for path, digest in paths if path is not None
            ]
        return self._files[key]

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """Yield the key parts that distinguish this state from others of the same program."""
        yield "roots", " ".join(self.roots).encode()
        for header in self.headers:
            yield f"file:{header.root}:{header.name}", header.digest.encode()


def join_states(states: Mapping[int, HeaderState], roots: Iterable[str]) -> HeaderState:
    """Return the state of a link whose parts have these states, by their index.

    `roots` are the labels of the include roots of all parts.
    """

    def named(index: int, root: str) -> str:
        return root if root == ABSOLUTE else f"{index}.{root}"

    headers: list[Header] = []
    absent: list[Place] = []
    for index, state in states.items():
        headers += (header._replace(root=named(index, header.root)) for header in state.headers)
        absent += ((named(index, root), name) for root, name in state.absent)
    return HeaderState(tuple(headers), tuple(absent), tuple(roots))


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
        return _find_new_file(state, roots)
    for root, name, digest in state.headers:
        path = path_of(roots, root, name)
        if path is None:
            return f"header {name}: its include directory is gone"
        try:
            if view.evidence(path).digest != digest:
                return f"header {name} changed"
        except OSError:
            return f"header {name} is gone"
    return _find_new_file(state, roots)


def mismatch(state: HeaderState, roots: Mapping[str, str], memo: Memo) -> str | None:
    """Return which header that a compile would find now differs from `state`, or None.

    A header that is not found at all is not a mismatch: this machine need not have it.
    """
    view = FileHasher(memo)
    for root, name, digest in state.headers:
        # With the same include roots, check the place where it was found, which may be beside another
        # header.
        same_root = root == ABSOLUTE or (tuple(roots) == state.roots and root in roots)
        candidates = [root] if same_root else [each for each in roots if part_of(each) == part_of(root)]
        for candidate in candidates:
            path = path_of(roots, candidate, name)
            if path is not None and os.path.isfile(path):
                try:
                    if view.evidence(path).digest != digest:
                        return f"header {name} changed"
                except OSError as fault:
                    return f"header {name} cannot be read: {fault}"
                break
    return _find_new_file(state, roots) if tuple(roots) == state.roots else None


def _find_new_file(state: HeaderState, roots: Mapping[str, str]) -> str | None:
    """Return a message about a new file that would hide a tracked header, or None."""
    for root, name in state.absent:
        path = path_of(roots, root, name)
        if path is None:
            continue
        if name.endswith("/"):
            hides = os.path.lexists(path[:-1])
        else:
            hides = os.access(path, os.F_OK) and os.path.isfile(path)  # The first costs less.
        if hides:
            return f"a new {name} in {roots.get(root, root)} may hide a tracked header"
    return None


def part_of(root: str) -> str:
    """Return the index of the part of a link that an include root belongs to, or an empty text."""
    return root.rpartition(".")[0]


def path_of(roots: Mapping[str, str], root: str, name: str) -> str | None:
    """Return the path of a place; None if its include root is not in `roots`."""
    if root == ABSOLUTE:
        return f"/{name}"
    return f"{roots[root]}/{name}" if root in roots else None


class HeaderLists:
    """Merges lists of header states. No other entries change: each compile adds to such a list."""

    def applies(self, blob: bytes) -> bool:
        """Return whether `blob` is a list of header states."""
        return is_header_list(blob)

    def merge(self, digest: str, mine: bytes, theirs: bytes) -> bytes:
        """Return `mine` with the newest states of `theirs` that it lacks; `mine` itself without any.

        No state of `mine` is lost. A list that cannot be decoded has no states.
        """
        own = _states(mine)
        known = {entry for _, entry in own}
        others = [row for row in _states(theirs) if row[1] not in known]
        room = max(_MAX_STATES - len(own), 0)
        added = others[max(len(others) - room, 0) :]
        if not added:
            return mine
        return pack_states(digest, _label(theirs), [*added, *own])

    def targets(self, blob: bytes) -> set[str]:
        """Return the digests of the code that a list leads to."""
        return {code for _, code in decode_states(codec.unpack_checked(blob).meta)}

    def restrict(self, digest: str, blob: bytes, targets: Collection[str]) -> bytes | None:
        """Return a list with the states that lead to this code only; None without any."""
        kept = [row for row in _states(blob) if row[1] in targets]
        return pack_states(digest, _label(blob), kept) if kept else None


def _label(blob: bytes) -> str:
    return str(codec.unpack_checked(blob).meta.get("label", ""))


def _states(blob: bytes) -> list[tuple[HeaderState, str]]:
    """Return the states of a list, oldest first. Anything else has no states."""
    try:
        return decode_states(codec.unpack_checked(blob).meta) if is_header_list(blob) else []
    except codec.DamagedEntryError:
        return []
