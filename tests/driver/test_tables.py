"""The committed tables of the CPU driver are those of the headers of the toolkit.

Headers that are newer than the tables may have more. Everything in the tables has to be in them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from preheat.driver.calls import KINDS, read_table
from preheat.driver.devices import ATTRIBUTES, VERSION
from tests.driver import headers

pytestmark = pytest.mark.skipif(
    not (headers.HEADERS / "cudaTypedefs.h").is_file(), reason="the headers of CUDA are not installed"
)


def rows(name: str) -> list[str]:
    """Return the rows of a committed table."""
    return (headers.NATIVE / name).read_text().splitlines()


def test_the_headers_are_not_older_than_the_tables() -> None:
    assert headers.version() >= VERSION


@pytest.mark.parametrize(
    ("name", "generate"),
    [("entry_points.def", headers.entry_points), ("errors.def", headers.errors)],
)
def test_a_table_is_that_of_the_header(name: str, generate: Callable[[], str]) -> None:
    generated = generate().splitlines()
    if headers.version() == VERSION:
        assert rows(name) == generated
    else:
        assert set(rows(name)) <= set(generated)


def test_every_row_of_the_table_is_read() -> None:
    table = list(read_table())
    assert len(table) == len(rows("entry_points.def"))
    assert {kind for point in table for kind in point.kinds} <= KINDS.keys()
    assert len({point.symbol for point in table}) == len(table)


def test_attributes_have_the_numbers_of_the_header() -> None:
    known = headers.attributes()
    assert {name: known[name] for name in ATTRIBUTES} == ATTRIBUTES


def test_symbols_are_those_that_the_header_declares() -> None:
    """A program that includes the header links these names."""
    if headers.version() > VERSION:
        pytest.skip("the headers are newer than the tables, and declare more functions")
    exported = {point.symbol for point in read_table()}
    assert headers.declared_symbols() - exported == set()
