"""Code that others compiled: cubins and object code are loaded, launched, and refused with reasons."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from preheat.build.builder import Builder
from preheat.build.code import Code
from preheat.errors import (
    CaptureError,
    DeviceError,
    InputError,
    LaunchError,
    SealedError,
    TargetError,
    UnknownEntryError,
)
from preheat.gpu import Gpu
from preheat.model.config import Config, SealMode
from preheat.model.program import Program
from preheat.toolchain.binaries.cubin import read_cubin
from tests.conftest import Recorder

SOURCE = """
__device__ int counter = 5;
template<class T> __global__ void scale(T *x, T by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= by;
}
extern "C" __global__ void add(float *x, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += by;
}
"""
PROGRAM = Program.of(SOURCE, label="others.cu", names=["scale<float>", "&counter"])
N = 100


class Object:
    """What `ObjectCode` of cuda.core shows of itself."""

    def __init__(
        self, code: Any, code_type: str, name: str = "theirs", names: Mapping[Any, Any] | None = None
    ) -> None:
        self.code = code
        self.code_type = code_type
        self.name = name
        self.symbol_mapping = names or {}


@pytest.fixture
def cubin(shared_builder: Builder) -> bytes:
    return shared_builder.build(PROGRAM, "sm_90").cubin


@pytest.fixture
def ptx(shared_builder: Builder) -> bytes:
    return shared_builder.build(PROGRAM, "sm_90").ptx


@pytest.fixture
def lowered(shared_builder: Builder) -> bytes:
    """Return the mangled name of the instance of the template."""
    return shared_builder.build(PROGRAM, "sm_90").names["scale<float>"].encode()


@pytest.fixture
def sealed(open_builder: Callable[..., Builder], config: Config) -> Builder:
    """Return a builder that compiles nothing, on an empty cache."""
    return open_builder(replace(config, sealed=SealMode.ERROR))


# PTX, which runs on every device


def test_object_code_with_ptx_runs_under_its_name_expressions(
    device: Gpu, ptx: bytes, lowered: bytes
) -> None:
    names = {"scale<Number>": lowered, b"scale<Other>": lowered.decode()}
    code = Object(ptx + b"\0", "ptx", names=names)
    module = device.module(code)
    x = device.array(np.arange(N, dtype=np.float32))
    module["scale<Number>"][1, 128](x, 2.0, N)
    module["scale<Other>"][1, 128](x, 2.0, N)
    module["add"][1, 128](x, 1.0, N)
    np.testing.assert_array_equal(x.numpy(), np.arange(N) * 4 + 1)
    assert module.artifact.label == "theirs"
    assert device.module(code) is module


def test_ptx_without_names_is_the_program_that_its_text_is(device: Gpu, ptx: bytes) -> None:
    module = device.module(Object(ptx, "ptx", name="same.ptx"))
    text = device.module(Program.of(ptx.decode(), label="same.ptx"))
    assert text is module
    assert sorted(module) == ["add", "scale<float>"]


def test_object_code_may_be_a_file(device: Gpu, ptx: bytes, tmp_path: Path) -> None:
    file = tmp_path / "theirs.ptx"
    file.write_bytes(ptx)
    assert sorted(device.module(Object(str(file), "ptx"))) == ["add", "scale<float>"]


def test_a_sealed_process_assembles_no_ptx(
    sealed: Builder, open_device: Callable[..., Gpu], ptx: bytes
) -> None:
    gpu = open_device("emulator", builder=sealed)
    with pytest.raises(SealedError, match="theirs"):
        gpu.module(Object(ptx, "ptx"))


# What cannot be loaded


def test_the_emulator_says_that_it_cannot_run_a_cubin(
    open_device: Callable[..., Gpu], cubin: bytes
) -> None:
    gpu = open_device("emulator")
    code: Any
    for code in (cubin, bytearray(cubin), memoryview(cubin), Object(cubin, "cubin")):
        with pytest.raises(
            DeviceError, match="is a cubin, and emulator:0 executes PTX alone"
        ) as refused:
            gpu.module(code)
        assert refused.value.hint == "compile it to PTX, or pass its source"


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("sm_80", "machine code runs only on devices of its own major version"),
        ("sm_100", "the target is newer than the device"),
        ("sm_100a", "an 'a' target runs only on compute capability 10.0"),
    ],
)
def test_code_for_another_architecture_is_refused(
    device: Gpu, shared_builder: Builder, arch: str, why: str
) -> None:
    code = shared_builder.build(PROGRAM, arch).cubin
    with pytest.raises(TargetError, match=f"mine targets {arch} and cannot run on .*: {why}"):
        device.module(code, label="mine")


def test_strict_wants_the_architecture_of_the_device(
    open_device: Callable[..., Gpu], shared_builder: Builder
) -> None:
    gpu = open_device("emulator", arch="sm_86")
    code = shared_builder.build(PROGRAM, "sm_80").cubin
    with pytest.raises(DeviceError, match="executes PTX alone"):  # It could run on such a GPU.
        gpu.module(code)
    with pytest.raises(TargetError, match="strict matching"):
        gpu.module(code, strict=True)


def test_other_formats_and_objects_are_refused(device: Gpu, ptx: bytes) -> None:
    with pytest.raises(InputError, match="is PTX, not a cubin") as refused:
        device.module(ptx)
    assert refused.value.hint == "pass PTX as text: data.decode()"
    with pytest.raises(InputError, match="theirs is LTO-IR, not a cubin"):
        device.module(Object(b"\xed\x43\x4e\x7f", "cubin"))
    for format in ("ltoir", "fatbin", "object", "library"):
        with pytest.raises(
            InputError, match=f"'theirs' is {format}, which cannot be loaded"
        ) as refused:
            device.module(Object(b"", format))
        assert refused.value.hint
    for other in (3, None, object()):
        with pytest.raises(InputError, match="source must be a path, source text or a Program, not"):
            device.module(other)  # type: ignore[arg-type]


def test_arguments_of_a_compile_are_refused(device: Gpu, ptx: bytes) -> None:
    given: dict[str, Any]
    for given in ({"options": ["-G"]}, {"include": ["."]}, {"headers": {"a.h": ""}}, {"arch": "sm_90"}):
        (name,) = given
        with pytest.raises(InputError, match=f"{name}= cannot be used: the code is compiled already"):
            device.module(Object(ptx, "ptx"), **given)


def test_compiled_code_is_not_a_program(device: Gpu, ptx: bytes) -> None:
    code: Any = Object(ptx, "ptx")
    with pytest.raises(InputError, match="compiled code is not a program"):
        device.kernels([(code, "add")])


def test_a_capture_refuses_to_load_it(device: Gpu, ptx: bytes) -> None:
    code = Object(ptx, "ptx", name="late", names={"other": b"add"})
    with pytest.raises(CaptureError, match="compiling or loading a program"), device.capture():
        device.module(code)
    add = device.module(code)["other"]
    x = device.zeros(4)
    with device.capture() as graph:
        device.module(code)["other"][1, 32](x, 1.0, 4)
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.ones(4, np.float32))
    assert add.module is device.module(code)


def test_parameters_without_types_take_numbers_of_their_size(
    device: Gpu, shared_builder: Builder
) -> None:
    """A cubin has no types of `extern "C"` kernels. Its layout is used here with code of any device."""
    artifact = shared_builder.build(PROGRAM, "sm_90")
    entries = read_cubin(artifact.cubin, "it").entries
    module = device._session.load(Code(replace(artifact, entries=entries, digest="0" * 64)))
    x = device.array(np.arange(N, dtype=np.float32))
    for by in (0.5, np.float32(0.5), ctypes.c_float(0.5)):
        module["add"][1, 128](x, by, N)
    module["add"][1, 128](x, 0.5, np.int32(N))
    np.testing.assert_array_equal(x.numpy(), np.arange(N) + 2)
    for wrong in (np.float64(0.5), np.float16(0.5), ctypes.c_double(0.5), "0.5", 1 << 32):
        with pytest.raises(LaunchError, match="argument 1: b32 cannot"):
            module["add"][1, 128](x, wrong, N)
    with pytest.raises(
        LaunchError, match=r"2 arguments given, but the kernel takes 3 \(b64, b32, b32\)"
    ):
        module["add"][1, 128](x, 0.5)
    with pytest.raises(LaunchError, match=r"float\* cannot take an array of int32"):
        module["scale<float>"][1, 128](device.zeros(N, "int32"), 1.0, N)


# Cubins, which need a GPU


@pytest.fixture
def gpu(open_device: Callable[..., Gpu]) -> Gpu:
    return open_device("cuda")


@pytest.fixture
def native_cubin(gpu: Gpu, shared_builder: Builder) -> bytes:
    """Return a cubin for the GPU that there is."""
    return shared_builder.build(PROGRAM, gpu.arch).cubin


@pytest.mark.gpu
def test_a_cubin_runs_and_its_arguments_are_checked(gpu: Gpu, native_cubin: bytes) -> None:
    module = gpu.module(native_cubin)
    x = gpu.array(np.arange(N, dtype=np.float32))
    module["scale<float>"][1, 128](x, 3.0, N)
    module["add"][1, 128](x, np.float32(0.5), N)
    np.testing.assert_array_equal(x.numpy(), np.arange(N) * 3 + 0.5)
    with pytest.raises(LaunchError, match="2 arguments given, but the kernel takes 3"):
        module["add"][1, 128](x, 1.0)
    with pytest.raises(LaunchError, match="argument 0"):
        module["scale<float>"][1, 128](gpu.zeros(N, "int32"), 1.0, N)
    assert module.symbol("counter", "int32").numpy() == 5
    with pytest.raises(UnknownEntryError) as unknown:
        module["ad"]
    assert unknown.value.hint == "did you mean 'add'?"


@pytest.mark.gpu
def test_a_cubin_is_loaded_once_and_unloaded_with_its_last_holder(
    gpu: Gpu, native_cubin: bytes
) -> None:
    module = gpu.module(native_cubin)
    assert gpu.module(bytes(native_cubin)) is module
    alive = weakref.ref(module)
    x = gpu.zeros(4)
    add = module["add"]
    with gpu.capture() as graph:
        add[1, 32](x, 1.0, 4)
    del module, add
    gpu.trim()
    graph.replay()
    np.testing.assert_array_equal(x.numpy(), np.ones(4, np.float32))
    graph.close()
    del graph
    gc.collect()
    gpu.trim()
    gc.collect()
    assert alive() is None


@pytest.mark.gpu
def test_a_sealed_process_loads_a_cubin_and_nothing_is_stored(
    sealed: Builder, recorder: Recorder, open_device: Callable[..., Gpu], native_cubin: bytes
) -> None:
    gpu = open_device("cuda", builder=sealed)
    module = gpu.module(native_cubin, label="mine")
    assert module.artifact.label == "mine"
    assert [each["program"] for each in recorder.named("load")] == ["mine"]
    assert not recorder.named("compile")
    assert not recorder.named("put")


@pytest.mark.gpu
def test_a_damaged_cubin_is_an_error_and_the_context_survives(gpu: Gpu, native_cubin: bytes) -> None:
    from preheat.errors import DriverError

    at = native_cubin.index(b".text.add")
    with pytest.raises((InputError, DriverError)):
        gpu.module(native_cubin[:at] + b"\xff" * 9 + native_cubin[at + 9 :])["add"]
    assert gpu.zeros(3).numpy().tolist() == [0, 0, 0]


@pytest.mark.gpu
def test_object_code_of_cuda_core_runs(gpu: Gpu) -> None:
    core = pytest.importorskip("cuda.core")
    options = core.ProgramOptions(arch=f"sm_{gpu.arch.major}{gpu.arch.minor}")
    program = core.Program(SOURCE, "c++", options)
    for target in ("cubin", "ptx"):
        code = program.compile(target, name_expressions=("scale<double>",))
        module = gpu.module(code)
        x = gpu.array(np.arange(N, dtype=np.float64))
        module["scale<double>"][1, 128](x, 2.0, N)
        np.testing.assert_array_equal(x.numpy(), np.arange(N) * 2)
        program = core.Program(SOURCE, "c++", options)
