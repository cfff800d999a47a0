"""Header files in a sealed process: the program's own are compared once, those of a toolkit never."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.build.builder import Builder
from preheat.build.lookup import Miss
from preheat.build.seal import sealed
from preheat.emulator.device import EmulatorDevice
from preheat.errors import ConfigError, SealedError, WarmError
from preheat.gpu import Gpu
from preheat.model.artifact import Artifact
from preheat.model.config import Config, SealMode
from preheat.model.events import Events, log_events
from preheat.model.linked_program import LinkedProgram
from preheat.model.program import Program
from preheat.store.bundle import write
from preheat.toolchain.headers import evidence, own_headers
from tests.build.sealed import recorded

KERNEL = 'extern "C" __global__ void k(int* x) { *x = BY; }\n'

Bake = Callable[..., Path]


@pytest.fixture
def bake(tmp_path: Path, shared_builder: Builder) -> Bake:
    """Bakes programs into one bundle."""

    def bake_all(*programs: Program) -> Path:
        entries: dict[str, bytes] = {}
        for program in programs:
            entries |= shared_builder.bundle_entry(program, "sm_90")[0].encode()
        write(tmp_path / "kernels.heat", entries, {})
        return tmp_path / "kernels.heat"

    return bake_all


@pytest.fixture
def seal(bare: Callable[..., Builder]) -> Callable[..., Builder]:
    """Opens a builder that has a bundle, no compiler and no cache, and is sealed."""

    def open_one(bundle: Path, policy: str = "error") -> Builder:
        return bare(bundles=(bundle,), sealed=SealMode.ERROR, sealed_headers=policy)

    return open_one


def files(place: Path, **texts: str) -> Path:
    """Write header files, in which `__` of a name is a slash, and return their directory."""
    for name, text in texts.items():
        path = place / f"{name.replace('__', '/')}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return place


def program(*include: Path, source: str = '#include "by.h"\n', label: str = "by.cu") -> Program:
    return Program.of(source + KERNEL, label=label, include=include)


def refusal(builder: Builder, wanted: Program) -> str:
    """Return the error of a sealed process as text, and check that it needs no compiler."""
    with pytest.raises(SealedError) as refused:
        builder.build(wanted, "sm_90")
    assert builder.toolchain.asked == ["identity"]  # type: ignore[attr-defined]  # for the cache
    return str(refused.value)


def test_a_changed_header_is_named_with_the_line_that_includes_it(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(
        tmp_path / "include", outer="// by.h\n#include <deep/by.h>\n", deep__by="#define BY 5\n"
    )
    wanted = program(place, source='#include "outer.h"\n')
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90").label == "by.cu"
    files(place, deep__by="#define BY 6\n")
    with pytest.raises(SealedError) as refused:
        seal(bundle).build(wanted, "sm_90")
    error = refused.value
    assert error.reason == "headers: header deep/by.h has changed since the bake"
    assert "cannot be compiled in this sealed process: header deep/by.h has changed" in str(error)
    shown = min(os.path.relpath(place / "outer.h"), str(place / "outer.h"), key=len)
    assert error.evidence == (f"included by {shown}:2: #include <deep/by.h>",)
    assert error.nearest is None
    assert "bake again" in str(error.hint)
    assert "PREHEAT_SEALED_HEADERS=warn" in str(error.hint)


def test_every_way_to_ask_finds_a_changed_header(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path, by="#define BY 5\n")
    wanted = program(place)
    bundle = bake(wanted)
    files(place, by="#define BY 6\n")
    builder = seal(bundle)
    assert builder.lookup(wanted, "sm_90") == Miss("headers: header by.h has changed since the bake")
    manifest = Manifest(programs=(ManifestProgram(wanted),))
    with Gpu(EmulatorDevice(0, "sm_90"), builder) as gpu:
        gpu.warm(bundle)  # A bundle does not say where the headers of its programs are.
        asks: list[Callable[[], object]] = [
            lambda: builder.build(wanted, "sm_90"),
            lambda: gpu.kernel(wanted, "k"),
            lambda: gpu.kernel(wanted, "k", wait=False),
            lambda: gpu.kernels([(wanted, "k")]),
            lambda: gpu.module(wanted),
        ]
        for ask in asks:
            with pytest.raises(SealedError, match=r"header by\.h has changed"):
                ask()
        with pytest.raises(WarmError, match=r"header by\.h has changed"):
            gpu.warm(manifest)


def test_a_new_file_that_is_found_before_a_header_is_named(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    last = files(tmp_path / "last", by="#define BY 5\n", sub__two="")
    first = tmp_path / "first"
    first.mkdir()
    wanted = program(first, last, source='#include "by.h"\n#include <sub/two.h>\n')
    bundle = bake(wanted)
    (first / "sub").mkdir()
    (first / "sub" / "other.h").write_text("")  # It is in a new directory, and hides nothing.
    assert seal(bundle).build(wanted, "sm_90")
    files(first, sub__two="")
    assert f"{Path('first', 'sub', 'two.h')} is new since the bake" in refusal(seal(bundle), wanted)
    (first / "sub" / "two.h").unlink()
    files(first, by="#define BY 6\n")
    assert f"{Path('first', 'by.h')} is new since the bake" in refusal(seal(bundle), wanted)


def test_a_header_that_is_gone_and_replaced_by_another_one_is_named(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    first = files(tmp_path / "first", by="#define BY 5\n")
    last = files(tmp_path / "last", other="")
    wanted = program(first, last)
    bundle = bake(wanted)
    (first / "by.h").unlink()
    assert seal(bundle).build(wanted, "sm_90")
    files(last, by="#define BY 5\n")
    assert seal(bundle).build(wanted, "sm_90")  # It is the same header in another place.
    files(last, by="#define BY 6\n")
    assert "header by.h is gone, and " in (told := refusal(seal(bundle), wanted))
    assert "by.cu:1" in told


def test_a_header_beside_its_includer_may_be_replaced_by_one_further_away(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path, sub__outer='#include "by.h"\n', sub__by="#define BY 5\n")
    named = program(place, source='#include "sub/outer.h"\n')
    other = program(place, source='#include "sub/by.h"\n', label="other.cu")
    bundle = bake(named, other)
    (place / "sub" / "by.h").unlink()
    files(place, by="#define BY 6\n")
    assert "header sub/by.h is gone, and " in refusal(seal(bundle), named)
    assert seal(bundle).build(other, "sm_90")  # No include of this program finds the other file.


def test_absent_headers_need_no_directory(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n", sub__two="")
    wanted = program(place, source='#include "by.h"\n#include "sub/two.h"\n')
    bundle = bake(wanted)
    for file in (place / "by.h", place / "sub" / "two.h"):
        file.unlink()
        assert seal(bundle).build(wanted, "sm_90")
    (place / "sub").rmdir()
    place.rmdir()
    assert seal(bundle).build(wanted, "sm_90")


def test_headers_of_a_toolkit_are_not_compared_wherever_it_is(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    """Also if its directory is not a toolkit any more, or its new release has more files."""
    toolkit = files(tmp_path / "cuda", cuda_runtime_api="", vector_types="#define BY 5\n")
    (toolkit / "cccl" / "cuda").mkdir(parents=True)
    (toolkit / "cccl" / "cuda" / "version").touch()
    linked = tmp_path / "link"
    linked.symlink_to(toolkit)
    source = (
        "#include <vector_types.h>\n#include <cuda/version>\n#if __has_include(<later.h>)\n#endif\n"
    )
    wanted = program(linked, toolkit / "cccl", source=source)
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90")
    files(toolkit, vector_types="#define BY 6\n", later="")
    (toolkit / "cccl" / "cuda" / "version").write_text("//")
    assert seal(bundle).build(wanted, "sm_90")
    (toolkit / "cuda_runtime_api.h").unlink()
    assert seal(bundle).build(wanted, "sm_90")


def test_a_directory_that_gets_a_file_of_a_toolkit_is_compared(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(place)
    bundle = bake(wanted)
    files(place, cuda_runtime_api="")
    assert seal(bundle).build(wanted, "sm_90")
    files(place, by="#define BY 6\n")
    assert "header by.h has changed" in refusal(seal(bundle), wanted)


def test_headers_of_the_program_beside_those_of_a_toolkit_are_compared(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    prefix = files(tmp_path / "prefix", cuda_runtime_api="", vector_types="", by="#define BY 5\n")
    wanted = program(prefix, source="#include <vector_types.h>\n#include <by.h>\n")
    bundle = bake(wanted)
    files(prefix, vector_types="// another release\n")
    builder = seal(bundle)
    artifact = builder.build(wanted, "sm_90")
    builder._stored.sealed_headers.clear()
    assert builder.build(wanted, "sm_90") is artifact  # Its entry is not decoded again.
    files(prefix, by="#define BY 6\n")
    assert "header by.h has changed" in refusal(seal(bundle), wanted)


def test_a_header_of_the_program_that_a_file_in_a_toolkit_hides_is_named(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    prefix = files(tmp_path / "prefix", cuda_runtime_api="")
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(prefix, place, source="#include <by.h>\n")
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90")
    files(prefix, by="#define BY 6\n")
    assert "by.h is new since the bake" in refusal(seal(bundle), wanted)


def test_an_entry_without_headers_of_a_toolkit_lists_none(
    tmp_path: Path, shared_builder: Builder
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    entry, _ = shared_builder.bundle_entry(program(place), "sm_90")
    assert entry.toolkit == ()
    assert b'"toolkit"' not in entry.encode()[entry.key]


def test_a_file_that_hides_a_header_of_the_toolkit_is_named(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(place, source='#include <cuda_fp16.h>\n#include "by.h"\n')
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90")
    files(place, cuda_fp16="")
    assert "cuda_fp16.h is new since the bake" in refusal(seal(bundle), wanted)


def test_links_and_paths_with_dots_are_followed(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    files(tmp_path / "v1", by="#define BY 5\n")
    files(tmp_path / "v2", by="#define BY 6\n")
    (tmp_path / "now").symlink_to("v1")
    place = files(tmp_path / "src" / "include", outer='#include "../../now/by.h"\n')
    wanted = program(place, source='#include "outer.h"\n')
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90")
    (tmp_path / "now").unlink()
    (tmp_path / "now").symlink_to("v2")
    assert "now/by.h has changed" in refusal(seal(bundle), wanted)


def test_a_header_by_absolute_path_is_compared(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(source=f'#include "{place}/by.h"\n')
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90")
    files(place, by="#define BY 6\n")
    told = refusal(seal(bundle), wanted)
    assert "by.h has changed" in told
    assert "included by by.cu:1" in told


def test_a_header_that_cannot_be_read_is_named(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(place)
    bundle = bake(wanted)
    (place / "by.h").unlink()
    os.mkfifo(place / "by.h")
    assert "header by.h cannot be read: it is not a regular file" in refusal(seal(bundle), wanted)


def test_the_directory_of_the_source_is_one_of_its_own(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "src", by="#define BY 5\n")
    (place / "k.cu").write_text('#include "by.h"\n' + KERNEL)
    wanted = Program.from_file(place / "k.cu")
    bundle = bake(wanted)
    files(place, by="#define BY 6\n")
    told = refusal(seal(bundle), wanted)
    assert "header by.h has changed since the bake" in told
    assert f"{Path('src', 'k.cu')}:1: #include" in told


def test_headers_of_the_parts_of_a_link_are_compared(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    helper = Program.of("__device__ int helper() { return 1; }", label="helper.cu")
    wanted = LinkedProgram.of([helper, program(place)], label="both")
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90")
    files(place, by="#define BY 6\n")
    told = refusal(seal(bundle), wanted)
    assert "header by.h has changed" in told
    assert "included by by.cu:1" in told


CLOCK = "__device__ const char* when = __TIME__;\n"
QUERY = '#if __has_include("more.h")\n#include "more.h"\n#endif\n'


@pytest.mark.parametrize("source", [CLOCK, QUERY])
def test_headers_of_a_program_that_no_cache_stores_are_compared(
    source: str, tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n", more="")
    wanted = program(place, source=f'{source}#include "by.h"\n')
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90")
    files(place, by="#define BY 6\n")
    assert "header by.h has changed" in refusal(seal(bundle), wanted)


def test_a_file_for_which_a_program_looked_in_vain_is_named(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder]
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(place, source=f'{QUERY}#include "by.h"\n')
    bundle = bake(wanted)
    assert seal(bundle).build(wanted, "sm_90")
    files(place, more="")
    assert f"{Path('include', 'more.h')} is new since the bake" in refusal(seal(bundle), wanted)


# Each file once


def test_each_file_is_compared_once(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n", more="")
    both = '#include "by.h"\n#include "more.h"\n'
    one, two = program(place), program(place, source=both, label="two.cu")
    builder = seal(bake(one, two))
    read: list[str] = []

    def counted(path: str) -> str:
        read.append(os.path.basename(path))
        return digest(path)

    digest = evidence.file_digest
    monkeypatch.setattr(own_headers, "file_digest", counted)
    for _ in range(3):
        for wanted in (one, two):
            builder.build(wanted, "sm_90")
    assert sorted(read) == ["by.h", "more.h"]
    files(place, by="#define BY 6\n")  # A later change does not count: see the page on sealing.
    assert builder.build(one, "sm_90")
    builder.clear_memory()
    assert "header by.h has changed" in refusal(builder, one)


# What to do about it


def test_with_warn_the_bundle_is_used_and_a_warning_is_logged_once(
    tmp_path: Path,
    bake: Bake,
    config: Config,
    open_builder: Callable[..., Builder],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(place)
    bundle = bake(wanted)
    files(place, by="#define BY 6\n")
    settings = replace(config, bundles=(bundle,), sealed=SealMode.ERROR, sealed_headers="warn")
    builder = open_builder(settings, Events(log_events()))
    with caplog.at_level(logging.WARNING, "preheat"):
        for _ in range(2):
            assert b"5" in builder.build(wanted, "sm_90").ptx
    (line,) = caplog.messages
    assert "by.cu for sm_90 is used as it was baked, but header by.h has changed since the bake" in line
    assert (builder.stats()["process"]["stale"], builder.stats()["process"]["headers"]) == (1, 1)


def test_with_ignore_no_file_is_looked_at(
    tmp_path: Path, bake: Bake, seal: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(place)
    bundle = bake(wanted)
    files(place, by="#define BY 6\n")
    monkeypatch.setattr(own_headers, "OwnHeaders", None)
    builder = seal(bundle, "ignore")
    assert builder.build(wanted, "sm_90")
    assert recorded(builder, "stale") == []
    assert recorded(builder, "headers") == [{"policy": "ignore"}]


@pytest.mark.parametrize("guard", [nullcontext, sealed])
def test_a_cache_with_code_of_the_new_header_is_used(
    guard: Callable[[], AbstractContextManager[None]],
    tmp_path: Path,
    bake: Bake,
    config: Config,
    open_builder: Callable[..., Builder],
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(place)
    bundle = bake(wanted)
    files(place, by="#define BY 6\n")
    new = open_builder(config).build(wanted, "sm_90")
    with guard():
        found = open_builder(replace(config, bundles=(bundle,))).lookup(wanted, "sm_90")
        assert isinstance(found.artifact, Artifact)
        assert found.artifact.cubin == new.cubin


def test_a_seal_that_warns_compiles_with_the_new_header_and_says_so_once(
    tmp_path: Path,
    bake: Bake,
    config: Config,
    open_builder: Callable[..., Builder],
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = files(tmp_path / "include", by="#define BY 5\n")
    wanted = program(place)
    bundle = bake(wanted)
    files(place, by="#define BY 6\n")
    builder = open_builder(
        replace(config, bundles=(bundle,), sealed=SealMode.WARN), Events(log_events())
    )
    with caplog.at_level(logging.WARNING, "preheat"):
        for _ in range(2):
            assert builder.build(wanted, "sm_90").headers[0].digest != ""
    (line,) = caplog.messages
    assert "is compiled although this process is sealed: headers: header by.h has changed" in line
    assert builder.stats()["process"]["compiles"] == 1


def test_a_policy_that_cannot_be_read_is_named() -> None:
    assert Config.from_env({"PREHEAT_SEALED_HEADERS": " Warn "}).sealed_headers == "warn"
    with pytest.raises(ConfigError, match="SEALED_HEADERS='off' is not one of its values: use error"):
        Config.from_env({"PREHEAT_SEALED_HEADERS": "off"})
