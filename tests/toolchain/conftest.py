"""One toolchain for all tests of the folder, so that compiles share its workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from preheat.model.events import Events
from preheat.toolchain.compiler import Toolchain
from tests.processes import TIMEOUT_SECONDS


@pytest.fixture(scope="session")
def toolchain() -> Iterator[Toolchain]:
    made = Toolchain(Events(), timeout=TIMEOUT_SECONDS)
    yield made
    made.close()
