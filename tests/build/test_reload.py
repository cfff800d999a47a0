"""Programs whose files are edited while the process runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import preheat
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.build import reload
from preheat.build.builder import Builder
from preheat.devices.kernel import Kernel
from preheat.errors import CaptureError, CompileError, InputError
from preheat.gpu import Gpu
from preheat.model.program import Program
from tests.faulty import FaultyGpu

PLAIN = 'extern "C" __global__ void k(int* x) {{ *x = {}; }}\n'
TWO = PLAIN + 'extern "C" __global__ void other(int* x) {{ *x = 100 + {}; }}\n'
WITH_HEADER = '#include "value.h"\nextern "C" __global__ void k(int* x) { *x = VALUE; }\n'


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replace the clock by one that the test advances."""
    now = [1000.0]
    monkeypatch.setattr(reload, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def answer(gpu: Gpu, kernel: Kernel) -> int:
    """Return the value that a kernel writes."""
    x = gpu.zeros(1, "int32")
    kernel[1, 1](x)
    return int(x.numpy()[0])


def test_an_edited_file_is_built_again_and_an_old_kernel_keeps_its_code(
    device: Gpu, tmp_path: Path
) -> None:
    file = tmp_path / "k.cu"
    file.write_text(PLAIN.format(1))
    old = device.kernel(file, "k")
    assert device.kernel(file, "k") is old
    file.write_text(PLAIN.format(2))
    new = device.kernel(file, "k")
    assert (answer(device, old), answer(device, new)) == (1, 2)
    assert device.kernel(file, "k") is new
    assert device.module(file)["k"].module is new.module


def test_kernels_of_one_file_are_built_again_together(faulty: FaultyGpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    gpu = faulty.gpu
    file.write_text(TWO.format(1, 1))
    gpu.kernel(file, "k"), gpu.kernel(file, "other")
    file.write_text(TWO.format(2, 2))
    with faulty.count_calls("load") as calls:
        kernels = [gpu.kernel(file, name) for name in ("k", "other", "k")]
    assert calls == {"load": 1}
    assert [answer(gpu, kernel) for kernel in kernels] == [2, 102, 2]


def test_an_edit_that_keeps_size_and_times_is_seen(device: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(PLAIN.format(1))
    stamp = file.stat()
    device.kernel(file, "k")
    file.write_text(PLAIN.format(2))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert answer(device, device.kernel(file, "k")) == 2


def test_a_file_that_was_only_touched_gives_the_same_kernel(device: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(PLAIN.format(1))
    kernel = device.kernel(file, "k")
    os.utime(file, (1, 1))
    file.write_text(PLAIN.format(1))
    assert device.kernel(file, "k") is kernel


def test_an_edited_header_is_seen_within_a_second(
    device: Gpu, tmp_path: Path, clock: Callable[[float], None]
) -> None:
    file, header = tmp_path / "k.cu", tmp_path / "value.h"
    file.write_text(WITH_HEADER)
    cases: list[tuple[Path | str, dict[str, Any]]] = [
        (file, {}),
        (WITH_HEADER, {"include": [tmp_path]}),
    ]
    for source, more in cases:
        header.write_text("#define VALUE 1\n")
        old = device.kernel(source, "k", **more)
        header.write_text("#define VALUE 2\n")
        assert device.kernel(source, "k", **more) is old  # Headers are compared once a second.
        clock(1.1)
        new = device.kernel(source, "k", **more)
        assert (answer(device, old), answer(device, new)) == (1, 2)
        assert device.kernel(source, "k", **more) is new
        clock(1.1)
        assert device.kernel(source, "k", **more) is new


def test_a_header_that_hides_another_is_seen(
    device: Gpu, tmp_path: Path, clock: Callable[[float], None]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        place.mkdir()
    (second / "value.h").write_text("#define VALUE 1\n")
    old = device.kernel(WITH_HEADER, "k", include=[first, second])
    (first / "value.h").write_text("#define VALUE 2\n")
    clock(1.1)
    new = device.kernel(WITH_HEADER, "k", include=[first, second])
    assert (answer(device, old), answer(device, new)) == (1, 2)


def test_an_edit_with_an_error_is_an_error_until_it_is_corrected(device: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(PLAIN.format(1))
    old = device.kernel(file, "k")
    file.write_text(PLAIN.format("one"))
    for _ in range(2):
        with pytest.raises(CompileError, match='identifier "one" is undefined'):
            device.kernel(file, "k")
    assert answer(device, old) == 1
    file.write_text(PLAIN.format(2))
    assert answer(device, device.kernel(file, "k")) == 2


def test_a_file_that_was_removed_is_an_error_that_names_it(device: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(PLAIN.format(1))
    old = device.kernel(file, "k")
    file.unlink()
    with pytest.raises(InputError, match=f"cannot read {file}"):
        device.kernel(file, "k")
    assert answer(device, old) == 1
    file.write_text(PLAIN.format(1))
    assert answer(device, device.kernel(file, "k")) == 1


def test_the_check_for_edited_files_can_be_turned_off(
    open_device: Callable[..., Gpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_device("emulator").reload
    monkeypatch.setenv("PREHEAT_RELOAD", "off")
    gpu = preheat.device("emulator:7")
    file = tmp_path / "k.cu"
    with gpu:
        file.write_text(PLAIN.format(1))
        kernel = gpu.kernel(file, "k")
        file.write_text(PLAIN.format(2))
        assert gpu.kernel(file, "k") is kernel


def test_a_sealed_process_keeps_what_it_has_loaded(device: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(PLAIN.format(1))
    kernel = device.kernel(file, "k")
    file.write_text(PLAIN.format(2))
    with preheat.sealed():
        assert device.kernel(file, "k") is kernel
    assert answer(device, device.kernel(file, "k")) == 2


def test_text_that_opens_no_file_looks_at_none(
    device: Gpu, monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    kernel = device.kernel(PLAIN.format(1), "k")
    clock(5.0)

    def changed(_: object) -> bool:
        raise AssertionError("a file was looked at")

    monkeypatch.setattr(reload.TrackedFiles, "changed", changed)
    assert device.kernel(PLAIN.format(1), "k") is kernel


def test_headers_of_the_toolkit_are_not_checked_again(
    device: Gpu, monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    source = "#include <nv/target>\n" + PLAIN.format("31")
    kernel = device.kernel(source, "k")
    assert answer(device, kernel) == 31
    clock(5.0)
    monkeypatch.setattr(device.builder._stored, "_compare_headers", None)
    assert device.kernel(source, "k") is kernel


def test_a_capture_refuses_a_program_that_was_edited(device: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(PLAIN.format(1))
    x = device.zeros(1, "int32")
    device.kernel(file, "k")[1, 1](x)
    with device.capture() as graph:
        device.kernel(file, "k")[1, 1](x)
    file.write_text(PLAIN.format(2))
    with pytest.raises(CaptureError, match="load"), device.capture():
        device.kernel(file, "k")
    graph.replay()
    assert x.numpy()[0] == 1


def test_threads_that_see_an_edit_together_load_it_once(faulty: FaultyGpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    gpu = faulty.gpu
    got = list[Any]()
    file.write_text(PLAIN.format(1))
    gpu.kernel(file, "k")
    file.write_text(PLAIN.format(2))
    threads = [threading.Thread(target=lambda: got.append(gpu.kernel(file, "k"))) for _ in range(8)]
    with faulty.count_calls("load") as calls:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert calls == {"load": 1}
    assert {answer(gpu, kernel) for kernel in got} == {2}
    assert len(got) == 8


def test_a_file_that_is_edited_while_it_is_built_is_built_again(
    device: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "k.cu"
    load = device._session.load
    file.write_text(PLAIN.format(1))

    def slow(*args: Any, **more: Any) -> Any:
        made = load(*args, **more)
        file.write_text(PLAIN.format(2))  # The file is saved before this load returns.
        return made

    monkeypatch.setattr(device._session, "load", slow)
    assert answer(device, device.kernel(file, "k")) == 2


def test_a_kernel_from_a_bundle_stays_where_its_headers_are_not_on_this_machine(
    open_device: Callable[..., Gpu],
    open_builder: Callable[..., Builder],
    tmp_path: Path,
    clock: Callable[[float], None],
) -> None:
    header, bundle = tmp_path / "value.h", tmp_path / "b.heat"
    header.write_text("#define VALUE 1\n")
    program = Program.of(WITH_HEADER, include=[tmp_path])
    baked = preheat.bake(
        Manifest((ManifestProgram(program),)), "sm_90", output=bundle, builder=open_builder(), jobs=1
    )
    assert baked.path == bundle
    header.unlink()
    builder = open_builder()
    builder.clear_memory()
    builder.mount(bundle)
    gpu = open_device("emulator", builder=builder)
    kernel = gpu.kernel(program, "k")
    for _ in range(3):
        clock(1.1)
        assert gpu.kernel(program, "k") is kernel
