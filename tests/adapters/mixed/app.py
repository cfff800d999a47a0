"""An application that uses several compilers in one process, as a server does at its start.

    python app.py [PART ...]

It checks every result against float64, and prints one line of JSON: the seconds of each part, the
seconds from the start of the process to the end, programs that were started, compilers that each
part loaded, and the counters of preheat. It does not know that it is recorded or sealed.
"""

import ctypes
import json
import os
import random
import signal
import sys
import time

_started_programs = []


def _watch(event, arguments):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
        words = arguments[1]
        words = [words] if isinstance(words, str | bytes | os.PathLike) else words
        _started_programs.append(" ".join(map(os.fsdecode, words)))


sys.addaudithook(_watch)

import torch

import triton_kernels

SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
"""
SCALE = """
extern "C" __global__ void scale(const float* x, float a, float* y, long long n) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}
"""
COMPILERS = ("libnvrtc.", "libnvJitLink.", "libtriton_ptxas", "libnvvm.")


def since_start():
    """Return the seconds since this process was started."""
    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    uptime = float(open("/proc/uptime").read().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def mapped_compilers():
    """Return the names of the compilers whose libraries are in this process."""
    with open("/proc/self/maps") as maps:
        text = maps.read()
    return [name.strip(".") for name in COMPILERS if name in text]


def close(found, wanted, tolerance):
    """Raise unless a result is right."""
    difference = (found.double() - wanted).abs().max().item()
    limit = tolerance * max(1.0, wanted.abs().max().item())
    if not difference <= limit:
        raise SystemExit(f"wrong result: {difference} is more than {limit}")


def plain_triton():
    for n in (1, 31, 4096, 100_003):
        x, y = (torch.randn(n, device="cuda") for _ in range(2))
        out = torch.empty_like(x)
        triton_kernels.scaled_sum[(-(-n // 1024),)](x, y, out, n, 1.5, BLOCK=1024)
        close(out, x.double() + 1.5 * y.double(), 1e-6)
    a, b = (torch.randn(77, 77, device="cuda", dtype=torch.float16) for _ in range(2))
    c = torch.empty_like(a)
    grid = (3, 3)
    triton_kernels.matmul[grid](a, b, c, 77, 77, 77, 77, 77, 77, BM=32, BN=32, BK=32)
    close(c, a.double() @ b.double(), 1e-3)


def tuned_triton():
    n = 100_003
    x = torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    triton_kernels.gelu[lambda meta: (-(-n // meta["BLOCK"]),)](x, out, n)
    close(out, torch.nn.functional.gelu(x.double()), 1e-6)


def compiled_model():
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(96, 160), torch.nn.GELU(), torch.nn.LayerNorm(160), torch.nn.Linear(160, 33)
    ).cuda()
    x = torch.randn(65, 96, device="cuda", requires_grad=True)
    compiled = torch.compile(model)
    y = compiled(x)
    y.square().mean().backward()
    exact_x = x.detach().double().requires_grad_()
    exact = model.double()(exact_x)
    exact.square().mean().backward()
    close(y.detach(), exact.detach(), 1e-3)
    close(x.grad, exact_x.grad, 1e-3)


def preheat_kernels():
    import preheat

    gpu = preheat.device()
    saxpy = gpu.kernel(SAXPY, "saxpy")
    x, y = (torch.randn(1003, device="cuda") for _ in range(2))
    wanted = 2.0 * x.double() + y.double()
    saxpy[4, 256](2.0, x, y, 1003)
    close(y, wanted, 1e-6)


def random_triton():
    choose = random.Random(1)
    for _ in range(400):
        m, n, k = (choose.choice((1, 2, 16, 31, 48, 77, 128)) for _ in range(3))
        a, b, c = (_matrix(choose, *shape) for shape in ((m, k), (k, n), (m, n)))
        grid = (-(-m // 32), -(-n // 32))
        strides = (a.stride(0), b.stride(0), c.stride(0))
        triton_kernels.matmul[grid](a, b, c, m, n, k, *strides, BM=32, BN=32, BK=32)
        close(c, a.double() @ b.double(), 1e-3)


def _matrix(choose, rows, columns):
    """Return a matrix with random rows that begin at a random multiple of two bytes."""
    stride = columns + choose.choice((0, 1, 16))
    offset = choose.choice((0, 1, 8))
    memory = torch.randn(offset + rows * stride, device="cuda", dtype=torch.float16)
    return memory[offset:].as_strided((rows, columns), (stride, 1))


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def cupy_kernels():
    import cupy

    kernel = cupy.RawKernel(SAXPY.replace("saxpy", "cupy_saxpy"), "cupy_saxpy")
    x, y = (torch.randn(1003, device="cuda") for _ in range(2))
    wanted = 2.0 * x.double() + y.double()
    torch.cuda.synchronize()
    arrays = cupy.asarray(x), cupy.asarray(y)
    kernel((4,), (256,), (cupy.float32(2.0), *arrays, cupy.int32(1003)))
    squared = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * x", "app_square")(arrays[0])
    cupy.cuda.runtime.deviceSynchronize()
    close(y, wanted, 1e-6)
    close(torch.as_tensor(squared, device="cuda"), x.double() ** 2, 1e-6)


def cuda_core_kernels():
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device()
    device.set_current()
    options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
    code = SAXPY.replace("saxpy", "core_saxpy")
    kernel = Program(code, code_type="c++", options=options).compile("cubin").get_kernel("core_saxpy")
    x, y = (torch.randn(1003, device="cuda") for _ in range(2))
    wanted = 2.0 * x.double() + y.double()
    torch.cuda.synchronize()
    stream = device.create_stream()
    arguments = (ctypes.c_float(2.0), x.data_ptr(), y.data_ptr(), ctypes.c_int32(1003))
    launch(stream, LaunchConfig(grid=4, block=256), kernel, *arguments)
    stream.sync()
    close(y, wanted, 1e-6)


def torch_operator():
    from preheat.adapters.torch import op

    scale = op(
        "app::scale(Tensor x, float a) -> Tensor",
        SCALE,
        out=lambda x, _: torch.empty_like(x),
        args=lambda x, a, y: (x, a, y, x.numel()),
        grid=lambda x, *_: -(-x.numel() // 256),
        block=256,
        backward=lambda _, gradient: (scale(gradient.contiguous(), 3.0), None),
    )
    x = torch.randn(77, 33, device="cuda", requires_grad=True)
    y = torch.compile(lambda x: scale(x.sin(), 3.0).cos(), fullgraph=True)(x)
    y.sum().backward()
    exact = x.detach().double()
    close(y.detach(), (3.0 * exact.sin()).cos(), 1e-5)
    close(x.grad, -(3.0 * exact.sin()).sin() * 3.0 * exact.cos(), 1e-5)


def torch_compile_kernel():
    code = SAXPY.replace("saxpy", "torch_saxpy").replace("float a", "double a")  # as torch passes it
    kernel = torch.cuda._compile_kernel(code, "torch_saxpy")
    x, y = (torch.randn(1003, device="cuda") for _ in range(2))
    wanted = 2.0 * x.double() + y.double()
    kernel(grid=(4, 1, 1), block=(256, 1, 1), args=[2.0, x, y, 1003])
    close(y, wanted, 1e-6)


def numba_kernels():
    import numba_kernels

    x = torch.randn(1003, device="cuda")
    y = torch.empty_like(x)
    numba_kernels.double[4, 256](x, y)
    close(y, 2.0 * x.double(), 1e-6)


PARTS = {
    "triton": plain_triton,
    "autotuned": tuned_triton,
    "torch.compile": compiled_model,
    "preheat": preheat_kernels,
    "torch operator": torch_operator,
    "torch kernel": torch_compile_kernel,
    "CuPy": cupy_kernels,
    "cuda.core": cuda_core_kernels,
}
# Numba has to fit the version of NumPy, which it does not on every machine with a GPU.
MORE = {"Numba": numba_kernels, "random": random_triton, "killed": killed}


def main():
    torch.cuda.init()
    known = {*mapped_compilers()}
    loaded = {}
    seconds = {"start": since_start()}
    for name in sys.argv[1:] or PARTS:
        begun = time.perf_counter()
        (PARTS | MORE)[name]()
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - begun
        loaded[name] = [library for library in mapped_compilers() if library not in known]
        known.update(loaded[name])
    report = {
        "seconds": seconds,
        "total": since_start(),
        "started": _started_programs,
        "loaded": {name: libraries for name, libraries in loaded.items() if libraries},
    }
    if "preheat.build.default" in sys.modules:
        report["stats"] = sys.modules["preheat.build.default"].default_builder().stats()["process"]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
