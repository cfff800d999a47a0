"""gpu.kernel(wait=False): the call returns at once, and the first use waits, loads and raises."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.build.seal import sealed
from preheat.devices.kernel import Kernel
from preheat.errors import (
    CaptureError,
    CompileError,
    ContextLostError,
    InputError,
    SealedError,
    UnknownEntryError,
)
from preheat.gpu import Gpu
from preheat.process.callsite import call_site, file_and_line
from tests.conftest import Recorder
from tests.processes import TIMEOUT_SECONDS, run_in_fork, wait_for

SOURCE = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] += 1; }'
OTHER = SOURCE.replace("+= 1", "+= 2")
BAD = "__global__ void bad(int* x) { *x = nope; }"


class Gate:
    """Holds compiles back until it is opened."""

    def __init__(self, builder: Builder) -> None:
        self.compiles = 0
        self._open = threading.Event()
        compile_program = builder.toolchain.compile

        def held(*args: Any) -> Any:
            self.compiles += 1
            assert self._open.wait(TIMEOUT_SECONDS)
            return compile_program(*args)

        builder.toolchain.compile = held  # type: ignore[method-assign, assignment]

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(builder: Builder) -> Iterator[Gate]:
    gate = Gate(builder)
    yield gate
    gate.open()


@pytest.fixture
def gpu(kind: str, open_device: Callable[..., Gpu], builder: Builder) -> Gpu:
    """Each kind of device, with a cache of the test's own."""
    return open_device(kind, builder=builder)


def is_loaded(kernel: Kernel) -> bool:
    """Return whether a kernel has been used, and so has the attributes of any kernel."""
    return "module" in vars(kernel)


def test_the_call_does_not_wait_and_the_first_use_does(gpu: Gpu, gate: Gate) -> None:
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    assert repr(kernel) == f"<Kernel k of program.cu on {gpu.name}: being compiled>"
    assert isinstance(kernel, Kernel)
    x = gpu.zeros(4)
    threading.Timer(0.05, gate.open).start()
    kernel[1, 4](x)
    assert np.array_equal(x.numpy(), [1, 1, 1, 1])


def test_after_its_first_use_it_is_an_ordinary_kernel(gpu: Gpu, recorder: Recorder) -> None:
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    assert not is_loaded(kernel)
    assert kernel.name == "k"
    plain = gpu.kernel(OTHER, "k")
    assert is_loaded(kernel)
    assert vars(kernel).keys() == vars(plain).keys()
    assert repr(kernel) == repr(plain)
    assert gpu.kernel(SOURCE, "k") is kernel
    assert gpu.kernel(SOURCE, "k", wait=False) is kernel
    assert not hasattr(kernel, "nonsense")
    assert len(recorder.named("compile")) == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda kernel: kernel[1, 1],
        lambda kernel: kernel.attributes,
        lambda kernel: kernel.occupancy(32),
        lambda kernel: kernel.carveout,
        lambda kernel: kernel.module,
        hash,
        lambda kernel: kernel == kernel.module["k"],
        lambda kernel: setattr(kernel, "carveout", 50),
        lambda kernel: kernel.prepare(1, 1),
    ],
)
def test_every_use_of_a_kernel_waits(use: Callable[[Any], object], gpu: Gpu) -> None:
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    assert use(kernel) is not False
    assert is_loaded(kernel)


@pytest.mark.usefixtures("gate")
def test_python_finds_no_protocol_of_other_libraries_and_does_not_wait(gpu: Gpu) -> None:
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    assert not hasattr(kernel, "__cuda_array_interface__")
    assert not is_loaded(kernel)


def test_an_equal_request_gets_the_same_kernel_and_one_compile(gpu: Gpu, gate: Gate) -> None:
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    assert gpu.kernel(SOURCE, "k", wait=False) is kernel
    gate.open()
    waited = gpu.kernel(SOURCE, "k")
    assert waited == kernel
    assert is_loaded(kernel)
    assert gate.compiles == 1


def test_many_kernels_are_compiled_at_the_same_time(gpu: Gpu, gate: Gate) -> None:
    kernels = [gpu.kernel(SOURCE.replace("1", str(n)), "k", wait=False) for n in (3, 4)]
    wait_for(lambda: gate.compiles == 2)
    gate.open()
    assert [kernel.name for kernel in kernels] == ["k", "k"]


def test_a_wrong_program_is_an_error_at_each_use_with_the_line_that_asked(gpu: Gpu) -> None:
    kernel = gpu.kernel(BAD, "bad", wait=False)
    for _ in range(2):
        with pytest.raises(CompileError, match='"nope" is undefined') as caught:
            kernel[1, 1]
        (note,) = caught.value.__notes__
        assert note.startswith(f"the kernel bad was requested with wait=False at {__file__}:")
    assert repr(kernel).endswith("cannot be compiled>")
    with pytest.raises(UnknownEntryError) as unknown:
        gpu.kernel(SOURCE, "nope", wait=False).name  # noqa: B018
    assert any("was requested with wait=False at" in note for note in unknown.value.__notes__)


def test_wrong_arguments_are_errors_at_once(gpu: Gpu, tmp_path: Path) -> None:
    for source, name in ((5, "k"), (SOURCE, 5), (tmp_path / "missing.cu", "k"), ("", "k")):
        with pytest.raises(InputError):
            gpu.kernel(source, name, wait=False)  # type: ignore[arg-type]


def test_a_kernel_that_failed_can_be_asked_for_again(gpu: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(BAD)
    kernel = gpu.kernel(file, "k", wait=False)
    with pytest.raises(CompileError):
        kernel.name  # noqa: B018
    file.write_text(SOURCE)
    assert gpu.kernel(file, "k", wait=False).name == "k"


def test_a_file_that_is_edited_before_the_first_use_is_compiled_as_it_is_then(
    gpu: Gpu, tmp_path: Path
) -> None:
    file = tmp_path / "k.cu"
    file.write_text(SOURCE)
    kernel = gpu.kernel(file, "k", wait=False)
    file.write_text(OTHER)
    x = gpu.zeros(1)
    kernel[1, 1](x)
    assert list(x.numpy()) == [2]
    assert gpu.kernel(file, "k") is kernel


def test_a_first_use_in_a_capture_is_refused_and_works_afterwards(gpu: Gpu, gate: Gate) -> None:
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    x = gpu.zeros(1)
    with pytest.raises(CaptureError, match="compiling or loading a program"), gpu.capture():
        kernel[1, 1](x)  # It does not wait either: the gate is closed.
    gate.open()
    kernel[1, 1](x)
    assert list(x.numpy()) == [1]


def test_a_kernel_whose_code_is_loaded_can_be_captured_at_its_first_use(gpu: Gpu) -> None:
    loaded = gpu.kernel(SOURCE, "k")
    kernel = gpu.kernel(SOURCE, "k", options=[], wait=False)
    assert kernel is loaded
    x = gpu.zeros(1)
    with gpu.capture() as graph:
        kernel[1, 1](x)
    graph.replay()
    assert list(x.numpy()) == [1]


def test_asking_in_a_capture_is_allowed(gpu: Gpu) -> None:
    x = gpu.zeros(1)
    other = gpu.kernel(OTHER, "k")
    with gpu.capture():
        other[1, 1](x)
        kernel = gpu.kernel(SOURCE, "k", wait=False)
    kernel[1, 1](x)
    assert list(x.numpy()) == [1]


def test_a_kernel_that_nobody_uses_is_compiled_and_freed(
    gpu: Gpu, recorder: Recorder, gate: Gate
) -> None:
    kernel = weakref.ref(gpu.kernel(SOURCE, "k", wait=False))
    gc.collect()
    assert kernel() is None
    gate.open()
    wait_for(lambda: len(recorder.named("compile")) == 1)
    assert recorder.named("load") == []


def test_a_reset_makes_it_unusable_without_a_wait(gpu: Gpu, gate: Gate) -> None:
    if gpu.name.startswith("cuda"):
        pytest.skip("a GPU is reset in a process of its own")
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    gpu.reset()
    with pytest.raises(ContextLostError):
        kernel[1, 1]
    gate.open()
    assert gpu.kernel(SOURCE, "k", wait=False).name == "k"


def test_a_closed_builder_compiles_at_the_first_use(gpu: Gpu, builder: Builder, gate: Gate) -> None:
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    wait_for(lambda: gate.compiles == 1)
    threading.Timer(0.05, gate.open).start()
    builder.close()
    assert kernel.name == "k"


def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(
    open_device: Callable[..., Gpu], builder: Builder, gate: Gate
) -> None:
    gpu = open_device("emulator", builder=builder)
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    wait_for(lambda: gate.compiles == 1)

    def child() -> None:
        gate.open()
        with suppress(ContextLostError):
            assert kernel.name == "k"

    threading.Timer(0.1, gate.open).start()  # The child waits for the lock of the parent's compile.
    run_in_fork(child)
    assert kernel.name == "k"


def test_a_sealed_process_finds_it_or_refuses_at_once(gpu: Gpu, recorder: Recorder) -> None:
    gpu.kernel(SOURCE, "k")
    gpu.trim()
    with sealed():
        assert type(gpu.kernel(SOURCE, "k", wait=False)) is Kernel
        with pytest.raises(SealedError, match=r"^tests/devices/test_pending.py:\d+: k "):
            gpu.kernel(OTHER, "k", wait=False)
    assert len(recorder.named("compile")) == 1


def test_threads_that_use_it_first_at_the_same_time_get_one_kernel(gpu: Gpu, gate: Gate) -> None:
    kernel = gpu.kernel(SOURCE, "k", wait=False)
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.append(kernel.name)) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate.open()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert names == ["k"] * 8
    assert is_loaded(kernel)


def test_an_event_of_the_compile_names_the_line_that_asked(gpu: Gpu, recorder: Recorder) -> None:
    recorder.forgive = True
    with sealed("warn"):
        line = file_and_line(call_site())[1] + 1
        kernel = gpu.kernel(SOURCE, "k", wait=False)
        assert kernel.name == "k"
    assert [row["caller"] for row in recorder.named("sealed")] == [
        f"tests/devices/test_pending.py:{line}"
    ]
