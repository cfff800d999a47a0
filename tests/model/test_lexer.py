"""Comments and literals: the lexer separates code from text in any input."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from preheat.model.lexer import (
    blank_comments,
    find_name,
    join_lines,
    scan,
    strip_comments,
    trigraph_variants,
)

CODE = {
    "a line comment": ("a // b\nc", "a  \nc"),
    "a line comment that goes on": ("a // b \\\n c\nd", "a  \nd"),
    "a line comment that goes on after a carriage return": ("a // b \\\r\n c\nd", "a  \nd"),
    "a backslash and a space end no line": ("a // b \\ \nc", "a  \nc"),
    "a block comment": ("a /* b\n */ c", "a   c"),
    "a block comment that nothing ends": ("a /* b\nc", "a  "),
    "a slash and a star on two lines": ("a /\\\n* b *\\\r\n/ c", "a   c"),
    "two slashes on two lines": ("a /\\\n/ b\nc", "a  \nc"),
    "a comment inside a directive": ('#/* \n */include "a.h"', '# include "a.h"'),
    "a comment inside a string": ('a = "/* b"; c', 'a = "/* b"; c'),
    "a quote inside a character": ("a = '\"'; /* b */ c", "a =  ;   c"),
    "an escaped quote inside a character": ("a = '\\''; /* b */ c", "a =  ;   c"),
    "a number with separators": ("a = 1'000'000; // b", "a = 1'000'000;  "),
    "a hexadecimal number with separators": ("a = 0xF'F'0; '/*'", "a = 0xF'F'0;  "),
    "an apostrophe in prose": ("#error don't /* b\nc", "#error don \nc"),
    "a string that nothing ends": ('a " /* b\nc', 'a " /* b\nc'),
    "a string over two lines": ('a = "b\\\n/*"; c', 'a = "b\\\n/*"; c'),
    "a raw string": ('a = R"x(" /* )" )x"; c', "a =  ; c"),
    "a raw string with a prefix": ('a = u8R"(//)"; c', "a =  ; c"),
    "a word that ends in R": ('FOOR"/*" c', 'FOOR"/*" c'),
    "a raw string that nothing ends": ('R"x( /* b */ c', 'R"x(   c'),
    "a header name with slashes": ("#include <a//b.h> // c", "#include <a//b.h>  "),
    "a word on two lines": ("__TI\\\nME__", "__TIME__"),
}


@pytest.mark.parametrize("what", CODE)
def test_stripped_text_is_what_a_preprocessor_sees(what: str) -> None:
    text, code = CODE[what]
    assert strip_comments(text, strings=True) == code


def test_strings_can_be_removed_as_well() -> None:
    assert strip_comments('a = "b"; // c') == "a =  ;  "


FRAGMENTS = ["/", "*", '"', "'", "\\", "\n", "\r", "R", "(", ")", "x", "1", " ", "#", "u8", "<", ">"]
texts = st.lists(st.sampled_from([*FRAGMENTS, "/*", "*/", "//", 'R"x(', ')x"'])).map("".join)


@given(texts)
@example("/" * 10 + "*" * 10)
def test_pieces_come_in_order_and_do_not_overlap(text: str) -> None:
    at = 0
    for _, start, end in scan(text):
        assert at <= start < end <= len(text)
        at = end


@given(texts)
def test_scanning_agrees_with_one_character_after_the_other(text: str) -> None:
    assert [text[p.start : p.end] for p in scan(text, ptx=True)] == reference(text)


def reference(text: str) -> list[str]:
    """Comments and strings of PTX, found by the simplest machine that can."""
    found = []
    at = 0
    while at < len(text):
        start = at
        if text[at : at + 2] == "//":
            while at < len(text) and text[at] != "\n":
                at += 1
        elif text[at : at + 2] == "/*":
            at += 2
            while at < len(text) and text[at : at + 2] != "*/":
                at += 1
            at = min(at + 2, len(text))
        elif text[at] == '"':
            at = string_end(text, at + 1)
        else:
            at += 1
            continue
        found.append(text[start:at])
    return found


def string_end(text: str, at: int) -> int:
    while at < len(text) and text[at] != "\n":
        if text[at] == '"':
            return at + 1
        if text[at] == "\\":
            if at + 1 == len(text):
                return at
            at += 2 if text[at + 1 : at + 3] == "\r\n" else 1
        at += 1
    return at


@given(texts)
def test_blanked_text_keeps_every_line_and_column(text: str) -> None:
    clean = blank_comments(text)
    assert len(clean) == len(text)
    assert [len(line) for line in clean.split("\n")] == [len(line) for line in text.split("\n")]


SPELLED = {
    "plainly": ["x = __TIME__;"],
    "on two lines": ["x = __TI\\\nME__;"],
    "on two lines with carriage returns": ["x = __TI\\\r\nME__;"],
    "from two words": ["#define C(a, b) a##b\nx = C(__TI, ME__);"],
    "from words of two texts": ["CAT(__TI, B)", "#define B ME__"],
    "from three words": ["CAT(_, _TI, ME__)"],
    "behind a character": ["a = '\"'; x = __TIME__; b = '\"';"],
    "behind a wide character": ['a = L\'\\"\'; x = __TIME__; b = "";'],
    "behind a raw string": ['a = R"(" /*)"; x = __TIME__;'],
    "with a trigraph": ["x = __TI??/\nME__;"],
    "behind a header name": ["#define Z #include <//> /*\nx = __TIME__; // */"],
    "behind a header name and a comment": ["#/**/include <x/*y.h>\nx = __TIME__; // */"],
    "behind a prefix on the line before": ['#define X q\\\nR"("\nx = __TIME__; // )"'],
}


@pytest.mark.parametrize("how", SPELLED)
def test_a_name_is_found_however_it_is_spelled(how: str) -> None:
    assert find_name(SPELLED[how], ["__TIME__"]) == "__TIME__"


@pytest.mark.parametrize(
    "text",
    [
        "// __TIME__",
        '"__TIME__"',
        "/* __TIME__ */",
        "my__TIME__",
        "__TI ME_",
        "// x \\\n__TIME__",
        "enum { TIME = 4 }; int _ = TIME;",
        "template <class T, int D, int A, int E> int _;",
    ],
)
def test_a_name_outside_of_code_is_not_found(text: str) -> None:
    assert find_name([text], ["__TIME__"]) is None


def test_lines_are_joined_and_trigraphs_read() -> None:
    assert join_lines("a\\\nb\\\r\nc\\ \nd") == "abc\\ \nd"
    assert list(trigraph_variants("a ??/\n??=b")) == ["a ??/\n??=b", "a \\\n#b"]
    assert list(trigraph_variants("a??b")) == ["a??b"]
