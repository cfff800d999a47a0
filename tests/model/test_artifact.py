"""Artifacts: their encoding, and the lookup of kernels by name."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import tracemalloc

import pytest

from preheat.errors import InputError, UnknownEntryError
from preheat.model import codec
from preheat.model.arch import Arch
from preheat.model.artifact import (  # fmt: skip
    Artifact,
    EntryPoint,
    Header,
    Parameter,
    Provenance,
    Resources,
    without_types,
)
from preheat.model.key import Part

DIGEST = "ab" * 32
POINTER = Parameter(0, 8, 8, "u64", type="float*")


def artifact(*entries: EntryPoint, **more: object) -> Artifact:
    fields: dict[str, object] = {
        "digest": DIGEST,
        "label": "k.cu",
        "arch": Arch.parse("sm_90a"),
        "toolchain": "NVRTC 13.4.92",
        "parts": (Part("arch", "sm_90a"),),
        "entries": entries,
        "cubin": b"\x7fELF",
        "ptx": b".version 9.4",
    }
    return Artifact(**{**fields, **more})  # type: ignore[arg-type]


FULL = artifact(
    EntryPoint("_Z2tkIfEvPT_", (POINTER,), "tk<float>", Resources(registers=8), (".maxntid 128",)),
    EntryPoint("plain", ()),
    names={"tk<float>": "_Z2tkIfEvPT_"},
    headers=(Header("0", "a.h", "cd" * 32),),
    log="ptxas info: ünïcode\n",
    provenance=Provenance(1.5, "2026-01-01T00:00:00Z", "Compile time = 3 ms\n"),
)


def decoded(blob: bytes) -> Artifact:
    return Artifact.decode(DIGEST, *codec.unpack(DIGEST, blob))


def test_an_artifact_survives_its_bytes() -> None:
    assert decoded(FULL.encode()) == FULL


FIELDS = [field.name for field in dataclasses.fields(Artifact)]
LATE = ("cubin", "ptx", "parts", "log", "sources")  # left in the bytes of an entry
WITH_SOURCES = dataclasses.replace(FULL, sources={"a.h": "int a;\n"})


@pytest.mark.parametrize("whole", [FULL, WITH_SOURCES, artifact()], ids=["full", "sources", "empty"])
def test_an_artifact_in_a_store_has_every_field(whole: Artifact) -> None:
    stored = Artifact.stored(DIGEST, whole.encode())
    assert not set(LATE) & set(vars(stored)), "they are decoded when they are read"
    assert stored.size == whole.size
    for name in FIELDS:
        value = getattr(stored, name)
        assert value == getattr(whole, name), name
        assert type(value) is type(getattr(whole, name)), name
    assert stored == whole == decoded(whole.encode())
    assert hash(stored) == hash(whole)
    assert stored.encode() == whole.encode()


def test_a_copy_of_an_artifact_in_a_store_is_complete() -> None:
    stored = Artifact.stored(DIGEST, WITH_SOURCES.encode())
    for other in (copy.copy(stored), copy.deepcopy(stored), pickle.loads(pickle.dumps(stored))):
        assert other == WITH_SOURCES
        assert other.sources == WITH_SOURCES.sources
    assert dataclasses.replace(stored, label="other.cu").cubin == WITH_SOURCES.cubin


def test_an_artifact_has_no_other_attributes() -> None:
    for each in (FULL, Artifact.stored(DIGEST, FULL.encode())):
        with pytest.raises(AttributeError, match=r"'Artifact' object has no attribute 'image'"):
            each.image  # type: ignore[attr-defined]  # noqa: B018


def test_an_artifact_keeps_no_more_memory_than_its_entry() -> None:
    size = 1 << 20
    large = artifact(cubin=b"c" * size, ptx=b"p" * size, log="l" * size)
    tracemalloc.start()
    try:
        blob = large.encode()
        gc.collect()
        entry = tracemalloc.get_traced_memory()[0]
        stored = Artifact.stored(DIGEST, blob)
        for _ in range(3):
            assert len(stored.cubin) == len(stored.ptx) == size
        gc.collect()
        with_artifact = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(blob) <= entry < len(blob) + size // 4
    assert with_artifact - entry < size // 64, "its code is that of the entry, once"


UNTYPED = EntryPoint("k", (Parameter(0, 4, 4, "f32"),), untyped="it is hidden; rename it")


def test_the_reason_for_unknown_types_is_stored() -> None:
    made = artifact(UNTYPED, *FULL.entries)
    blob = made.encode()
    assert Artifact.stored(DIGEST, blob).entries == (UNTYPED, *FULL.entries)
    assert Artifact.decode(DIGEST, *codec.unpack(DIGEST, blob)).entries == (UNTYPED, *FULL.entries)


def test_the_rows_of_kernels_are_those_of_versions_without_a_reason_for_unknown_types() -> None:
    known = UNTYPED._replace(untyped=None)
    with_reason, without = (codec.unpack(DIGEST, artifact(e).encode()).meta for e in (UNTYPED, known))
    assert with_reason.pop("untyped") == {"k": "it is hidden; rename it"}
    assert with_reason == without
    assert len(without["entries"][0]) == 5


@pytest.mark.parametrize("wrong", [[], "text", {"k": 1}, {"k": None}, {"k": "\ud800"}])
def test_a_reason_that_is_not_text_is_damage(wrong: object) -> None:
    meta, sections = codec.unpack(DIGEST, artifact(UNTYPED).encode())
    meta["untyped"] = wrong
    with pytest.raises(codec.DamagedEntryError):
        Artifact.decode(DIGEST, meta, sections)


def test_a_kernel_is_found_by_its_prototype_also_where_types_are_unknown() -> None:
    made = artifact(UNTYPED, EntryPoint("_Z1kPf", (POINTER,), "k"))
    assert made.entry("k(f32)") == UNTYPED
    assert made.name_of(UNTYPED) == "k"
    assert repr(made).endswith(": k(f32), k(float*)>")


def test_values_that_vary_by_run_are_in_one_section() -> None:
    again = artifact(*FULL.entries, names=FULL.names, headers=FULL.headers, log=FULL.log)
    one, other = (codec.unpack(DIGEST, a.encode()) for a in (FULL, again))
    assert one.meta == other.meta
    assert {n for n in one.sections if one.sections[n] != other.sections[n]} == {"provenance"}


@pytest.mark.parametrize("missing", ["label", "arch", "entries", "parts", "names", "headers"])
def test_an_entry_without_a_field_is_damaged(missing: str) -> None:
    meta, sections = codec.unpack(DIGEST, FULL.encode())
    del meta[missing]
    with pytest.raises(codec.DamagedEntryError):
        Artifact.decode(DIGEST, meta, sections)


def test_an_entry_with_a_label_that_no_program_has_is_damaged() -> None:
    meta, sections = codec.unpack(DIGEST, FULL.encode())
    with pytest.raises(codec.DamagedEntryError):
        Artifact.decode(DIGEST, meta | {"label": "\x1b[31m.cu"}, sections)


@pytest.mark.parametrize(("at", "equal"), [(0, False), (1, 4.0), (4, 0), (5, ["float"])])
def test_an_equal_value_of_another_type_is_damaged(at: int, equal: object) -> None:
    parameter = Parameter(0, 4, 4, "f32", False, "float")
    meta, sections = codec.unpack(DIGEST, artifact(EntryPoint("k", (parameter,))).encode())
    Artifact.decode(DIGEST, meta, sections)  # Equal lists of parameters are decoded once.
    meta["entries"][0][1][0][at] = equal
    with pytest.raises(codec.DamagedEntryError):
        Artifact.decode(DIGEST, meta, sections)


def named(name: str, cpp: str | None = None) -> EntryPoint:
    return EntryPoint(name, (), cpp)


def test_entry_finds_extern_c_and_plain_cpp_alike() -> None:
    code = artifact(named("saxpy"), named("_Z5plainPi", "plain"))
    assert code.entry("saxpy").name == "saxpy"
    assert code.entry("plain").name == "_Z5plainPi"
    assert code.entry("_Z5plainPi").name == "_Z5plainPi"


def test_entry_finds_a_namespaced_kernel_by_full_and_by_last_name() -> None:
    code = artifact(named("_ZN2ns5innerEi", "ns::inner"))
    assert code.entry("ns::inner") is code.entry("inner")


@pytest.mark.parametrize(
    ("names", "usable"),
    [(("a::k", "b::k"), "'a::k', 'b::k'"), (("k", "k"), "'_ZN1a1kEv', '_ZN1b1kEv'")],
)
def test_a_name_that_two_kernels_share_is_not_guessed(names: tuple[str, str], usable: str) -> None:
    code = artifact(named("_ZN1a1kEv", names[0]), named("_ZN1b1kEv", names[1]))
    with pytest.raises(InputError, match=r"has 2 kernels 'k'") as caught:
        code.entry("k")
    assert caught.value.hint == f"use one of the names {usable}"
    assert code.entry("_ZN1b1kEv").name == "_ZN1b1kEv"


def overload(name: str, cpp: str | None, *types: str) -> EntryPoint:
    parameters = (Parameter(8 * at, 8, 8, "u64", type=each) for at, each in enumerate(types))
    return EntryPoint(name, tuple(parameters), cpp)


OVERLOADS = artifact(
    overload("f1", "f", "float*"),
    overload("f2", "f", "float const*", "unsigned int"),
    overload("f3", "ns::f", "ns::T<float const, int>*"),
    overload("f4", "ns::f", "ns::T<float const, int> const*"),
    overload("f5", "g<ns::U>", "ns::U*"),
    overload("f6", "(anonymous namespace)::h", "void (*)(int)"),
    overload("f7", "g2", "P<P<int> > const*", "long long", "unsigned int"),
    overload("f8", "z"),
    overload("plain", None, "int"),
)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("g2(const P<P<int>>*, long long int, unsigned)", "f7"), ("z(void)", "f8"),
        ("f(float* const)", "f1"), ("f(const float*, const unsigned)", "f2"),
        ("f(float*)", "f1"), ("f( float * )", "f1"), ("f(float const*, unsigned int)", "f2"),
        ("f(const float*, unsigned int)", "f2"), ("f(const  float *,unsigned int)", "f2"),
        ("ns::f(ns::T<float const, int>*)", "f3"), ("f(ns::T<const float, int>*)", "f3"),
        ("f(const ns::T<float const, int>*)", "f4"), ("g<ns::U>", "f5"), ("g<ns::U>(ns::U*)", "f5"),
        ("(anonymous namespace)::h", "f6"), ("h", "f6"), ("h(void (*)(int))", "f6"),
        ("plain(int)", "plain"), ("plain", "plain"),
    ],
)  # fmt: skip
def test_parameter_types_choose_an_overload(name: str, entry: str) -> None:
    assert OVERLOADS.entry(name).name == entry


def test_every_name_that_an_error_prints_is_accepted() -> None:
    with pytest.raises(
        InputError, match=r"has 2 kernels 'f': f\(float\*\), f\(float const\*,"
    ) as caught:
        OVERLOADS.entry("f")
    assert caught.value.hint == "use one of the names 'f(float*)', 'f(float const*, unsigned int)'"
    with pytest.raises(UnknownEntryError) as unknown:
        OVERLOADS.entry("f(char*)")
    assert len(unknown.value.known) == len(OVERLOADS.entries)
    for entry in OVERLOADS.entries:
        name = OVERLOADS.name_of(entry)
        assert name in unknown.value.known
        assert OVERLOADS.entry(name) is entry
        assert OVERLOADS.entry(str(entry)) is entry


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("tk<float>(float*)", "tk<float>"), ("tk<float>", "tk<float>"), ("k<f(int)>(x)", "k<f(int)>"),
        ("(void (*)(float*))k", "(void (*)(float*))k"), ("(x)", "(x)"), (")", ")"), ("k<1> ()", "k<1>"),
    ],
)  # fmt: skip
def test_a_name_expression_has_no_parameter_types(name: str, bare: str) -> None:
    assert without_types(name) == bare


def test_an_artifact_can_be_hashed_and_its_provenance_does_not_count() -> None:
    again = artifact(*FULL.entries, names=FULL.names, headers=FULL.headers, log=FULL.log)
    assert again == FULL
    assert hash(again) == hash(FULL)


def test_entry_finds_a_template_instance_however_it_is_spaced() -> None:
    assert FULL.entry("tk<float>") is FULL.entry("tk< float >")


def test_an_unknown_name_lists_what_there_is_and_guesses() -> None:
    with pytest.raises(
        UnknownEntryError, match=r"k\.cu has no kernel 'saxpi'; it has: saxpy, gemm"
    ) as e:
        artifact(named("saxpy"), named("gemm")).entry("saxpi")
    assert e.value.hint == "did you mean 'saxpy'?"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tk", "name an instance of the template tk<class T, int N>, such as 'tk<float, 1>'"),
        ("ns::tagged", "name an instance of the template ns::tagged<Tag T>"),
        ("tk<float, 3>", "an instance is named when the program is compiled: names=['tk<float, 3>']"),
        ("inner<int>", "did you mean 'ns::inner<int>'?"),
        ("inne", "did you mean 'ns::inner<class T>'?"),
        ("gone", None),
    ],
)
def test_an_unknown_name_lists_the_templates_that_could_be_compiled(name: str, hint: str) -> None:
    templates = ("tk<class T, int N>", "ns::inner<class T>", "ns::tagged<Tag T>")
    code = artifact(named("saxpy"), templates=templates)
    stored = Artifact.decode(code.digest, *codec.unpack(code.digest, code.encode()))
    with pytest.raises(UnknownEntryError) as caught:
        stored.entry(name)
    has = f"it has: saxpy and the templates {', '.join(templates)}"
    assert str(caught.value) == f"k.cu has no kernel {name!r}; {has}"
    assert caught.value.hint == hint


def test_an_artifact_shows_itself_in_one_line() -> None:
    assert repr(FULL) == "<Artifact k.cu for sm_90a, abababababab: tk<float>(float*), plain()>"


def test_a_program_without_kernels_says_so() -> None:
    with pytest.raises(UnknownEntryError, match="no kernels at all"):
        artifact().entry("k")


def test_a_kernel_shows_its_cpp_types_and_else_its_layout() -> None:
    struct = Parameter(8, 16, 4, "b8")
    assert str(EntryPoint("k", (POINTER, struct))) == "k(float*, 16 bytes)"
    assert str(EntryPoint("k", (Parameter(0, 8, 8, "u64", pointer=True),))) == "k(pointer)"
