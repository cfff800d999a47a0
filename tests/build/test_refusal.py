"""The error of a sealed process: the bundles that were searched, what has changed, and how to bake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.ahead.bake import bake
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.build import refusal
from preheat.build.builder import Builder
from preheat.errors import SealedError
from preheat.model.arch import Arch
from preheat.model.config import SealMode
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.model.linked_program import LinkedProgram
from preheat.model.program import Program
from preheat.store.bundle import Bundle, write

SOURCE = "// A comment that makes the source longer than what bundles store of it as text.\n" * 3
SOURCE += 'extern "C" __global__ void twice(int* x) {\n    *x *= 2;\n}\n'
CHANGED = SOURCE.replace("*= 2", "*= 3")

Seal = Callable[..., Builder]


@pytest.fixture
def seal(
    bare: Callable[..., Builder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Builder]:
    """Opens a builder that has bundles of the working directory, no compiler, no cache, and a seal."""
    monkeypatch.chdir(tmp_path)
    return lambda *names: bare(bundles=tuple(tmp_path / name for name in names), sealed=SealMode.ERROR)


def refused(builder: Builder, program: Program, arch: str = "sm_90") -> SealedError:
    with pytest.raises(SealedError) as caught:
        builder.build(program, arch)
    return caught.value


def of(*programs: Program) -> Manifest:
    return Manifest(tuple(map(ManifestProgram, programs)))


def test_the_bundles_that_were_searched_are_named_with_their_architectures(
    seal: Seal, builder: Builder
) -> None:
    program = Program.of(SOURCE, label="twice.cu")
    other = Program.of("__global__ void other() {}", label="other.cu")
    bake(of(other), ["sm_90"], output="other.heat", builder=builder)
    bake(of(program), ["sm_100", "sm_75", "sm_80"], output="twice.heat", builder=builder)
    error = refused(seal("other.heat", "twice.heat"), program)
    assert error.evidence == (
        "searched twice.heat, which has twice.cu for sm_75, sm_80 and sm_100",
        "searched other.heat, which does not have twice.cu",
    )
    assert error.differences == ("arch: 'sm_80' became 'sm_90'",)
    command = "preheat bake MANIFEST --arch sm_75 --arch sm_80 --arch sm_90 --arch sm_100 -o twice.heat"
    assert (
        error.hint == f"bake for sm_90 as well: {command}; or let it compile with PREHEAT_SEALED=warn"
    )
    first, *rest = str(error).splitlines()
    assert first.endswith(
        "twice.cu (sm_90) cannot be compiled in this sealed process: no bundle has it"
    )
    assert rest[0].strip() == error.evidence[0]


def test_more_bundles_than_fit_are_counted(seal: Seal) -> None:
    names = [f"{number}.heat" for number in range(6)]
    builder = seal(*names)
    for name in names:
        write(Path(name), {}, {})
        builder.mount(name)
    builder._bundles.rejected.clear()
    error = refused(builder, Program.of(SOURCE, label="twice.cu"))
    assert len(error.evidence) == 5
    assert error.evidence[-1] == "searched 2 bundles more"


def test_the_bake_command_names_the_manifest_that_is_beside_the_bundle(
    seal: Seal, builder: Builder, tmp_path: Path
) -> None:
    place = tmp_path / "my kernels"
    place.mkdir()
    program = Program.of(SOURCE, label="twice.cu")
    of(program).write(place / "k.toml")
    bake(place / "k.toml", ["sm_90"], output=place / "k.heat", builder=builder)
    error = refused(seal("my kernels/k.heat"), replace(program, options=("-G",)))
    assert str(error.hint).startswith(
        "record and bake what the process needs: preheat bake 'my kernels/k.toml' --arch sm_90; or let"
    )


def test_the_changed_line_comes_from_the_source_beside_the_bundle(seal: Seal, builder: Builder) -> None:
    program = Program.of(SOURCE, label="twice.cu")
    of(program).write("k.toml")
    bake("k.toml", ["sm_90"], output="k.heat", builder=builder)
    error = refused(seal("k.heat"), replace(program, source=CHANGED))
    line = "source: line 5: '    *x *= 2;' became '    *x *= 3;'"
    assert error.differences == (line,)
    assert f"    {line}" in str(error)
    (stored,) = Path("k.sources").iterdir()
    stored.write_text("something else")
    error = refused(seal("k.heat"), replace(program, source=CHANGED + "\n"))
    assert error.differences == (
        f"source: {len(SOURCE)} bytes of twice.cu became {len(CHANGED) + 1} bytes",
    )


def test_the_changed_line_comes_from_a_file_of_the_manifest(seal: Seal, builder: Builder) -> None:
    Path("src").mkdir()
    Path("src/twice.cu").write_text(SOURCE)
    of(Program.from_file("src/twice.cu")).write("k.toml")
    bake("k.toml", ["sm_90"], output="k.heat", builder=builder)
    edited = replace(Program.from_file("src/twice.cu"), source=CHANGED)
    error = refused(seal("k.heat"), edited)
    assert error.differences == ("source: line 5: '    *x *= 2;' became '    *x *= 3;'",)
    assert str(error.hint).startswith("bake again: preheat bake k.toml --arch sm_90; or let it")


@pytest.mark.parametrize(
    ("new", "line"),
    [
        (SOURCE + "// more", "source: line 7: '' became '// more'"),
        (SOURCE + "\n// more", "source: line 8 is new: '// more'"),
        (SOURCE.rstrip(), "source: line 7 is gone: ''"),
    ],
)
def test_a_bundle_with_sources_shows_the_changed_line_by_itself(
    new: str, line: str, seal: Seal, builder: Builder
) -> None:
    program = Program.of(SOURCE, label="twice.cu")
    bake(of(program), ["sm_90"], output="k.heat", with_sources=True, builder=builder)
    assert refused(seal("k.heat"), replace(program, source=new)).differences == (line,)


def test_headers_in_memory_and_parts_of_a_link_are_compared_by_lines(
    seal: Seal, builder: Builder
) -> None:
    program = Program.of('#include "two.h"\n', label="two.cu", headers={"two.h": SOURCE})
    link = LinkedProgram.of([Program.of(SOURCE, label="twice.cu")], label="linked")
    bake(of(program, link), ["sm_90"], output="k.heat", with_sources=True, builder=builder)
    sealed = seal("k.heat")
    changed = replace(program, headers=(("two.h", CHANGED),))
    shown = "line 5: '    *x *= 2;' became '    *x *= 3;'"
    assert refused(sealed, changed).differences == (f"header:two.h: {shown}",)
    changed_link = LinkedProgram.of([Program.of(CHANGED, label="twice.cu")], label="linked")
    assert refused(sealed, changed_link).differences == (f"part[0].source: {shown}",)


def test_only_a_bake_with_sources_stores_them(builder: Builder, tmp_path: Path) -> None:
    wanted = of(Program.of(SOURCE, label="twice.cu"))
    for name, flag in (("plain", False), ("again", False), ("with", True)):
        bake(wanted, ["sm_90"], output=tmp_path / name, with_sources=flag, builder=builder)
    plain, again, full = ((tmp_path / name).read_bytes() for name in ("plain", "again", "with"))
    assert plain == again
    with Bundle.open(tmp_path / "plain") as bundle:
        assert not any(
            b"A comment that makes" in (bundle.get(each) or b"") for each in bundle.digests()
        )
    with Bundle.open(tmp_path / "with") as bundle:
        assert any(b"A comment that makes" in (bundle.get(each) or b"") for each in bundle.digests())
    assert len(full) > len(plain)


def test_the_error_of_another_library_names_the_bundles(seal: Seal) -> None:
    entry = ForeignEntry("mylib", "key", {"a": b"code"}, "", "gemm", Arch(8, 0))
    write(Path("k.heat"), {entry.digest: entry.encode(provenance=False)}, {"archs": ["sm_80"]})
    wanted = ForeignRequest("mylib", "other", label="gemm", arch=Arch(9, 0))
    with pytest.raises(SealedError) as caught:
        seal("k.heat").foreign.obtain(wanted, dict)
    assert caught.value.evidence == ("searched k.heat, which has mylib gemm for sm_80",)
    assert "preheat bake MANIFEST --arch sm_80 --arch sm_90 -o k.heat" in str(caught.value.hint)


def test_a_search_without_time_says_nothing_wrong(
    seal: Seal, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program.of(SOURCE, label="twice.cu")
    bake(of(program), ["sm_80"], output="k.heat", builder=builder)
    monkeypatch.setattr(refusal, "_SEARCH", -1.0)
    assert refused(seal("k.heat"), program).evidence == ("searched k.heat",)
