"""The devices of the runtime's tests, for the tests of warming up."""

from __future__ import annotations

import pytest

from tests.processes import PATIENCE
from tests.runtime.conftest import flaky, kind, open_flaky

__all__ = ["flaky", "kind", "open_flaky"]


@pytest.fixture(autouse=True)
def explaining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explanations are not cut short by a busy machine either."""
    monkeypatch.setattr("preheat.ahead.check._EXPLAIN_SECONDS", PATIENCE)
