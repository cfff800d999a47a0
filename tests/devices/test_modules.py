"""Kernels and modules: a second request is free, a load happens once, and unused ones are unloaded."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.errors import (
    CompileError,
    DeviceError,
    DriverError,
    InputError,
    InvalidCodeError,
    OutOfMemoryError,
    TargetError,
    UnknownEntryError,
)
from preheat.gpu import Gpu
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.program import Program
from tests.conftest import SAXPY, Recorder
from tests.devices.support import KERNELS, PTX, SaxpyCase, saxpy_case
from tests.driver_errors import out_of_memory
from tests.faulty import FaultyGpu

OpenBuilder = Callable[..., Builder]
OpenFlaky = Callable[..., FaultyGpu]
OpenDevice = Callable[..., Gpu]


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable the cycle collector, so that only reference counts free objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# Repeated requests


def test_asking_again_gives_the_same_kernel_and_asks_nobody(
    kind: str, open_builder: OpenBuilder, open_faulty: OpenFlaky, recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    builder = open_builder()
    faulty = open_faulty(kind, builder)
    options = ["-use_fast_math"]
    plain = faulty.gpu.kernel(SAXPY, "saxpy")
    fast = faulty.gpu.kernel(SAXPY, "saxpy", options=options, headers={"a.h": "int a;"})
    module = faulty.gpu.module(SAXPY)
    seen = len(recorder.seen)
    monkeypatch.setattr(builder, "_request", lambda *_: pytest.fail("a key was made"))
    with faulty.count_calls() as calls:
        for _ in range(3):
            assert faulty.gpu.kernel(SAXPY, "saxpy") is plain
            again = faulty.gpu.kernel(SAXPY, "saxpy", options=options, headers={"a.h": "int a;"})
            assert again is fast
            assert faulty.gpu.module(SAXPY) is module
    assert calls == {}
    assert len(recorder.seen) == seen  # There was no lookup, so not even a hit.
    assert plain is not fast


def python_calls(call: Callable[[], object]) -> list[str]:
    """Return the names of the Python functions that a call runs outside devices."""
    called: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "/preheat/devices/" not in frame.f_code.co_filename:
            called.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


def test_a_hot_kernel_takes_two_calls_at_most(device: Gpu) -> None:
    kernel = device.kernel(SAXPY, "saxpy")
    fast = device.kernel(SAXPY, "saxpy", options=("-use_fast_math",))
    program = Program.of(SAXPY)
    whole = device.kernel(program, "saxpy")

    def hot() -> None:
        assert device.kernel(SAXPY, "saxpy") is kernel
        assert device.kernel(SAXPY, "saxpy", options=("-use_fast_math",)) is fast

    assert python_calls(hot)[1:] == ["Gpu.kernel", "Gpu.kernel"]
    assert len(python_calls(lambda: device.kernel(program, "saxpy"))) - 1 <= 2
    assert device.kernel(program, "saxpy") is whole


def test_arguments_of_another_form_find_the_same_kernel(device: Gpu) -> None:
    made = device.kernel(SAXPY, "saxpy", options=["-DA=1"], arch="sm_90", label="a.cu")
    assert made is device.kernel(SAXPY, "saxpy", options=("-DA=1",), arch=Arch(9, 0), label="a.cu")
    more: dict[str, Any] = {"options": iter(["-DA=1"]), "label": "a.cu", "headers": {}}
    more |= {"arch": "9.0", "names": None}
    assert made is device.kernel(SAXPY, "saxpy", **more)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"headers": (("a.h", "int a;"),)}, "headers must be a mapping"),
        ({"options": "-DA=1"}, "options must be a list, not one value"),
        ({"options": [1]}, "option must be text"),
        ({"label": ["a.cu"]}, "label must be text, not list"),
        ({"names": {"a": 1}}, "names must be a list"),
        ({"include": [["a"]]}, "include must hold paths"),
        ({"arch": ["sm_90"]}, "is not a GPU architecture"),
        ({"name": ["saxpy"]}, "the name of a kernel must be text"),
        ({"source": [SAXPY]}, "source must be a path, source text or a Program"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_a_wrong_argument_is_named_also_where_the_kernel_is_loaded(
    device: Gpu, wrong: dict[str, Any], message: str
) -> None:
    device.kernel(SAXPY, "saxpy", headers={"a.h": "int a;"}, options=["-DA=1"])
    device.kernel(SAXPY, "saxpy")
    with pytest.raises(InputError, match=message):
        device.kernel(**{"source": SAXPY, "name": "saxpy", **wrong})


def test_two_entries_of_one_program_share_one_module(faulty: FaultyGpu) -> None:
    with faulty.count_calls("load", "module.function") as calls:
        saxpy, add = faulty.gpu.kernel(KERNELS, "saxpy"), faulty.gpu.kernel(KERNELS, "add")
        module = faulty.gpu.module(KERNELS)
        assert saxpy.module is add.module is module
        assert module["add"] == add
        assert module["add"] != saxpy
        assert hash(module["add"]) == hash(add)
        assert {module["add"], add, saxpy} == {add, saxpy}
    assert calls == {"load": 1, "module.function": 2}
    assert "saxpy" in set(module)
    assert len(module) == len(list(module)) == KERNELS.count("__global__")


def test_the_same_name_with_new_source_is_another_kernel(device: Gpu) -> None:
    out = device.zeros(1, "int32")
    seen = []
    for value in (1, 2, 1):
        source = f'extern "C" __global__ void same(int* out) {{ *out = {value}; }}'
        device.kernel(source, "same")[1, 1](out)
        seen.append(int(out.numpy()[0]))
    assert seen == [1, 2, 1]


def test_the_same_program_on_two_devices_is_two_kernels(open_device: OpenDevice) -> None:
    first, second = saxpy_case(open_device("emulator")), saxpy_case(open_device("emulator:1"))
    assert first.saxpy != second.saxpy
    for made in (first, second):
        made.gpu.module(KERNELS)["count"][1, 1]()
        made.launch(4)
        made.check(4)
        assert made.gpu.module(KERNELS).symbol("counter", "int32").numpy().tolist() == [42]


def test_options_headers_and_names_make_other_kernels(device: Gpu) -> None:
    source = '#include "which.h"\nextern "C" __global__ void which(int* out) { *out = N * WHICH; }'
    out = device.zeros(1, "int32")
    for which in (3, 5):
        for n in (1, 2):
            headers = {"which.h": f"#define WHICH {which}"}
            device.kernel(source, "which", headers=headers, options=[f"-DN={n}"])[1, 1](out)
            assert out.numpy()[0] == which * n


def test_templates_and_plain_cpp_names_are_found(device: Gpu) -> None:
    source = """
        namespace deep {
        template <class T, int N> __global__ void times(T* x) { x[threadIdx.x] *= N; }
        }
        __global__ void plain(float* x) { x[threadIdx.x] += 1; }
    """
    data = np.arange(1, 6, dtype=np.float32)
    x = device.array(data)
    device.kernel(source, "deep::times<float, 3>")[1, 5](x)
    device.kernel(source, "plain")[1, 5](x)
    assert np.array_equal(x.numpy(), data * 3 + 1)
    with pytest.raises(UnknownEntryError, match="no kernel 'plane'; it has: plain"):
        device.kernel(source, "plane")


def test_source_may_be_a_file_or_a_program(device: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "saxpy.cu"
    file.write_text(SAXPY)
    kernels = [device.kernel(s, "saxpy") for s in (file, str(file), Program.of(SAXPY), SAXPY)]
    made = saxpy_case(device)
    for times, kernel in enumerate(kernels, start=1):
        kernel[5, 64](2.0, made.x, made.y, made.n)
        made.check(times)
    assert device.kernel(file, "saxpy") is kernels[0]


def test_a_compile_error_comes_out_and_the_next_source_is_tried(device: Gpu) -> None:
    for _ in range(2):
        with pytest.raises(CompileError, match="missing"):
            device.kernel('extern "C" __global__ void k(int* x) { x[0] = missing; }', "k")
    assert saxpy_case(device).saxpy.name == "saxpy"


def test_32_threads_load_once(faulty: FaultyGpu) -> None:
    start = threading.Barrier(32)
    got = list[object]()

    def work() -> None:
        start.wait()
        got.append(faulty.gpu.kernel(SAXPY + "// for 32 threads", "saxpy"))

    threads = [threading.Thread(target=work) for _ in range(32)]
    with faulty.count_calls("load", "module.function") as calls:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 32
    assert len(set(map(id, got))) == 1
    assert calls == {"load": 1, "module.function": 1}


def test_a_thread_that_comes_late_finds_what_the_first_one_loaded(
    faulty: FaultyGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = faulty.gpu
    run = faulty.gpu._session._module_loads.run

    def late(key: Any, make: Any, *, title: str) -> Any:
        monkeypatch.setattr(gpu._session._module_loads, "run", run)
        gpu.module(SAXPY)  # as another thread would, between the lookup and the load
        return run(key, make, title=title)

    monkeypatch.setattr(gpu._session._module_loads, "run", late)
    with faulty.count_calls("load") as calls:
        gpu.module(SAXPY)
    assert calls == {"load": 1}


def test_a_load_that_failed_is_tried_again(faulty: FaultyGpu) -> None:
    full = out_of_memory("cuModuleLoadData")
    faulty.device.fail("load", full)
    with pytest.raises(OutOfMemoryError):
        faulty.gpu.kernel(SAXPY, "saxpy")
    assert faulty.gpu.kernel(SAXPY, "saxpy").name == "saxpy"


def test_every_load_is_an_event(device: Gpu, open_builder: OpenBuilder, recorder: Recorder) -> None:
    gpu = Gpu(device._device, open_builder())
    kernel = gpu.kernel(SAXPY, "saxpy", label="mine.cu")
    gpu.kernel(SAXPY, "saxpy", label="mine.cu")
    (event,) = recorder.named("load")
    assert (event["device"], event["program"]) == (device.name, "mine.cu")
    assert event["key"] == kernel.module.artifact.digest
    assert event["seconds"] > 0


# Unloading


@pytest.mark.parametrize("launches", [0, 1, 2, 5])
def test_trim_unloads_what_only_the_memo_holds(launches: int, faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    with no_collector():
        held = gpu.kernel(KERNELS, "add")
        dropped = gpu.kernel(SAXPY, "saxpy")
        made = gpu.zeros(4)
        for _ in range(launches):
            dropped[1, 4](1.0, made, made, 4)
            dropped.launch(1.0, made, made, 4, grid=1, block=4)
        assert gpu.trim() == 0  # Both are held.
        del dropped
        with faulty.count_calls("module.unload", "synchronize") as calls:
            assert gpu.trim() == 1
        assert calls == {"module.unload": 1, "synchronize": 1}
        assert gpu.kernel(KERNELS, "add") is held
        with faulty.count_calls("load") as calls:
            gpu.kernel(SAXPY, "saxpy")
        assert calls == {"load": 1}


def test_a_launch_that_can_still_run_keeps_its_module_loaded(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    made = saxpy_case(gpu)
    holders: dict[str, Callable[[], object]] = {
        "bound": lambda: gpu.kernel(SAXPY, "saxpy").bind(2.0, made.x, made.y, made.n, grid=5, block=64),
        "launcher": lambda: gpu.kernel(SAXPY, "saxpy")[5, 64],
        "symbol": lambda: gpu.module(KERNELS + "//").symbol("table"),
        "module": lambda: gpu.module(SAXPY),
    }
    with no_collector():
        for hold in holders.values():
            holder = hold()
            assert gpu.trim() == 0
            del holder
            with faulty.count_calls("module.unload") as calls:
                assert gpu.trim() == 1
            assert calls == {"module.unload": 1}


def test_a_launcher_outlives_its_kernel(faulty: FaultyGpu) -> None:
    made = saxpy_case(faulty.gpu)
    launcher = faulty.gpu.kernel(SAXPY, "saxpy")[5, 64]
    faulty.gpu.trim()
    for times in range(1, 6):
        launcher(2.0, made.x, made.y, made.n)
        made.check(times)


def test_a_module_without_references_is_unloaded_at_a_safe_point_only(faulty: FaultyGpu) -> None:
    with no_collector():
        kernel = faulty.gpu.kernel(SAXPY, "saxpy")
        with faulty.count_calls("module.unload") as calls:
            faulty.gpu._session.kernels.clear()
            faulty.gpu._session.modules.clear()
            del kernel
            faulty.gpu.array([1.0]).numpy()
        assert calls == {}
        with faulty.count_calls("module.unload") as calls:
            faulty.gpu.synchronize()
        assert calls == {"module.unload": 1}


# Variables


def test_variables_are_read_and_written(device: Gpu) -> None:
    module = device.module(KERNELS)
    table = module.symbol("table", "float32")
    assert table.numpy().tolist() == [1.5, 2.5, 3.5]
    table.write([4.0, 5.0, 6.0])
    assert table.numpy().tolist() == [4.0, 5.0, 6.0]
    untyped = module.symbol("table")
    assert untyped.numpy().tobytes() == np.array([4, 5, 6], np.float32).tobytes()
    assert untyped.numpy("float32").tolist() == [4.0, 5.0, 6.0]
    assert table.numpy("float64").tolist() == [4.0, 5.0, 6.0]
    with pytest.raises(InputError, match="12 bytes, which is not a multiple of the size of int64"):
        untyped.numpy("int64")
    assert repr(table) == f"<variable table, 12 bytes on {device.name}>"
    assert (table.nbytes, table.dtype.name) == (12, "float32")


def test_a_structure_is_written_as_its_bytes(device: Gpu) -> None:
    class Params(ctypes.Structure):
        _fields_ = (("a", ctypes.c_float), ("b", ctypes.c_int))

    source = "struct P { float a; int b; }; __constant__ P p; "
    source += "__global__ void k(float* o) { *o = p.a * p.b; }"
    module = device.module(source)
    out = device.zeros(1)
    module.symbol("p").write(Params(2.5, 7))
    module["k"][1, 1](out)
    assert out.numpy().tolist() == [17.5]
    with pytest.raises(InputError, match="p has 8 bytes, not 4"):
        module.symbol("p").write(b"1234")


def test_constants_written_from_the_host_are_what_kernels_read(device: Gpu) -> None:
    module = device.module(KERNELS)
    out = device.zeros(4, "int32")
    module["weigh"][1, 4](out)
    assert out.numpy().tolist() == [10, 20, 30, 40]
    module.symbol("weights", "int32").write([7, -8, 9, 10])
    module["weigh"][1, 4](out)
    assert out.numpy().tolist() == [70, -80, 90, 100]


def test_a_typed_variable_of_bytes_does_not_take_other_elements_as_bytes(device: Gpu) -> None:
    module = device.module("__device__ unsigned char t[8];")
    typed = module.symbol("t", "uint8")
    with pytest.raises(InputError, match="values from 258 to 258 do not fit uint8"):
        typed.write(np.array([258]))
    typed.write(np.arange(8))
    assert typed.numpy().tolist() == list(range(8))
    module.symbol("t").write(np.array([258]))
    assert typed.numpy().tolist() == [2, 1, 0, 0, 0, 0, 0, 0]


def test_variables_keep_their_value_while_a_handle_lives(faulty: FaultyGpu) -> None:
    gpu = faulty.gpu
    with no_collector():
        kernel = gpu.kernel(KERNELS, "count")
        for _ in range(3):
            kernel[1, 1]()
            gpu.trim()
        assert kernel.module.symbol("counter", "int32").numpy().tolist() == [44]
        del kernel
        gpu.trim()
        assert gpu.module(KERNELS).symbol("counter", "int32").numpy().tolist() == [41]  # loaded again


def test_a_variable_in_a_namespace_has_a_name_expression(device: Gpu) -> None:
    source = (
        "namespace ns { __device__ int hidden = 9; } __global__ void k(int* o) { *o = ns::hidden; }"
    )
    module = device.module(source, names=["&ns::hidden"])
    assert module.symbol("ns::hidden", "int32").numpy().tolist() == [9]
    for name in ("hidden", "&ns::hidden"):
        with pytest.raises(InputError, match=f"has no variable '{name}'") as caught:
            module.symbol(name)
        assert caught.value.hint == "did you mean 'ns::hidden'?"


def test_modules_and_kernels_say_what_they_are(setup: SaxpyCase) -> None:
    name = setup.gpu.name
    assert repr(setup.saxpy) == f"<Kernel saxpy(float, float const*, float*, int) on {name}>"
    module = setup.gpu.module(SAXPY, label="mine.cu")
    assert repr(module) == f"<Module mine.cu on {name}: saxpy(float, float const*, float*, int)>"


# Architectures


def test_code_for_the_a_variant_runs_on_its_own_device(device: Gpu) -> None:
    kernel = device.kernel(SAXPY, "saxpy", arch="sm_90a")
    assert str(kernel.module.artifact.arch) == "sm_90a"
    assert kernel is not device.kernel(SAXPY, "saxpy")
    made = saxpy_case(device)
    kernel[5, 64](2.0, made.x, made.y, made.n)
    made.check(1)


@pytest.mark.parametrize(
    ("target", "strict", "why"),
    [
        ("sm_80", False, None),
        ("sm_90", False, None),
        ("sm_90a", False, None),
        ("sm_90", True, None),
        ("sm_80", True, "strict matching requires the same architecture"),
        ("sm_90a", True, "strict matching requires the same architecture"),
        ("sm_100", False, "the target is newer than the device"),
        ("sm_100a", False, "an 'a' target runs only on compute capability 10.0"),
    ],
)
def test_ptx_runs_where_its_target_allows(
    target: str, strict: bool, why: str | None, device: Gpu
) -> None:
    source = PTX.replace(".version 8.0", ".version 8.6").replace("sm_80", target)
    if why is None:
        kernel = device.kernel(source, "keep", strict=strict)
        out = device.zeros(16, "uint8")
        kernel[1, 1](out, 7, 9, 0.5)
        assert out.numpy()[0] == 9
        return
    with pytest.raises(TargetError, match=why) as caught:
        device.kernel(source, "keep", strict=strict)
    assert target in str(caught.value)
    assert "sm_90" in str(caught.value)


def test_strict_takes_no_code_made_for_a_lower_minor(
    open_device: OpenDevice, open_builder: OpenBuilder
) -> None:
    builder = open_builder()
    builder.build(Program.of(SAXPY), "sm_80")
    gpu = open_device("emulator", builder=builder, arch="sm_86")
    assert str(gpu.kernel(SAXPY, "saxpy").module.artifact.arch) == "sm_80"  # found, not compiled
    strict = gpu.kernel(SAXPY, "saxpy", strict=True)
    assert str(strict.module.artifact.arch) == "sm_86"


@pytest.mark.parametrize(
    ("stored", "device", "used"),
    [
        (["sm_80"], "sm_86", "sm_80"),
        (["sm_80", "sm_86"], "sm_86", "sm_86"),
        (["sm_90a"], "sm_90", "sm_90a"),
        (["sm_100f"], "sm_103", "sm_100f"),
        (["sm_90"], "sm_100", "sm_100"),  # another major: compiled
        (["sm_89"], "sm_86", "sm_86"),  # a higher minor: compiled
    ],
)
def test_stored_code_is_used_for_every_runnable_architecture(
    stored: list[str], device: str, used: str,
    open_device: OpenDevice, open_builder: OpenBuilder, recorder: Recorder,
) -> None:  # fmt: skip
    builder = open_builder()
    for arch in stored:
        builder.build(Program.of(SAXPY), arch)
    compiled = len(recorder.named("compile"))
    made = saxpy_case(open_device("emulator:5", arch=device))
    gpu = open_device("emulator", builder=builder, arch=device)
    kernel = gpu.kernel(SAXPY, "saxpy")
    assert str(kernel.module.artifact.arch) == used
    assert len(recorder.named("compile")) - compiled == (0 if used in stored else 1)
    y = gpu.array(made.ys)
    kernel[5, 64](2.0, gpu.array(made.xs), y, made.n)
    np.testing.assert_allclose(y.numpy(), made.ys + 2.0 * made.xs, rtol=1e-5, atol=1e-5)


def test_a_device_newer_than_the_compiler_says_so_and_runs_where_its_driver_may_compile(
    open_device: OpenDevice,
) -> None:
    new = open_device("emulator", arch="sm_130")
    with pytest.raises(
        DeviceError, match=r"emulator:0\[sm_130\] is sm_130, which .* cannot compile for"
    ) as caught:
        new.kernel(SAXPY, "saxpy")
    assert "pip install -U 'preheat[cu13]'" in str(caught.value.hint)
    assert "PREHEAT_JIT=1" in str(caught.value.hint)
    made = saxpy_case(open_device("emulator:1", arch="sm_130", jit=True))
    made.launch(4)
    made.check(4)
    assert made.saxpy.module.artifact.arch < new.arch


def test_a_device_older_than_the_compiler_says_what_the_compiler_supports(
    open_device: OpenDevice,
) -> None:
    old = open_device("emulator", arch="sm_70")
    with pytest.raises(DeviceError, match=r"is sm_70, which .* cannot compile for") as caught:
        old.kernel(SAXPY, "saxpy")
    assert str(caught.value.hint).startswith("it supports sm_75, ")


def test_the_drivers_compiler_is_asked_for_only_where_it_is_needed(
    open_faulty: OpenFlaky,
) -> None:
    faulty = open_faulty("emulator", jit=True)
    asked: list[bool] = []
    load = faulty.device._part.load

    def watched(artifact: Artifact, *, jit: bool = False, **more: Any) -> object:
        asked.append(jit)
        return load(artifact, jit=jit, **more)

    faulty.device._part.load = watched
    saxpy_case(faulty.gpu)
    assert asked == [False]


# Code that the driver rejects


def invalid() -> InvalidCodeError:
    return InvalidCodeError("cuModuleLoadData", 200, "CUDA_ERROR_INVALID_IMAGE", "invalid kernel image")


def test_code_the_driver_calls_invalid_is_purged_and_rebuilt_once(
    kind: str, open_builder: OpenBuilder, open_faulty: OpenFlaky, recorder: Recorder
) -> None:
    recorder.forgive = True
    faulty = open_faulty(kind, open_builder())
    faulty.device.fail("load", invalid())
    kernel = faulty.gpu.kernel(SAXPY, "saxpy")
    assert faulty.device.calls["load"] == 2
    assert len(recorder.named("compile")) == 2
    (damaged,) = recorder.named("damaged")
    assert damaged["tier"] == "device"
    assert damaged["key"] == kernel.module.artifact.digest
    assert "CUDA_ERROR_INVALID_IMAGE" in damaged["reason"]
    made = saxpy_case(faulty.gpu)
    kernel[5, 64](2.0, made.x, made.y, made.n)
    made.check(1)
    again = open_faulty(kind, open_builder())  # Another process finds the rebuilt code.
    again.gpu.kernel(SAXPY, "saxpy")
    assert recorder.named("hit")[-1]["tier"] == "disk"


def test_code_that_stays_invalid_is_reported(
    kind: str, open_builder: OpenBuilder, open_faulty: OpenFlaky, recorder: Recorder
) -> None:
    recorder.forgive = True
    faulty = open_faulty(kind, open_builder())
    faulty.device.fail("load", invalid(), invalid())
    with pytest.raises(InvalidCodeError, match="CUDA_ERROR_INVALID_IMAGE") as caught:
        faulty.gpu.kernel(SAXPY, "saxpy")
    assert (caught.value.code, caught.value.call) == (200, "cuModuleLoadData")
    assert faulty.device.calls["load"] == 2
    assert len(recorder.named("damaged")) == 1
    assert faulty.gpu.kernel(SAXPY, "saxpy").name == "saxpy"  # A later call tries again.


@pytest.mark.parametrize(
    "error",
    [
        out_of_memory("cuModuleLoadData"),
        DriverError(
            "cuModuleLoadData", 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the PTX is too new"
        ),
    ],
    ids=lambda error: error.name,
)
def test_a_load_that_fails_for_another_reason_purges_nothing(
    error: DriverError, kind: str, open_builder: OpenBuilder, open_faulty: OpenFlaky, recorder: Recorder
) -> None:
    faulty = open_faulty(kind, open_builder())
    faulty.device.fail("load", error)
    with pytest.raises(type(error), match=error.name):
        faulty.gpu.kernel(SAXPY, "saxpy")
    assert faulty.device.calls["load"] == 1
    faulty.gpu.kernel(SAXPY, "saxpy")
    assert len(recorder.named("compile")) == 1
    assert recorder.named("damaged") == []


def test_ptx_the_drivers_compiler_refuses_is_not_compiled_again(
    open_builder: OpenBuilder, open_faulty: OpenFlaky, recorder: Recorder
) -> None:
    faulty = open_faulty("emulator", open_builder(), jit=True)
    faulty.device._part.arch = Arch.parse("sm_130")  # newer than the compiler
    faulty.device.fail("load", invalid())
    with pytest.raises(InvalidCodeError):
        faulty.gpu.kernel(SAXPY, "saxpy")
    assert faulty.device.calls["load"] == len(recorder.named("compile")) == 1


def test_ptx_the_emulator_cannot_read_is_rebuilt_too(
    open_device: OpenDevice, open_builder: OpenBuilder, recorder: Recorder
) -> None:
    recorder.forgive = True
    builder = open_builder()
    program = Program.of(SAXPY)
    artifact = builder.build(program, "sm_90")
    object.__setattr__(artifact, "ptx", b"\xff\xfe not a text")
    gpu = open_device("emulator", builder=builder)
    kernel = gpu.kernel(program, "saxpy")
    assert len(recorder.named("damaged")) == 1
    assert kernel.module.artifact.ptx.startswith(b"//")


@pytest.mark.parametrize(
    "given", [{"options": "-use_fast_math"}, {"include": "."}, {"names": "k<int>"}]
)
def test_one_thing_where_several_are_meant_is_refused_by_name(
    device: Gpu, given: dict[str, str]
) -> None:
    with pytest.raises(InputError, match=f"{next(iter(given))} must be a list"):
        device.module(KERNELS, **given)  # type: ignore[arg-type]


def test_a_file_is_the_one_of_the_directory_it_was_asked_in(
    device: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for value in (1, 2):
        place = tmp_path / str(value)
        place.mkdir()
        (place / "k.cu").write_text(f'extern "C" __global__ void k(int* x) {{ *x = {value}; }}')
        monkeypatch.chdir(place)
        x = device.zeros(1, "int32")
        device.kernel("k.cu", "k")[1, 1](x)
        found.append(int(x.numpy()[0]))
    assert found == [1, 2]


def test_an_overload_is_chosen_by_a_type_that_has_template_arguments(device: Gpu) -> None:
    source = """
    template <class T> struct P { T value; };
    __global__ void f(P<int>* x) { x->value = 1; }
    __global__ void f(float* x) { *x = 2; }
    """
    with pytest.raises(InputError) as caught:
        device.kernel(source, "f")
    assert caught.value.hint == "use one of the names 'f(P<int>*)', 'f(float*)'"
    x = device.zeros(1, "int32")
    device.kernel(source, "f(P<int>*)")[1, 1](x)
    assert x.numpy()[0] == 1


def test_a_method_of_a_module_of_cupy_is_an_error_with_the_expression_of_preheat(device: Gpu) -> None:
    module: Any = device.module('extern "C" __global__ void f() {}')
    for name, instead in {
        "get_function": r"; write module\['name'\]",
        "get_global": r"; write module.symbol\('name'\)",
        "nothing": "",
    }.items():
        with pytest.raises(AttributeError, match=f"^a Module has no attribute '{name}'{instead}$"):
            getattr(module, name)
    assert not hasattr(module, "get_function")
