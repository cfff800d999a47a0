"""Run every kind of launch of the shipped kernels under compute-sanitizer: `make sanitize-gpu`."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator

import numpy as np

import preheat
from preheat import Array, Gpu
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.kernels import elementwise, gemm, rms_norm, softmax
from preheat.kernels.nf4 import quantize
from preheat.kernels.op import Op
from preheat.kernels.ops import Ops

TOOLS = "memcheck", "initcheck", "racecheck"
DTYPES = "float32", "float16", "bfloat16"
#: Rows, widths and the elements in front of each operand.
ROWS = [
    (5, 7, 1), (5, 33, 0), (3, 40, 1), (5, 128, 3), (5, 129, 1), (300, 1000, 1), (70, 1001, 3),
    (3, 1001, 0), (3, 1000, 0), (2, 4096, 1), (70, 4097, 1), (2, 16384, 1), (2, 20001, 1),
    (2, 50257, 3), (70, 50257, 0), (1, 200000, 1),
]  # fmt: skip
#: The sizes m, n and k of products, and the elements in front of each operand.
PRODUCTS = [(300, 264, 72, 0), (130, 129, 65, 1), (17, 33, 31, 1), (16, 264, 520, 0), (1, 1, 1, 0)]


def operand(gpu: Gpu, shape: tuple[int, ...], dtype: str, offset: int) -> Array:
    """Random numbers at an address of that kind; every byte of the buffer is written."""
    size = int(np.prod(shape))
    values = np.random.default_rng().standard_normal(size + offset, dtype=np.float32)
    room = gpu.array(values.astype("float16") if dtype == "float16" else values, dtype)
    return room[offset:].reshape(shape)


def rows(gpu: Gpu, cases: Iterable[tuple[int, int, int]], dtypes: Iterable[str] = DTYPES) -> int:
    ops = Ops(gpu, blas=False)
    done = 0
    for dtype in dtypes:
        for number, width, offset in cases:
            x, gy = (operand(gpu, (number, width), dtype, offset) for _ in range(2))
            gamma = operand(gpu, (width,), dtype, offset)
            y = ops.softmax(x)
            ops.softmax_backward(gy, y, out=y)
            ops.rms_norm_backward(gy, x, gamma, eps=1e-6, out=(gy, None))
            ops.rms_norm(x, gamma, eps=1e-6, out=x)
            ops.swiglu_backward(gy, x, y, out=(x, None))
            ops.silu(x)
            done += 1
    return done


def products(
    gpu: Gpu, cases: Iterable[tuple[int, int, int, int]], dtypes: Iterable[str] = DTYPES
) -> int:
    done = 0
    for dtype in dtypes:
        for m, n, k, offset in cases:
            a, b, gc = (operand(gpu, shape, dtype, offset) for shape in ((m, k), (k, n), (m, n)))
            packed = quantize(np.random.default_rng().standard_normal((k, n))).on(gpu)
            c, ga, gb = (gpu.empty(shape, dtype) for shape in ((m, n), (m, k), (k, n)))
            for tile in gemm.tiles(dtype):
                mnk = m, n, k
                gemm.gemm(*mnk, dtype, tile=tile).launch(gpu, a, b, c, *mnk, False)
                gemm.gemm_backward_a(*mnk, dtype, tile=tile).launch(gpu, gc, b, ga, *mnk, False)
                gemm.gemm_backward_b(*mnk, dtype, tile=tile).launch(gpu, a, gc, gb, *mnk, False)
                nf4 = gemm.gemm_backward_a_nf4(*mnk, dtype, tile=tile)
                nf4.launch(gpu, gc, packed.codes, packed.scales, ga, *mnk, True)
                done += 1
    return done


def every_op() -> Iterator[Op]:
    """Yield what the cases launch."""
    for dtype in DTYPES:
        for number, width, _ in ROWS:
            yield softmax.softmax(number, width, dtype)
            yield softmax.softmax_backward(number, width, dtype)
            yield rms_norm.rms_norm(number, width, dtype)
            yield from rms_norm.rms_norm_backward(number, width, dtype)
            yield elementwise.swiglu_backward(number * width, dtype)
            yield elementwise.silu(number * width, dtype)
        for (m, n, k, _), tile in itertools.product(PRODUCTS, gemm.tiles(dtype)):
            yield gemm.gemm(m, n, k, dtype, tile=tile)
            yield gemm.gemm_backward_a(m, n, k, dtype, tile=tile)
            yield gemm.gemm_backward_b(m, n, k, dtype, tile=tile)
            yield gemm.gemm_backward_a_nf4(m, n, k, dtype, tile=tile)


def case(dtype: str) -> None:
    """Run all cases of an element type and print each one, because a tool may take seconds for it."""
    gpu = preheat.device("cuda")
    for each in ROWS:
        rows(gpu, [each], [dtype])
        _say("{} rows of {} at +{}".format(*each))
    for product in PRODUCTS:
        products(gpu, [product], [dtype])
        _say("a product of m={} n={} k={} at +{}".format(*product))
    gpu.synchronize()


def main() -> None:
    """Every tool on every element type, all at the same time, and what each of them found."""
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
    wanted = {op.entry: ManifestProgram(op.program, entries=(op.entry,)) for op in every_op()}
    preheat.device("cuda").warm(Manifest(tuple(wanted.values())))  # compiled on all processors at once
    _say(f"{len(wanted)} kernels are compiled")
    running = {
        (tool, dtype): subprocess.Popen(
            ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1",
             sys.executable, "-m", "tests.kernels.sanitized", dtype],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for tool, dtype in itertools.product(TOOLS, DTYPES)
    }  # fmt: skip
    failed = 0
    for (tool, dtype), process in running.items():
        said = process.communicate()[0]
        _say(f"{tool} {dtype}: {said.splitlines()[-1]}")
        if process.returncode:
            failed += 1
            _say(said)
    sys.exit(failed)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    case(*sys.argv[1:]) if sys.argv[1:] else main()
