"""The devices of the runtime's tests, for the tests of warming up."""

from __future__ import annotations

from tests.runtime.conftest import flaky, kind, open_flaky

__all__ = ["flaky", "kind", "open_flaky"]
