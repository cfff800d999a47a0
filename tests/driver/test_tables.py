"""The committed tables of the CPU driver are those of the headers of the toolkit."""

from __future__ import annotations

import pytest

from preheat.driver.devices import ATTRIBUTES, VERSION
from preheat.driver.entry_points import KINDS, read_table
from tests.driver import headers

pytestmark = pytest.mark.skipif(
    not (headers.HEADERS / "cudaTypedefs.h").is_file(), reason="the headers of CUDA are not installed"
)


def test_the_table_of_functions_is_that_of_the_header() -> None:
    assert (headers.NATIVE / "entry_points.def").read_text() == headers.entry_points()


def test_the_table_of_errors_is_that_of_the_header() -> None:
    assert (headers.NATIVE / "errors.def").read_text() == headers.errors()


def test_every_row_of_the_table_is_read() -> None:
    table = list(read_table())
    assert len(table) == len(headers.entry_points().splitlines())
    assert {kind for point in table for kind in point.kinds} <= KINDS.keys()
    assert len({point.symbol for point in table}) == len(table)


def test_attributes_have_the_numbers_of_the_header() -> None:
    known = headers.attributes()
    assert {name: known[name] for name in ATTRIBUTES} == ATTRIBUTES


def test_the_version_is_that_of_the_header() -> None:
    assert f"#define CUDA_VERSION {VERSION}\n" in (headers.HEADERS / "cuda.h").read_text()


def test_symbols_are_those_that_the_header_declares() -> None:
    """A program that includes the header links these names."""
    exported = {point.symbol for point in read_table()}
    assert headers.declared_symbols() - exported == set()
