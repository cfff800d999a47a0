"""Header files by content: what a compile opened, and whether all of it is still so.

A compile is described by the files it opened, each as (include root, name there, content hash), and
by the names it would have preferred had they been files. It can be used again while the first are
unchanged and the second are still no files.

What the compiler reports is the truth. The text of a program is read only to learn where a file would
have to appear to be found first, and before a compile to learn which files to look at: a file counts
as read by the compiler when it was the same before and after.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from preheat.artifact import Header
from preheat.cache import codec
from preheat.errors import InputError
from preheat.lexer import joined, pasted
from preheat.program import Program, clock_macro
from preheat.toolchain.evidence import Evidence, Memo, View
from preheat.toolchain.includes import QUESTIONS, Include, includes, line_names, questions, wrappers

__all__ = [
    "TOOLKIT",
    "HeaderState",
    "Survey",
    "Unexpected",
    "Untrackable",
    "change",
    "decode_states",
    "encode_states",
    "mismatch",
    "observe",
]

#: The roots of the toolkit, as `worker.py` labels them.
TOOLKIT = frozenset({"cuda", "cccl"})
#: The root of names that were included by absolute path.
ABSOLUTE = "/"
#: Where programs seem to lie, see worker.py: a quoted include looks there first, should it exist.
HOME = (ABSOLUTE, "preheat")

_NOT_FILES = ("/proc/", "/sys/", "/dev/pts/")  # some of which never end
_MOST = 5000  # files looked at before a compile; of more the compiler's report says which matter

_LIST = b'{"meta":{"kind":"headers",'  # the JSON of `pack_states` begins so: it has its keys in order

Place = tuple[str, str]  # an include root and a name in it


class Untrackable(Exception):  # noqa: N818  (a finding, not a failure: the compile is good)
    """Why a compile cannot be described by the files it opened."""


class Unexpected(Exception):  # noqa: N818  (as above)
    """The compiler opened files that had not been looked at before; now they have."""


@dataclass(frozen=True, slots=True)
class HeaderState:
    """The files one compile depended on, and the names that would hide one of them.

    A name in `absent` must not be a file. One that ends in "/" must not exist at all.
    """

    headers: tuple[Header, ...]
    absent: tuple[Place, ...]
    roots: tuple[str, ...] = ()  # the include roots there were, in search order

    def parts(self) -> Iterator[tuple[str, bytes]]:
        """The key parts that tell this state from others of the same program."""
        yield "roots", " ".join(self.roots).encode()
        for header in self.headers:
            yield f"file:{header.root}:{header.name}", header.digest.encode()


def pack_states(digest: str, label: str, states: Sequence[tuple[HeaderState, str]]) -> bytes:
    """The entry of a header list: what leads from a request to its code, by the files there are."""
    meta = {"kind": "headers", "label": label, "states": encode_states(states)}
    return codec.pack(digest, meta, {})


def is_header_list(front: bytes) -> bool:
    """Whether an entry that begins like this is a header list."""
    return front.startswith(_LIST, codec.JSON_AT)


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
        raise codec.DamagedEntryError(f"not a header list: {bad!r:.200}") from None


def _decode_state(row: dict[str, Any]) -> tuple[HeaderState, str]:
    """One state and the digest of its entry; each field may be anything, and only the right will do."""
    headers, absent = codec.rows(row["headers"], 3), codec.rows(row["absent"], 2)
    (roots,) = codec.rows([row["roots"]], len(row["roots"]))
    if any("\0" in name for root, name, *_ in (*headers, *absent)):
        raise ValueError("a name has a NUL character in it")
    digest = codec.text(row["entry"])
    if not re.fullmatch("[0-9a-f]{64}", digest):  # it names a file
        raise ValueError(f"{digest!r} is not a digest")
    state = HeaderState(
        tuple(map(Header._make, headers)),
        tuple((root, name) for root, name in absent),
        tuple(roots),
    )
    return state, digest


# Looking a compile up


def change(state: HeaderState, roots: Mapping[str, str], memo: Memo) -> str | None:
    """What is no longer as `state` found it, in words; None when everything is."""
    if tuple(roots) != state.roots:
        return "other include directories, which may hide a tracked header"
    view = View(memo)
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
    """Which header file that a compile would find now is not as `state` says; None when there is none.

    A file that cannot be found at all is no mismatch: this machine need not have it.
    """
    view = View(memo)
    for root, name, digest in state.headers:
        # With the same include roots it is looked for where it was: it may lie beside another header.
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
    """A name that would hide a tracked header, in words."""
    for root, name in state.absent:
        path = _path(roots, root, name)
        if path is None:
            continue
        if os.path.lexists(path[:-1]) if name.endswith("/") else os.path.isfile(path):
            return f"a new {name} in {roots.get(root, root)} may hide a tracked header"
    return None


# Describing a compile


class _Text(NamedTuple):
    """Something that includes: where a quoted include looks first, and what it includes."""

    beside: Place | None
    includes: tuple[Include, ...]


class _File(NamedTuple):
    """A file before the compile. `text` is kept of files that are not the toolkit's."""

    evidence: Evidence
    includes: tuple[Include, ...]
    text: str | None


class Survey:
    """The files that a compile may open, as they are before it.

    `roots` maps labels to directories in search order, `toolkit` names those that are the toolkit's.
    """

    def __init__(
        self, program: Program, roots: Mapping[str, str], toolkit: Iterable[str], memo: Memo
    ) -> None:
        self.program, self.roots, self._memo = program, roots, memo
        places = {os.path.realpath(roots[label]) for label in toolkit if label in roots}
        self.theirs = {label for label in roots if os.path.realpath(roots[label]) in places}
        self.in_memory = dict(program.headers)
        self.texts = [_Text(HOME, tuple(includes(program.source)))]
        for name, text in program.headers:
            beside = (ABSOLUTE, os.path.dirname(name).lstrip("/")) if name.startswith("/") else None
            self.texts.append(_Text(beside, tuple(includes(text))))
        self.files: dict[Place, _File] = {}
        self.macros: set[str] = set()  # of the toolkit, that ask as `__has_include` does
        self._is_file: dict[str, bool] = {}
        self._view = View(memo)
        self._follow(self.texts)

    def add(self, places: Iterable[Place]) -> None:
        """Look at files that the texts do not lead to; what is a file is looked at anew."""
        self._view = View(self._memo)
        self._is_file.clear()
        texts = []
        for place in places:
            if place not in self.files:
                self._look(place)
                texts.append(self.text(place))
        self._follow(texts)

    def text(self, place: Place) -> _Text:
        """What a file that was looked at includes, and from where."""
        root, name = place
        return _Text((root, os.path.dirname(name)), self.files[place].includes)

    def find(self, include: Include, beside: Place | None) -> tuple[Place | None, list[Place]]:
        """The file that an include leads to, and the names before it that are no files."""
        name = include.name
        passed: list[Place] = []
        if name is None or name in self.in_memory:
            return None, []
        if os.path.isabs(name):
            place = (ABSOLUTE, name.lstrip("/"))
            return (place, []) if self.is_file(place) else (None, [])
        candidates = [(root, name) for root in self.roots]
        if include.quoted and beside is not None:
            candidates.insert(0, (beside[0], os.path.join(beside[1], name)))
        for place in candidates:
            if self.is_file(place):
                return place, passed
            passed.append(place)
        return None, passed

    def is_file(self, place: Place) -> bool:
        """Whether there was a file before the compile."""
        path = self.path(place)
        if path not in self._is_file:
            self._is_file[path] = _is_file(path)
        return self._is_file[path]

    def path(self, place: Place) -> str:
        root, name = place
        return f"{self.roots.get(root, '')}/{name}"

    def is_real(self, name: str) -> bool:
        """Whether a name in the compiler's report is that of a file.

        It is not for a header in memory, nor for a name that `#line` made up. Such a name counts only
        where it could be no file: those that are found have an absolute name or begin with `@`.
        """
        if name in self.in_memory:
            return name.startswith("/") and os.path.isfile(name)
        return name.startswith(("/", "@")) or not any(name in line_names(text) for text in self._own())

    def _own(self) -> Iterator[str]:
        """All text that is not the toolkit's."""
        yield from self.program.texts
        for place, file in self.files.items():
            if self.mine(place):
                yield file.text or ""

    def mine(self, place: Place) -> bool:
        """Whether a file is not the toolkit's."""
        return place[0] not in self.theirs

    def _follow(self, texts: Iterable[_Text]) -> None:
        """Look at every file that includes lead to, in branches that are not taken as well."""
        queue = deque(texts)
        while queue and len(self.files) < _MOST:
            beside, found = queue.popleft()
            for include in found:
                place, _ = self.find(include, beside)
                if place is None or place in self.files:
                    continue
                try:
                    self._look(place)
                except OSError:  # the compiler will say so, if it needs the file
                    continue
                queue.append(self.text(place))

    def _look(self, place: Place) -> None:
        path, mine = self.path(place), self.mine(place)
        if os.path.realpath(path).startswith(_NOT_FILES):
            raise OSError("the kernel makes it up")
        evidence = self._view.evidence(path)
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            text = file.read()
        if not mine:
            self.macros |= wrappers(text, [*QUESTIONS, *self.macros])
        self.files[place] = _File(
            evidence,
            tuple(includes(text, exact=mine)),
            text if mine or "__has_include" in text else None,
        )


def observe(survey: Survey, opened: Iterable[str], memo: Memo) -> HeaderState:
    """Describe a finished compile by the files it opened, as the compiler named them (`@0/x.h`).

    Raises `Untrackable` when no honest description exists, `Unexpected` when the survey did not look
    at one of the files: it has now, so another compile can be described.
    """
    places = [_located(name, survey.roots) for name in opened if survey.is_real(name)]
    surprising = [place for place in places if place not in survey.files]
    if surprising:
        try:
            survey.add(surprising)
        except OSError as fault:
            raise Untrackable(f"header {surprising[0][1]} cannot be read back: {fault}") from None
        raise Unexpected(", ".join(name for _, name in surprising))
    watch = _Watch(survey)
    headers = {place: Header(*place, survey.files[place].evidence.digest) for place in places}
    _require_no_clock(survey, places)
    view = View(memo)
    for place in watch.questions(places):
        if place not in headers:
            headers[place] = Header(*place, _digest(survey, place, view))
    watch.includes(places)
    for place in headers:
        if place in survey.files and not _same(survey, place, view):
            raise Untrackable(f"header {place[1]} changed while the program was compiled")
    return HeaderState(tuple(headers.values()), tuple(sorted(watch.absent)), tuple(survey.roots))


def _same(survey: Survey, place: Place, view: View) -> bool:
    """Whether a file is what it was before the compile, by content and by identity."""
    try:
        return view.evidence(survey.path(place)) == survey.files[place].evidence
    except OSError:
        return False


def _digest(survey: Survey, place: Place, view: View) -> str:
    """The content of a file whose existence was asked for."""
    try:
        return view.evidence(survey.path(place)).digest
    except OSError as fault:
        raise Untrackable(f"header {place[1]} cannot be read back: {fault}") from None


def _require_no_clock(survey: Survey, places: Sequence[Place]) -> None:
    texts = {place: survey.files[place].text or "" for place in places if survey.mine(place)}
    macro = clock_macro(*texts.values(), *survey.program.texts)
    if macro is not None:
        where = next((name for (_, name), text in texts.items() if clock_macro(text)), "a header")
        raise Untrackable(f"header {where} uses {macro}, which reads the clock")


class _Watch:
    """Collects the names that would change what a compile finds, were they to become files."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._seen: set[Place] = set()
        self._exists: dict[str, bool] = {}
        self.absent: set[Place] = set()

    def includes(self, places: Sequence[Place]) -> None:
        """Watch what would come before the files in `places`, which the compiler opened."""
        survey = self._survey
        explained: set[Place] = set()
        unreadable: set[Place] = set()  # places from which a macro includes
        for text in (*survey.texts, *map(survey.text, places)):
            for include in text.includes:
                if include.name is None and text.beside is not None and survey.mine(text.beside):
                    unreadable.add(text.beside)
                found, passed = survey.find(include, text.beside)
                if found is not None:
                    explained.add(found)
                    self._must_stay_absent(passed)
        for place in places:
            self._must_stay_absent(self._earlier(place))
            by_macro = any(root == place[0] for root, _ in unreadable)  # found beside, perhaps
            if place not in explained and not by_macro and not self._by_next(place, places):
                self._require_first(place)
        for name in survey.in_memory:  # a file of that name would be found beside its includer
            if name.startswith("/"):
                self._must_stay_absent([(ABSOLUTE, name.lstrip("/"))])
        beside = {(root, os.path.dirname(name)) for root, name in places if root not in survey.theirs}
        for place in places:
            # An include that cannot be read, or that was not seen, may look beside any file.
            for root, directory in unreadable if place in explained else {*unreadable, *beside, HOME}:
                self._must_stay_absent([(root, os.path.join(directory, place[1]))])

    def questions(self, places: Sequence[Place]) -> Iterator[Place]:
        """The files that `__has_include` found; `Untrackable` where its answer cannot be followed."""
        survey = self._survey
        mine = [survey.files[place].text or "" for place in places if survey.mine(place)]
        own = [*mine, *survey.program.texts]
        if name := pasted(own, [*QUESTIONS, *survey.macros]):
            raise Untrackable(f"{name} may be put together by ##, which cannot be followed")
        for text in own:
            for asked in questions(text, [*QUESTIONS, *survey.macros]):
                if asked is None:
                    raise Untrackable(
                        "__has_include of a name that is not spelled out cannot be followed"
                    )
                if asked in survey.in_memory:
                    continue
                found = self._ask(asked)
                if found is None or survey.mine(found):
                    raise Untrackable(f"__has_include of {asked}, which is not the toolkit's")
                yield found
        for place in places:
            if survey.mine(place):
                continue
            for asked in questions(survey.files[place].text or ""):
                if asked is None or asked in survey.in_memory:  # the toolkit wraps its own questions
                    continue
                found = self._ask(asked)
                if found is not None:
                    yield found

    def _ask(self, name: str) -> Place | None:
        found, passed = self._survey.find(Include(name, quoted=False), None)
        self._must_stay_absent(passed)
        return found

    def _by_next(self, place: Place, places: Iterable[Place]) -> bool:
        """Whether `#include_next`, which starts behind the including file, may have led to a file."""
        texts = (self._survey.files[each].text for each in places)
        return any("include_next" in joined(text) and place[1] in text for text in texts if text)

    def _require_first(self, place: Place) -> None:
        """`Untrackable` when a file of this name came first before the compile and was passed over."""
        for earlier in self._earlier(place):
            if self._survey.is_file(earlier):
                raise Untrackable(f"header {place[1]} was not found where it lay before the compile")

    def _earlier(self, place: Place) -> Iterator[Place]:
        """The same name in the include directories before the one where a file was found."""
        root, name = place
        if root == ABSOLUTE:
            return
        for earlier in self._survey.roots:
            if earlier == root:
                return
            yield earlier, name

    def _must_stay_absent(self, places: Iterable[Place]) -> None:
        for place in places:
            if place not in self._seen:
                self._seen.add(place)
                if not self._survey.is_file(place):
                    self._watch(place)

    def _watch(self, place: Place) -> None:
        """Watch the shortest leading part of a name that does not exist: one look covers many."""
        root, name = place
        if os.path.isfile(self._survey.path(place)):
            raise Untrackable(f"header {name} appeared while the program was compiled")
        steps = name.split("/")
        for count in range(1, len(steps)):
            lead = "/".join(steps[:count])
            if not self._there(self._survey.path((root, lead))):
                self.absent.add((root, f"{lead}/"))
                return
        self.absent.add(place)

    def _there(self, path: str) -> bool:
        if path not in self._exists:
            self._exists[path] = os.path.lexists(path)
        return self._exists[path]


def _is_file(path: str) -> bool:
    """Whether there is a regular file; `InputError` for what a compiler would wait for."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise InputError(f"an include leads to {path}, a pipe for which the compiler would wait")
    return stat.S_ISREG(mode)


def _located(spelled: str, roots: Mapping[str, str]) -> Place:
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
