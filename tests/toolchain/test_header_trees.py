"""Random trees of headers: a tree that compiles differently never has the same state."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from preheat.model.artifact import Header
from preheat.model.program import Program
from preheat.toolchain.headers.evidence import Memo
from preheat.toolchain.headers.observe import Unexpected, observe
from preheat.toolchain.headers.states import HeaderState, change
from preheat.toolchain.headers.survey import Survey

# A small preprocessor stands in for the compiler: quoted names are looked for next to the header
# that has them, then all names in the roots, in order; each file is read once. The toolkit has a
# plain file of every name, so that nearly everything compiles.

NAMES = ("a.h", "b.h", "sub/a.h", "sub/b.h")


INCLUDES = (*NAMES, "../a.h")


OWN = ("0", "1")


DIRECTIVES = st.builds(
    lambda form, name: form.format(name),
    st.sampled_from(['#include "{}"\n', "#include <{}>\n", '#define M "{}"\n#include M\n#undef M\n']),
    st.sampled_from(INCLUDES),
)


TEXTS = st.builds(
    lambda lines, number: "".join(lines) + f"int v{number};\n",
    st.lists(DIRECTIVES, max_size=2),
    st.integers(0, 2),
)


TREES = st.dictionaries(st.tuples(st.sampled_from(OWN), st.sampled_from(NAMES)), TEXTS, min_size=1)


def preprocess(text: str, roots: Mapping[str, str], where: str | None = None) -> Iterator[str]:
    """Yield the files that a compile opens, as `@0/sub/a.h`; raise `LookupError` for a missing name."""
    name = ""
    for line in text.splitlines():
        if line.startswith("#define M "):
            name = line.removeprefix("#define M ")
        elif line.startswith("#include"):
            spelled = line.removeprefix("#include ")
            spelled = name if spelled == "M" else spelled
            places = [f"@{root}" for root in roots]
            if spelled.startswith('"') and where is not None:
                places.insert(0, os.path.dirname(where))
            yield next(
                found
                for found in (f"{place}/{spelled[1:-1]}" for place in places)
                if os.path.isfile(path_of(found, roots))
            )


def path_of(spelled: str, roots: Mapping[str, str]) -> str:
    root, _, name = spelled.removeprefix("@").partition("/")
    return f"{roots[root]}/{name}"


def compile_tree(source: str, roots: Mapping[str, str]) -> dict[str, str] | None:
    """Everything opened, with its text; None when something is not found."""
    opened: dict[str, str] = {}
    seen: set[Path] = set()
    pending: list[tuple[str, str | None]] = [(source, None)]
    while pending:
        text, where = pending.pop()
        try:
            for spelled in preprocess(text, roots, where):
                file = Path(path_of(spelled, roots)).resolve()
                if file not in seen:
                    seen.add(file)
                    opened[spelled] = file.read_text()
                    pending.append((opened[spelled], spelled))
        except (StopIteration, RuntimeError):
            return None
    return opened


def plant(tree: Mapping[tuple[str, str], str], base: str) -> None:
    """Make the files under `base` be those of `tree`, and the toolkit's."""
    for root in (*OWN, "cuda"):
        shutil.rmtree(f"{base}/{root}", ignore_errors=True)
        os.makedirs(f"{base}/{root}/sub")
    for name in (*NAMES, "../a.h"):
        Path(base, "cuda", name).write_text(f"int of_the_toolkit; // {name}\n")
    for (root, name), text in tree.items():
        Path(base, root, name).write_text(text)


@settings(max_examples=200, deadline=None)
@given(source=st.lists(DIRECTIVES, min_size=1, max_size=2).map("".join), tree=TREES, edits=TREES)
@example(
    source='#include "sub/b.h"\n',
    tree={("0", "sub/b.h"): '#define M "a.h"\n#include M\n#undef M\n'},
    edits={("0", "sub/a.h"): "int v0;\n"},
)
def test_a_tree_that_compiles_differently_is_never_taken_for_the_same(
    source: str, tree: dict[tuple[str, str], str], edits: dict[tuple[str, str], str]
) -> None:
    with tempfile.TemporaryDirectory() as base:
        roots = {root: f"{base}/{root}" for root in (*OWN, "cuda")}
        plant(tree, base)
        before = compile_tree(source, roots)
        if before is None:
            event("does not compile")
            return
        survey = Survey(Program.of(source), roots, ("cuda",), Memo())
        try:
            state = observe(survey, before, Memo())
        except Unexpected:
            event("a second compile")
            state = observe(survey, before, Memo())
        assert change(state, roots, Memo()) is None
        # Every other edit of an existing file removes the file.
        gone = {at for at, text in edits.items() if at in tree and "v1" in text}
        plant({at: text for at, text in {**tree, **edits}.items() if at not in gone}, base)
        after = compile_tree(source, roots)
        event("same" if after == before else "different")
        if after != before:
            assert change(state, roots, Memo()) is not None


def test_a_state_with_a_root_that_was_removed_has_changed(tmp_path: Path) -> None:
    state = HeaderState((Header("3", "v.h", "0" * 64),), (), ("0",))
    assert "include directory is gone" in str(change(state, {"0": str(tmp_path)}, Memo()))
