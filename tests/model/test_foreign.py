"""Entries of other libraries: identity, encoding, and what is rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.errors import InputError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import Provenance
from preheat.model.foreign import ForeignEntry, ForeignRequest, foreign_digest, foreign_kind, is_foreign

ENTRY = ForeignEntry(
    "triton",
    "a" * 64,
    {"add.cubin": b"\x7fELF", "add.json": b"{}"},
    variant="typed",
    label="kernels:add",
    arch=Arch.parse("sm_90"),
    properties={"version": "3.6.0"},
    provenance=Provenance(1.5, "2026-01-02T03:04:05Z"),
)

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_entries = st.builds(
    ForeignEntry,
    kind=st.from_regex(r"[a-z][a-z0-9_.-]{0,31}", fullmatch=True),
    key=_texts.filter(bool),
    files=st.dictionaries(_texts.filter(bool), st.binary(max_size=100), max_size=4),
    variant=_texts,
    label=_texts,
    arch=st.sampled_from([None, Arch.parse("sm_90a"), Arch.parse("sm_100")]),
    properties=st.dictionaries(_texts, _texts, max_size=4),
)


def decoded(entry: ForeignEntry, blob: bytes) -> ForeignEntry:
    return ForeignEntry.decode(entry.digest, *codec.unpack(entry.digest, blob))


@given(_entries)
def test_an_entry_survives_its_encoding(entry: ForeignEntry) -> None:
    blob = entry.encode()
    assert decoded(entry, blob) == entry
    assert foreign_kind(blob) == entry.kind
    assert is_foreign(codec.unpack_checked(blob).meta)


@given(_entries)
def test_a_reference_leads_back_to_the_request(entry: ForeignEntry) -> None:
    request = entry.request
    assert ForeignRequest.referenced(request.kind, request.reference, *request[3:]) == request


@pytest.mark.parametrize("key", ["a b", "a%20b", "%", "%25 %20", " "])
def test_a_key_may_have_spaces(key: str) -> None:
    for variant in ("", "typed digest"):
        request = ForeignRequest("kind", key, variant)
        assert ForeignRequest.referenced("kind", request.reference) == request


def test_provenance_is_stored_and_can_be_left_out() -> None:
    assert decoded(ENTRY, ENTRY.encode()).provenance == ENTRY.provenance
    bare = ENTRY.encode(provenance=False)
    assert decoded(ENTRY, bare).provenance == Provenance()
    other = ForeignEntry(**{**vars(ENTRY), "provenance": Provenance(9.0, "2027-01-01T00:00:00Z")})
    assert other.encode(provenance=False) == bare


def test_the_order_of_the_files_does_not_matter() -> None:
    turned = dict(sorted(ENTRY.files.items(), reverse=True))
    assert ForeignEntry(**{**vars(ENTRY), "files": turned}).encode() == ENTRY.encode()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("triton", "k", ""), ("tritom", "k", "")),
        (("triton", "k", ""), ("triton", "l", "")),
        (("triton", "k", ""), ("triton", "k", "v")),
        (("triton", "ab", "c"), ("triton", "a", "bc")),
        (("triton", "a\0b", "c"), ("triton", "a", "b\0c")),
    ],
)
def test_the_digest_differs_on_each_part_of_the_identity(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    assert foreign_digest(*one) != foreign_digest(*other)


def test_the_digest_is_the_same_for_everything_else() -> None:
    other = ForeignEntry("triton", "a" * 64, {}, variant="typed", label="another")
    assert other.digest == ENTRY.digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "Triton"}, "is not a kind of entry"),
        ({"kind": ""}, "is not a kind of entry"),
        ({"kind": 3}, "is not a kind of entry"),
        ({"kind": "x" * 33}, "is not a kind of entry"),
        ({"key": ""}, "is text that is not empty"),
        ({"key": b"k"}, "is text that is not empty"),
        ({"key": "\ud800"}, "is not text"),
        ({"files": [b"x"]}, "a mapping from names to bytes"),
        ({"files": {"": b""}}, "has a name"),
        ({"files": {1: b""}}, "has a name"),
        ({"files": {"a": "text"}}, "is bytes, not str"),
        ({"label": None}, "is not text"),
        ({"properties": {"a": 1}}, "is not text"),
    ],
)
def test_bad_entries_are_rejected(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ForeignEntry(**{**vars(ENTRY), **fields})


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "artifact"},
        {"kind": "foreign:UPPER"},
        {"name": "another key"},
        {"name": 3},
        {"properties": []},
        {"properties": {"a": 1}},
        {"target": 90},
        {"target": "sm_x"},
        {"label": None},
        {"variant": "other"},
    ],
)
def test_entries_with_other_fields_are_damaged(change: dict[str, object]) -> None:
    meta, sections = codec.unpack_checked(ENTRY.encode())
    with pytest.raises(codec.DamagedEntryError):
        ForeignEntry.decode(ENTRY.digest, {**meta, **change}, sections)


@pytest.mark.parametrize("field", ["kind", "name", "properties", "target", "label", "variant"])
def test_entries_without_a_field_are_damaged(field: str) -> None:
    meta, sections = codec.unpack_checked(ENTRY.encode())
    with pytest.raises(codec.DamagedEntryError):
        ForeignEntry.decode(ENTRY.digest, {k: v for k, v in meta.items() if k != field}, sections)


def test_the_kind_of_other_entries_is_none() -> None:
    assert foreign_kind(codec.pack("0" * 64, {"kind": "artifact"}, {})) is None
    assert foreign_kind(b"") is None


def test_titles_name_the_kind_and_the_label() -> None:
    assert ENTRY.title == "triton kernels:add"
    assert ForeignEntry("cc", "k" * 40, {}).title == f"cc {'k' * 24}"
    assert "triton kernels:add for sm_90" in repr(ENTRY)
    assert (ENTRY.size, ENTRY.target) == (6, "sm_90")
