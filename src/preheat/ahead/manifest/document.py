"""The TOML text of a manifest: render, or edit so that comments, order and layout stay."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Array, Comment, InlineTable, Null, Table, Whitespace

from preheat.ahead.manifest.reader import VERSION, VERSION_1_KEYS

__all__ = ["ManifestTable", "edit", "render"]

_WIDTH = 100  # A list that does not fit on a line of this width gets one line for each item.
_KINDS = ("program", "link", "foreign", "graph", "unrecorded")  # in the order of a new file
_UNORDERED = ("entries", "arch", "callers")  # lists whose order has no meaning
_RECORDED = re.compile(r"^recorded[ \t]*=.*\n", re.M)
_INTRO = """\
# The kernels an application needs; `preheat bake` compiles them.
# Review and edit it as you like: in a [[program]] only `file` or `source` must be there.
# `preheat record` and `preheat plan` add to it, and keep your comments.
"""


class ManifestTable(NamedTuple):
    """A table to write. Equal identities mean the same program, request or graph."""

    kind: str
    identity: Any
    values: Mapping[str, Any]


@dataclass(eq=False)
class _Block:
    """A table of the file, and the blank lines and comments above it."""

    kind: str
    identity: Any  # None for a table that could not be read
    table: Table
    above: str = "\n"

    def change(self, values: Mapping[str, Any]) -> None:
        """Give the table these values.

        tomlkit adds keys at the end. A table without comments whose keys are in the usual order is
        replaced by a new one, so that the text of an unedited file does not depend on its history.
        """
        common = [key for key in values if key in self.table]
        in_usual_order = common == [key for key in self.table if key in values]
        if len(common) < len(values) and in_usual_order and "#" not in self.table.as_string():
            self.table = tomlkit.table()
        _assign(self.table, values)

    def __str__(self) -> str:
        document = tomlkit.document()
        tables = tomlkit.aot()
        tables.append(self.table)
        document.append(self.kind, tables)
        return self.above + document.as_string()


def render(entries: Iterable[ManifestTable], recorded: str = "") -> str:
    """Return the text of a new manifest. It depends on nothing but the arguments."""
    top = _set_recorded(f"{_INTRO}version = {VERSION}\n", recorded)
    return top + "".join(str(_make_block(entry)) for entry in entries)


def edit(
    text: str,
    identities: Mapping[str, Sequence[Any]],
    entries: Sequence[ManifestTable],
    recorded: str = "",
) -> str | None:
    """Return the manifest `text` with its tables changed to `entries`.

    `recorded` is the bundle with the entries that cannot be made again, if there is one.
    `identities` has the identity of each table of `text` by kind, in the order of the file. Returns
    None for a text that cannot be edit, such as one in which the tables are not written as
    `[[program]]`.
    """
    try:
        top, blocks, end = _parse(_upgrade(text), identities)
        _update(blocks, entries)
        result = "".join([_set_recorded(top, recorded), *_render_blocks(blocks), end])
        # Check that the edit text has the right programs. Otherwise, comments are given up.
        wanted = _group(entries) | ({"recorded": recorded} if recorded else {})
        return result if _normalize(tomllib.loads(result)) == _normalize(wanted) else None
    except (TOMLKitError, ValueError, TypeError, RecursionError):
        return None


def _set_recorded(top: str, recorded: str) -> str:
    """Return the text above the tables with the line of the bundle of recorded entries."""
    line = f"recorded = {json.dumps(recorded)}\n" if recorded else ""
    changed, count = _RECORDED.subn(lambda _: line, top, count=1)
    return changed if count else top + line


def _make_block(entry: ManifestTable) -> _Block:
    block = _Block(entry.kind, entry.identity, tomlkit.table())
    _assign(block.table, entry.values)
    return block


# Editing


def _upgrade(text: str) -> str:
    """Return the text of version 1 with the number and the names of keys of this version."""
    if tomllib.loads(text)["version"] != 1:
        return text
    text = re.sub(r"^([ \t]*version[ \t]*=[ \t]*)1\b", rf"\g<1>{VERSION}", text, count=1, flags=re.M)
    for key, old in VERSION_1_KEYS.items():
        text = re.sub(rf"^([ \t]*){old}(?=[ \t]*=)", rf"\g<1>{key}", text, flags=re.M)
    return text


def _parse(text: str, identities: Mapping[str, Sequence[Any]]) -> tuple[str, list[_Block], str]:
    """Split a manifest into the text above its tables, the tables, and the text below them."""
    document = tomlkit.parse(text)
    arrays = {kind: document[kind] for kind in document if kind in identities}
    for kind in arrays:
        document.remove(kind)
    blocks: list[_Block] = []
    above = _cut_trailing_comments(document.body)
    for kind, array in arrays.items():
        if not isinstance(array, AoT):
            raise TypeError(f"{kind} is not an array of tables")
        for table, identity in zip(array.body, identities[kind], strict=True):
            blocks.append(_Block(kind, identity, table, above))
            above = _cut_trailing_comments(table.value.body)
    top = document.as_string()
    return (top if top.endswith("\n") else top + "\n"), blocks, above


def _cut_trailing_comments(body: list[Any]) -> str:
    """Remove the comments that belong to the next table from the end of `body`, and return them.

    TOML attaches them to the table above. Those that follow the last key without a blank line stay,
    unless there is no blank line before the next table either.
    """
    if body and isinstance(body[-1][1], Table):
        return _cut_trailing_comments(body[-1][1].value.body)
    start = next((i for i, (_, item) in reversed([*enumerate(body)]) if not _is_trivia(item)), -1) + 1
    blank = (i for i in range(start, len(body)) if isinstance(body[i][1], Whitespace))
    start = next(blank, start)
    cut = "".join(item.as_string() for _, item in body[start:])
    del body[start:]
    return cut


def _is_trivia(item: object) -> bool:
    return isinstance(item, Comment | Whitespace | Null)  # Null is where a key was removed.


def _update(blocks: list[_Block], entries: Sequence[ManifestTable]) -> None:
    """Change, add and remove blocks so that there is exactly one for each of `entries`."""
    found: dict[tuple[str, Any], _Block] = {}
    for block in blocks:
        found.setdefault((block.kind, block.identity), block)
    wanted = {(entry.kind, entry.identity): entry for entry in entries}
    for block in reversed([*blocks]):
        key = block.kind, block.identity
        if key not in wanted or found[key] is not block:
            _remove(blocks, block)
    for key, entry in wanted.items():
        if key in found:
            found[key].change(entry.values)
        else:
            blocks.insert(_find_position(blocks, entry), _make_block(entry))


def _remove(blocks: list[_Block], block: _Block) -> None:
    """Remove a block. The comments above it stay, because they may be about more than the block."""
    index = blocks.index(block)
    del blocks[index]
    if "#" in block.above and index < len(blocks):
        blocks[index].above = block.above + blocks[index].above


def _find_position(blocks: Sequence[_Block], entry: ManifestTable) -> int:
    """Return where to insert a new entry: sorted among its kind, and the kinds in their order."""
    same = [i for i, block in enumerate(blocks) if block.kind == entry.kind]
    after = (i for i in same if blocks[i].identity > entry.identity)
    kinds = (entry.kind,) if same else _KINDS[: _KINDS.index(entry.kind)]
    before = [i for i, block in enumerate(blocks) if block.kind in kinds]
    return next(after, before[-1] + 1 if before else 0)


def _render_blocks(blocks: Iterable[_Block]) -> Iterable[str]:
    for block in blocks:
        text = str(block)
        yield text if text.endswith("\n") else text + "\n"


# Values


def _assign(table: Table, values: Mapping[str, Any]) -> None:
    """Set the keys and values of `table` to `values`. Equal values are not touched."""
    for key in [key for key in table if key not in values]:
        table.remove(key)
    indents = {key: item.trivia.indent for key, item in table.items() if isinstance(item, Table)}
    for key, value in values.items():
        if isinstance(value, Mapping):
            if key not in table:
                table.append(key, tomlkit.table())
            _assign(table[key], value)
            if isinstance(table[key], Table):
                table[key].trivia.indent = indents.get(key, "")  # tomlkit adds blank lines above.
        elif isinstance(value, str | int | float):
            if key not in table or table[key] != value:
                table[key] = _make_literal(value) if isinstance(value, str) else value
        else:
            _assign_list(table, key, list(value))


def _make_literal(text: str) -> str:
    """Return text with quotes as a TOML literal without escapes, if that is possible."""
    plain = '"' in text and "'" not in text and text.isprintable()
    return tomlkit.string(text, literal=True) if plain else text


def _assign_list(table: Table, key: str, values: list[Any]) -> None:
    old = table.get(key)
    values = [_make_inline_table(value) if isinstance(value, Mapping) else value for value in values]
    if old is not None and _sort_unordered(key, old) == _sort_unordered(key, values):
        return
    if isinstance(old, Array) and "#" in old.as_string():
        kept = [value for value in old if value in values]
        added = [value for value in values if value not in kept]
        if key in _UNORDERED or kept + added == values:
            for value in [value for value in old if value not in values]:
                old.remove(value)
            old.extend(added)
            return
    new = tomlkit.array()
    new.extend(values)
    table[key] = new.multiline(len(f"{key} = {new.as_string()}") > _WIDTH)


def _make_inline_table(row: Mapping[str, Any]) -> InlineTable:
    """Return a table as TOML has it inside a list."""
    table = tomlkit.inline_table()
    for key, value in row.items():
        inner = _make_inline_table(value) if isinstance(value, Mapping) else value
        table.append(key, list(value) if isinstance(value, tuple) else inner)
    return table


def _sort_unordered(key: str, values: Iterable[Any]) -> list[Any]:
    return sorted(values) if key in _UNORDERED else list(values)


def _group(entries: Iterable[ManifestTable]) -> dict[str, Any]:
    """Return the data that the text of a manifest with these entries has."""
    data: dict[str, Any] = {"version": VERSION}
    for entry in entries:
        data.setdefault(entry.kind, []).append(entry.values)
    return data


def _normalize(data: Mapping[str, Any]) -> object:
    """Return a value that is equal for two manifests that differ only in their order."""
    rows = [
        json.dumps(
            [kind, {key: _normalize_value(key, value) for key, value in row.items()}], sort_keys=True
        )
        for kind in _KINDS
        for row in data.get(kind, ())
    ]
    return data["version"], data.get("recorded", ""), sorted(rows)


def _normalize_value(key: str, value: Any) -> object:
    return _sort_unordered(key, value) if isinstance(value, list | tuple) else value
