"""gpu.kernels and compile_all: all requests are checked and looked up first, then compiled together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import preheat
from preheat.build.builder import Builder
from preheat.build.seal import sealed
from preheat.errors import (
    CaptureError,
    CompileError,
    ContextLostError,
    InputError,
    SealedError,
    TargetError,
    UnknownEntryError,
)
from preheat.gpu import Gpu
from preheat.model.program import Program
from preheat.process.callsite import call_site, file_and_line
from tests.conftest import Recorder

OpenDevice = Callable[..., Gpu]


def text(name: str, number: int = 1) -> str:
    return f'extern "C" __global__ void {name}(float* x) {{ x[threadIdx.x] += {number}; }}\n'


TEMPLATE = "template <class T> __global__ void add(T* x) { x[threadIdx.x] += 1; }"
BAD, WORSE = "__global__ void bad(int* x) { *x = nope; }", "__global__ void bad(int* x) { *x = no; }"


@pytest.fixture
def gpu(kind: str, open_device: OpenDevice, builder: Builder) -> Gpu:
    """Each kind of device, with a cache of the test's own."""
    return open_device(kind, builder=builder)


def test_kernels_come_in_order_and_work(gpu: Gpu) -> None:
    one, two, template = gpu.kernels(
        [(text("one"), "one"), (text("two", 2), "two"), (TEMPLATE, "add<float>")]
    )
    x = gpu.zeros(4)
    for kernel in (one, two, template):
        kernel[1, 4](x)
    assert np.array_equal(x.numpy(), [4, 4, 4, 4])
    assert [one.name, two.name] == ["one", "two"]
    assert gpu.kernel(text("one"), "one") is one
    assert gpu.kernel(TEMPLATE, "add<float>") is template


def test_equal_requests_are_compiled_once(gpu: Gpu, recorder: Recorder, tmp_path: Path) -> None:
    both = text("one") + text("two")
    file = tmp_path / "program.cu"
    file.write_text(both)
    made = gpu.kernels(
        [(both, "one"), (both, "two"), (Program.of(both), "one"), (file, "two"), (both, "one")]
    )
    assert len(recorder.named("compile")) == 1
    assert len(recorder.named("load")) == 1
    assert made[0] is made[4]
    assert made[1] == made[3]


def test_what_is_stored_or_loaded_is_not_compiled(
    gpu: Gpu, builder: Builder, recorder: Recorder
) -> None:
    loaded = gpu.kernel(text("one"), "one")
    builder.build(Program.of(text("two")), gpu.arch)
    made = gpu.kernels([(text("two"), "two"), (text("one"), "one"), (text("three"), "three")])
    assert made[1] is loaded
    assert [row["program"] for row in recorder.named("compile")] == ["program.cu"] * 3
    hits = len(recorder.named("hit"))
    assert gpu.kernels([(text("three"), "three"), (text("two"), "two")]) == [made[2], made[0]]
    assert len(recorder.named("hit")) == hits  # What is loaded is not looked up.


def test_options_hold_for_all_requests_and_programs_have_their_own(gpu: Gpu) -> None:
    source = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] = VALUE; }'
    other = source.replace("void k", "void l")
    k, other_k = gpu.kernels([(source, "k"), (other, "l")], options=["-DVALUE=3"])
    (own,) = gpu.kernels([(Program.of(source, options=["-DVALUE=4"]), "k")])
    x = gpu.zeros(3)
    for index, kernel in enumerate((k, other_k, own)):
        kernel[1, 1](x[index:])
    assert list(x.numpy()) == [3, 3, 4]
    with pytest.raises(InputError, match="a Program already has its"):
        gpu.kernels([(Program.of(source), "k")], options=["-DVALUE=3"])


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (5, "each request is a pair of a source and a name, in a list, not 5"),
        ("saxpy.cu", "each request is a pair of a source and a name, in a list"),
        ([(text("a"), "a"), "b"], "request 2 is not a pair of a source and a name: 'b'"),
        ([(text("a"), "a", {})], "request 1 is not a pair"),
        ([(text("a"), "a"), (text("b"), 5)], "5"),
        ([(text("a"), "a"), (5, "b")], "source must be a path, source text or a Program, not 5"),
        ([(text("a"), "a"), ("missing.cu", "b")], "missing.cu"),
        ([(text("a"), "a"), ("", "b")], "the source is empty"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_compiled(
    requests: Any, message: str, gpu: Gpu, recorder: Recorder
) -> None:
    with pytest.raises(InputError) as caught:
        gpu.kernels(requests)
    assert message in str(caught.value)
    assert recorder.named("compile") == recorder.named("worker") == []


def test_an_architecture_that_does_not_run_here_is_refused_before_anything_is_compiled(
    gpu: Gpu, recorder: Recorder
) -> None:
    with pytest.raises(TargetError):
        gpu.kernels([(text("a"), "a"), (text("b"), "b")], arch="sm_121")
    assert recorder.named("compile") == []


def test_no_requests_are_no_kernels(gpu: Gpu) -> None:
    assert gpu.kernels([]) == []
    assert preheat.compile_all([]) == []


def test_all_errors_are_reported_and_the_rest_is_stored(gpu: Gpu, recorder: Recorder) -> None:
    requests = [(text("good"), "good"), (BAD, "bad"), (WORSE, "bad"), (BAD, "bad")]
    with pytest.raises(CompileError, match='"nope" is undefined') as caught:
        gpu.kernels(requests)
    (other,) = caught.value.others
    assert isinstance(other, CompileError)
    assert '"no" is undefined' in str(other)
    notes = "\n".join(caught.value.__notes__)
    assert "1 other failure:" in notes
    assert '"no" is undefined' in notes
    assert len(recorder.named("compile")) == 1
    gpu.kernels(requests[:1])
    assert len(recorder.named("compile")) == 1


def test_a_name_that_a_program_lacks_is_reported_with_the_others(gpu: Gpu) -> None:
    with pytest.raises(UnknownEntryError, match="'b'") as caught:
        gpu.kernels([(text("a"), "a"), (text("a"), "b"), (text("a"), "c")])
    assert [type(each) for each in caught.value.others] == [UnknownEntryError]


def test_an_error_does_not_share_its_notes_with_later_ones(gpu: Gpu) -> None:
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            gpu.kernels([(BAD, "bad"), (WORSE, "bad")])
        assert len([note for note in caught.value.__notes__ if "other failure" in note]) == 1


def test_a_sealed_process_refuses_what_is_not_stored_and_compiles_nothing(
    gpu: Gpu, recorder: Recorder
) -> None:
    gpu.kernel(text("stored"), "stored")
    gpu.trim()
    compiles = len(recorder.named("compile"))
    with sealed():
        assert len(gpu.kernels([(text("stored"), "stored")])) == 1
        with pytest.raises(SealedError) as caught:
            gpu.kernels([(text("stored"), "stored"), (text("one"), "one"), (text("two"), "two")])
    assert caught.value.entry == "one"
    assert caught.value.caller.startswith("tests/devices/test_batch.py:")
    (other,) = caught.value.others
    assert isinstance(other, SealedError)
    assert other.entry == "two"
    assert len(recorder.named("compile")) == compiles


def test_a_capture_takes_what_is_loaded_and_refuses_the_rest(gpu: Gpu) -> None:
    (kernel,) = gpu.kernels([(text("one"), "one")])
    x = gpu.zeros(1)
    with gpu.capture():
        (same,) = gpu.kernels([(text("one"), "one")])
        same[1, 1](x)
    assert same is kernel
    with pytest.raises(CaptureError, match="compiling or loading a program"), gpu.capture():
        gpu.kernels([(text("one"), "one"), (text("two"), "two")])


def test_a_closed_device_compiles_nothing(
    open_device: OpenDevice, builder: Builder, recorder: Recorder
) -> None:
    gpu = open_device("emulator", builder=builder)
    gpu.close()
    with pytest.raises(ContextLostError):
        gpu.kernels([(text("one"), "one")])
    assert recorder.named("compile") == []


def test_a_file_that_is_edited_is_compiled_again(gpu: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(text("k", 1))
    (old,) = gpu.kernels([(file, "k")])
    file.write_text(text("k", 2))
    os.utime(file, ns=(1, 1))
    (new,) = gpu.kernels([(file, "k")])
    x = gpu.zeros(1)
    old[1, 1](x)
    new[1, 1](x)
    assert list(x.numpy()) == [3]


def test_events_of_the_compiles_name_the_line_that_asked(gpu: Gpu, recorder: Recorder) -> None:
    with sealed("warn"):
        line = file_and_line(call_site())[1] + 1
        gpu.kernels([(text("one"), "one"), (text("two"), "two")])
    callers = [row["caller"] for row in recorder.named("sealed")]
    assert callers == [f"tests/devices/test_batch.py:{line}"] * 2


# compile_all


def test_artifacts_come_in_order_and_equal_requests_are_compiled_once(
    tmp_path: Path,
) -> None:
    requests = [(text("a"), "sm_90"), (text("b"), "sm_80"), (text("a"), "sm_80"), (text("a"), "sm_90")]
    made = preheat.compile_all(requests, cache_dir=tmp_path / "cache")
    assert [(each.entries[0].name, str(each.arch)) for each in made] == [
        *(("a", "sm_90"), ("b", "sm_80"), ("a", "sm_80"), ("a", "sm_90"))
    ]
    assert made[0] is made[3]
    stats = preheat.default_builder(tmp_path / "cache").stats()["process"]
    assert stats["compiles"] == 3
    again = preheat.compile_all(requests, cache_dir=tmp_path / "cache")
    assert [each.digest for each in again] == [each.digest for each in made]
    assert made[0].digest == preheat.compile(text("a"), "sm_90", cache_dir=tmp_path / "cache").digest
    stats = preheat.default_builder(tmp_path / "cache").stats()["process"]
    assert stats["compiles"] == 3
    assert stats["workers.started"] <= 1 + (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([text("a")], "request 1 is not a pair of a source and an architecture"),
        ([(text("a"), "sm_90"), (text("b"), "nonsense")], "nonsense"),
        ([(text("a"), "sm_90"), ("missing.cu", "sm_90")], "missing.cu"),
    ],
)
def test_compile_all_refuses_wrong_requests_before_it_compiles(
    requests: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        preheat.compile_all(requests, cache_dir=tmp_path / "cache")
    stats = preheat.default_builder(tmp_path / "cache").stats()["process"]
    assert "compiles" not in stats


def test_compile_all_reports_all_errors(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        preheat.compile_all([(BAD, "sm_90"), (WORSE, "sm_90")], cache_dir=tmp_path / "cache")
    assert len(caught.value.others) == 1
    with sealed(), pytest.raises(SealedError) as refused:
        preheat.compile_all([(text("a"), "sm_90"), (text("a"), "sm_80")], cache_dir=tmp_path / "cache")
    assert len(refused.value.others) == 1
