"""Modules that reach the driver: their kind, their bytes, who loaded them, and where they came from."""

from __future__ import annotations

import ctypes.util
import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.audit.conftest import PREHEAT, Audited, Cli, Standins
from tests.audit.modules import PTX, cubin, entry, fatbin

Audit = Callable[[Sequence[str]], Audited]
Script = Callable[[str], list[str]]

LOAD = """\
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0)
def load(data):
    module = ctypes.c_void_p()
    return cuda.cuModuleLoadData(ctypes.byref(module), data)
"""


def modules(done: Audited) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = done.report["modules"]
    return rows


def loads_of(*images: bytes) -> str:
    return LOAD + "".join(f"load({image!r})\n" for image in images)


@pytest.fixture(params=["cupti", "preload"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Lets each part of the library see the loads: the subscriber of CUPTI, and the wrappers."""
    if request.param == "preload":
        monkeypatch.setenv("STANDIN_PROFILER", "1")
    return str(request.param)


CASES = {
    "cubin": (cubin(), "cubin", False),
    "PTX": (PTX, "PTX", True),
    "a fat binary for the device": (fatbin(entry(2, 90, cubin()), entry(1, 90)), "fat binary", False),
    "a fat binary for an older device of the same family": (fatbin(entry(2, 90)), "fat binary", False),
    "a fat binary with PTX alone": (fatbin(entry(1, 80, PTX)), "fat binary", True),
    "a fat binary for another device": (fatbin(entry(2, 100), entry(1, 90)), "fat binary", True),
    "a fat binary for other devices alone": (fatbin(entry(2, 100)), "fat binary", False),
    "a fat binary with PTX for a newer device": (
        fatbin(entry(2, 100), entry(1, 100)),
        "fat binary",
        False,
    ),
    "code for a specific device": (fatbin(entry(2, 90, flags=0x100011)), "fat binary", False),
    "no module": (b"nothing of the kind", "unknown", False),
}


def test_each_kind_is_known_with_bytes_digest_and_line(audit: Audit, script: Script, way: str) -> None:
    done = audit(script(loads_of(*(image for image, _, _ in CASES.values()))))
    assert done.report["cupti"] == (way == "cupti")
    assert done.report["compute_capability"] == 90
    for row, (image, kind, compiled) in zip(modules(done), CASES.values(), strict=True):
        assert (row["kind"], row["compiled_by_driver"]) == (kind, compiled)
        assert (row["call"], row["result"]) == ("cuModuleLoadData", 0)
        assert (row["library"], row["line"]) == ("app.py", "app.py:6")
        assert row["milliseconds"] >= 0
        if kind != "unknown":
            assert row["bytes"] == len(image)
            assert row["sha256"] == hashlib.sha256(image).hexdigest()
        assert (row["origin"], row["accounted"]) == ("unknown", False)
    assert done.report["compiles"] != []
    assert done.report["clean"] is False


def test_every_module_is_reported_once(audit: Audit, script: Script, way: str) -> None:
    done = audit(script(loads_of(*[cubin()] * 3)))
    assert len(modules(done)) == 3
    assert done.report["resident_modules"] == (3 if way == "cupti" else 0)
    held = "modules: a profiler holds CUPTI, which has room for one subscriber"
    assert done.report["unseen"] == ([] if way == "cupti" else [held])


@pytest.mark.parametrize("route", ["symbol", "dlsym", "cuGetProcAddress"])
def test_a_program_in_c_reaches_the_driver_on_every_route(
    audit: Audit, standins: Standins, way: str, tmp_path: Path, route: str
) -> None:
    (tmp_path / "a.ptx").write_bytes(PTX)
    done = audit([str(standins.loader), "call", route, "a.ptx"])
    (row,) = modules(done)
    assert (row["kind"], row["library"], row["line"]) == ("PTX", "loader", "loader")
    assert row["sha256"] == hashlib.sha256(PTX).hexdigest()
    assert way in ("cupti", "preload")


def test_a_wrapper_is_followed_to_the_file_that_it_is_in(
    audit: Audit, standins: Standins, way: str
) -> None:
    done = audit([str(standins.loader), "embedded"])
    (row,) = modules(done)
    assert (row["kind"], row["contents"], row["bytes"]) == ("fat binary", "PTX 90", 80)
    assert row["compiled_by_driver"] is True
    assert Path(row["from"]).samefile(standins.loader)
    assert way in ("cupti", "preload")


def test_code_in_an_installed_file_is_accounted_for(
    audit: Audit, standins: Standins, tmp_path: Path
) -> None:
    """A file that is older than the command is told from one that was built during the command."""
    package = tmp_path / "site-packages" / "acme"
    package.mkdir(parents=True)
    installed = Path(shutil.copy(standins.loader, package / "loader"))
    (row,) = modules(audit([str(installed), "embedded"]))
    assert (row["origin"], row["from"]) == ("installed", "acme (loader)")
    assert row["accounted"] is False  # It has PTX alone, which the driver compiled.
    code = f"import shutil, subprocess\nshutil.copy({str(standins.loader)!r}, 'new')\n"
    (tmp_path / "build.py").write_text(code + "subprocess.run(['./new', 'embedded'])")
    done = audit([sys.executable, "build.py"])
    (row,) = modules(done)
    assert (row["origin"], row["from"]) == ("built", str(tmp_path / "new"))


@pytest.mark.parametrize("before", [b"", b"CUPYKC\x01\x01" + b"_Z1kv" * 40])
def test_code_in_the_cache_of_cupy_is_found_behind_its_checksum_and_names(
    audit: Audit, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    """CuPy leaves out the last byte of the code that it writes."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    (tmp_path / "kernels").mkdir()
    for number in range(3):
        code = before + cubin(b"%d" % number)[:-1]
        file = tmp_path / "kernels" / f"{number}.cubin"
        file.write_bytes(hashlib.sha1(code).hexdigest().encode() + code)
    done = audit(script(loads_of(cubin(b"1")[:-1], cubin(b"4"))))
    assert [(row["origin"], row["from"]) for row in modules(done)] == [
        ("cache", "CuPy"),
        ("unknown", ""),
    ]


def test_damaged_modules_do_not_stop_the_program(audit: Audit, script: Script, way: str) -> None:
    """Sizes that point outside the image are read by the kernel, which finds nothing there."""
    whole = cubin(b"x" * 5000)
    far = bytearray(whole)
    far[40:48] = (1 << 40).to_bytes(8, "little")  # the section headers
    huge = fatbin(entry(2, 90))
    huge = huge[:8] + (1 << 50).to_bytes(8, "little") + huge[16:]
    done = audit(script(loads_of(whole[:100], bytes(far), huge, b"\x7fELF", b"\x50\xed\x55\xba", b"")))
    assert len(modules(done)) == 6
    assert [row["sha256"] for row in modules(done)][1:3] == [None, None]
    assert way in ("cupti", "preload")


def test_a_link_of_ptx_is_a_compile_of_the_driver(audit: Audit, script: Script, way: str) -> None:
    code = (
        "cubin, size = ctypes.c_void_p(), ctypes.c_size_t()\n"
        f"ptx = {PTX!r}\n"
        "cuda.cuLinkAddData_v2(None, 1, ptx, ctypes.c_size_t(len(ptx)), b'a', 0, None, None)\n"
        "cuda.cuLinkComplete(None, ctypes.byref(cubin), ctypes.byref(size))\n"
    )
    done = audit(script(LOAD + code))
    assert [row["call"] for row in modules(done)] == ["cuLinkAddData_v2", "cuLinkComplete"]
    assert {row["compiler"] for row in done.report["compiles"]} == {"driver"}
    assert way in ("cupti", "preload")


def test_forked_children_have_lines_of_their_own(audit: Audit, script: Script) -> None:
    code = (
        "import os\n"
        "children = []\n"
        "for _ in range(4):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        f"        [load({cubin()!r}) for _ in range(20)]\n"
        "        os._exit(0)\n"
        "    children.append(child)\n"
        "[os.waitpid(child, 0) for child in children]\n"
    )
    rows = modules(audit(script(LOAD + code)))
    assert len(rows) == 80
    assert len({row["pid"] for row in rows}) == 4
    assert {row["line"] for row in rows} == {"app.py:6"}


def test_lines_are_known_after_children_of_every_kind(audit: Audit, script: Script) -> None:
    """A child may share the memory of its parent, its files, or both, until it executes a program."""
    code = (
        "import os, subprocess\n"
        "subprocess.run(['tool'], close_fds=False)\n"
        "subprocess.run(['tool'])\n"
        "subprocess.run(['tool'], preexec_fn=os.getpid)\n"
        "child = os.fork() or os.execlp('tool', 'tool')\n"
        "os.waitpid(child, 0)\n"
        f"load({cubin()!r})\n"
        "subprocess.run(['nvcc', 'a.cu'], close_fds=False)\n"
    )
    done = audit(script(LOAD + code))
    assert [row["line"] for row in modules(done)] == ["app.py:6"]
    assert [row["line"] for row in done.compilers] == ["app.py:14"]


def test_a_file_of_ptx_is_ptx(audit: Audit, script: Script, way: str, tmp_path: Path) -> None:
    (tmp_path / "a.ptx").write_bytes(PTX)
    (tmp_path / "a.cubin").write_bytes(cubin())
    code = "for name in (b'a.ptx', b'a.cubin', b'absent'):\n"
    code += "    cuda.cuModuleLoad(ctypes.byref(ctypes.c_void_p()), name)\n"
    rows = modules(audit(script(LOAD + code)))
    assert [row["kind"] for row in rows] == ["PTX", "cubin", "unknown"]
    assert [row["origin"] for row in rows] == ["file", "file", "unknown"]
    assert rows[0]["sha256"] == hashlib.sha256(PTX).hexdigest()
    assert way in ("cupti", "preload")


def test_threads_that_load_together_have_lines_of_their_own(audit: Audit, script: Script) -> None:
    code = (
        "import threading\n"
        f"work = lambda: [load({cubin()!r}) for _ in range(20)]\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
    )
    rows = modules(audit(script(LOAD + code)))
    assert len(rows) == 160
    assert {row["line"] for row in rows} == {"app.py:6"}


def test_a_library_that_was_not_preloaded_is_injected(
    audit: Audit, script: Script, standins: Standins, tmp_path: Path
) -> None:
    """The driver loads it, and CUPTI reports; a Python loads it at its start, and lines are known."""
    (tmp_path / "a.cubin").write_bytes(cubin())
    code = (
        "import os, subprocess, sys\n"
        "env = {k: v for k, v in os.environ.items() if k != 'LD_PRELOAD'}\n"
        f"words = [{str(standins.loader)!r}, 'call', 'symbol', 'a.cubin']\n"
        "subprocess.run(words, env=env, check=True)\n"
        f"subprocess.run([sys.executable, '-c', {loads_of(cubin())!r}], env=env, check=True)\n"
    )
    done = audit(script(code))
    assert [(row["library"], row["line"]) for row in modules(done)] == [
        ("loader", "loader"),
        ("<string>", "<string>:6"),
    ]


NVRTC = """\
from cuda.bindings import nvrtc
_, program = nvrtc.nvrtcCreateProgram(b'extern "C" __global__ void k() {}', b"k.cu", 0, [], [])
print(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"]))
"""


def test_a_compile_of_nvrtc_in_the_process_is_seen(
    audit: Audit, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")  # NVRTC does not take the stand-in for a driver.
    done = audit(script(NVRTC))
    (row,) = done.report["compiles"]
    assert (row["compiler"], row["library"], row["line"]) == ("NVRTC", "app.py", "app.py:3")
    assert row["seconds"] > 0


CUDA_CORE = """\
from cuda.core import Program, ProgramOptions
Program('extern "C" __global__ void k() {}', "c++", ProgramOptions(arch="sm_90")).compile("cubin")
"""


def test_a_compile_of_a_library_in_cython_has_its_name(
    audit: Audit, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda.core has no frames of Python, and calls NVRTC by cuda.bindings."""
    pytest.importorskip("cuda.core")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    report = audit(script(CUDA_CORE)).report
    (row,) = report["compiles"]
    assert (row["compiler"], row["library"], row["line"]) == ("NVRTC", "cuda.core", "app.py:2")
    (library,) = report["libraries"]
    assert library["bake"].startswith("preheat record -- ")


def test_modules_of_preheat_are_entries_of_the_store_or_the_bundle(
    cli: Cli, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = script(PREHEAT)
    cold = cli("audit", "--json", "--", *words)
    (row,) = cold.report["compiles"]
    assert (row["compiler"], row["name"], row["library"]) == ("preheat", "k.cu", "preheat")
    assert cold.report["libraries"][0]["bake"].startswith("preheat record -- ")
    (module,) = modules(cold)
    assert (module["origin"], module["from"], module["accounted"]) == ("store", "k.cu", True)
    warm = cli("audit", "--json", "--", *words)
    assert warm.report["compiles"] == []
    assert warm.report["clean"] is True
    assert cli("record", "--", *words).code == 0
    assert cli("bake", "kernels.toml").code == 0
    monkeypatch.setenv("PREHEAT_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("PREHEAT_BUNDLE", str(tmp_path / "kernels.heat"))
    baked = cli("audit", "--json", "--", *words)
    (module,) = modules(baked)
    assert (module["origin"], module["from"]) == ("bundle", "kernels.heat k.cu")
    assert baked.report["clean"] is True


def test_the_search_for_a_library_is_a_question(audit: Audit, script: Script) -> None:
    assert ctypes.util.find_library("no-such-library") is None
    done = audit(script("import ctypes.util\nctypes.util.find_library('no-such-library')"))
    assert done.compilers == []
