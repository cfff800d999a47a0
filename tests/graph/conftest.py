"""The devices of the runtime's tests, for the tests of graphs."""

from __future__ import annotations

from tests.runtime.conftest import flaky, kind, open_flaky, setup

__all__ = ["flaky", "kind", "open_flaky", "setup"]
