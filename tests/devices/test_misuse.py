"""Mistakes of users: each is refused before the device is called, with a helpful message.

Every row is tried on the first launch of a kernel and again once its launches have become quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from preheat.devices.operands import Pointer
from preheat.errors import (
    EmulatorFault,
    InputError,
    LaunchError,
    PreheatError,
    StaleBufferError,
    TargetError,
    UnknownEntryError,
)
from preheat.gpu import Gpu, device
from preheat.model.program import Program
from tests.conftest import SAXPY
from tests.devices.support import KERNELS, PTX, SaxpyCase, saxpy_case
from tests.frames import own_frames


@dataclass(frozen=True)
class Misuse:
    """What the user writes, and what must be in the answer."""

    code: str
    do: Callable[[SaxpyCase], object]
    error: type[Exception]
    says: tuple[str, ...]
    hint: str | None = None


def closed(b: SaxpyCase) -> Any:
    """Return an array that was closed."""
    made = b.gpu.array(b.xs)
    made.close()
    return made


def closed_view(b: SaxpyCase) -> Any:
    made = b.gpu.array(b.xs)
    view = made[1:]
    made.close()
    return view


def closed_stream(b: SaxpyCase) -> Any:
    stream = b.gpu.stream()
    stream.close()
    return stream


def kernel(b: SaxpyCase, name: str) -> Any:
    return b.gpu.kernel(KERNELS, name)


class Version1:
    """Speaks a later version of the stream protocol."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (1, 0)


def asked_for(b: SaxpyCase, name: Any) -> object:
    return b.gpu.kernel(SAXPY, name)


TAKES = "the kernel takes 4 (float, float const*, float*, int)"
LAUNCHES = (
    Misuse("saxpy[5, 64](2.0, x, y)", lambda b: b.saxpy[5, 64](2.0, b.x, b.y),
        LaunchError, ("saxpy: 3 arguments given", TAKES)),
    Misuse("saxpy[5, 64]()", lambda b: b.saxpy[5, 64](),
        LaunchError, ("saxpy: 0 arguments given", TAKES)),
    Misuse("saxpy[5, 64](2.0, x, y, n, 1)", lambda b: b.saxpy[5, 64](2.0, b.x, b.y, b.n, 1),
        LaunchError, ("saxpy: 5 arguments given", TAKES)),
    Misuse("saxpy[5, 64](x, x, y, n)", lambda b: b.saxpy[5, 64](b.x, b.x, b.y, b.n),
        LaunchError, ("saxpy, argument 0: float cannot take", "Array"), "a pointer: const float*"),
    Misuse('saxpy[5, 64]("2", x, y, n)', lambda b: b.saxpy[5, 64]("2", b.x, b.y, b.n),
        LaunchError, ("saxpy, argument 0: float cannot take '2' (str)",)),
    Misuse("saxpy[5, 64](None, x, y, n)", lambda b: b.saxpy[5, 64](None, b.x, b.y, b.n),
        LaunchError, ("saxpy, argument 0: float cannot take NoneType",)),
    Misuse("saxpy[5, 64](numpy.float64(2), x, y, n)",
        lambda b: b.saxpy[5, 64](np.float64(2), b.x, b.y, b.n),
        LaunchError, ("saxpy, argument 0: float cannot take", "numpy.float64"), "numpy.float32(…)"),
    Misuse("saxpy[5, 64](2.0, 7, y, n)", lambda b: b.saxpy[5, 64](2.0, 7, b.y, b.n),
        LaunchError, ("saxpy, argument 1: float const* cannot take int 7",), "preheat.Pointer("),
    Misuse("saxpy[5, 64](2.0, [1.0, 2.0], y, n)", lambda b: b.saxpy[5, 64](2.0, [1.0, 2.0], b.y, b.n),
        LaunchError, ("saxpy, argument 1: float const* cannot take list [1.0, 2.0]",), "pass an array"),
    Misuse("saxpy[5, 64](2.0, list(range(10_000)), y, n)",
        lambda b: b.saxpy[5, 64](2.0, list(range(10_000)), b.y, b.n),
        LaunchError, ("saxpy, argument 1: float const* cannot take list [0, 1, 2, 3, 4, 5, …]",),
        "gpu.array(…)"),
    Misuse('saxpy[5, 64]("2" * 9999, x, y, n)', lambda b: b.saxpy[5, 64]("2" * 9999, b.x, b.y, b.n),
        LaunchError, (f"float cannot take '{'2' * 27}…{'2' * 28}' (str)",)),
    Misuse("saxpy[5, 64](2.0, x, y, 10**5000)", lambda b: b.saxpy[5, 64](2.0, b.x, b.y, 10**5000),
        LaunchError, ("saxpy, argument 3: int cannot hold an integer of 16610 bits",)),
    Misuse("saxpy[5, 64]((2.0, x, y, n))",
        lambda b: b.saxpy[5, 64]((2.0, b.x, b.y, b.n)),
        LaunchError, ("1 argument given, but the kernel takes 4",), "kernel[grid, block](*args)"),
    Misuse("saxpy[5, 64](2.0, x, scalar, n)  # of float64",
        lambda b: b.saxpy[5, 64](2.0, b.x, b.gpu.scalar("float64"), b.n),
        LaunchError, ("saxpy, argument 2: float* cannot take a scalar of float64",),
        "gpu.scalar('float32')"),
    Misuse("saxpy[5, 64](2.0, x, y64, n)  # of float64",
        lambda b: b.saxpy[5, 64](2.0, b.x, b.gpu.zeros(b.n, "float64"), b.n),
        LaunchError, ("saxpy, argument 2: float* cannot take an array of float64",),
        "x = gpu.array(x.numpy(), 'float32')"),
    Misuse("saxpy[5, 64](2.0, x, y, 3.5)", lambda b: b.saxpy[5, 64](2.0, b.x, b.y, 3.5),
        LaunchError, ("saxpy, argument 3: int cannot take 3.5, a float",), "convert it: int(…)"),
    Misuse("saxpy[5, 64](2.0, x, y, 2**31)", lambda b: b.saxpy[5, 64](2.0, b.x, b.y, 2**31),
        LaunchError, ("saxpy, argument 3: int cannot hold 2147483648",)),
    Misuse("saxpy[5, 64](2.0, x, y, numpy.int64(257))",
        lambda b: b.saxpy[5, 64](2.0, b.x, b.y, np.int64(257)),
        LaunchError, ("saxpy, argument 3: int cannot take", "numpy.int64"), "numpy.int32(…)"),
    Misuse("saxpy[5, 64](2.0, x, y, y)", lambda b: b.saxpy[5, 64](2.0, b.x, b.y, b.y),
        LaunchError, ("saxpy, argument 3: int cannot take", "Array"), "make it a pointer: const int*"),
    Misuse("x.close(); saxpy[5, 64](2.0, x, y, n)", lambda b: b.saxpy[5, 64](2.0, closed(b), b.y, b.n),
        StaleBufferError, ("saxpy, argument 1: <Array float32[257]", "its memory was freed")),
    Misuse("part = x[1:]; x.close(); saxpy[5, 64](2.0, part, y, n)",
        lambda b: b.saxpy[5, 64](2.0, closed_view(b), b.y, b.n),
        StaleBufferError, ("saxpy, argument 1: <Array float32[256]", "its memory was freed")),
    Misuse("unpack[1, 1](b'123', out)", lambda b: kernel(b, "unpack")[1, 1](b"123", b.x),
        LaunchError, ("unpack, argument 0: Pair has 16 bytes, not 3",)),
    Misuse("unpack[1, 1](5, out)", lambda b: kernel(b, "unpack")[1, 1](5, b.x),
        LaunchError, ("unpack, argument 0: Pair is passed by value: it takes 16 bytes, not 5 (int)",),
        "pass bytes, a ctypes.Structure or a NumPy record"),
)  # fmt: skip

GRID_AND_BLOCK = "kernel[grid, block] takes a grid and a block"
GEOMETRIES = (
    Misuse("saxpy[5]", lambda b: b.saxpy[5],
        LaunchError, (f"saxpy: {GRID_AND_BLOCK}, not only 5",), "kernel[grid, 256]"),
    Misuse("saxpy[...]", lambda b: b.saxpy[...],
        LaunchError, (f"saxpy: {GRID_AND_BLOCK}, not only Ellipsis",), "kernel[grid, 256]"),
    Misuse("saxpy()", lambda b: b.saxpy(),
        LaunchError, ("saxpy: a launch needs a grid and a block",), "saxpy[grid, block](…)"),
    Misuse("saxpy(2.0, x, y, n)", lambda b: b.saxpy(2.0, b.x, b.y, b.n),
        LaunchError, ("saxpy: a launch needs a grid and a block",), "saxpy[grid, block](…)"),
    Misuse("saxpy[:, 64]", lambda b: b.saxpy[:, 64],
        LaunchError, ("saxpy: grid slice(None, None, None) is not one to three",), "kernel[8, 256]"),
    Misuse("saxpy[5, 64, 0]", lambda b: b.saxpy[5, 64, 0],
        LaunchError, ("saxpy: kernel[grid, block] takes two values, a grid and a block, not 3",),
        "shared=, stream="),
    Misuse("saxpy[0, 64]", lambda b: b.saxpy[0, 64],
        LaunchError, ("saxpy: grid 0 is not one to three positive integers",)),
    Misuse("saxpy[-1, 64]", lambda b: b.saxpy[-1, 64],
        LaunchError, ("saxpy: grid -1 is not one to three positive integers",)),
    Misuse("saxpy[5, 0]", lambda b: b.saxpy[5, 0],
        LaunchError, ("saxpy: block 0 is not one to three positive integers",)),
    Misuse("saxpy[1.5, 64]", lambda b: b.saxpy[1.5, 64],
        LaunchError, ("saxpy: grid 1.5 is not one to three integers",)),
    Misuse('saxpy["5", 64]', lambda b: b.saxpy["5", 64],
        LaunchError, ("saxpy: grid '5' is not one to three integers",)),
    Misuse("saxpy[(1, 1, 1, 1), 64]", lambda b: b.saxpy[(1, 1, 1, 1), 64],
        LaunchError, ("saxpy: grid (1, 1, 1, 1) is not one to three positive integers",)),
    Misuse("saxpy[5, 2048]", lambda b: b.saxpy[5, 2048],
        LaunchError, ("saxpy: block (2048, 1, 1) exceeds the limits of the device, (1024, 1024, 64)",)),
    Misuse("saxpy[5, (64, 32)]", lambda b: b.saxpy[5, (64, 32)],
        LaunchError, ("saxpy: a block of 2048 threads; the maximum on this device is 1024",)),
    Misuse("saxpy[5, (1, 1, 65)]", lambda b: b.saxpy[5, (1, 1, 65)],
        LaunchError, ("saxpy: block (1, 1, 65) exceeds the limits of the device, (1024, 1024, 64)",)),
    Misuse("narrow[1, 128]  # has __launch_bounds__(64)", lambda b: kernel(b, "narrow")[1, 128],
        LaunchError, ("narrow: a block of 128 threads; the maximum of narrow is 64",)),
    Misuse("saxpy[2**31, 64]", lambda b: b.saxpy[2**31, 64],
        LaunchError, ("saxpy: grid (2147483648, 1, 1) exceeds the limits of the device, (",)),
    Misuse("saxpy[(1, 65536), 64]", lambda b: b.saxpy[(1, 65536), 64],
        LaunchError, ("saxpy: grid (1, 65536, 1) exceeds the limits of the device",)),
    Misuse("saxpy.launch(…, shared=300_000)", lambda b: b.saxpy.geometry(1, 1, shared=300_000),
        LaunchError, ("saxpy: 300000 bytes of dynamic and 0 of static", "a block can have 232448")),
    Misuse("saxpy.launch(…, shared=-1)", lambda b: b.saxpy.geometry(1, 1, shared=-1),
        LaunchError, ("saxpy: -1 bytes of dynamic",)),
    Misuse("saxpy.launch(…, shared=1.5)",
        lambda b: b.saxpy.geometry(1, 1, shared=1.5),  # type: ignore[arg-type]
        LaunchError, ("saxpy: shared 1.5 is not a number of bytes",)),
    Misuse("saxpy.launch(…, grid=5, cluster=2)", lambda b: b.saxpy.geometry(5, 1, cluster=2),
        LaunchError, ("saxpy: grid (5, 1, 1) is not a multiple of the cluster (2, 1, 1)",)),
    Misuse("saxpy.launch(…, grid=34, cluster=17)", lambda b: b.saxpy.geometry(34, 1, cluster=17),
        LaunchError, ("saxpy: a cluster of 17 blocks; the device allows",)),
    Misuse("saxpy.launch(…, stream=7)",
        lambda b: b.saxpy.launch(2.0, b.x, b.y, b.n, grid=5, block=64, stream=7),
        InputError, ("7 is not a stream",), "__cuda_stream__"),
    Misuse("saxpy.launch(…, stream=gpu.record())",
        lambda b: b.saxpy.launch(2.0, b.x, b.y, b.n, grid=5, block=64, stream=b.gpu.record()),
        InputError, ("<Event on ", "> is not a stream"), "gpu.stream()"),
    Misuse("stream.close(); saxpy.launch(…, stream=stream)",
        lambda b: b.saxpy.launch(2.0, b.x, b.y, b.n, grid=5, block=64, stream=closed_stream(b)),
        InputError, ("this stream is closed",), "make the stream again: gpu.stream()"),
    Misuse("saxpy.launch(…, stream=of_a_later_protocol)",
        lambda b: b.saxpy.launch(2.0, b.x, b.y, b.n, grid=5, block=64, stream=Version1()),
        InputError, ("has version 1 of __cuda_stream__, not 0",)),
)  # fmt: skip

ARRAYS = (
    Misuse("gpu.kernel([source], 'saxpy')", lambda b: b.gpu.kernel(cast(str, [SAXPY]), "saxpy"),
        InputError, ("source must be a path, source text or a Program, not ['extern",)),
    Misuse('gpu.kernel("a\\0.cu", "k")', lambda b: b.gpu.kernel("a\0.cu", "k"),
        InputError, ("cannot read", "embedded null")),
    Misuse("scalar.set(1e39)", lambda b: b.gpu.scalar("float32").set(1e39),
        InputError, ("1e+39 does not fit float32",)),
    Misuse("x.fill(10**400)", lambda b: b.x.fill(10**400),
        InputError, ("does not fit float32",)),
    Misuse("m[:, numpy.array([1, 2])]", lambda b: b.gpu.zeros((4, 4))[:, np.array([1, 2])],
        InputError, ("an index after a slice selects elements that are not contiguous",)),
    Misuse("x[True]", lambda b: b.x[True],
        InputError, ("an array is indexed by integers and slices, not by True",)),
    Misuse('x["a":]', lambda b: b.x["a":],
        InputError, ("a slice of the first axis takes integers, not slice('a', None, None)",)),
    Misuse("gpu.array(numpy.array([], dtype=object))",
        lambda b: b.gpu.array(np.array([], dtype=object)),
        InputError, ("an empty array of objects has no element type",), "numpy.empty(0, 'float32')"),
    Misuse("gpu.array(numpy.array(None, dtype=object))",
        lambda b: b.gpu.array(np.array(None, dtype=object)),
        InputError, ("cannot read ndarray as an array: None is not a number",)),
    Misuse('gpu.profile(every="x")', lambda b: b.gpu.profile(every=cast(int, "x")),
        InputError, ("every must be an integer of 1 or more, not 'x'",)),
    Misuse('device("emulator", sanitize="no")', lambda _: device("emulator", sanitize=cast(bool, "no")),
        InputError, ("sanitize must be True or False, not 'no'",)),
    Misuse("saxpy.max_potential_block_size(limit=(16, 16))",
        lambda b: b.saxpy.max_potential_block_size(limit=cast(int, (16, 16))),
        LaunchError, ("saxpy: limit is a number of threads, not (16, 16)",)),
    Misuse("x.close(); x.numpy()", lambda b: closed(b).numpy(),
        StaleBufferError, ("numpy(): <Array float32[257]", "its memory was freed")),
    Misuse("x.close(); x.write(data)", lambda b: closed(b).write(b.xs),
        StaleBufferError, ("write():", "its memory was freed")),
    Misuse("x.write(data[1:])", lambda b: b.x.write(b.xs[1:]),
        InputError, ("cannot write shape (256,) into an array of shape (257,)",)),
    Misuse("x.write(1j * data)", lambda b: b.x.write(1j * b.xs),
        InputError, ("complex64 cannot be converted to float32 without loss",)),
    Misuse('gpu.array([300], "uint8")', lambda b: b.gpu.array([300], "uint8"),
        InputError, ("values from 300 to 300 do not fit uint8",)),
    Misuse('gpu.array([1.5], "int32")', lambda b: b.gpu.array([1.5], "int32"),
        InputError, ("float64 cannot be converted to int32 without loss",)),
    Misuse('gpu.array(["a"])', lambda b: b.gpu.array(["a"]),
        InputError, ("cannot read list as an array: 'a' is not a number",), "nested lists of numbers"),
    Misuse('gpu.empty(3, "flot32")', lambda b: b.gpu.empty(3, "flot32"),
        InputError, ("'flot32' is not an element type",), "did you mean 'float32'?"),
    Misuse("gpu.empty((3, -1))", lambda b: b.gpu.empty((3, -1)),
        InputError, ("shape (3, -1) has a negative extent",)),
    Misuse('gpu.zeros(3, "int32").fill(1.5)', lambda b: b.gpu.zeros(3, "int32").fill(1.5),
        InputError, ("1.5 does not fit int32",)),
    Misuse('gpu.scalar("uint8", 256)', lambda b: b.gpu.scalar("uint8", 256),
        InputError, ("256 does not fit uint8",)),
    Misuse("x[::2]", lambda b: b.x[::2],
        InputError, ("a slice of the first axis has step 1, not 2",), "gpu.array(a.numpy()[…])"),
    Misuse("x.reshape(1, -1)[:, 1]", lambda b: b.x.reshape(1, -1)[:, 1],
        InputError, ("<Array float32[1, 257]", "an index after a slice selects elements that are not"),
        "index it in the kernel, or take a copy: gpu.array(a.numpy()[…])"),
    Misuse("x[x]", lambda b: b.x[b.x],
        InputError, ("an array is indexed by integers and slices, not by <Array",), "a copy"),
    Misuse("x[1.0]", lambda b: b.x[1.0],
        InputError, ("an array is indexed by integers and slices, not by 1.0",), "a copy"),
    Misuse("x.copy_from([1.0])", lambda b: b.x.copy_from([1.0]),  # type: ignore[arg-type]
        InputError, ("copy_from() takes an array of", "not list"), "write(…) copies from the host"),
    Misuse('gpu.array(x, "int32")', lambda b: b.gpu.array(b.x, "int32"),
        InputError, ("Array of float32 cannot be copied as int32",), "gpu.array(a.numpy(), dtype)"),
    Misuse('gpu.scalar("int32", name=3)',
        lambda b: b.gpu.scalar("int32", name=3),  # type: ignore[arg-type]
        InputError, ("the name of a scalar is text, not 3",)),
    Misuse('gpu.stream(priority="high")',
        lambda b: b.gpu.stream(priority="high"),  # type: ignore[arg-type]
        InputError, ("the priority of a stream is an integer, not 'high'",)),
    Misuse("x[257]", lambda b: b.x[257],
        IndexError, ("index 257 is outside the first axis of (257,)",)),
    Misuse("x.copy_from(y[1:])", lambda b: b.x.copy_from(b.y[1:]),
        InputError, ("cannot copy <Array float32[256]", "into <Array float32[257]")),
)  # fmt: skip

PROGRAMS = (
    *(
        Misuse(f"gpu.kernel(source, {name!r})", partial(asked_for, name=name),
            InputError, (f"the name of a kernel must be text, not {name!r}",), "as a string")
        for name in (None, 3, b"saxpy", ["saxpy"])
    ),
    Misuse("gpu.module(source)[0]", lambda b: b.gpu.module(KERNELS)[0],  # type: ignore[index]
        InputError, ("the name of a kernel must be text, not 0",), "as a string"),
    Misuse("gpu.module(source).symbol(None)",
        lambda b: b.gpu.module(KERNELS).symbol(None),  # type: ignore[arg-type]
        InputError, ("the name of a variable must be text, not None",), "as a string"),
    Misuse('gpu.kernel(source, "saxpi")', lambda b: b.gpu.kernel(SAXPY, "saxpi"),
        UnknownEntryError, ("has no kernel 'saxpi'; it has: saxpy",), "did you mean 'saxpy'?"),
    Misuse('gpu.module(source).symbol("nothing")', lambda b: b.gpu.module(KERNELS).symbol("nothing"),
        InputError, ("has no variable 'nothing'",), "names=['&ns::table']"),
    Misuse('gpu.module(source).symbol("tabel")', lambda b: b.gpu.module(KERNELS).symbol("tabel"),
        InputError, ("has no variable 'tabel'",), "did you mean 'table'?"),
    Misuse('gpu.kernel("saxpy", source)', lambda b: b.gpu.kernel("saxpy", SAXPY),
        InputError, ("the name of a kernel cannot be source text: ",),
        "the source comes first, and then the name"),
    Misuse('gpu.module(source).symbol("table", "float64")  # of 12 bytes',
        lambda b: b.gpu.module(KERNELS).symbol("table", "float64"),
        InputError, ("table has 12 bytes, which is not a multiple of the size of float64",)),
    Misuse('gpu.module(source).symbol("table", "float32").write([1.0])',
        lambda b: b.gpu.module(KERNELS).symbol("table", "float32").write([1.0]),
        InputError, ("table has 12 bytes, not 4",), "write 3 elements of float32"),
    Misuse('gpu.kernel(program, "saxpy", options=["-G"])',
        lambda b: b.gpu.kernel(Program.of(SAXPY), "saxpy", options=["-G"]),
        InputError, ("a Program already has its label, options",)),
    Misuse('gpu.kernel(source, "saxpy", arch="sm_91x")',
        lambda b: b.gpu.kernel(SAXPY, "saxpy", arch="sm_91x"),
        InputError, ("'sm_91x' is not a GPU architecture",), "sm_90"),
    Misuse('gpu.kernel(source, "saxpy", arch="sm_120")',
        lambda b: b.gpu.kernel(SAXPY, "saxpy", arch="sm_120"),
        TargetError, ("targets sm_120 and cannot run on", "sm_90", "newer than the device")),
    Misuse('gpu.kernel(ptx, "keep")  # with .target sm_120',
        lambda b: b.gpu.kernel(PTX.replace("sm_80", "sm_120").replace("8.0", "8.7", 1), "keep"),
        TargetError, ("targets sm_120 and cannot run on", "sm_90", "newer than the device")),
    Misuse('gpu.kernel(ptx, "keep", strict=True)  # with .target sm_80',
        lambda b: b.gpu.kernel(PTX, "keep", strict=True),
        TargetError, ("targets sm_80", "sm_90", "strict matching requires the same architecture")),
)  # fmt: skip

DEVICES = (
    Misuse('preheat.device("emulatr")', lambda _: device("emulatr"),
        InputError, ("'emulatr' is not a device",), "did you mean 'emulator'?"),
    Misuse('preheat.device("cuda:x")', lambda _: device("cuda:x"),
        InputError, ("'cuda:x' is not a device",)),
    Misuse('preheat.device("gpu")', lambda _: device("gpu"),
        InputError, ("'gpu' is not a device",), "use cuda, cuda:1, emulator, emulator:1 or auto"),
    Misuse('preheat.device("emulator:99")', lambda _: device("emulator:99"),
        InputError, ("there is no emulator:99",), "they are numbered 0 to 7"),
    Misuse('preheat.device("cuda", arch="sm_90")', lambda _: device("cuda", arch="sm_90"),
        InputError, ("arch, patience and schedule belong to the emulator: a GPU has its own",)),
)  # fmt: skip


def check_traceback(error: BaseException, frames: int = 1) -> None:
    """Require a traceback without errors that preheat has handled, and with few of its frames."""
    assert error.__context__ is None or error.__suppress_context__
    if isinstance(error, PreheatError):
        assert len(own_frames(error)) <= frames


MISUSES = (*LAUNCHES, *GEOMETRIES, *ARRAYS, *PROGRAMS, *DEVICES)


@pytest.mark.parametrize("warm", [0, 4], ids=["first", "quick"])
@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.code)
def test_a_mistake_is_refused_with_a_helpful_message(
    misuse: Misuse, warm: int, setup: SaxpyCase
) -> None:
    setup.launch(warm)
    with pytest.raises(misuse.error) as caught:
        misuse.do(setup)
    assert type(caught.value) is misuse.error
    check_traceback(caught.value)
    for words in misuse.says:
        assert words in str(caught.value)
    if misuse.hint is not None:
        assert misuse.hint in str(getattr(caught.value, "hint", None))
    setup.check(warm)  # nothing has happened
    setup.launch()
    setup.check(warm + 1)


@pytest.mark.parametrize("misuse", LAUNCHES, ids=lambda misuse: misuse.code)
def test_a_refused_launch_tells_kernel_and_argument_as_data(misuse: Misuse, setup: SaxpyCase) -> None:
    with pytest.raises(LaunchError) as caught:
        misuse.do(setup)
    head = str(caught.value).partition(":")[0]
    error = caught.value
    expected = error.kernel if error.argument is None else f"{error.kernel}, argument {error.argument}"
    assert head == expected


@pytest.mark.parametrize("warm", [0, 4], ids=["first", "quick"])
def test_memory_of_another_device_is_refused(warm: int, open_device: Callable[..., Gpu]) -> None:
    setup = saxpy_case(open_device("emulator"))
    other = open_device("emulator:1")
    setup.launch(warm)
    with pytest.raises(
        LaunchError, match=r"saxpy, argument 1: .*emulator:1> is not on the device of the kernel"
    ) as caught:
        setup.saxpy[5, 64](2.0, other.array(setup.xs), setup.y, setup.n)
    assert "emulator:0" in str(caught.value)
    with pytest.raises(InputError, match="is not on emulator:0"):
        setup.gpu.array(other.array(setup.xs))
    with pytest.raises(InputError, match="cannot copy"):
        setup.x.copy_from(other.array(setup.xs))
    setup.check(warm)


def test_a_stream_of_another_device_is_refused(open_device: Callable[..., Gpu]) -> None:
    setup = saxpy_case(open_device("emulator"))
    other = open_device("emulator:1")
    with pytest.raises(InputError, match="does not belong to emulator:0"):
        setup.saxpy.launch(2.0, setup.x, setup.y, setup.n, grid=5, block=64, stream=other.stream())
    with pytest.raises(InputError, match="does not belong to emulator:0"):
        setup.gpu.empty(3, stream=other.stream())


FAULTS = (
    Misuse("saxpy[5, 64](2.0, x, y, n + 1)", lambda b: b.saxpy[5, 64](2.0, b.x, b.y, b.n + 1),
        EmulatorFault, ("saxpy, program.cu:3, PTX line",
                        "(block (4, 0, 0), thread (1, 0, 0)): reads 4 bytes at 0x",
                        "0 bytes past the end of the 1028-byte buffer",
                        "\n    if (i < n) y[i] = a * x[i] + y[i];\n    ld.global")),
    Misuse("saxpy[5, 64](2.0, preheat.Pointer(0), y, n)",
        lambda b: b.saxpy[5, 64](2.0, Pointer(0), b.y, b.n),
        EmulatorFault, ("saxpy, program.cu:3, PTX line", "thread (0, 0, 0)): reads 4 bytes at 0x0",
                        ", which no allocation contains: the pointer is null")),
    Misuse("saxpy[5, 64](2.0, preheat.Pointer(1 << 46), y, n)",
        lambda b: b.saxpy[5, 64](2.0, Pointer(1 << 46), b.y, b.n),
        EmulatorFault, ("reads 4 bytes at 0x400000000000, which no allocation contains\n",)),
)  # fmt: skip


@pytest.mark.parametrize("warm", [0, 4], ids=["first", "quick"])
@pytest.mark.parametrize("misuse", FAULTS, ids=lambda misuse: misuse.code)
def test_the_emulator_stops_at_what_a_gpu_would_not_survive(
    misuse: Misuse, warm: int, open_device: Callable[..., Gpu]
) -> None:
    setup = saxpy_case(open_device("emulator"))
    setup.launch(warm)
    with pytest.raises(misuse.error) as caught:
        misuse.do(setup)
    for words in misuse.says:
        assert words in str(caught.value)
    check_traceback(caught.value, frames=2)  # Those of the emulator, which the native core calls.


@pytest.mark.parametrize("warm", [0, 4], ids=["first", "quick"])
def test_an_error_of_a_closed_device_shows_the_call_only(
    warm: int, open_device: Callable[..., Gpu]
) -> None:
    setup = saxpy_case(open_device("emulator"))
    setup.launch(warm)
    bound = setup.saxpy.bind(2.0, setup.x, setup.y, setup.n, grid=5, block=64)
    setup.gpu.close()
    uses: tuple[Callable[[], object], ...] = (
        setup.launch,
        bound,
        lambda: setup.saxpy[7, 64],
        lambda: setup.saxpy.launch(2.0, setup.x, setup.y, setup.n, grid=6, block=64),
        lambda: setup.saxpy.geometry(1, 1),
        lambda: setup.gpu.zeros(3),
        lambda: setup.gpu.kernel(SAXPY, "saxpy"),
        setup.gpu.stream,
        lambda: setup.gpu.capture().begin(),
        setup.x.numpy,
    )
    for use in uses:
        with pytest.raises(PreheatError) as caught:
            use()
        check_traceback(caught.value)


CLASH = """
#define SCALAR unsigned short
template <class T> __device__ void foo(T x) {}
extern "C" __global__ void foo(SCALAR x, float* y) { *y = x; }
extern "C" __global__ void k(float a, float* y) { y[0] = a; }
#undef SCALAR
"""


def test_an_error_about_an_argument_of_unknown_type_says_why_it_is_unknown(device: Gpu) -> None:
    module = device.module(CLASH)
    unknown = (
        "the C++ types of foo are unknown, because foo is also the name of other functions; rename"
    )
    assert unknown in str(module["foo"].entry)
    with pytest.raises(LaunchError) as caught:
        module["foo"][1, 1]("x", device.zeros(1))
    assert unknown in (caught.value.hint or "")
    with pytest.raises(LaunchError) as caught:
        module["k"][1, 1](1.5, device.zeros(2, "int64"))
    assert str(caught.value) == "k, argument 1: float* cannot take an array of int64"
    assert "unknown" not in (caught.value.hint or "")
