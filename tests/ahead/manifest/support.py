"""Helpers for the tests of manifests: digests, round trips, and strategies that generate manifests."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from preheat.ahead.manifest import GraphKeys, Manifest, ManifestProgram, key_literal
from preheat.model.arch import Arch
from preheat.model.key import bundle_key
from preheat.model.program import Program

INCLUDING = '#include "cfg.h"\n'


KERNEL = 'extern "C" __global__ void k() {}\n'


SM_80, SM_90, SM_90A, SM_100 = (Arch.parse(a) for a in ("sm_80", "sm_90", "sm_90a", "sm_100"))


# The test's directory serves every example: they write manifests of the same name over and over.
shared_directory = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
    max_examples=40,
)


unhurried = settings(deadline=None)


def digest(program: Program) -> str:
    return bundle_key(program, SM_90).digest


def digests(manifest: Manifest) -> list[str]:
    return [digest(wanted.program) for wanted in manifest.programs]


def written(manifest: Manifest, file: Path) -> Manifest:
    """Return the manifest after a round trip."""
    manifest.write(file)
    return Manifest.read(file)


# Anything a program, a label or an entry may hold: every character but NUL and halves of pairs.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


_printable = st.characters(exclude_characters="/", exclude_categories=["C", "Z"]) | st.just(" ")
labels = st.text(_printable, min_size=1, max_size=30)


_REFUSED = (
    "-I",
    "--include-path",
    "-arch",
    "--gpu",
    "-d",
    "--d",
    "-gen",
    "-r",
    "--relocatable",
    "-lto",
)


options = texts.filter(lambda text: not text.startswith(_REFUSED))


programs = st.builds(
    lambda source, language, headers, names, **more: Program.of(
        source,
        language=language,
        headers=headers if language == "cuda" else None,
        names=names if language == "cuda" else (),
        **more,
    ),
    source=texts.filter(str.strip),
    language=st.sampled_from(["cuda", "ptx"]),
    label=labels,
    options=st.lists(options, max_size=3),
    include=st.lists(
        st.sampled_from(["/usr/include", "/", "/opt/ä b/include"]), max_size=2, unique=True
    ),
    headers=st.dictionaries(texts.filter(lambda name: "@" not in name), texts, max_size=3),
    names=st.lists(texts, max_size=3),
)


wanteds = st.builds(
    ManifestProgram,
    programs,
    archs=st.lists(st.sampled_from([SM_80, SM_90, SM_90A, SM_100]), max_size=3).map(tuple),
    entries=st.lists(texts, max_size=3).map(tuple),
    seconds=st.integers(0, 10_000_000).map(lambda ms: ms / 1000),
    requests=st.integers(0, 1000),
    callers=st.lists(texts, max_size=3).map(tuple),
)


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False) | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


graphs = st.builds(
    GraphKeys, texts.filter(bool), st.lists(keys.map(repr).filter(key_literal), max_size=3).map(tuple)
)


manifests = st.builds(
    Manifest, st.lists(wanteds, max_size=3).map(tuple), st.lists(graphs, max_size=2).map(tuple)
)


# Manifests that have much in common, as those of several runs do.
alike = st.builds(
    lambda source, include, path: Program.of(source, include=include, path=path),
    st.sampled_from(["a", '#include "b"']),
    st.lists(st.sampled_from(["/a", "/b", "/c"]), max_size=2),
    st.sampled_from([None, "/a/k.cu", "/b/k.cu"]),
)


recordings = st.builds(
    Manifest,
    st.lists(
        st.builds(
            ManifestProgram,
            alike,
            archs=st.lists(st.sampled_from([SM_80, SM_90, SM_90A, SM_100]), max_size=3).map(tuple),
            entries=st.lists(st.sampled_from("xyz"), max_size=2).map(tuple),
            seconds=st.sampled_from([0.0, 0.5, 2.0]),
            requests=st.integers(0, 3),
            callers=st.lists(st.sampled_from("abcdefghijkl"), max_size=9).map(tuple),
            changed=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
    st.lists(
        st.builds(
            GraphKeys, st.sampled_from("gh"), st.lists(st.sampled_from("123"), max_size=3).map(tuple)
        ),
        max_size=3,
    ).map(tuple),
)
