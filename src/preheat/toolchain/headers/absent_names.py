"""The names that must stay absent: a file of such a name would be found instead of a header.

A compiler searches directories in order, so its result also depends on files that do not exist. With
the options `-I a -I b`, where `b` contains util.h and sub/deep.h, and `a` is empty, the program

    #include "util.h"
    #include <sub/deep.h>

opens b/util.h and b/sub/deep.h. The result is valid only as long as these do not exist:

    /preheat/    A quoted include searches beside its includer first, and the compiler sees the program
                 in /preheat. This directory does not exist, so one check covers all names in it.
    a/util.h     `a` is searched before `b`.
    a/sub/       stands for a/sub/deep.h in the same way.

An include whose name is a macro (`#include NAME`) cannot be read from the text. Each file that was
opened may then have been searched beside the includer, so that name must stay absent as well.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence

from preheat.model.lexer import find_pasted_name, join_lines
from preheat.toolchain.headers.includes import QUERIES, Include, has_include_queries
from preheat.toolchain.headers.states import ABSOLUTE, Place
from preheat.toolchain.headers.survey import SOURCE_PLACE, Survey

__all__ = ["AbsentNames", "Untrackable"]


class Untrackable(Exception):  # noqa: N818  (The compile itself succeeded.)
    """A compile cannot be described by the files that it opened, for the given reason."""


class AbsentNames:
    """Collects in `absent` the names that would change what a compile finds if they became files."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._seen: set[Place] = set()
        self._exists = functools.cache(os.path.lexists)
        self.absent: set[Place] = set()

    def add_includes(self, opened: Sequence[Place]) -> None:
        """Add the names that would be found before the files that the compiler opened."""
        survey = self._survey
        explained, macro_users = self._follow_includes(opened)
        for place in opened:
            self._must_stay_absent(self._earlier(place))
            # A file in the root of a macro user may have been found beside the macro user.
            by_macro = any(root == place[0] for root, _ in macro_users)
            if place in explained or by_macro or self._by_next(place, opened):
                continue
            if any(map(survey.is_file, self._earlier(place))):
                raise Untrackable(f"header {place[1]} was not found where it was before the compile")
        for name in survey.in_memory:  # A file of that name would be found first, beside its includer.
            if name.startswith("/"):
                self._must_stay_absent([(ABSOLUTE, name.lstrip("/"))])
        beside = {(root, os.path.dirname(name)) for root, name in filter(survey.is_user_file, opened)}
        for place in opened:
            # An include whose name is a macro, or that was not seen, may search beside any file.
            unseen = set() if place in explained else {*beside, SOURCE_PLACE}
            for root, directory in macro_users | unseen:
                self._must_stay_absent([(root, os.path.join(directory, place[1]))])

    def _follow_includes(self, opened: Sequence[Place]) -> tuple[set[Place], set[Place]]:
        """Add the names that includes search for without success before they find a file.

        Return the files that the includes find, and the directories of files with an include whose
        name is a macro.
        """
        survey = self._survey
        explained: set[Place] = set()
        macro_users: set[Place] = set()
        for text in (*survey.texts, *map(survey.text, opened)):
            for include in text.includes:
                if include.name is None and text.beside and survey.is_user_file(text.beside):
                    macro_users.add(text.beside)
                place, passed = survey.find(include, text.beside)
                if place is not None:
                    explained.add(place)
                    self._must_stay_absent(passed)
        return explained, macro_users

    def add_has_include_queries(self, opened: Sequence[Place]) -> Iterator[Place]:
        """Add the names that `__has_include` did not find, and yield the files that it found.

        Raises `Untrackable` if they are not known.
        """
        survey = self._survey
        texts = self._user_texts(opened)
        operators = [*QUERIES, *survey.macros]
        if name := find_pasted_name(texts, operators):
            raise Untrackable(f"{name} may be composed by ##, which cannot be tracked")
        for text in texts:
            for queried in has_include_queries(text, operators):
                if queried is None:
                    raise Untrackable("__has_include of a name that is not a literal cannot be tracked")
                if queried in survey.in_memory:
                    continue
                place = self._ask(queried)
                if place is None or survey.is_user_file(place):
                    raise Untrackable(
                        f"__has_include of {queried}, which is not a toolkit header, cannot be tracked"
                    )
                yield place
        for toolkit_file in opened:
            if survey.is_user_file(toolkit_file):
                continue
            for queried in has_include_queries(survey.files[toolkit_file].text or ""):
                if queried is None or queried in survey.in_memory:  # The toolkit wraps it in macros.
                    continue
                if (place := self._ask(queried)) is not None:
                    yield place

    def add_known_queries(self, opened: Sequence[Place]) -> Iterator[Place]:
        """Do the same for the queries in user files whose name is known, and ignore the others."""
        survey = self._survey
        operators = [*QUERIES, *survey.macros]
        for text in self._user_texts(opened):
            for queried in has_include_queries(text, operators):
                place, passed = survey.find(Include(queried, quoted=False), None)
                self.absent.update(passed)
                if place is not None:
                    yield place

    def _user_texts(self, opened: Iterable[Place]) -> list[str]:
        """Return the texts of opened files outside the toolkit, and the texts of the program."""
        survey = self._survey
        files = (survey.files[place].text or "" for place in filter(survey.is_user_file, opened))
        return [*files, *survey.program.texts]

    def _ask(self, name: str) -> Place | None:
        """Return the file that `__has_include` of `name` finds, if any."""
        place, passed = self._survey.find(Include(name, quoted=False), None)
        self._must_stay_absent(passed)
        return place

    def _by_next(self, place: Place, opened: Iterable[Place]) -> bool:
        """Return whether `#include_next`, which searches after its includer, may have found it."""
        texts = (self._survey.files[each].text for each in opened)
        return any("include_next" in join_lines(text) and place[1] in text for text in texts if text)

    def _earlier(self, place: Place) -> Iterator[Place]:
        """Yield the same name in the include roots before the one where the file was found."""
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
                    self._add(place)

    def _add(self, place: Place) -> None:
        """Add the shortest leading part of a name that does not exist: one check covers many names."""
        root, name = place
        if os.path.isfile(self._survey.path(place)):
            raise Untrackable(f"header {name} appeared while the program was compiled")
        steps = name.split("/")
        for count in range(1, len(steps)):
            lead = "/".join(steps[:count])
            if not self._exists(self._survey.path((root, lead))):
                self.absent.add((root, f"{lead}/"))
                return
        self.absent.add(place)
