"""The duration and the seed of an attack, and the report of both."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from preheat.model.events import Events
from preheat.toolchain.compiler import Toolchain
from tests.conftest import LONG
from tests.processes import TIMEOUT_SECONDS


class Campaign:
    """The extent of one attack. A long campaign takes a new seed each time and reports it."""

    def __init__(self, item: pytest.Item) -> None:
        given = os.environ.get("PREHEAT_TORTURE_SEED")
        self.seed = int(given) if given else random.randrange(1 << 32) if LONG else 14
        self.random = random.Random(self.seed)
        self._item = item

    def rounds(self, *, quick: int, long: int) -> int:
        """Return the number of attacks; the number and the seed are printed at the end of the run."""
        count = long if LONG else quick
        self.note(f"{count:,} rounds, seed {self.seed}")
        return count

    def note(self, text: str) -> None:
        """Print a line about this attack at the end of the run."""
        self._item.user_properties.append(("attack", text))


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Campaign:
    return Campaign(request.node)


@pytest.fixture(scope="session")
def toolchain() -> Iterator[Toolchain]:
    made = Toolchain(Events(), timeout=TIMEOUT_SECONDS)
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the extent of every attack of a long campaign."""
    if not LONG:
        return
    terminalreporter.section("attacks")
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in report.user_properties:
                if name == "attack":
                    terminalreporter.line(f"{report.nodeid}: {value}, {outcome}")
