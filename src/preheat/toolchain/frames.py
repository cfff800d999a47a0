"""Messages between a process and its compiler worker: a JSON part and named byte blocks, framed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["Frame", "decode", "encode", "read"]

_HEAD = struct.Struct("<IQ")


class Frame(NamedTuple):
    """One message."""

    message: dict[str, Any]
    blocks: dict[str, bytes]


def encode(message: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None) -> bytes:
    """A frame as bytes."""
    blocks = blocks or {}
    table = [[name, len(block)] for name, block in blocks.items()]
    text = json.dumps({"message": message, "blocks": table}).encode()
    body = b"".join(blocks.values())
    return _HEAD.pack(len(text), len(body)) + text + body


def decode(text: bytes, body: bytes) -> Frame:
    """A frame from its two parts."""
    head = json.loads(text)
    blocks, at = {}, 0
    for name, length in head["blocks"]:
        blocks[name] = body[at : at + length]
        at += length
    return Frame(head["message"], blocks)


def read(exactly: Callable[[int], bytes]) -> Frame:
    """The next frame, taking bytes from `exactly(n)`, which raises `EOFError` when they end."""
    text_size, body_size = _HEAD.unpack(exactly(_HEAD.size))
    return decode(exactly(text_size), exactly(body_size))
