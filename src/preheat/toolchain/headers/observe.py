"""Describe a finished compile by the header files that it opened.

The compiler's report decides which files were opened. The text of a program is read for two purposes
only: to learn at which names a new file would be found first, and to scan the files before the compile
(`survey.py`). A file counts as read by the compiler if it was the same before and after the compile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from preheat.model.artifact import Header
from preheat.model.program import clock_macro
from preheat.toolchain.headers.absent_names import AbsentNames, Untrackable
from preheat.toolchain.headers.evidence import FileHasher, Memo
from preheat.toolchain.headers.states import ABSOLUTE, HeaderState, Place
from preheat.toolchain.headers.survey import Survey

__all__ = ["Unexpected", "observe", "observe_roughly"]


class Unexpected(Exception):  # noqa: N818  (The compile itself succeeded.)
    """The compiler opened files that had not been scanned before the compile. They have been now."""


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


def observe_roughly(survey: Survey, opened: Iterable[str], memo: Memo) -> HeaderState:
    """Return what is known of the user's header files after a compile that `observe` cannot describe.

    No cache may rely on it. A sealed process compares it, to find files that certainly differ.
    """
    places: list[Place] = []
    for name in filter(survey.is_real, opened):
        with suppress(Untrackable):
            places.append(_place(name, survey.roots))
    names = AbsentNames(survey)
    scanned = [place for place in places if place in survey.files]
    places += names.add_known_queries(scanned)
    with suppress(Untrackable):
        names.add_includes(scanned)
    view = FileHasher(memo)
    headers: dict[Place, Header] = {}
    for place in filter(survey.is_user_file, places):
        with suppress(Untrackable):
            file = survey.files.get(place)
            digest = _digest(survey, place, view) if file is None else file.evidence.digest
            headers[place] = Header(*place, digest)
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
    if not texts:
        return  # The texts of the program itself are checked before it is compiled.
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
