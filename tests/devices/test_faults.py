"""Faults of a device: raised once, kept if they end the context, and cleared by a reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.emulator.device import EmulatorDevice
from preheat.errors import (
    ContextLostError,
    DeviceError,
    DriverError,
    EmulatorFault,
    StaleBufferError,
    UnsupportedInstructionError,
)
from preheat.gpu import Gpu
from tests.conftest import SAXPY, Recorder
from tests.devices.support import KERNELS, PTX, SaxpyCase, saxpy_case
from tests.driver_errors import illegal_address, not_supported
from tests.faulty import FaultyDevice, FaultyGpu
from tests.threads import run_in_thread

Operation = Callable[[SaxpyCase], object]
#: Operations of a user, by the call of the device interface that each one makes.
DOORS: dict[str, Operation] = {
    "launch": lambda b: b.launch(),
    "allocate": lambda b: b.gpu.empty(3),
    "copy_in": lambda b: b.x.write(b.xs),
    "copy_out": lambda b: b.y.numpy(),
    "copy": lambda b: b.y.copy_from(b.x),
    "fill": lambda b: b.y.fill(1.0),
    "load": lambda b: b.gpu.kernel(SAXPY, "saxpy", label="mine.cu"),
    "synchronize": lambda b: b.gpu.synchronize(),
    "memory": lambda b: b.gpu.memory(),
    "trim": lambda b: b.gpu.trim(),
    "stream": lambda b: b.gpu.stream(priority=-1),
    "stream.record": lambda b: b.gpu.record(),
    "function.occupancy": lambda b: b.saxpy.occupancy(64),
    "function.prepare": lambda b: b.saxpy.launch(2.0, b.x, b.y, b.n, grid=7, block=32),
    "module.symbol": lambda b: b.saxpy.module.symbol("table"),
    "module.function": lambda b: b.saxpy.module["add"],
}


@pytest.mark.parametrize("warm", [0, 4])
@pytest.mark.parametrize("verb", DOORS)
def test_an_error_that_nothing_survives_is_remembered_with_its_cause(
    verb: str, warm: int, faulty: FaultyGpu
) -> None:
    made = saxpy_case(faulty.gpu)
    operation = DOORS[verb]
    made.launch(warm)
    faulty.device.fail(verb, illegal_address("cuStreamSynchronize"))
    with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as first:
        operation(made)
    assert first.value.sticky
    lost = f"{faulty.gpu.name} is lost after an error: {first.value}"
    with faulty.count_calls() as calls:
        for other in DOORS.values():
            with pytest.raises((ContextLostError, StaleBufferError)) as later:
                other(made)
            assert lost in str(later.value)
    assert calls == {}  # The device is not called.
    assert ", lost>" in repr(made.x)


def test_a_lost_device_is_an_event(
    open_faulty: Callable[..., FaultyGpu], open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    faulty = open_faulty("emulator", open_builder())
    faulty.device.fail("synchronize", illegal_address("cuStreamSynchronize"))
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            faulty.gpu.synchronize()
        first = recorder.named("lost")[0]
    assert recorder.named("lost") == [first]
    assert first["device"] == faulty.gpu.name
    assert first["reason"] in str(caught.value)


@pytest.mark.parametrize("verb", DOORS)
def test_an_error_that_passes_leaves_everything_usable(verb: str, faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    operation = DOORS[verb]
    for launches in range(0, 5, 2):
        faulty.device.fail(verb, not_supported("cuMemsetD32Async"))
        with pytest.raises(DriverError, match="CUDA_ERROR_NOT_SUPPORTED"):
            operation(made)
        made.check(launches)
        made.launch(2)
        made.check(launches + 2)
    operation(made)


@pytest.mark.parametrize("wait", ["stream", "event"])
def test_waiting_tells_of_errors_of_the_work_before(
    wait: str, open_faulty: Callable[..., FaultyGpu]
) -> None:
    faulty = open_faulty("emulator")
    stream = faulty.gpu.stream()
    if wait == "stream":
        faulty.device.fail("stream.synchronize", illegal_address("cuStreamSynchronize"))
        operation = stream.synchronize
    else:
        event = stream.record()
        raised = illegal_address("cuStreamSynchronize")

        def failing() -> None:
            faulty.device.on_loss(raised)
            raise raised

        event.raw.synchronize = failing  # type: ignore[method-assign]
        operation = event.synchronize
    with pytest.raises(DriverError):
        operation()
    with pytest.raises(ContextLostError, match="lost after an error: cuStreamSynchronize failed"):
        faulty.gpu.empty(1)


def test_a_blocking_device_names_the_kernel_that_failed(
    kind: str, open_faulty: Callable[..., FaultyGpu]
) -> None:
    faulty = open_faulty(kind, blocking=True)
    made = saxpy_case(faulty.gpu)
    made.launch(3)
    faulty.device.fail("stream.synchronize", illegal_address("cuStreamSynchronize"))
    with pytest.raises(
        DriverError, match="saxpy: cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        made.launch()
    with pytest.raises(
        ContextLostError, match="lost after an error: saxpy: cuStreamSynchronize failed"
    ):
        made.launch()


def test_a_driver_error_carries_call_code_name_and_meaning() -> None:
    error = illegal_address("cuLaunchKernel")
    assert (error.call, error.code, error.name) == ("cuLaunchKernel", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    assert error.meaning == "an illegal memory access was encountered"
    assert str(error) == f"cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): {error.meaning}"
    assert isinstance(error, DeviceError)


def test_a_status_that_a_launch_gives_becomes_an_error(
    open_faulty: Callable[..., FaultyGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = saxpy_case(open_faulty("emulator").gpu)
    function: Any = made.saxpy._function
    monkeypatch.setattr(function._part, "prepare", lambda *_: lambda *_: (7,))
    for _ in range(4):
        with pytest.raises(DriverError, match=r"launch of saxpy failed: EMULATOR_ERROR \(7\)"):
            made.launch()


# The emulator's own faults


def overrun(made: SaxpyCase) -> None:
    made.saxpy[5, 64](2.0, made.x, made.y, made.n + 1)


@pytest.mark.parametrize("warm", [0, 4])
def test_a_fault_on_the_emulator_ends_its_context_until_a_reset(
    warm: int, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("emulator")
    made = saxpy_case(gpu)
    made.launch(warm)
    with pytest.raises(EmulatorFault, match="past the end of the 1028-byte buffer") as caught:
        overrun(made)
    fault = caught.value
    assert (fault.kernel, fault.block, fault.thread) == ("saxpy", (4, 0, 0), (1, 0, 0))
    assert fault.address == made.x.address + made.x.nbytes
    assert fault.line is not None
    assert "ld.global" in made.saxpy.module.artifact.ptx.decode().splitlines()[fault.line - 1]
    with pytest.raises(
        ContextLostError, match=r"is lost after an error: saxpy, program\.cu:3, PTX line"
    ) as lost:
        made.launch()
    assert lost.value.hint == "call gpu.reset(); then ask for the kernel again: gpu.kernel(…)"
    with pytest.raises(
        StaleBufferError, match=r"is lost after an error: saxpy, program\.cu:3, PTX line"
    ):
        made.x.numpy()
    gpu.reset()
    again = saxpy_case(gpu)
    again.launch(4)
    again.check(4)


@pytest.mark.parametrize("warm", [0, 4])
def test_everything_on_an_emulator_is_usable_after_it_has_recovered(
    warm: int, open_device: Callable[..., Gpu]
) -> None:
    gpu = open_device("emulator")
    made = saxpy_case(gpu)
    with gpu.capture() as graph:
        made.launch()
    made.launch(warm)
    for _ in range(2):
        free = gpu.memory().free
        short = gpu.zeros(1)
        with pytest.raises(EmulatorFault, match="past the end"):
            made.saxpy.launch(2.0, short, short, 4096, grid=16, block=256)
        assert gpu._context.lost is not None
        short.close()
        assert gpu._context.recover()
        gpu.synchronize()
        assert gpu.memory().free == free
    graph.replay()
    made.launch(2)
    made.check(warm + 3)
    assert gpu.kernel(SAXPY, "saxpy")[1, 32](0.0, gpu.zeros(1), gpu.zeros(1), 1) is None


def test_a_deferred_stream_and_a_capture_do_not_recover(open_device: Callable[..., Gpu]) -> None:
    late = open_device("emulator:2", schedule=1)
    made = saxpy_case(late)
    overrun(made)
    with pytest.raises(EmulatorFault):
        late.synchronize()
    assert not late._context.recover()
    gpu = open_device("emulator:3")
    made = saxpy_case(gpu)
    graph = gpu.capture()
    graph.begin()
    with pytest.raises(EmulatorFault):
        run_in_thread(lambda: overrun(made))
    assert not gpu._context.recover()
    with pytest.raises(ContextLostError):
        graph.end()
    gpu.reset()
    assert not made.saxpy._context.recover()


def test_a_fault_of_one_emulator_does_not_affect_the_others(open_device: Callable[..., Gpu]) -> None:
    first, second = saxpy_case(open_device("emulator")), saxpy_case(open_device("emulator:1"))
    with pytest.raises(EmulatorFault):
        overrun(first)
    second.launch(4)
    second.check(4)


def test_an_instruction_the_emulator_does_not_know_ends_nothing(
    open_device: Callable[..., Gpu],
) -> None:
    gpu = open_device("emulator")
    made = saxpy_case(gpu)
    strange = PTX.replace("    ret;", "    wgmma.fence.sync.aligned;\n    ret;").replace(
        "sm_80", "sm_90a"
    )
    with pytest.raises((UnsupportedInstructionError, DeviceError)) as caught:
        gpu.kernel(strange, "keep")[1, 1](made.x, 1, 2, 0.0)
    assert isinstance(caught.value, UnsupportedInstructionError)
    assert "wgmma" in str(caught.value)
    made.launch()
    made.check(1)


def test_a_refusal_to_run_at_all_ends_nothing_either(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    faulty.device.fail("launch", UnsupportedInstructionError("saxpy", "no such instruction"))
    with pytest.raises(UnsupportedInstructionError):
        made.launch()
    made.launch(4)
    made.check(4)


def test_use_after_free_within_the_device_is_seen(open_device: Callable[..., Gpu]) -> None:
    gpu = open_device("emulator")
    source = """
        extern "C" __global__ void keep(float** to, float* x) { *to = x; }
        extern "C" __global__ void use(float** to) { **to = 1; }
    """
    to, x = gpu.zeros(1, "int64"), gpu.zeros(8)
    gpu.kernel(source, "keep")[1, 1](to, x)
    x.close()
    with pytest.raises(
        EmulatorFault, match=r"use, program\.cu:3, PTX line .* in a freed 32-byte buffer"
    ):
        gpu.kernel(source, "use")[1, 1](to)


def test_fresh_memory_is_poison_on_the_emulator(open_device: Callable[..., Gpu]) -> None:
    found = open_device("emulator").empty(64, "uint8").numpy()
    assert len(set(found.tolist())) == 1
    assert found[0] not in (0, 255)


# The wrapper itself


def test_a_faulty_device_counts_and_fails_in_turn() -> None:
    seam = FaultyDevice(EmulatorDevice())
    stream = seam.stream()
    seam.fail("allocate", None, not_supported("allocate"), illegal_address("allocate"))
    address = seam.allocate(16, stream)
    for name in ("NOT_SUPPORTED", "ILLEGAL_ADDRESS"):
        with pytest.raises(DriverError, match=name):
            seam.allocate(16, stream)
    seam.allocate(16, stream)
    seam.free(address, stream)
    stream.record()
    assert seam.calls == {"stream": 1, "allocate": 4, "free": 1, "stream.record": 1}
    assert (seam.name, seam.dlpack) == ("emulator:0", (1, 0))
    with pytest.raises(AttributeError, match="nonsense"):
        seam.nonsense()


def test_a_faulty_device_sees_through_to_modules_functions_and_launches(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    made.launch()
    faulty.device.fail("module.function", not_supported("cuModuleGetFunction"))
    with pytest.raises(DriverError, match="cuModuleGetFunction"):
        faulty.gpu.kernel(KERNELS, "add")
    calls = faulty.device.calls
    assert (calls["load"], calls["module.function"], calls["function.prepare"], calls["launch"]) == (
        1,
        2,
        1,
        1,
    )
    assert np.array_equal(made.x.numpy(), made.xs)
