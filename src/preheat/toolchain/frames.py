"""The frames between a process and its compiler workers: a JSON message and named byte blocks."""

from __future__ import annotations

import json
import struct
from collections import namedtuple

TYPE_CHECKING = False  # `typing` takes long to import, and workers are started while a caller waits.
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

__all__ = ["Frame", "encode", "read"]

_HEAD = struct.Struct("<IQ")

#: A message, which JSON can express, and its byte blocks by name.
Frame = namedtuple("Frame", "message blocks")


def encode(message: Mapping[str, Any], blocks: Mapping[str, bytes] | None = None) -> bytes:
    """Return a frame as bytes."""
    blocks = blocks or {}
    table = [[name, len(block)] for name, block in blocks.items()]
    text = json.dumps({"message": message, "blocks": table}).encode()
    body = b"".join(blocks.values())
    return _HEAD.pack(len(text), len(body)) + text + body


def read(read_some: Callable[[int], bytes]) -> Frame:
    """Return the next frame. `read_some(n)` returns 1 to n of the next bytes, or none at the end.

    Raises `EOFError` when the bytes end before the frame does.
    """
    text_size, body_size = _HEAD.unpack(_read_exactly(read_some, _HEAD.size))
    head = json.loads(_read_exactly(read_some, text_size))
    body = _read_exactly(read_some, body_size)
    blocks = {}
    at = 0
    for name, length in head["blocks"]:
        blocks[name] = body[at : at + length]
        at += length
    return Frame(head["message"], blocks)


def _read_exactly(read_some: Callable[[int], bytes], size: int) -> bytes:
    parts = []
    while size:
        part = read_some(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
