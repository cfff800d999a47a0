"""A plugin of pytest that records the status of each driver call of each test.

    PREHEAT_NATIVE=0 python -m pytest -p tests.driver.statuses --statuses FILE -m gpu …

Two such files, of a GPU and of the CPU driver, are compared by `differences`. Without the native core,
every call goes through the bindings, where it is seen.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Statuses", "differences"]

#: Work that is not finished yet. Whether a query sees it depends on time.
_NOT_READY = 600

Calls = Mapping[str, Mapping[str, list[int]]]  # the statuses, by test and by function


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--statuses", metavar="FILE", help="write the statuses of driver calls to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to record."""
    if config.getoption("--statuses"):
        config.pluginmanager.register(Statuses(Path(config.getoption("--statuses"))))


class Statuses:
    """Which statuses each function returned in each test."""

    def __init__(self, file: Path) -> None:
        from cuda.bindings import driver

        self._file = file
        self._test = ""
        self._seen: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for name in dir(driver):
            function = getattr(driver, name)
            if name.startswith("cu") and callable(function) and not isinstance(function, type):
                setattr(driver, name, self._recorded(name, function))

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            result = function(*args)
            if isinstance(result, tuple):
                self._seen[self._test][name].add(int(result[0]))
            return result

        return call

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note which test runs."""
        self._test = item.nodeid
        result = yield
        self._test = ""
        return result

    def pytest_sessionfinish(self) -> None:
        """Write what was seen."""
        found = {
            test: {name: sorted(each) for name, each in sorted(calls.items())}
            for test, calls in sorted(self._seen.items())
            if test
        }
        self._file.write_text(json.dumps(found, indent=1) + "\n")


def differences(gpu: Calls, cpu: Calls) -> list[str]:
    """Return a line for each function that returned other statuses in a test that both have run."""
    lines = []
    for test in sorted(gpu.keys() & cpu.keys()):
        for name in sorted(gpu[test].keys() | cpu[test].keys()):
            first, second = (set(each[test].get(name, ())) - {_NOT_READY} for each in (gpu, cpu))
            if first != second:
                lines.append(f"{test}: {name}: GPU {sorted(first)}, CPU driver {sorted(second)}")
    return lines
