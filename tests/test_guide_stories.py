"""The guides of the documentation run from top to bottom, as the pages of `test_stories.py` do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_stories import GUIDES, check_page, env, name_of

__all__ = ["env"]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_guide_does_what_it_shows(page: Path, env: dict[str, str], tmp_path: Path) -> None:
    check_page(page, env, tmp_path / "work")
