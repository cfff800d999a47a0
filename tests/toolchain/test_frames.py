"""Frames between a process and its worker, byte for byte, and shared text functions."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.model.lexer import split_commas
from preheat.toolchain import frames

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.dictionaries(st.text(), JSON, max_size=4)
BLOCKS = st.dictionaries(st.text(), st.binary(max_size=200), max_size=4)


def reader(data: bytes) -> Callable[[int], bytes]:
    stream = io.BytesIO(data)

    def exactly(size: int) -> bytes:
        part = stream.read(size)
        if len(part) < size:
            raise EOFError
        return part

    return exactly


@given(MESSAGES, BLOCKS)
def test_a_frame_comes_back_as_it_was(message: dict[str, object], blocks: dict[str, bytes]) -> None:
    frame = frames.read(reader(frames.encode(message, blocks)))
    assert (frame.message, frame.blocks) == (message, blocks)
    assert list(frame.blocks) == list(blocks)


@given(st.lists(st.tuples(MESSAGES, BLOCKS), max_size=4))
def test_frames_follow_one_another(sent: list[tuple[dict[str, object], dict[str, bytes]]]) -> None:
    exactly = reader(b"".join(frames.encode(*frame) for frame in sent))
    assert [tuple(frames.read(exactly)) for _ in sent] == sent
    with pytest.raises(EOFError):
        frames.read(exactly)


@given(MESSAGES, BLOCKS, st.data())
def test_a_frame_cut_short_is_an_end_and_never_a_message(
    message: dict[str, object], blocks: dict[str, bytes], data: st.DataObject
) -> None:
    whole = frames.encode(message, blocks)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(EOFError):
        frames.read(reader(whole[:cut]))


def test_a_frame_needs_no_blocks() -> None:
    assert frames.read(reader(frames.encode({"do": "locate"}))) == ({"do": "locate"}, {})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("  ", []),
        ("a", ["a"]),
        (" a , b,c ", ["a", "b", "c"]),
        ("{%f1, %f2}, [%rd1+8]", ["{%f1, %f2}", "[%rd1+8]"]),
        (
            "std::pair<int, A<3, 4>>, void (*)(int, int)",
            ["std::pair<int, A<3, 4>>", "void (*)(int, int)"],
        ),
        ("a,,b", ["a", "", "b"]),
        ("a,", ["a"]),
    ],
)
def test_only_commas_outside_brackets_separate(text: str, parts: list[str]) -> None:
    assert split_commas(text) == parts


@given(st.text(alphabet="ab,()<>[]{} "))
def test_nothing_but_separating_commas_and_white_space_is_lost(text: str) -> None:
    parts = split_commas(text)
    assert "".join("".join(parts).split()).replace(",", "") == "".join(text.split()).replace(",", "")
