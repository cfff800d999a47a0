"""Header files by content: what a compile opened, and whether all of it is still so.

A compile is described by the files it opened, each as (include root, name there, content hash), and
by the names it would have preferred had they existed. It can be used again while the first are
unchanged and the second still absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preheat import container
from preheat.artifact import Header
from preheat.program import Program, reads_clock, without_comments

__all__ = [
    "HeaderState",
    "Memo",
    "Untrackable",
    "change",
    "decode_states",
    "encode_states",
    "observe",
]

#: The root of names that were included by absolute path.
ABSOLUTE = "/"
#: Where programs seem to lie, see worker.py: a quoted include looks there first, should it exist.
HOME = (ABSOLUTE, "preheat")

_INCLUDE = re.compile(r'(?:#|%:)\s*include(?:_next)?\s*(?:<([^>\n]+)>|"([^"\n]+)")')
_COMPUTED = re.compile(r'(?:#|%:)\s*include(?:_next)?\b(?!\s*[<"])')
_PROBE = re.compile(r"__has_include(?:_next)?\s*\(\s*([^)]*)\)")
_ALIAS = re.compile(
    r"(?P<asked>(?:\bdefined\s*\(?|#\s*(?:el)?ifn?def)\s*)?\b__has_include(?:_next)?\b(?!\s*\()"
)
_LITERAL = re.compile(r'<([^>]+)>|"([^"]+)"')
_RACY = 2_000_000_000  # ns: a file stamped this close to the moment it was hashed may still change


class Untrackable(Exception):  # noqa: N818  (a finding, not a failure: the compile is good)
    """Why a compile cannot be described by the files it opened."""


@dataclass(frozen=True, slots=True)
class HeaderState:
    """The files one compile depended on, and the names that must stay absent."""

    headers: tuple[Header, ...]
    absent: tuple[tuple[str, str], ...]
    roots: tuple[str, ...] = ()  # the include roots there were, in search order

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """The key parts that tell this state from others of the same program."""
        yield "roots", " ".join(self.roots).encode()
        for header in self.headers:
            yield f"file:{header.root}:{header.name}", header.digest.encode()


def encode_states(states: Sequence[tuple[HeaderState, str]]) -> list[dict[str, Any]]:
    """Header states, each with the digest of its entry, as they are stored."""
    return [
        {
            "entry": digest,
            "headers": state.headers,
            "absent": state.absent,
            "roots": state.roots,
        }
        for state, digest in states
    ]


def decode_states(meta: Mapping[str, Any]) -> list[tuple[HeaderState, str]]:
    """The same read back; `DamagedEntryError` when it is something else."""
    try:
        if type(meta["states"]) is not list:
            raise TypeError("its states are not a list")
        return [_decode_state(row) for row in meta["states"]]
    except (KeyError, TypeError, ValueError) as bad:
        raise container.DamagedEntryError(f"not a header list: {bad!r:.200}") from None


def _decode_state(row: dict[str, Any]) -> tuple[HeaderState, str]:
    """One state and the digest of its entry; each field may be anything, and only the right will do."""
    headers, absent = container.rows(row["headers"], 3), container.rows(row["absent"], 2)
    (roots,) = container.rows([row["roots"]], len(row["roots"]))
    if any("\0" in name for root, name, *_ in (*headers, *absent)):
        raise ValueError("a name has a NUL character in it")
    digest = container.text(row["entry"])
    if not re.fullmatch("[0-9a-f]{64}", digest):  # it names a file
        raise ValueError(f"{digest!r} is not a digest")
    state = HeaderState(
        tuple(map(Header._make, headers)),
        tuple((root, name) for root, name in absent),
        tuple(roots),
    )
    return state, digest


class Memo:
    """Content hashes by path, believed while size, times and inode of the file stay the same.

    `note` is where the last process left off. A file changed within two seconds of its hashing is
    hashed again next time: its stamp may not tell the two contents apart.
    """

    def __init__(self, note: bytes | None = None) -> None:
        self._known: dict[str, tuple[list[int], str]] = {}
        self.changed = False
        try:
            rows = json.loads(note or b"{}")
            self._known = {str(p): (list(sig), str(digest)) for p, (sig, digest) in rows.items()}
        except (ValueError, TypeError, AttributeError):
            self.changed = True

    def digest(self, path: str) -> str:
        """The hash of a file's contents; `OSError` when it cannot be read."""
        found = os.stat(path)
        stamp = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            after = os.fstat(file.fileno())
        if after.st_ino == found.st_ino and after.st_mtime_ns == found.st_mtime_ns:
            self._remember(path, stamp, digest)
        return digest

    def _remember(self, path: str, stamp: list[int], digest: str) -> None:
        if time.time_ns() - max(stamp[1], stamp[2]) > _RACY:
            self._known[path] = (stamp, digest)
            self.changed = True

    def note(self) -> bytes:
        """What to keep for the next process."""
        known = dict(self._known)  # a copy: other threads may be learning more
        return json.dumps(known, separators=(",", ":")).encode()


def change(
    state: HeaderState, roots: Mapping[str, str], memo: Memo, *, present: bool = False
) -> str | None:
    """What is no longer as `state` found it, in words; None when everything is.

    With `present` only files that are there are looked at: one that is missing is no change.
    """
    if tuple(roots) != state.roots and not present:
        return "other include directories, which may hide a tracked header"
    for header in state.headers:
        path = _path(roots, header.root, header.name)
        if path is None:
            if present:
                continue
            return f"header {header.name}: its include directory is gone"
        try:
            digest = memo.digest(path)
        except OSError:
            if present:
                continue
            return f"header {header.name} is gone"
        if digest != header.digest:
            return f"header {header.name} changed"
    for root, name in state.absent:
        path = _path(roots, root, name)
        if path is not None and os.path.lexists(path):
            return f"a new {name} in {roots.get(root, root)} may hide a tracked header"
    return None


def observe(
    program: Program,
    opened: Iterable[str],
    roots: Mapping[str, str],
    toolkit: Iterable[str],
    memo: Memo,
    started_ns: int,
) -> HeaderState:
    """Describe a finished compile by the files it opened, as the compiler named them (`@0/x.h`).

    `roots` maps labels to directories in search order, `toolkit` names those that are the
    toolkit's. Raises `Untrackable` when no honest description exists.
    """
    in_memory = dict(program.headers)
    watch = _Watch(roots, set(in_memory))
    headers: dict[tuple[str, str], Header] = {}
    computed: list[tuple[str, str]] = []  # where `#include MACRO` stands
    places = {os.path.realpath(roots[label]) for label in toolkit if label in roots}
    theirs = {label for label, place in roots.items() if os.path.realpath(place) in places}
    source = program.source.replace("\\\n", "")
    watch.read(source, *HOME)
    if _COMPUTED.search(source):
        computed.append(HOME)
    for text in in_memory.values():
        watch.read(text, None, None)
    for text in (source, *in_memory.values()):
        watch.probe(text, mine=True, theirs=theirs)
    for spelled in opened:
        if spelled in in_memory:
            continue
        root, name = _located(spelled, roots)
        path = f"{roots.get(root, '')}/{name}"
        try:
            found = os.stat(path)
            if max(found.st_mtime_ns, found.st_ctime_ns) >= started_ns:
                raise Untrackable(f"header {name} changed while the program was compiled")
            headers[root, name] = Header(root, name, memo.digest(path))
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read().replace("\\\n", "")
        except OSError as fault:
            raise Untrackable(f"header {name} cannot be read back: {fault}") from None
        mine = root not in theirs
        if mine and reads_clock(text):
            raise Untrackable(f"header {name} uses __DATE__, __TIME__ or __TIMESTAMP__")
        watch.read(text, root, os.path.dirname(name))
        watch.name(name, root)
        watch.probe(text, mine=mine, theirs=theirs)
        if mine and _COMPUTED.search(text):
            computed.append((root, os.path.dirname(name)))
    for root, directory in computed:
        watch.beside(root, directory, [name for _, name in headers])
    for root, name in sorted(watch.also):  # a set has an order of its own in every process
        try:
            probed = Header(root, name, memo.digest(f"{roots[root]}/{name}"))
        except OSError as fault:
            raise Untrackable(f"header {name} cannot be read back: {fault}") from None
        headers.setdefault((root, name), probed)
    return HeaderState(tuple(headers.values()), tuple(sorted(watch.absent)), tuple(roots))


class _Watch:
    """Collects the names that would change what an include finds, were they to appear."""

    def __init__(self, roots: Mapping[str, str], in_memory: set[str]) -> None:
        self._roots, self._in_memory = roots, in_memory
        self._seen: set[tuple[str | None, str]] = set()
        self._exists: dict[str, bool] = {}
        self._files: dict[str, bool] = {}
        self.absent: set[tuple[str, str]] = set()
        self.also: set[tuple[str, str]] = set()  # files whose existence was probed, not contents

    def read(self, text: str, root: str | None, directory: str | None) -> None:
        """Every include `text` spells out: the candidates before the one found must stay absent."""
        for angled, quoted in _INCLUDE.findall(text):
            beside = None
            if quoted and root is not None:
                beside = (root, os.path.join(directory or "", quoted))
            self._resolve(angled or quoted, beside)

    def name(self, name: str, root: str) -> None:
        """A file that was opened, however it was spelled: the same name in an earlier root hides it."""
        for earlier in self._roots:
            if earlier == root or root == ABSOLUTE:
                return
            self._must_stay_absent(earlier, name)

    def beside(self, root: str, directory: str, names: Iterable[str]) -> None:
        """An include nobody can read: whatever was opened could be hidden by a file next to it."""
        for name in names:
            self._must_stay_absent(root, os.path.join(directory, name))

    def probe(self, text: str, *, mine: bool, theirs: set[str]) -> None:
        """`__has_include`: fine where its answer is known to be the toolkit's or ours, else not."""
        if "__has_include" not in text:
            return
        text = without_comments(text, strings=True)
        if mine and any(not alias["asked"] for alias in _ALIAS.finditer(text)):
            raise Untrackable("__has_include under another name cannot be followed")
        for spelled in _PROBE.findall(text):
            literal = _LITERAL.fullmatch(spelled.strip())
            if literal is None:  # a macro's parameter: the toolkit wraps its own probes so
                if mine:
                    raise Untrackable(f"__has_include({spelled}) cannot be followed")
                continue
            name = literal[1] or literal[2]
            if name in self._in_memory:
                continue
            found = self._resolve(name, None, all_absent=True)
            if found is not None:
                self.also.add((found, name))
            if mine and (found is None or found not in theirs):
                raise Untrackable(f"__has_include of {name}, which is not the toolkit's")

    def _resolve(
        self, name: str, beside: tuple[str, str] | None, *, all_absent: bool = False
    ) -> str | None:
        """The root in which `name` is found, watching the places before it."""
        if name in self._in_memory or os.path.isabs(name):
            return None
        passed: list[tuple[str, str]] = []
        for root, candidate in ([beside] if beside else []) + [(r, name) for r in self._roots]:
            if self._is_file(f"{self._roots.get(root, '')}/{candidate}"):
                for place in passed:
                    self._must_stay_absent(*place)
                return root
            passed.append((root, candidate))
        if all_absent:
            for place in passed:
                self._must_stay_absent(*place)
        return None

    def _must_stay_absent(self, root: str, name: str) -> None:
        """Watch the shortest leading part of `name` that does not exist: one look covers many."""
        if (root, name) in self._seen:
            return
        self._seen.add((root, name))
        base, steps = self._roots.get(root, ""), name.split("/")
        for count in range(1, len(steps) + 1):
            lead = "/".join(steps[:count])
            if not self._there(f"{base}/{lead}"):
                self.absent.add((root, lead))
                return

    def _there(self, path: str) -> bool:
        if path not in self._exists:
            self._exists[path] = os.path.lexists(path)
        return self._exists[path]

    def _is_file(self, path: str) -> bool:
        if path not in self._files:
            self._files[path] = os.path.isfile(path)
        return self._files[path]


def _located(spelled: str, roots: Mapping[str, str]) -> tuple[str, str]:
    """`@0/sub/x.h` as ("0", "sub/x.h"), an absolute path under the root "/"."""
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
