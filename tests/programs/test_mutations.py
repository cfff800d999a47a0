"""Every mutation of `mutations.py` fits its source; `make mutations` runs the tests with each."""

from __future__ import annotations

import pytest

from tests.programs.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_matches_its_source_once(mutation: Mutation) -> None:
    text = (ROOT / "src" / "preheat" / mutation.file).read_text()
    assert text.count(mutation.before) == 1
    assert mutation.before != mutation.after
