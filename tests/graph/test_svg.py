"""The parts of SVG pictures: escaping, text that fits, and documents."""

from __future__ import annotations

import doctest
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.graph.pictures import svg

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)  # also surrogates and NUL


def test_examples() -> None:
    assert doctest.testmod(svg).failed == 0


#: The characters of XML 1.0.
XML = [(0x9, 0xA), (0xD, 0xD), (0x20, 0xD7FF), (0xE000, 0xFFFD), (0x10000, 0x10FFFF)]


def permitted(character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in XML)


@given(ANY_TEXT, ANY_TEXT)
def test_any_text_is_valid_xml_and_comes_back(name: str, value: str) -> None:
    line = svg.fit(name, 30)
    drawn = svg.document(name, 10, 10, {}, [svg.text(f"x{line}", 1, 2, 12, id_=value)])
    root = ElementTree.fromstring(drawn)
    assert root[-1].text == "x" + "".join(each if permitted(each) else "\ufffd" for each in line)


@given(st.text(max_size=80), st.integers(3, 40))
def test_a_text_that_is_cut_fits_and_keeps_both_ends(value: str, limit: int) -> None:
    cut = svg.fit(value, limit)
    assert svg.columns(cut) <= limit
    assert not set(cut) & set("\n\r\t")
    if svg.columns(value) <= limit:
        assert cut == svg.one_line(value)


def test_the_middle_of_a_long_name_is_left_out() -> None:
    assert svg.fit("abcdefghij", 10) == "abcdefghij"
    assert svg.fit("abcdefghijk", 7) == "abc…ijk"
    assert svg.fit("漢字漢字漢字", 7) == "漢字…字"  # Each of these takes two columns.


def test_a_text_states_its_length() -> None:
    element = ElementTree.fromstring(svg.text("a<b>&c", 1.23, 2, 10))
    assert element.text == "a<b>&c"
    assert element.attrib["textLength"] == "36"
    assert (element.attrib["x"], element.attrib["font-size"]) == ("1.2", "10")


def test_a_document_is_accessible_scales_and_has_colours_for_dark_pages() -> None:
    style = {"box": ("fill: #fff", "fill: #000")}
    drawn = svg.document("A title", 300, 20.5, style, [svg.element("rect", class_="box")])
    root = ElementTree.fromstring(drawn)
    assert root.attrib["role"] == "img"
    assert root.attrib["viewBox"] == "0 0 300 20.5"
    assert root[0].tag.endswith("title")
    assert root[0].text == "A title"
    sheet = root[1].text or ""
    light, dark = sheet.split("@media (prefers-color-scheme: dark)")
    assert ".preheat .box { fill: #fff }" in light
    assert ".preheat .box { fill: #000 }" in dark


@pytest.mark.parametrize(
    ("value", "shown"), [(1, "1"), (1.25, "1.2"), (2.0, "2"), (123456.7, "123457")]
)
def test_coordinates_are_short(value: float, shown: str) -> None:
    assert svg.number(value) == shown
