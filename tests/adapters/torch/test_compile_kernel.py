"""`torch.cuda._compile_kernel`: compiled once, recorded, baked for other GPUs, and sealed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a CPU build of torch is installed by `make test-torch`")

from preheat.adapters.torch import compile_kernel
from preheat.adapters.torch.compile_kernel import TorchAdapter
from preheat.ahead.manifest import Manifest
from preheat.build.builder import Builder
from preheat.errors import AdapterError, SealedError, ToolchainNotFoundError
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from tests.adapters.torch.applications import Application
from tests.conftest import Recorder
from tests.processes import kill_started_processes

pytestmark = pytest.mark.torch

SCALE = """
extern "C" __global__ void scale(float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}
"""
FILL = "template <class T, int N> __global__ void fill(T* x) { x[threadIdx.x] = N; }"
CUBIN = b"\x7fELF"


@pytest.fixture
def utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of torch whose function the adapter replaces. The test's end restores it."""
    from torch.cuda import _utils

    monkeypatch.setattr(_utils, "_nvrtc_compile", _utils._nvrtc_compile)
    return _utils


@pytest.fixture
def compile(utils: Any, builder: Builder) -> Callable[..., tuple[bytes, str]]:
    """Return torch's function, connected to a cache of the test's own."""
    TorchAdapter().install(builder)
    found: Callable[..., tuple[bytes, str]] = utils._nvrtc_compile
    return found


# One process


def test_a_kernel_is_compiled_once(
    compile: Callable[..., tuple[bytes, str]], recorder: Recorder, utils: Any,
    open_builder: Callable[..., Builder],
) -> None:  # fmt: skip
    code, name = compile(SCALE, "scale", "90")
    assert (code[:4], name) == (CUBIN, "scale")
    assert len(recorder.named("compile")) == 1
    connect(utils, open_builder())
    assert utils._nvrtc_compile(SCALE, "scale", "90") == (code, name)
    assert len(recorder.named("compile")) == 1
    assert [hit["tier"] for hit in recorder.named("hit")] == ["disk"]


def connect(utils: Any, builder: Builder) -> None:
    """Connect torch to another builder, as another process would."""
    utils._nvrtc_compile = compile_kernel._compiler(builder, utils._nvrtc_compile)


def test_the_name_of_an_instance_is_that_in_the_code(
    compile: Callable[..., tuple[bytes, str]],
) -> None:
    code, name = compile(FILL, "fill<float, 3>", "90")
    assert name == "_Z4fillIfLi3EEvPT_"
    assert name.encode() in code
    assert compile("__global__ void plain() {}", "plain", "90")[1] == "_Z5plainv"


@pytest.mark.parametrize(
    "other",
    [
        {"kernel_source": SCALE.replace("*=", "+=")},
        {"compute_capability": "100"},
        {"compute_capability": "90a"},
        {"nvcc_options": ["-lineinfo"]},
        {"kernel_name": "twin", "kernel_source": SCALE + SCALE.replace("scale", "twin")},
    ],
    ids=["source", "gpu", "suffix", "options", "name"],
)
def test_another_request_is_another_compile(
    compile: Callable[..., tuple[bytes, str]], recorder: Recorder, other: dict[str, Any]
) -> None:
    given = {"kernel_source": SCALE, "kernel_name": "scale", "compute_capability": "90"}
    first = compile(**given)
    assert compile(**{**given, **other}) != first
    assert len(recorder.named("compile")) == 2


def test_a_header_that_changes_is_another_compile(
    compile: Callable[..., tuple[bytes, str]], recorder: Recorder, tmp_path: Path
) -> None:
    header = tmp_path / "factor.h"
    source = '#include "factor.h"\nextern "C" __global__ void f(int* x) { *x = FACTOR; }'
    made = []
    for factor in (3, 4, 3):
        header.write_text(f"#define FACTOR {factor}\n")
        made.append(compile(source, "f", "90", cuda_include_dirs=[str(tmp_path)]))
    assert made[0] == made[2] != made[1]
    assert len(recorder.named("compile")) == 2


def test_the_macros_of_torch_reach_the_headers_of_cuda(
    compile: Callable[..., tuple[bytes, str]],
) -> None:
    source = '#include <cuda_fp16.h>\nextern "C" __global__ void f(__half* x) { x[0] = x[1] + x[2]; }'
    with pytest.raises(RuntimeError, match=r"Kernel compilation failed:\n(.|\n)*no operator"):
        compile(source, "f", "90")


@pytest.mark.parametrize(
    ("source", "include", "expected"),
    [
        ("", (), False),
        ("#include <cuda_fp16.h>", (), False),
        ("#include <cuda_fp16.h>\n#include <c10/macros/Macros.h>", (), True),
        ("#define NAME <cuda_fp16.h>\n#include NAME", (), True),
        ('#include "mine.h"', ("/mine",), True),
    ],
)
def test_the_headers_of_torch_are_searched_where_they_may_be_needed(
    source: str, include: tuple[str, ...], expected: bool
) -> None:
    request = compile_kernel._Request(source + SCALE, "scale", (), include)
    found = [place for place in request.program.include if place not in include]
    assert bool(found) is expected
    assert all(Path(place).is_dir() for place in found)


def test_options_that_only_headers_can_see_are_all_macros(utils: Any) -> None:
    """The adapter leaves them out for a program without headers."""
    assert all(flag.startswith("-D__CUDA_NO_") for flag in utils._get_gpu_rtc_compatible_flags())


def test_precompiled_headers_change_nothing(
    compile: Callable[..., tuple[bytes, str]], recorder: Recorder
) -> None:
    assert compile(SCALE, "scale", "90", auto_pch=True) == compile(SCALE, "scale", "90")
    assert len(recorder.named("compile")) == 1


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        ('extern "C" __global__ void f() { x; }', "f", 'identifier "x" is undefined'),
        ('extern "C" __global__ void f() {}', "g", 'identifier "g" is undefined'),
    ],
)
def test_a_wrong_program_is_the_error_of_torch(
    compile: Callable[..., tuple[bytes, str]], source: str, name: str, reason: str
) -> None:
    with pytest.raises(RuntimeError, match=f"Kernel compilation failed:\n(.|\n)*{reason}"):
        compile(source, name, "90")


def test_the_architecture_is_that_of_the_current_gpu(
    compile: Callable[..., tuple[bytes, str]], monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = {1: SimpleNamespace(major=12, minor=1)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    compile(SCALE, "scale")
    assert [event["arch"] for event in recorder.named("compile")] == ["sm_121"]


def test_stored_code_that_runs_on_the_current_gpu_is_used(
    compile: Callable[..., tuple[bytes, str]], monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=8, minor=6)
    )
    assert compile(SCALE, "scale", "80") == compile(SCALE, "scale")
    assert len(recorder.named("compile")) == 1


def test_damage_is_a_miss(
    compile: Callable[..., tuple[bytes, str]], utils: Any, config: Config, recorder: Recorder,
    open_builder: Callable[..., Builder],
) -> None:  # fmt: skip
    made = compile(SCALE, "scale", "90")
    files = [file for file in config.cache_dirs[0].rglob("*") if file.stat().st_size > 4000]
    entries = [file for file in files if file.is_file() and CUBIN in file.read_bytes()]
    assert entries
    for file in entries:
        data = bytearray(file.read_bytes())
        data[data.index(CUBIN) + 100] ^= 1
        file.write_bytes(data)
    recorder.forgive = True
    connect(utils, open_builder())
    assert utils._nvrtc_compile(SCALE, "scale", "90") == made
    assert recorder.named("damaged")
    assert len(recorder.named("compile")) == 2


def test_a_sealed_process_names_the_kernel_and_the_line(
    utils: Any, config: Config, open_builder: Callable[..., Builder]
) -> None:
    TorchAdapter().install(open_builder(replace(config, sealed=SealMode.ERROR)))
    utils._cuda_load_module = None  # It is not reached.
    line = sys._getframe().f_lineno + 2
    with pytest.raises(SealedError) as refused:
        torch.cuda._compile_kernel(SCALE, "scale", compute_capability="90")
    assert (refused.value.entry, refused.value.arch) == ("scale", "sm_90")
    assert refused.value.caller == f"tests/adapters/torch/test_compile_kernel.py:{line}"


def test_torch_compiles_where_preheat_finds_no_compiler(
    builder: Builder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[object, ...]] = []

    def obtain(*_: object, **__: object) -> None:
        raise ToolchainNotFoundError("NVRTC 13 is not installed")

    def stock(
        kernel_source: str, kernel_name: str, compute_capability: str, nvcc_options: list[str]
    ) -> tuple[bytes, str]:
        asked.append((kernel_source, kernel_name, compute_capability, nvcc_options))
        return b"code", "name"

    monkeypatch.setattr(builder, "obtain", obtain)
    replaced = compile_kernel._compiler(builder, stock)
    for _ in range(2):
        assert replaced(SCALE, "scale", "90", nvcc_options=["-G"]) == (b"code", "name")
    assert asked == [(SCALE, "scale", "90", ["-G"])] * 2
    assert caplog.text.count("compiled by torch, and are not stored: NVRTC 13 is not installed") == 1


# Versions, and what is not an adapter's


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0", "3.0.0"])
def test_an_unknown_version_is_refused(
    utils: Any, builder: Builder, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    stock = utils._nvrtc_compile
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(AdapterError, match=f"torch {version} is not known: .* accepts 2.11 to 2.13"):
        TorchAdapter().install(builder)
    assert utils._nvrtc_compile is stock


def test_an_unknown_version_compiles_nothing_in_a_sealed_process(
    utils: Any, config: Config, open_builder: Callable[..., Builder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    TorchAdapter().install(open_builder(replace(config, sealed=SealMode.ERROR)))
    with pytest.raises(AdapterError, match=r"torch 2\.14\.0 is not known"):
        utils._nvrtc_compile(SCALE, "scale", "90")


def test_a_directory_called_torch_is_not_torch(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    TorchAdapter().install(builder)


def test_code_before_the_source_is_part_of_it(builder: Builder) -> None:
    """Older releases have an argument for it."""

    def stock(
        kernel_source: str, kernel_name: str, compute_capability: str, header_code: str = ""
    ) -> Any:
        raise AssertionError((kernel_source, kernel_name, compute_capability, header_code))

    compile = compile_kernel._compiler(builder, stock)
    code, name = compile("__global__ void f(T* x) { *x = 1; }", "f", "90", "using T = int;")
    assert (code[:4], name) == (CUBIN, "_Z1fPi")


def test_other_arguments_than_the_known_ones_are_refused(
    utils: Any, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "_nvrtc_compile", lambda kernel_source, flags: None)  # noqa: ARG005
    with pytest.raises(AdapterError, match="takes kernel_source, flags, which is not known"):
        TorchAdapter().install(builder)


def test_a_build_for_rocm_is_refused(
    utils: Any, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    del utils
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(AdapterError, match="built for ROCm"):
        TorchAdapter().install(builder)


def test_kernels_of_torch_are_no_requests_of_an_adapter() -> None:
    with pytest.raises(AdapterError, match="recorded as programs"):
        TorchAdapter().bake({}, Arch(9, 0), "recorded")
    with pytest.raises(AdapterError, match="recorded as programs"):
        TorchAdapter().keys({}, Arch(9, 0), "recorded")
    assert TorchAdapter().count({}, "recorded") == 0


# Processes


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """Return the application, recorded as sm_90 and baked for sm_90 and sm_100.

    Tests use it and leave it unchanged. The manifest is `kernels.toml` and the bundle `kernels.heat`.
    """
    made = Application(tmp_path_factory.mktemp("torch") / "app")
    made.preheat("record", "-o", "kernels.toml", "--", sys.executable, "app.py").ok()
    baking = made.other_cache("empty")
    baking.preheat("bake", "kernels.toml", "--arch", "sm_90", "--arch", "sm_100").ok()
    yield made
    kill_started_processes()


def test_a_recording_has_the_programs_with_the_lines_of_the_application(baked: Application) -> None:
    manifest = Manifest.read(baked.root / "kernels.toml")
    found = {item.program.label: item for item in manifest.programs}
    assert set(found) == {"scale.cu", "one<__half>.cu"}
    assert not manifest.foreign
    assert found["one<__half>.cu"].program.names == ("one<__half>",)
    assert not found["one<__half>.cu"].program.include  # A bake needs no torch.
    lines = (baked.root / "app.py").read_text().splitlines()
    for item in found.values():
        (caller,) = item.callers
        file, _, line = caller.partition(":")
        assert file == "app.py"
        assert "_compile_kernel(" in lines[int(line) - 1]


@pytest.mark.parametrize("capability", [90, 100])
def test_a_sealed_process_compiles_nothing(baked: Application, capability: int) -> None:
    sealed = baked.other_cache(f"sealed-{capability}")
    words = ("run", "--bundle", "kernels.heat", "--sealed", "--", sys.executable, "app.py")
    ran = sealed.preheat(*words, capability=capability).ok()
    assert [kernel["name"] for kernel in ran.kernels] == ["scale", "_Z3oneI6__halfEvPT_"]
    assert {kernel["is"] for kernel in ran.kernels} == {CUBIN.hex()}
    assert ran.stats.get("compiles", 0) == 0
    assert ran.stats["hits.bundle"] == 2


def test_a_check_says_which_gpu_is_missing(baked: Application) -> None:
    checked = baked.other_cache("check")
    words = ("check", "kernels.toml", "--bundle", "kernels.heat", "--arch")
    checked.preheat(*words, "sm_90").ok()
    ran = checked.preheat(*words, "sm_120")
    assert ran.code == 1
    assert "one<__half>.cu" in ran.out + ran.err


def test_a_sealed_process_of_another_gpu_is_refused(baked: Application) -> None:
    sealed = baked.other_cache("other")
    words = ("run", "--bundle", "kernels.heat", "--sealed", "--", sys.executable, "app.py")
    ran = sealed.preheat(*words, capability=120)
    assert ran.code != 0
    assert "scale (scale.cu, sm_120) cannot be compiled in this sealed process" in ran.err
    assert "app.py:" in ran.err


# The import of torch takes most of the time of a process, so that all of them share it.
TOGETHER = """
import json, os
import preheat, app

def child():
    code, name = app._utils._nvrtc_compile(app.SCALE, "scale", "90")
    app._utils._nvrtc_compile(app.ONE, "one<__half>", "90")
    stats = preheat.default_builder().stats()["process"]
    row = [app.hashlib.sha256(code).hexdigest(), stats.get("compiles", 0)]
    os.write(1, json.dumps(row).encode() + b"\\n")

children = []
for _ in range(8):
    children.append(os.fork())
    if children[-1] == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
assert not any(os.waitpid(each, 0)[1] for each in children)
"""


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    ran = Application(tmp_path / "app").python("-c", TOGETHER, PREHEAT_ADAPTERS="torch").ok()
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert len(rows) == 8
    assert len({code for code, _ in rows}) == 1
    assert sum(compiles for _, compiles in rows) == 2


def test_an_unknown_version_is_left_alone_with_one_warning(tmp_path: Path) -> None:
    made = Application(tmp_path / "app")
    package = tmp_path / "app" / "torch"
    (package / "cuda").mkdir(parents=True)
    (package / "__init__.py").write_text('from torch import cuda\n__version__ = "2.14.1"\n')
    (package / "cuda" / "__init__.py").write_text("from torch.cuda import _utils\n")
    (package / "cuda" / "_utils.py").write_text("def _nvrtc_compile():\n    return 'stock'\n")
    code = (
        "import sys; sys.path.insert(0, '.'); import preheat, torch\n"
        "print(torch.__version__)\n"
        "print(torch.cuda._utils._nvrtc_compile())\n"
    )
    ran = made.python("-c", code, PREHEAT_ADAPTERS="torch").ok()
    assert ran.out == "2.14.1\nstock\n"
    assert ran.err.count("the adapter for torch is not installed: torch 2.14.1 is not known") == 1
    refused = made.python("-c", code, PREHEAT_ADAPTERS="torch", PREHEAT_SEALED="1")
    assert refused.code == 1
    assert refused.out == "2.14.1\n"
    assert "AdapterError: torch 2.14.1 is not known" in refused.err
