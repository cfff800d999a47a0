"""`preheat run --sealed`: compilers and PTX are refused, whoever asks, and the verdict tells."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preheat.audit import library
from preheat.model.arch import Arch
from preheat.toolchain.binaries.fatbin import compiled_on, parse_fatbin
from preheat.tools.cli import run as run_command
from preheat.tools.cli.run_settings import gpu_archs
from tests.audit.conftest import PREHEAT, Cli, Standins
from tests.audit.modules import PTX, cubin, entry, fatbin
from tests.audit.test_modules import LOAD, NVRTC
from tests.processes import SOURCE

Script = Callable[[str], list[str]]

PYTHON_STARTS = """\
import subprocess
try:
    subprocess.run(["nvcc", "a.cu"])
except PermissionError as error:
    print(error)
print(subprocess.run(["nvcc", "--version"], stdout=subprocess.DEVNULL).returncode)
"""


def test_a_compiler_is_an_error_at_the_line_that_starts_it(cli: Cli, script: Script) -> None:
    done = cli("run", "--sealed", "--", *script(PYTHON_STARTS))
    assert (done.code, done.out) == (0, "[Errno 1] Operation not permitted: 'nvcc'\n0\n")
    assert "preheat: this process is sealed: starting the compiler /" in done.err
    assert (
        f'/nvcc was refused, called from File "{Path.cwd() / "app.py"}", line 3 in <module>\n'
        in done.err
    )
    assert "error: the run is sealed: app.py:3 tried to start a compiler: " in done.err
    assert done.err.count("\nhint: preheat has no adapter for what app.py compiles with nvcc:\n") == 1


@pytest.mark.parametrize("words", [["popen", "nvcc a.cu"], ["spawn", "nvcc", "a.cu"]])
def test_a_compiler_that_c_starts_is_refused(cli: Cli, standins: Standins, words: list[str]) -> None:
    done = cli("run", "--sealed", "--", str(standins.loader), *words)
    assert done.code != 0
    assert "error: the run is sealed: loader tried to start a compiler: " in done.err


def test_a_compiler_that_a_shell_starts_is_refused(cli: Cli, script: Script) -> None:
    code = "import os, sys\nsys.exit(os.system('nvcc a.cu') == 0)"
    done = cli("run", "--sealed", "--", *script(code))
    assert done.code == 0
    assert "error: the run is sealed: app.py:2 tried to start a compiler: " in done.err
    assert done.err.count("tried to") == 1  # although the shell tries every directory of PATH


def test_a_compiler_refuses_itself_where_its_start_was_not_seen(cli: Cli, standins: Standins) -> None:
    """A program may start another one by an instruction, which no library sees."""
    done = cli(
        "run", "--sealed", "--", str(standins.loader), "exec", str(standins.programs / "nvcc"), "a.cu"
    )
    assert done.code == 126
    assert f"running the compiler {standins.programs.parent}" not in done.err  # It is a link.
    assert "this process is sealed: running the compiler /" in done.err
    assert "tried to run a compiler" in done.err


@pytest.mark.parametrize("how", ["syscall", "at", "raw"])
def test_a_compiler_that_a_system_call_starts_is_refused(
    cli: Cli, standins: Standins, how: str
) -> None:
    compiler = str(standins.programs / "nvcc")
    if how == "raw" and os.uname().machine != "x86_64":
        pytest.skip("there is no such system call")
    done = cli("run", "--sealed", "--", str(standins.loader), how, compiler, "a.cu")
    assert done.code != 0
    assert f"starting the compiler {compiler} was refused" in done.err
    done = cli("audit", "--json", "--", str(standins.loader), how, compiler, "a.cu")
    assert (done.code, [row["library"] for row in done.compilers]) == (0, ["loader"])


def test_ptx_is_refused_and_machine_code_is_not(cli: Cli, script: Script) -> None:
    images = [PTX, fatbin(entry(2, 80), entry(1, 80)), cubin(), fatbin(entry(2, 90), entry(1, 90))]
    code = LOAD + "".join(f"print(load({image!r}))\n" for image in images)
    done = cli("run", "--sealed", "--", *script(code))
    assert (done.code, done.out.split()) == (0, ["223", "223", "0", "0"])
    assert (
        "error: the run is sealed: app.py:6 tried to load code that the driver must compile: PTX"
        in done.err
    )
    assert "loading PTX was refused (the driver would have to compile it), called from File" in done.err
    warned = cli("run", "--sealed", "warn", "--", *script(code))
    assert warned.out.split() == ["0", "0", "0", "0"]
    assert "is sealed (warning only): loading PTX was permitted (the driver has to" in warned.err
    assert "error" not in warned.err


SPECIFIC = 0x100011  # the flags of code for an architecture with the suffix `a`

#: Images by the compute capability of the device, each with the decision whether the driver compiles.
FATBINS: dict[int, list[tuple[bytes, bool]]] = {
    90: [
        (fatbin(entry(2, 90), entry(1, 90)), False),
        (fatbin(entry(2, 90, flags=SPECIFIC), entry(1, 90)), False),
        (fatbin(entry(1, 80), entry(1, 100)), True),
        (fatbin(entry(1, 90)), True),
        (fatbin(entry(1, 100)), False),  # The driver cannot compile it, and says so itself.
        (fatbin(entry(2, 80), entry(1, 100)), False),
        (fatbin(entry(2, 80), entry(1, 80)), True),
        (fatbin(entry(2, 100), entry(1, 90)), True),
    ],
    86: [
        (fatbin(entry(2, 80), entry(1, 80)), False),  # of the same family
        (fatbin(entry(2, 80, flags=SPECIFIC), entry(1, 80)), True),
        (fatbin(entry(2, 89), entry(1, 86)), True),
        (fatbin(entry(2, 89), entry(1, 87)), False),
    ],
    121: [
        (fatbin(entry(2, 120), entry(1, 120)), False),
        (fatbin(entry(2, 120, flags=SPECIFIC), entry(1, 120)), True),
        (fatbin(entry(2, 120, flags=SPECIFIC), entry(2, 121, flags=SPECIFIC), entry(1, 120)), False),
    ],
    0: [  # not known
        (fatbin(entry(2, 100, flags=SPECIFIC), entry(1, 90)), False),
        (fatbin(entry(1, 100)), True),
    ],
}


@pytest.mark.parametrize("capability", FATBINS)
def test_a_fat_binary_is_refused_if_the_driver_would_compile_its_ptx_for_this_device(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, capability: int
) -> None:
    monkeypatch.setenv("STANDIN_CAPABILITY", str(capability))
    images, compiled = zip(*FATBINS[capability], strict=True)
    code = LOAD + "".join(f"print(load({image!r}))\n" for image in images)
    done = cli("run", "--sealed", "--", *script(code))
    assert done.out.split() == ["223" if each else "0" for each in compiled]
    assert [compiled_on(parse_fatbin(image), capability or None) for image in images] == [*compiled]


def test_without_a_verdict_only_refusals_are_kept(cli: Cli, script: Script) -> None:
    """A server may run for long: its loads and the programs that it waits for take no space."""
    count = "import os\nplace = os.environ['PREHEAT_AUDIT']\n"
    count += "print(len([f for f in os.listdir(place) if f.endswith('.image')]))\n"
    count += "print(sum(b'reaped' in open(f'{place}/{f}', 'rb').read() for f in os.listdir(place)))\n"
    code = f"import subprocess\nload({cubin()!r})\nsubprocess.run(['tool'])\n"
    assert cli("run", "--sealed", "--", *script(LOAD + code + count)).out.split() == ["0", "0"]
    judged = ("run", "--sealed", "--verdict", "v.json", "--")
    assert cli(*judged, *script(LOAD + code + count)).out.split() == ["1", "1"]


def test_a_link_of_a_file_is_refused(cli: Cli, script: Script, tmp_path: Path) -> None:
    (tmp_path / "a.ptx").write_bytes(PTX)
    (tmp_path / "a.fatbin").write_bytes(fatbin(entry(1, 90, PTX)))
    (tmp_path / "a.cubin").write_bytes(cubin())
    code = "for kind, name in (1, b'a.ptx'), (2, b'a.fatbin'), (0, b'a.cubin'):\n"
    code += "    print(cuda.cuLinkAddFile_v2(None, kind, name, 0, None, None))\n"
    done = cli("run", "--sealed", "--", *script(LOAD + code))
    assert done.out.split() == ["223", "223", "0"]
    assert done.err.count("error: the run is sealed: app.py:8 tried to load code") == 2


def test_only_the_last_starts_are_kept_without_a_verdict(cli: Cli, script: Script) -> None:
    """A server may start programs for ever. Only refusals and compilers have files of their own."""
    code = (
        "import os, subprocess\n"
        "for _ in range(40): subprocess.run(['tool', 'x' * 9000])\n"
        "place = os.environ['PREHEAT_AUDIT']\n"
        "files = os.listdir(place)\n"
        "print(len(files), sum(os.path.getsize(f'{place}/{f}') for f in files))\n"
    )
    done = cli("run", "--sealed", "--", *script(code))
    number, size = map(int, done.out.split())
    assert number <= 16 + 3  # with the refusals, the losses and the list of compilers
    assert size < 16 * (65536 + 16384)


def test_each_refusal_counts(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, standins: Standins
) -> None:
    """Two directories of PATH may have one compiler, which is refused once."""
    twin = tmp_path / "twin"
    twin.symlink_to(standins.programs)
    monkeypatch.setenv("PATH", f"{twin}{os.pathsep}{os.environ['PATH']}")
    code = "import subprocess\ndef start():\n    try: subprocess.run(['nvcc', 'a.cu'])\n"
    code += "    except OSError: pass\nstart()\nstart()\n"
    code += "subprocess.run('nvcc a.cu; nvcc b.cu', shell=True)\n"
    done = cli("run", "--sealed", "--verdict", "verdict.json", "--", *script(code))
    assert len(verdict()["refused"]) == 4
    assert done.err.count("preheat: this process is sealed: starting the compiler") == 4


def test_the_search_for_a_library_is_permitted(cli: Cli, script: Script) -> None:
    """`ctypes.util.find_library` asks gcc, which starts a linker."""
    code = "import ctypes.util\nprint(ctypes.util.find_library('no-such-library'))"
    done = cli("run", "--sealed", "--verdict", "verdict.json", "--", *script(code))
    assert (done.code, done.out) == (0, "None\n"), done.err


def test_a_message_does_not_go_into_a_file_of_the_program(cli: Cli, script: Script) -> None:
    code = (
        "import os, subprocess\n"
        "os.close(2)\n"
        "assert os.open('data', os.O_RDWR | os.O_CREAT) == 2\n"
        "try: subprocess.run(['nvcc', 'a.cu'])\n"
        "except OSError: os.write(2, b'mine')\n"
    )
    done = cli("run", "--sealed", "--", *script(code))
    assert Path("data").read_bytes() == b"mine"
    assert "app.py:4 tried to start a compiler" in done.err


def test_many_versions_of_nvrtc_are_said(cli: Cli, standins: Standins, tmp_path: Path) -> None:
    for number in range(5):
        shutil.copy(standins.libraries / "libcupti.so.13", tmp_path / f"libnvrtc-{number}.so")
    done = cli("audit", "--json", "--", str(standins.loader), "versions", str(tmp_path))
    said = "compiles in the process: it has loaded more than four versions of one compiler library"
    assert done.report["unseen"] == [said]


def test_nvrtc_is_refused(cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH")
    done = cli("run", "--sealed", "--", *script(NVRTC))
    assert "NVRTC_ERROR_COMPILATION" in done.out
    assert "error: the run is sealed: app.py:3 tried to compile: NVRTC" in done.err


# The events of the user

ALL_REFUSALS = (
    LOAD
    + f"""\
load({PTX!r})
import subprocess
try:
    subprocess.run(["nvcc", "a.cu"])
except PermissionError:
    print("refused")
"""
)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("options", [[], ["--verdict", "verdict.json"]])
@pytest.mark.parametrize("seal", ["error", "warn"])
def test_refusals_are_events_of_the_user(
    cli: Cli,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    seal: str,
) -> None:
    """Whoever watches the file of PREHEAT_EVENTS does not have to wait for the verdict."""
    monkeypatch.setenv("PREHEAT_EVENTS", "events.jsonl")
    words = script(f"import os\nos.chdir('/')\n{ALL_REFUSALS}")
    before = time.time()
    done = cli("run", "--sealed", seal, *options, "--", *words)
    assert "cannot be written" not in done.err
    loaded, started, *ran = events(tmp_path / "events.jsonl")
    assert list(loaded) == ["time", "event", "mode", "program", "arch", "caller", "reason"]
    assert before <= loaded["time"] <= started["time"] <= time.time()
    common = {"event": "sealed", "mode": seal, "arch": ""}
    assert loaded == loaded | common | {
        "program": "PTX",
        "caller": f"{tmp_path / 'app.py'}:8",
        "reason": "driver: the audit library saw code that the driver must compile",
    }
    assert started == started | common | {
        "caller": f"{tmp_path / 'app.py'}:12",
        "reason": "compiler: the audit library saw that the process starts a compiler",
    }
    assert Path(started["program"]).name == "nvcc"
    assert len(ran) == (seal == "warn")  # The compiler runs, and reports itself.
    if options:
        assert len(verdict()["refused"]) == 2 + len(ran)


def test_a_refusal_in_a_program_without_python_is_an_event(
    cli: Cli, standins: Standins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = os.fsdecode(b"nv\xff\xc3\xa4")
    place = tmp_path / name
    place.mkdir()
    (place / "nvcc").symlink_to(standins.programs / "nvcc")
    monkeypatch.setenv("PREHEAT_EVENTS", str(tmp_path / "events.jsonl"))
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    cli("run", "--sealed", "--", str(standins.loader), "spawn", "nvcc", "a.cu")
    (event,) = events(tmp_path / "events.jsonl")
    assert event["program"] == str(tmp_path / "nv\ufffdä" / "nvcc")
    assert event["caller"] == str(standins.loader)


def test_the_events_of_preheat_and_of_the_audit_library_are_in_one_file_and_in_the_verdict(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_EVENTS", str(tmp_path / "events.jsonl"))
    code = "import preheat\ntry: preheat.compile('__global__ void k() {}', 'sm_90', label='k.cu')\n"
    code += f"except preheat.SealedError: pass\n{PYTHON_STARTS}"
    done = cli("run", "--sealed", "--verdict", "verdict.json", "--", *script(code))
    assert done.code == run_command.NOT_ACCOUNTED
    sealed = [row for row in events(tmp_path / "events.jsonl") if row["event"] == "sealed"]
    assert [Path(row["program"]).name for row in sealed] == ["k.cu", "nvcc"]
    assert sorted(row["what"] for row in verdict()["refused"]) == ["compile", "start a compiler"]
    assert verdict()["unseen"] == []


def test_an_events_file_that_cannot_be_written_is_said_once(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_EVENTS", str(tmp_path / "missing" / "events"))
    done = cli("run", "--sealed", "--", *script(LOAD + f"load({PTX!r})\nload({PTX!r})\n"))
    assert done.code == 0
    said = f"preheat: refusals are not written to {tmp_path / 'missing' / 'events'}, which"
    assert done.err.count(said) == 1
    assert done.err.count("loading PTX was refused") == 2


# The verdict


def verdict() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("verdict.json").read_text())
    return found


SEALED = ("run", "--bundle", "kernels.heat", "--sealed", "--verdict", "verdict.json")


def test_a_verdict_accounts_for_every_module(cli: Cli, baked: list[str]) -> None:
    done = cli(*SEALED, "--manifest", "kernels.toml", "--", *baked)
    assert done.code == 0, done.err
    said = "nothing was compiled, and 1 module loaded, all accounted for → verdict.json\n"
    assert done.err.endswith(said)
    made = verdict()
    assert made["accounted"] is True
    assert made["modules"] == {
        "loaded": 1, "accounted": 1, "by_origin": {"bundle": 1}, "seen_by": "CUPTI",
    }  # fmt: skip
    (bundle,) = made["bundles"]
    assert bundle["sha256"] == hashlib.sha256(Path("kernels.heat").read_bytes()).hexdigest()
    assert (made["unaccounted"], made["compiled"], made["refused"]) == ([], [], [])


def test_a_verdict_is_complete_with_events_of_the_user(
    cli: Cli, baked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREHEAT_EVENTS", str(tmp_path / "events.jsonl"))
    done = cli(*SEALED, "--", *baked)
    assert done.code == 0, done.err
    assert (verdict()["accounted"], verdict()["unseen"]) == (True, [])
    assert "hit" in [row["event"] for row in events(tmp_path / "events.jsonl")]


def changed_header(cli: Cli, place: Path) -> Path:
    """Bake `k.cu` into a bundle, change the header that it includes, and return the header."""
    header = place / "value.cuh"
    header.write_text("#define VALUE 1\n")
    (place / "k.cu").write_text(
        '#include "value.cuh"\nextern "C" __global__ void k(int* x) { *x = VALUE; }'
    )
    (place / "k.toml").write_text('version = 1\n[[program]]\nfile = "k.cu"\n')
    assert cli("bake", "k.toml", "--arch", "sm_90", "-o", "kernels.heat").code == 0
    header.write_text("#define VALUE 2\n")
    return header


def test_a_verdict_says_what_was_not_compared_with_headers(
    cli: Cli, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = changed_header(cli, tmp_path)
    code = "import preheat\npreheat.compile(preheat.Program.from_file('k.cu'), 'sm_90')"
    for policy in ("warn", "ignore"):
        monkeypatch.setenv("PREHEAT_SEALED_HEADERS", policy)
        assert cli(*SEALED, "--", *script(code)).code == 0
        made = verdict()
        assert made["sealed_headers"] == policy
        assert [(each["name"], each["header"]) for each in made["stale"]] == (
            [("k.cu", str(header))] if policy == "warn" else []
        )
        assert made["verdict"] == "accounted"


@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_a_verdict_has_the_policy_for_headers_that_the_program_has_set(
    cli: Cli, script: Script, tmp_path: Path, policy: str
) -> None:
    changed_header(cli, tmp_path)
    code = (
        f"import os\nos.environ['PREHEAT_SEALED_HEADERS'] = '{policy}'\n"
        "import preheat\npreheat.compile(preheat.Program.from_file('k.cu'), 'sm_90')"
    )
    assert cli(*SEALED, "--", *script(code)).code == 0
    assert verdict()["sealed_headers"] == policy
    assert len(verdict()["stale"]) == (policy == "warn")


def test_a_bundle_that_lacks_an_entry_does_not_start(cli: Cli, baked: list[str]) -> None:
    manifest = Path("kernels.toml")
    Path("other.cu").write_text('extern "C" __global__ void other() {}')
    row = '\n[[program]]\nfile = "other.cu"\narch = ["sm_90"]\n'
    manifest.write_text(manifest.read_text() + row)
    started = [sys.executable, "-c", "open('started', 'w')"]
    done = cli(*SEALED, "--manifest", "kernels.toml", "--", *started)
    assert done.code == run_command.NOT_STARTED
    assert "other.cu" in done.out
    assert "the command was not started" in done.err
    assert not Path("started").exists()
    assert baked


def test_a_manifest_is_checked_for_the_gpu_of_the_machine(
    cli: Cli, baked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Arch.parse("sm_80")]
    monkeypatch.setattr(run_command, "gpu_archs", lambda _: gpus)
    checked = ("run", "--bundle", "kernels.heat", "--sealed", "--manifest", "kernels.toml")
    done = cli(*checked, "--", *baked)
    assert done.code == run_command.NOT_STARTED
    assert done.out == "k.cu sm_80: not baked for this architecture\n"
    assert "checking for sm_80, the GPU of this machine\n" in done.err
    done = cli(*checked, "--arch", "sm_90", "--", *baked)  # The option wins.
    assert done.code == 0
    assert "warning: this machine has a GPU of sm_80, which --arch does not name\n" in done.err
    monkeypatch.setenv("PREHEAT_DEVICE", "emulator")
    assert cli(*checked, "--", *baked).code == 0
    monkeypatch.delenv("PREHEAT_DEVICE")
    for present in ([Arch.parse("sm_90")], []):
        gpus[:] = present
        done = cli(*checked, "--", *baked)
        assert done.code == 0, done.err
        assert "warning" not in done.err


def test_without_a_driver_there_is_no_gpu() -> None:
    assert gpu_archs({"PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}) == []
    assert gpu_archs({"PYTHONPATH": "/nowhere"}) == []


@pytest.fixture
def unbaked(cli: Cli, baked: list[str]) -> list[str]:
    """The application, changed so that the cache has its kernel and the bundle lacks it."""
    Path("app.py").write_text(PREHEAT.replace("void k()", "void other()"))
    assert cli("run", "--", *baked).code == 0
    return baked


def test_a_sealed_run_says_what_came_from_the_cache(cli: Cli, unbaked: list[str]) -> None:
    done = cli(*SEALED, "--", *unbaked)
    assert done.code == 0, done.err
    assert verdict()["modules"]["by_origin"] == {"store": 1}
    said = (
        "1 module came from the cache, and no bundle has the code: --empty-cache runs with the bundles"
    )
    assert said in done.err


def test_with_an_empty_cache_the_bundle_alone_must_be_enough(
    cli: Cli, unbaked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_LAYERS", str(tmp_path / "empty"))
    assert cli("run", "--sealed", "--bundle", "kernels.heat", "--", *unbaked).code == 0
    done = cli("run", "--sealed", "--empty-cache", "--bundle", "kernels.heat", "--", *unbaked)
    assert done.code == 1
    assert "SealedError" in done.err
    Path("app.py").write_text(PREHEAT)
    done = cli(*SEALED, "--empty-cache", "--", *unbaked)
    assert done.code == 0, done.err
    assert "came from the cache" not in done.err


def test_what_is_missing_fails_at_the_request(cli: Cli, baked: list[str]) -> None:
    Path("app.py").write_text(PREHEAT.replace("void k()", "void missing()"))
    done = cli(*SEALED, "--", *baked)
    assert done.code == 1
    assert "SealedError" in done.err
    assert "k.cu" in done.err
    assert verdict()["modules"]["loaded"] == 0


def test_a_program_that_catches_the_refusal_is_not_accounted_for(cli: Cli, baked: list[str]) -> None:
    code = PREHEAT.replace("void k()", "void missing()").splitlines()[:2]
    caught = [code[0], "try:", f"    {code[1]}", "except preheat.SealedError: pass"]
    Path("app.py").write_text("\n".join(caught))
    done = cli(*SEALED, "--", *baked)
    assert done.code == run_command.NOT_ACCOUNTED
    assert verdict()["refused"] == [
        {"what": "compile", "name": "k.cu", "library": "preheat", "line": "app.py:3"}
    ]
    assert "error: the run is sealed: app.py:3 tried to compile: k.cu" in done.err


def test_a_program_that_the_compiler_rejects_is_a_compile(cli: Cli, script: Script) -> None:
    code = "import preheat\ntry: preheat.compile('nonsense', 'sm_90', label='bad.cu')\n"
    words = script(code + "except preheat.CompileError: pass\n")
    done = cli("audit", "--json", "--", *words)
    (row,) = done.report["compiles"]
    assert (row["name"], row["rejected"], row["library"]) == ("bad.cu", True, "preheat")
    Path("app.py").write_text(code.replace("nonsense", "other") + "except preheat.CompileError: pass\n")
    assert "bad.cu (rejected)" in cli("audit", "--", *words).err


def test_bundles_are_described_before_the_command(cli: Cli, baked: list[str]) -> None:
    before = hashlib.sha256(Path("kernels.heat").read_bytes()).hexdigest()
    Path("app.py").write_text(PREHEAT + "open('kernels.heat', 'ab').write(b'more')\n")
    done = cli(*SEALED, "--", *baked)
    assert verdict()["bundles"][0]["sha256"] == before
    assert done.code == run_command.NOT_ACCOUNTED
    assert any("it changed during the run" in each for each in verdict()["unseen"])


def test_the_verdict_of_an_earlier_run_does_not_stay(cli: Cli, baked: list[str]) -> None:
    """A run that ends without a verdict must not leave a positive one behind."""
    lacking = Path("lacking.toml")
    lacking.write_text('version = 1\n[[program]]\nsource = "__global__ void other() {}"\n')
    runs = [(["--", "no-such-program"], 127), (["--manifest", str(lacking), "--", *baked], 3)]
    for words, status in runs:
        assert cli(*SEALED, "--", *baked).code == 0
        assert verdict()["accounted"] is True
        assert cli(*SEALED, *words).code == status
        assert not Path("verdict.json").exists()


def test_a_verdict_that_cannot_be_written_keeps_the_status(cli: Cli, script: Script) -> None:
    code = "import os, sys\nos.rmdir('place')\nsys.exit(int(sys.argv[1]))"
    for status, expected in ((7, 7), (0, 1)):
        Path("place").mkdir()
        words = [*script(code), str(status)]
        done = cli("run", "--verdict", "place/v.json", "--", *words)
        assert done.code == expected
        assert "error: cannot write place/v.json: " in done.err


def test_a_module_of_unknown_origin_is_a_negative_verdict(cli: Cli, script: Script) -> None:
    done = cli("run", "--verdict", "verdict.json", "--", *script(LOAD + f"load({cubin()!r})"))
    assert done.code == run_command.NOT_ACCOUNTED
    made = verdict()
    assert (made["accounted"], made["modules"]["accounted"]) == (False, 0)
    assert made["unaccounted"][0]["line"] == "app.py:6"


def test_the_status_of_the_command_comes_first(cli: Cli, script: Script) -> None:
    code = LOAD + f"load({cubin()!r})\nsys.exit(7)"
    assert cli("run", "--verdict", "verdict.json", "--", *script(code)).code == 7
    assert verdict()["exit_status"] == 7


# Settings


def test_each_setting_is_explained(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "kernels.heat").touch()
    done = cli("run", "--sealed", "--bundle", "kernels.heat", "--explain")
    lines = done.err.splitlines()
    names = [line.partition("=")[0] for line in lines if not line.startswith(" ")]
    assert done.code == 0
    assert names == [
        "PREHEAT_ADAPTERS", "PREHEAT_BUNDLE", "PREHEAT_SEALED", "PREHEAT_SEALED_BY",
        "CUDA_DISABLE_PTX_JIT", "CUDA_CACHE_DISABLE",
        "JAX_RAISE_PERSISTENT_CACHE_ERRORS", "TRITON_CACHE_AUTOTUNING",
    ]  # fmt: skip
    assert all(line.startswith("    ") and len(line) > 20 for line in lines[1::2])


def test_the_option_wins_over_the_variable_and_the_hint_names_it(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint of the error names what lets the command compile, and that works."""
    compile_it = script("import preheat\npreheat.compile('__global__ void k() {}', 'sm_90')")
    monkeypatch.setenv("PREHEAT_SEALED", "warn")
    refused = cli("run", "--sealed", "--", *compile_it)
    assert refused.code == 1
    assert "or let it compile with 'preheat run --sealed warn'\n" in refused.err
    monkeypatch.setenv("PREHEAT_SEALED", "1")
    refused = cli("run", "--", *compile_it)
    assert refused.code == 1
    assert "or let it compile with PREHEAT_SEALED=warn\n" in refused.err
    assert cli("run", "--sealed", "warn", "--", *compile_it).code == 0


def test_an_empty_cache_is_explained_and_removed(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREHEAT_REMOTE", "s3://bucket/kernels")
    names = "PREHEAT_CACHE_DIR", "PREHEAT_REMOTE", "PREHEAT_LAYERS"
    code = f"import os\nprint(*[os.environ.get(n) for n in {names}], sep='\\n')\n"
    code += "print(os.listdir(os.environ['PREHEAT_CACHE_DIR']))"
    done = cli("run", "--empty-cache", "--explain", "--", *script(code))
    cache, remote, layers, entries = done.out.splitlines()
    assert (remote, layers, entries) == ("", "None", "[]")
    assert f"PREHEAT_CACHE_DIR={cache}\n    the cache is empty" in done.err
    assert "PREHEAT_REMOTE=\n    no other cache is searched" in done.err
    assert not Path(cache).exists()


def test_an_empty_cache_that_cannot_be_used_is_an_error(
    cli: Cli, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command would use the cache of the user instead."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    done = cli("run", "--empty-cache", "--", *script("print('ran')"))
    assert (done.code, done.out) == (2, "")
    assert "cannot be used as a cache: " in done.err
    assert "hint: set TMPDIR to a directory of your own" in done.err
    assert list(shared.iterdir()) == []


def test_the_command_gets_the_settings(cli: Cli, script: Script) -> None:
    code = "import os\nprint([os.environ.get(n) for n in ('CUDA_DISABLE_PTX_JIT', 'PREHEAT_SEALED')])"
    assert cli("run", "--sealed", "--", *script(code)).out == "['1', '1']\n"
    assert cli("run", "--", *script(code)).out == "[None, None]\n"


def test_variables_of_a_recording_are_set_again(cli: Cli, tmp_path: Path) -> None:
    common = {"TRITON_DEFAULT_FP_FUSION": "1"}
    rows = [{"env": {**common, "A": "1", "B": "1"}}, {"env": {**common, "A": "2"}}, {"other": 1}]
    tables = [
        f"[[foreign]]\nkind = 'triton'\nname = 'k{n}'\nrequest = '{json.dumps(row)}'\n"
        for n, row in enumerate(rows)
    ]
    (tmp_path / "kernels.toml").write_text("version = 1\n" + "".join(tables))
    done = cli("run", "--manifest", "kernels.toml", "--explain")
    assert "TRITON_DEFAULT_FP_FUSION=1\n" in done.err
    assert "\nA=" not in done.err  # The requests do not agree.
    assert "\nB=" not in done.err  # It was not set for the second request.


def test_the_variable_seals_a_run_as_the_option_does(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA_DISABLE_PTX_JIT=1" not in cli("run", "--explain").err
    assert "CUDA_DISABLE_PTX_JIT=1" in cli("run", "--sealed", "--explain").err
    monkeypatch.setenv("PREHEAT_SEALED", "1")
    assert "CUDA_DISABLE_PTX_JIT=1" in cli("run", "--explain").err
    assert "CUDA_DISABLE_PTX_JIT=1" not in cli("run", "--sealed", "warn", "--explain").err


def test_a_check_of_an_empty_cache_is_not_answered_by_that_of_the_user(
    cli: Cli, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k() {}')
    (tmp_path / "k.toml").write_text('version = 1\n[[program]]\nfile = "k.cu"\narch = ["sm_90"]\n')
    assert cli("compile", "k.cu", "--arch", "sm_90").code == 0
    checked = ["run", "--sealed", "--manifest", "k.toml"]
    assert cli(*checked, "--", *script("print('ran')")).out == "ran\n"
    done = cli(*checked, "--empty-cache", "--", *script("print('ran')"))
    assert done.code == 3
    assert "ran" not in done.out


def test_without_the_library_a_verdict_is_an_error_and_a_seal_a_message(
    cli: Cli, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (library, run_command):
        monkeypatch.setattr(module, "LIBRARY", tmp_path / "absent.so")
    words = script("print('ran')")
    for args in (["audit"], ["run", "--verdict", "v.json"]):
        done = cli(*args, "--", *words)
        assert (done.code, done.out) == (2, "")
        assert "the audit library was not built" in done.err
    sealed = cli("run", "--sealed", "--", *words)
    assert (sealed.code, sealed.out) == (0, "ran\n")
    assert "there is no audit library" in sealed.err


def test_a_compiler_that_refused_to_run_has_not_compiled(cli: Cli, standins: Standins) -> None:
    """It was started by the system call alone, so that it had to refuse by itself."""
    compiler = str(standins.programs / "nvcc")
    done = cli(
        "run", "--sealed", "--verdict", "v.json", "--", str(standins.loader), "exec", compiler, "a.cu"
    )
    verdict = json.loads(Path("v.json").read_text())
    assert [each["what"] for each in verdict["refused"]] == ["run a compiler"]
    assert (done.code, verdict["compiled"], verdict["accounted"]) == (126, [], False)
