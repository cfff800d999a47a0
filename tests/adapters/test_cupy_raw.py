"""`RawKernel` and `RawModule` of preheat: the interface of CuPy's classes, without CuPy."""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import preheat
from preheat import Gpu
from preheat.adapters.cupy import RawKernel, RawModule, place
from preheat.build.builder import Builder
from preheat.config import Config, SealMode
from preheat.errors import (
    CaptureError,
    CompileError,
    InputError,
    LaunchError,
    NoGpuError,
    SealedError,
    UnknownEntryError,
)
from preheat.link_errors import LinkError

SOURCE = r"""
struct Pair { int first; float second; };
extern "C" {
__constant__ float factors[4];
__global__ void add(const float* a, const float* b, float* out, unsigned int n) {
    unsigned int i = blockDim.x * blockIdx.x + threadIdx.x;
    int unused;
    if (i < n) out[i] = a[i] + b[i];
}
__global__ void scalars(double* out, float f, double d, long long l, short s, unsigned char c, bool b) {
    out[0] = f; out[1] = d; out[2] = l; out[3] = s; out[4] = c; out[5] = b;
}
__global__ void complexes(float2 z, double2 w, double* out) {
    out[0] = z.x; out[1] = z.y; out[2] = w.x; out[3] = w.y;
}
__global__ void pairs(Pair p, float* out) { out[0] = p.first; out[1] = p.second; }
__global__ void bits(unsigned int* out, unsigned long long n) { *out = n; }
__global__ void bytes(unsigned char* out) { out[threadIdx.x] = threadIdx.x; }
__global__ void scale(float* x) { x[threadIdx.x] *= factors[threadIdx.x]; }
__global__ void dynamic(float* x) { extern __shared__ float s[]; s[threadIdx.x] = 1; x[0] = s[0]; }
__global__ void columns(const float* x, float* out, int step) {
    out[threadIdx.x] = x[(int)threadIdx.x * step];
}
__global__ void blocks(int* out) { if (threadIdx.x == 0) atomicAdd(out, 1); }
__global__ void nothing(void* p, int* out) { *out = p == 0; }
}
"""
TEMPLATE = r"""
namespace tags { enum class Tag { A, B }; }
template <class T> __global__ void square(T* x, int n) {
    if (threadIdx.x < n) x[threadIdx.x] *= x[threadIdx.x];
}
template <tags::Tag t> __global__ void tagged(int* x) { *x = (int)t; }
__global__ void plain(double* x) { *x = 7; }
"""


@pytest.fixture
def gpu(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Return a device, which raw kernels take for the default and for that of its arrays."""
    monkeypatch.setattr(place, "device", lambda *_: device)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    return device


@pytest.fixture
def module(gpu: Gpu) -> RawModule:
    del gpu
    return RawModule(code=SOURCE)


# Launches


def test_a_kernel_is_called_with_grid_block_and_a_tuple_of_arguments(gpu: Gpu) -> None:
    add = RawKernel(SOURCE, "add")
    a, out = gpu.array(np.arange(100, dtype="float32")), gpu.zeros(100)
    add((4,), (32,), (a, a, out, 100))
    assert out.numpy().tolist() == [2.0 * i for i in range(100)]
    assert (add.name, add.__name__, add.backend, add.options) == ("add", "add", "nvrtc", ())
    assert (add.code, add.file_path, add.name_expressions) == (SOURCE, None, None)
    assert (add.enable_cooperative_groups, add.translate_cucomplex, add.jitify) == (False, False, False)


def test_an_empty_grid_is_one_block_as_in_cupy(gpu: Gpu, module: RawModule) -> None:
    count = gpu.zeros(1, "int32")
    module.get_function("blocks")((0, 3), (0,), (count,))
    assert count.numpy().tolist() == [3]


def test_a_launch_goes_to_the_stream_that_is_given(gpu: Gpu, module: RawModule) -> None:
    blocks, stream = module.get_function("blocks"), gpu.stream()
    count = gpu.zeros(1, "int32")
    with gpu.capture() as graph:
        blocks((5,), (1,), (count,))
    graph.replay(stream=stream)
    blocks((2,), (1,), (count,), stream=stream)
    assert count.numpy().tolist() == [7]


def test_dynamic_shared_memory_needs_no_setting(gpu: Gpu, module: RawModule) -> None:
    dynamic = module.get_function("dynamic")
    x = gpu.zeros(1)
    most = dynamic.max_dynamic_shared_size_bytes
    assert most > 48 << 10
    dynamic((1,), (32,), (x,), shared_mem=most)
    dynamic.max_dynamic_shared_size_bytes = 64 << 10
    assert dynamic.max_dynamic_shared_size_bytes == 64 << 10
    assert x.numpy().tolist() == [1]
    with pytest.raises(LaunchError, match=f"a launch can have {most}"):
        dynamic.max_dynamic_shared_size_bytes = most + 1


def test_a_cooperative_grid_is_reduced_to_the_blocks_that_run_together(gpu: Gpu) -> None:
    blocks = RawKernel(SOURCE, "blocks", enable_cooperative_groups=True)
    count = gpu.zeros(1, "int32")
    most = blocks.kernel.occupancy(1024).blocks * gpu.limits.processors
    with pytest.warns(RuntimeWarning, match=f"reduced from {most + 5} to {most} blocks"):
        blocks((most + 5,), (1024,), (count,))
    assert count.numpy().tolist() == [most]
    with pytest.raises(LaunchError, match=f"more blocks than the {most} that run at the same time"):
        blocks((most, 2), (1024,), (count,))


@pytest.mark.parametrize("prepare", [RawKernel.compile, lambda k: k((1,), (1,), (None, None))])
def test_a_capture_needs_a_kernel_that_was_compiled_or_launched(
    gpu: Gpu, prepare: Callable[[RawKernel], None]
) -> None:
    source = 'extern "C" __global__ void one(int* p, int* out) { if (out) *out = 1; }'
    one, out = RawKernel(source, "one"), gpu.zeros(1, "int32")
    with pytest.raises(CaptureError, match="compiling or loading a program") as caught, gpu.capture():
        one((1,), (1,), (None, out))
    assert str(caught.value.hint).endswith("for a RawKernel, call .compile() or launch it once")
    prepare(one)
    with gpu.capture() as graph:
        one((1,), (1,), (None, out))
    graph.replay()
    assert out.numpy().tolist() == [1]


# Memory


@pytest.fixture
def emulator(open_device: Callable[..., Gpu], monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Return an emulator as the default device. It uses arrays of NumPy as memory."""
    made = open_device("emulator", host_arrays=True)
    monkeypatch.setattr(place, "device", lambda *_: made)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    return made


def test_arrays_of_numpy_are_memory_on_an_emulator_that_permits_it(emulator: Gpu) -> None:
    del emulator
    a, out = np.arange(8, dtype="float32"), np.zeros(8, "float32")
    RawKernel(SOURCE, "add")((1,), (8,), (a, a, out, a.size))
    assert out.tolist() == (a + a).tolist()


def test_a_view_is_passed_by_the_address_of_its_first_element(emulator: Gpu) -> None:
    """CuPy ignores strides: a kernel that knows them gets what it wants."""
    del emulator
    matrix, out = np.arange(12, dtype="float32").reshape(3, 4), np.zeros(3, "float32")
    columns = RawKernel(SOURCE, "columns")
    columns((1,), (3,), (matrix[:, 1], out, 4))
    assert out.tolist() == matrix[:, 1].tolist()
    columns((1,), (3,), (matrix[::-1, 1], out[:], -4))
    assert out.tolist() == matrix[::-1, 1].tolist()


@pytest.mark.parametrize("dtype", ["uint32", "int32", "float32"])
def test_elements_of_the_same_size_may_have_another_type(gpu: Gpu, dtype: str) -> None:
    out = gpu.zeros(1, dtype)
    RawKernel(SOURCE, "bits")((1,), (1,), (out, 9))
    assert out.numpy().view("uint32").tolist() == [9]


@pytest.mark.parametrize("dtype", ["int64", "float16", "uint8", "complex128"])
def test_elements_of_another_size_are_refused(gpu: Gpu, dtype: str) -> None:
    with pytest.raises(
        LaunchError, match=rf"argument 0: unsigned int\* cannot take an array of {dtype}"
    ):
        RawKernel(SOURCE, "bits")((1,), (1,), (gpu.zeros(1, dtype), 9))


def test_complex_numbers_are_pairs_and_any_memory_is_bytes(gpu: Gpu, module: RawModule) -> None:
    z = gpu.array(np.array([1 + 2j, 3 + 4j], "complex64"))
    out = gpu.zeros(2, "complex64")
    module.get_function("add")((1,), (4,), (z, z, out, 4))
    assert out.numpy().tolist() == [2 + 4j, 6 + 8j]
    word = gpu.zeros(1, "uint32")
    module.get_function("bytes")((1,), (4,), (word,))
    assert word.numpy().tolist() == [0x03020100]


def test_none_is_a_null_pointer(gpu: Gpu, module: RawModule) -> None:
    out = gpu.zeros(1, "int32")
    module.get_function("nothing")((1,), (1,), (None, out))
    assert out.numpy().tolist() == [1]


# Values

RIGHT: list[tuple[tuple[Any, ...], list[float]]] = [
    ((1.5, 2.5, 3, 4, 5, True), [1.5, 2.5, 3, 4, 5, 1]),
    ((2, 3, -(2**40), -5, 255, 0), [2, 3, -(2**40), -5, 255, 0]),
    (
        (np.float32(0.1), np.float64(0.1), np.int64(2**40), np.int16(-7), np.uint8(9), np.bool_(True)),
        [float(np.float32(0.1)), 0.1, 2**40, -7, 9, 1],
    ),
    ((1, 1, np.int32(-3), np.int64(-4), np.int32(200), np.True_), [1, 1, -3, -4, 200, 1]),
    ((1, 1, np.array([6]), np.array(7, "int64"), np.array([[8]]), False), [1, 1, 6, 7, 8, 0]),
]


@pytest.mark.parametrize(("values", "expected"), RIGHT)
def test_values_arrive_as_they_are(
    gpu: Gpu, module: RawModule, values: tuple[Any, ...], expected: list[float]
) -> None:
    out = gpu.zeros(6, "float64")
    module.get_function("scalars")((1,), (1,), (out, *values))
    assert out.numpy().tolist() == expected


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (
            0,
            np.float64(1),
            r"float cannot take np\.float64\(1\.0\)",
        ),  # CuPy passes the wrong half of it.
        (1, np.float32(1), "double cannot take numpy.float32"),  # CuPy reads beyond it.
        (2, 1.5, "long long cannot take 1.5, a float"),
        (3, 40_000, "short cannot hold 40000"),
        (3, np.int64(40_000), "short cannot hold 40000"),
        (4, -1, "unsigned char cannot hold -1"),
        (4, "text", "unsigned char cannot take 'text'"),
    ],
)
def test_values_that_cupy_passes_wrong_are_refused(
    gpu: Gpu, module: RawModule, at: int, value: Any, message: str
) -> None:
    values: list[Any] = [1.0, 1.0, 1, 1, 1, True]
    values[at] = value
    with pytest.raises(LaunchError, match=f"scalars, argument {at + 1}: {message}"):
        module.get_function("scalars")((1,), (1,), (gpu.zeros(6, "float64"), *values))


def test_the_number_of_arguments_is_checked(gpu: Gpu, module: RawModule) -> None:
    with pytest.raises(LaunchError, match="blocks: 2 arguments given, but the kernel takes 1"):
        module.get_function("blocks")((1,), (1,), (gpu.zeros(1, "int32"), 1))


def test_an_array_of_numpy_is_no_value_unless_it_has_one_element(gpu: Gpu, module: RawModule) -> None:
    out = gpu.zeros(1, "uint32")
    with pytest.raises(TypeError, match=r"numpy\.ndarray of shape \(3,\): only arrays of one element"):
        module.get_function("bits")((1,), (1,), (out, np.arange(3)))


@pytest.mark.parametrize("small", [1 + 2j, np.complex64(1 + 2j), np.array([1 + 2j], "complex64")])
@pytest.mark.parametrize("large", [3 + 4j, np.complex128(3 + 4j)])
def test_complex_values_and_structs_are_passed_by_value(
    gpu: Gpu, module: RawModule, small: Any, large: Any
) -> None:
    out = gpu.zeros(4, "float64")
    module.get_function("complexes")((1,), (1,), (small, large, out))
    assert out.numpy().tolist() == [1, 2, 3, 4]


def test_a_struct_is_a_numpy_record(gpu: Gpu, module: RawModule) -> None:
    out = gpu.zeros(2)
    layout = np.dtype([("first", "int32"), ("second", "float32")])
    for record in (np.array([(3, 0.5)], layout), np.array((3, 0.5), layout)[()]):
        module.get_function("pairs")((1,), (1,), (record, out))
        assert out.numpy().tolist() == [3, 0.5]


# Modules


def test_name_expressions_find_instances(gpu: Gpu) -> None:
    names = ["square<int>", "square<size_t>", "tagged<tags::Tag::B>", "plain"]
    module = RawModule(code=TEMPLATE, name_expressions=names)
    x, tag, number = gpu.array([2, 3, 4], "int32"), gpu.zeros(1, "int32"), gpu.zeros(1, "float64")
    module.get_function("square<int>")((1,), (3,), (x, 2))
    module.get_function("tagged<tags::Tag::B>")((1,), (1,), (tag,))
    module.get_function("plain")((1,), (1,), (number,))
    results = (x.numpy().tolist(), tag.numpy().tolist(), number.numpy().tolist())
    assert results == ([4, 9, 4], [1], [7])
    assert module.name_expressions == tuple(names)
    with pytest.raises(UnknownEntryError, match=r"has no kernel 'square<double>'") as caught:
        module.get_function("square<double>")
    assert str(caught.value.hint).endswith("name_expressions=['square<double>']")


def test_a_name_and_a_source_that_are_swapped_are_refused() -> None:
    with pytest.raises(InputError, match="the name of a kernel cannot be source text"):
        RawKernel("square", TEMPLATE)


def test_a_variable_can_be_set(gpu: Gpu, module: RawModule) -> None:
    module.get_global("factors").write(np.array([1, 2, 3, 4], "float32"))
    x = gpu.array([1.0] * 4, "float32")
    module.get_function("scale")((1,), (4,), (x,))
    assert x.numpy().tolist() == [1, 2, 3, 4]
    with pytest.raises(InputError, match="no variable 'nowhere'"):
        module.get_global("nowhere")


def test_a_file_of_ptx_is_loaded(gpu: Gpu, tmp_path: Path) -> None:
    file = tmp_path / "kernels.ptx"
    file.write_bytes(RawModule(code=TEMPLATE).module.artifact.ptx)
    module = RawModule(path=str(file))
    assert (module.code, module.file_path, module.backend) == (None, str(file), "nvcc")
    out = gpu.zeros(1, "float64")
    module.get_function("plain")((1,), (1,), (out,))
    assert out.numpy().tolist() == [7]
    with pytest.raises(InputError, match=r"cannot read .*missing\.cubin"):
        RawModule(path=str(tmp_path / "missing.cubin")).get_function("plain")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "either code= or path="),
        ({"code": "", "path": "x.cubin"}, TypeError, "either code= or path="),
        ({"code": 5}, TypeError, "code must be text, not int"),
        ({"code": "", "backend": "gcc"}, ValueError, "'nvrtc' or 'nvcc', not 'gcc'"),
        ({"code": "", "backend": "nvcc", "name_expressions": ["k"]}, ValueError, "backend='nvrtc'"),
        ({"path": "x.cubin", "name_expressions": ["k"]}, ValueError, "need code"),
        ({"path": "x.cubin", "jitify": True}, ValueError, "jitify=True needs code"),
    ],
)
def test_wrong_arguments_of_a_module_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RawModule(**arguments)


# Compiles


def test_the_messages_of_the_compiler_are_written_whether_it_ran_or_not(gpu: Gpu) -> None:
    del gpu
    for made in (RawKernel(SOURCE, "add"), RawModule(code=SOURCE)) * 2:
        log = io.StringIO()
        made.compile(log_stream=log)
        assert '"unused" was declared but never referenced' in log.getvalue()


def options_of(kernel: RawKernel) -> set[str]:
    parts = kernel.kernel.module.artifact.parts
    return {part.value for part in parts if part.label.startswith("option[")}


def test_options_are_those_that_cupy_passes(gpu: Gpu) -> None:
    del gpu
    code = 'extern "C" __global__ void which(long* out) { *out = __cplusplus + VALUE; }'
    default = RawKernel(code, "which", ("-DVALUE=1",))
    asked = RawKernel(code, "which", ("-DVALUE=1", "--std=c++20", "-ftz=false", "-default-device"))
    assert options_of(default) == {
        "-DVALUE=1",
        "--std=c++17",
        "-ftz=true",
        "--device-as-default-execution-space",
    }
    assert options_of(asked) == {"-DVALUE=1", "--std=c++20", "-ftz=false", "-default-device"}


def test_a_program_that_does_not_compile_says_why(gpu: Gpu) -> None:
    del gpu
    with pytest.raises(CompileError, match="expected a"):
        RawKernel('extern "C" __global__ void broken() {', "broken").compile()


@pytest.mark.parametrize("option", ["-dc", "--device-c", "-rdc=true"])
def test_code_is_linked_with_the_device_runtime(gpu: Gpu, tmp_path: Path, option: str) -> None:
    code = 'extern "C" __device__ int f(); extern "C" __global__ void k(int* x) { *x = f(); }'
    with pytest.raises(InputError, match=r"needs libcudadevrt\.a"):
        RawKernel(code, "k", (option,)).compile()
    (tmp_path / "include").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libcudadevrt.a").write_bytes(b"!<arch>\n")
    with pytest.raises(LinkError, match="f"):
        RawKernel(code, "k", (option, f"-I{tmp_path}/include")).compile()
    defined = code + ' extern "C" __device__ int f() { return 5; }'
    out = gpu.zeros(1, "int32")
    RawKernel(defined, "k", (option, f"-I{tmp_path}/include"))((1,), (1,), (out,))
    assert out.numpy().tolist() == [5]


def test_complex_translation_needs_cupy(gpu: Gpu) -> None:
    del gpu
    with pytest.raises(InputError, match="needs the headers of CuPy"):
        RawKernel("#include <cuComplex.h>\n", "k", translate_cucomplex=True).compile()


@pytest.mark.parametrize(
    ("jitify", "message"), [(True, "jitify=True is deprecated"), (False, "Avoid passing jitify=False")]
)
def test_jitify_is_deprecated_at_the_line_of_the_caller(jitify: bool, message: str) -> None:
    for make in (
        lambda: RawKernel(SOURCE, "add", jitify=jitify),
        lambda: RawModule(code=SOURCE, jitify=jitify),
    ):
        with pytest.warns(DeprecationWarning, match=message) as caught:
            make()
        assert caught[0].filename == __file__


def test_attributes_are_those_of_the_loaded_kernel(gpu: Gpu) -> None:
    add = RawKernel(SOURCE, "add")
    attributes = add.attributes
    assert attributes["num_regs"] == add.num_regs > 0
    assert (add.shared_size_bytes, add.local_size_bytes) == (0, 0)
    assert add.const_size_bytes == add.kernel.attributes.constant
    assert add.max_threads_per_block == 1024
    assert add.binary_version == add.ptx_version == gpu.arch.major * 10 + gpu.arch.minor
    assert add.cache_mode_ca in (0, 1)
    add.preferred_shared_memory_carveout = 50
    assert add.preferred_shared_memory_carveout == attributes["preferred_shared_memory_carveout"] + 51
    add.preferred_shared_memory_carveout = -1
    assert add.attributes == attributes


def test_a_pickle_holds_the_source_and_works_elsewhere(gpu: Gpu) -> None:
    add = RawKernel(SOURCE, "add", ("-DX=1",), "nvcc", enable_cooperative_groups=True)
    module = RawModule(code=TEMPLATE, name_expressions=["square<int>"])
    out = gpu.zeros(4)
    ones = gpu.array([1.0] * 4, "float32")
    add((1,), (4,), (ones, ones, out, 4))
    again, module = pickle.loads(pickle.dumps((add, module)))
    assert (again.name, again.backend, again.options) == ("add", "nvcc", ("-DX=1",))
    assert again.enable_cooperative_groups
    again((1,), (4,), (out, out, out, 4))
    assert out.numpy().tolist() == [4.0] * 4
    module.get_function("square<int>").compile()
    with pytest.raises(ValueError, match="another version of preheat"):
        again.__setstate__({"version": 0})


def test_a_device_that_was_reset_gets_the_kernel_again(gpu: Gpu) -> None:
    if gpu.name.startswith("cuda"):
        pytest.skip("a GPU is reset for everybody in the process")
    blocks = RawKernel(SOURCE, "blocks")
    blocks((1,), (1,), (gpu.zeros(1, "int32"),))
    gpu.reset()
    count = gpu.zeros(1, "int32")
    blocks((2,), (1,), (count,))
    assert count.numpy().tolist() == [2]


# Sealed


def test_a_sealed_process_names_the_kernel_and_the_line(
    config: Config,
    open_builder: Callable[..., Builder],
    open_device: Callable[..., Gpu],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builder = open_builder(replace(config, sealed=SealMode.ERROR))
    made = open_device("emulator", builder=builder)
    monkeypatch.setattr(place, "device", lambda *_: made)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    line = sys._getframe().f_lineno + 2
    with pytest.raises(SealedError) as caught:
        RawKernel(SOURCE, "add")((1,), (1,), (np.zeros(1, "float32"),) * 3 + (1,))
    assert caught.value.entry == "add"
    assert caught.value.caller == f"tests/adapters/test_cupy_raw.py:{line}"


def test_the_place_is_that_of_an_array_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    asked: list[Any] = []
    monkeypatch.setattr(place, "device", lambda which=None: asked.append(which))
    gpu = preheat.device("emulator:3")
    array = gpu.zeros(1)
    for args in ((1, array), (1, preheat.strided(array)), (1,)):
        place.gpu_at(place.place_of(args))
    assert asked == ["emulator:3", "emulator:3", None]
    gpu.close()


def test_importing_the_classes_does_not_import_cupy() -> None:
    from tests.processes import expect_success, start_python

    code = "import sys; from preheat.adapters.cupy import RawKernel; print('cupy' in sys.modules)"
    assert expect_success(start_python(code)).strip() == "False"


# Errors

CALLS: dict[str, Callable[[], object]] = {
    "__call__": lambda: RawKernel(SOURCE, "blocks")((1,), (1,), (None,)),
    "kernel": lambda: RawKernel(SOURCE, "blocks").kernel,
    "compile": lambda: RawKernel(SOURCE, "blocks").compile(),
    "module": lambda: RawModule(code=SOURCE).module,
    "get_function": lambda: RawModule(code=SOURCE).get_function("blocks"),
    "get_global": lambda: RawModule(code=SOURCE).get_global("factors"),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_shows_the_call_of_the_user(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(*_: object) -> Gpu:
        raise NoGpuError("no GPU")

    monkeypatch.setattr(place, "device", no_device)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(NoGpuError) as caught:
        CALLS[call]()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["<lambda>", call, "no_device"]  # The last one is a function of this test.


@pytest.mark.parametrize(
    "make", [lambda o: RawKernel("x", "f", o), lambda o: RawModule(code="x", options=o)]
)
def test_options_in_one_text_are_refused(make: Callable[[str], object]) -> None:
    with pytest.raises(InputError, match="options must be a list, not one value: '-DX'") as caught:
        make("-DX")
    assert caught.value.hint == "write options=['-DX']"


@pytest.mark.parametrize("given", [{"code": "kernels.cu"}, {"path": "kernels.cu"}])
def test_the_name_of_a_source_file_is_neither_code_nor_a_compiled_file(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"'kernels\.cu' is") as caught:
        RawModule(**given)
    assert caught.value.hint == "read the file: code=open('kernels.cu').read()"
