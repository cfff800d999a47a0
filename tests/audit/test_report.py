"""What is made of events: sites, processes, seconds, and lines that are not whole."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.audit.events import Event, EventLog, read_events
from preheat.audit.images import Image, Load, read_loads
from preheat.audit.library_caches import LibraryCaches
from preheat.audit.origins import Origins
from preheat.audit.processes import compilers, read_processes
from preheat.audit.report import Compile, covered_seconds, make_report
from preheat.audit.sites import Caller, caller_of, package_of
from preheat.tools.cli.audit import report_lines
from tests.audit.modules import cubin

APP = 4_100_010
SITE = "/venv/lib/python3.12/site-packages"


def frames(*paths: str) -> str:
    lines = [f'  File "{path}", line {number} in f' for number, path in enumerate(paths, 1)]
    return "\n".join(["Stack (most recent call first):", *lines])


@pytest.mark.parametrize(
    ("site", "object_path", "caller"),
    [
        (frames("/app/serve.py"), "", Caller("serve.py", "serve.py:1")),
        (frames(f"{SITE}/triton/jit.py", "/app/serve.py"), "", Caller("triton", "serve.py:2")),
        (frames(f"{SITE}/cuda/core/x.py", "/app/a.py"), "/l.so", Caller("cuda.core", "a.py:2")),
        (frames(f"/c/te/cte{'a2' * 24}b.py", "/app/a.py"), "", Caller("torch", "a.py:2")),
        (frames("/app/a.py"), f"{SITE}/cuda/core/_program.so", Caller("cuda.core", "a.py:1")),
        (frames("/app/a.py"), f"{SITE}/cuda/bindings/cynvrtc.so", Caller("a.py", "a.py:1")),
        (frames("/app/a.py"), f"{SITE}/cupy_backends/cuda/api/driver.so", Caller("cupy", "a.py:1")),
        (frames("/usr/lib/python3.12/subprocess.py", "/app/a.py"), "", Caller("a.py", "a.py:2")),
        (frames("<frozen os>", f"{SITE}/cupy/a.py"), "", Caller("cupy", "a.py:2")),
        (frames("/src/triton/compiler.py", "/app/a.py"), "", Caller("triton", "a.py:2")),
        ("", f"{SITE}/torch/lib/libtorch_cuda.so", Caller("torch", "libtorch_cuda.so")),
        ("", "/opt/engine/server", Caller("server", "server")),
        ("", "", Caller("unknown")),
        ("no frames at all", "", Caller("unknown")),
    ],
)
def test_the_caller_is_the_line_of_the_program_and_the_library(
    site: str, object_path: str, caller: Caller
) -> None:
    assert caller_of(site, object_path) == caller


def test_packages_are_known_by_their_files() -> None:
    assert package_of(f"{SITE}/nvidia/cublas/lib/libcublas.so.13") == "nvidia.cublas"
    assert package_of(f"{SITE}/six.py") == "six"
    assert package_of("/app/serve.py") == ""


def event(name: str, time: float, pid: int, /, **fields: object) -> Event:
    """Return an event. The process ids of these tests are larger than those of the machine."""
    return Event(name, time, pid, {"event": name, "time": time, "pid": pid, **fields})


def compiled(started: float, ended: float, library: str = "a") -> Compile:
    return Compile("NVRTC", "k", Caller(library), started, ended, 1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10))))
def test_what_overlaps_counts_once(spans: list[tuple[int, int]]) -> None:
    """The same as counting the seconds that any of them covers."""
    covered = {second for start, length in spans for second in range(start, start + length)}
    assert covered_seconds((s, s + n) for s, n in spans) == len(covered)


def test_a_process_that_is_known_by_its_parent_alone() -> None:
    """A statically linked compiler reports neither its start nor its end."""
    log = EventLog(
        (
            event("process", 1.0, APP, parent=1, path="/bin/app", argv=["app"], role="", preloaded=1),
            event("exec", 2.0, APP + 1, parent=APP, path="/x/nvcc", argv=["nvcc", "a.cu"],
                  role="compiler", hidden="it is static"),
            event("reaped", 4.5, APP, child=APP + 1, status=1),
        )
    )  # fmt: skip
    (found,) = compilers(read_processes(log))
    assert (found.seconds, found.status, found.by) == (2.5, 1, Caller("app", "app"))
    report = make_report(
        log, (), Origins((), None, log, 0.0, {}), command=["app"], status=0, seconds=5.0
    )
    assert report.unseen == ("activity of nvcc: it is static",)
    (row,) = report.libraries()
    assert (row.library, row.compiles, row.seconds, row.bake) == ("app", 1, 2.5, None)
    text = "\n".join(report_lines(report))
    assert "nvcc         1  2.5 s  app  app" in text


def test_a_compiler_inside_a_compile_counts_once() -> None:
    """Triton starts ptxas: the time of its own compile has that of the program in it."""
    log = EventLog(
        (
            event("process", 0.0, APP, parent=1, path="/bin/python", argv=["python"], role=""),
            event("exec", 2.0, APP + 1, parent=APP, path="/x/ptxas", argv=["ptxas", "a"],
                  role="compiler", site=frames(f"{SITE}/triton/a.py", "/app/serve.py")),
            event("exit", 2.5, APP + 1),
            event("compile", 3.0, APP, compiler="Triton", name="add", seconds=2.0,
                  site=frames(f"{SITE}/triton/a.py", "/app/serve.py")),
        )
    )  # fmt: skip
    report = make_report(log, (), Origins((), None, log, 0.0, {}), command=["x"], status=0, seconds=9)
    (row,) = report.libraries()
    assert (row.library, row.compiles, row.seconds) == ("triton", 1, 2.0)
    assert row.bake == "preheat record -- x && preheat bake kernels.toml"
    assert [each.name for each in report.compilers] == ["ptxas"]


def test_equal_compilers_are_one_row_and_their_parts_are_named() -> None:
    """ninja builds two files at a time. What runs below nvcc is a part of its time."""
    started = {
        (20, "ninja"): (1.0, 9.0, "build tool", 10, frames(f"{SITE}/torch/a.py", "/app/serve.py")),
        (30, "nvcc"): (2.0, 6.0, "compiler", 20, ""),
        (31, "nvcc"): (3.0, 8.0, "compiler", 20, ""),
        (40, "cicc"): (2.5, 5.0, "compiler", 30, ""),
        (41, "ptxas"): (5.0, 5.5, "compiler", 30, ""),
        (42, "cicc"): (4.0, 6.0, "compiler", 31, ""),
        (43, "gcc"): (7.0, 7.5, "compiler", 31, ""),
        (50, "cc1plus"): (7.1, 7.4, "compiler", 43, ""),
    }
    events = [event("process", 0.0, APP + 10, parent=1, path="/bin/python", argv=["python"])]
    for (pid, name), (at, end, role, parent, site) in started.items():
        events += [
            event("exec", at, APP + pid, parent=APP + parent, path=f"/x/{name}", argv=[name],
                  role=role, site=site),
            event("exit", end, APP + pid),
        ]  # fmt: skip
    log = EventLog(tuple(sorted(events, key=lambda each: each.time)))
    report = make_report(log, (), Origins((), None, log, 0.0, {}), command=["x"], status=0, seconds=9)
    (row,) = report.libraries()
    assert (row.library, row.compiles, row.seconds) == ("torch", 2, 6.0)
    lines = [" ".join(line.split()) for line in report_lines(report)]
    first = lines.index("Compilers that were started")
    assert lines[first + 1 : first + 11] == [
        "PROGRAM COUNT TIME BY LIBRARY",
        "nvcc 2 6.0 s serve.py:2 torch",
        "",
        "Compilers that those started, as a part of their time",
        "PROGRAM COUNT TIME STARTED BY LIBRARY",
        "cicc 2 3.5 s nvcc torch",
        "ptxas 1 500 ms nvcc torch",
        "gcc 1 500 ms nvcc torch",
        "cc1plus 1 300 ms gcc torch",
        "",
    ]
    json_rows = {(row["path"], row["compiler"]) for row in report.json()["compilers"]}
    assert json_rows >= {("/x/nvcc", ""), ("/x/cicc", "nvcc"), ("/x/cc1plus", "gcc")}


def test_equal_compiles_inside_processes_are_one_row() -> None:
    """Two of them overlap, and one second of them counts once."""
    log = EventLog(
        tuple(
            event(
                "compile", at, 1, compiler="NVRTC", seconds=2.0, site=frames(f"{SITE}/cupy/a.py", app)
            )
            for at, app in ((2.0, "/app/a.py"), (3.0, "/app/a.py"), (9.0, "/app/b.py"))
        )
    )
    report = make_report(log, (), Origins((), None, log, 0.0, {}), command=["x"], status=0, seconds=9)
    lines = [" ".join(line.split()) for line in report_lines(report)]
    assert lines[3:6] == [
        "COMPILER NAME COUNT TIME BY LIBRARY",
        "NVRTC 2 3.0 s a.py:2 cupy",
        "NVRTC 1 2.0 s b.py:2 cupy",
    ]


def test_a_compiler_whose_end_was_not_seen_took_longer_than_is_known() -> None:
    log = EventLog(
        tuple(
            event(name, at, APP + pid, parent=1, path=f"/x/{program}", argv=[program], role="compiler")
            for name, at, pid, program in (
                ("exec", 1.0, 1, "nvcc"), ("exit", 2.0, 1, "nvcc"), ("exec", 3.0, 2, "nvcc"),
                ("exec", 4.0, 3, "gcc"),
            )
        )
    )  # fmt: skip
    report = make_report(log, (), Origins((), None, log, 0.0, {}), command=["x"], status=0, seconds=9)
    lines = [" ".join(line.split()) for line in report_lines(report)]
    assert "nvcc 2 > 1.0 s nvcc nvcc" in lines
    assert "gcc 1 ? gcc gcc" in lines


def test_an_id_that_is_used_again_is_another_process() -> None:
    """The first parent waits by a function that the audit knows, the second one does not."""
    for end in (event("reaped", 2.0, APP, child=APP + 1, status=0), event("exit", 2.0, APP + 1)):
        log = EventLog(
            (
                event("process", 0.0, APP, parent=1, path="/bin/app", argv=["app"], preloaded=1),
                event("process", 1.0, APP + 1, parent=APP, path="/bin/nvcc", role="compiler",
                      argv=["nvcc", "a.cu"], preloaded=1),
                end,
                event("process", 9.0, APP + 1, parent=APP, path="/bin/gcc", role="compiler",
                      argv=["gcc", "b.c"], preloaded=1),
                event("exit", 9.5, APP + 1),
                event("exec", 10.0, APP, child=APP + 1, parent=APP, path="/bin/ls", argv=["ls"]),
            )
        )  # fmt: skip
        found = [(each.name, each.seconds) for each in compilers(read_processes(log))]
        assert found == [("nvcc", 1.0), ("gcc", 0.5)]


def test_a_birth_tells_processes_with_one_id_apart() -> None:
    log = EventLog(
        tuple(
            event(
                "exec", time, APP, parent=1, path=f"/bin/{name}", argv=[name], role="compiler", birth=b
            )
            for time, name, b in ((1.0, "nvcc", 7), (9.0, "gcc", 8))
        )
    )
    assert [each.name for each in compilers(read_processes(log))] == ["nvcc", "gcc"]


def test_caches_of_triton_and_inductor_have_their_default_places(tmp_path: Path) -> None:
    (tmp_path / "torchinductor_me" / "triton").mkdir(parents=True)
    (tmp_path / "torchinductor_me" / "triton" / "a.cubin").write_bytes(cubin(b"1"))
    (tmp_path / ".triton" / "cache").mkdir(parents=True)
    (tmp_path / ".triton" / "cache" / "b.cubin").write_bytes(cubin(b"2"))
    caches = LibraryCaches({"TMPDIR": str(tmp_path), "LOGNAME": "me", "TRITON_HOME": str(tmp_path)})
    for code, library in ((cubin(b"1"), "Inductor"), (cubin(b"2"), "Triton")):
        assert caches.find(hashlib.sha256(code).hexdigest(), len(code)) == library


def test_libraries_are_listed_with_the_worst_first() -> None:
    log = EventLog(
        tuple(
            event(
                "compile", 10.0 * n, 1, compiler="NVRTC", seconds=n, site=frames(f"{SITE}/{name}/a.py")
            )
            for n, name in ((1, "cupy"), (3, "torch"), (2, "triton"))
        )
    )
    report = make_report(log, (), Origins((), None, log, 0.0, {}), command=["x"], status=0, seconds=9)
    assert [row.library for row in report.libraries()] == ["torch", "triton", "cupy"]


def test_a_project_with_the_name_of_a_library_is_a_program(tmp_path: Path) -> None:
    project = tmp_path / "triton"
    project.mkdir()
    site = frames(f"{SITE}/triton/jit.py", str(project / "serve.py"))
    assert caller_of(site) == Caller("triton", "serve.py:2")
    (project / "__init__.py").touch()
    assert caller_of(site) == Caller("triton", "jit.py:1")


def test_a_hint_names_what_no_adapter_covers() -> None:
    """torch starts g++ for code that runs on the CPU, which cannot be recorded."""
    site = frames(f"{SITE}/torch/_inductor/cpp_builder.py", "/app/serve.py")
    log = EventLog(
        (
            event(
                "exec", 1.0, 7, parent=1, path="/usr/bin/g++", argv=["g++"], role="compiler", site=site
            ),
            event("reaped", 3.0, 1, child=7, status=0),
        )
    )
    report = make_report(log, (), Origins((), None, log, 0.0, {}), command=["x"], status=0, seconds=9)
    (row,) = report.libraries()
    assert (row.library, row.bake) == ("torch", None)
    text = "\n".join(report_lines(report))
    assert "hint: preheat has no adapter for what torch compiles with g++:" in text
    assert "TORCHINDUCTOR_CACHE_DIR" in text
    assert "preheat record" not in text


LINES = st.lists(st.one_of(st.binary(max_size=40), st.just(b'{"event":"load","time":1.0,"pid":7}')))


@given(LINES)
def test_any_lines_are_events_or_counted(lines: list[bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "7.jsonl").write_bytes(b"\n".join(lines))
        log = read_events(place)
        loads = read_loads(log, place)
        make_report(log, loads, Origins((), None, log, 0.0, {}), command=["x"], status=0, seconds=1.0)
        assert len(log.events) >= lines.count(b'{"event":"load","time":1.0,"pid":7}')


def test_fields_of_other_types_are_absent() -> None:
    odd = event("load", 1.0, 1, call=7, bytes="many", argv="text", seconds=True)
    assert (odd.text("call"), odd.number("bytes"), odd.words("argv"), odd.number("seconds")) == (
        "", 0, (), 0,
    )  # fmt: skip


def test_a_copy_outside_of_the_directory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "audit").mkdir()
    line = {"event": "load", "time": 1.0, "pid": 1, "saved": "../secret", "kind": "cubin"}
    (tmp_path / "audit" / "1.jsonl").write_text(json.dumps(line))
    (load,) = read_loads(read_events(tmp_path / "audit"), tmp_path / "audit")
    assert load.image.digest is None


def test_origins_of_files(tmp_path: Path) -> None:
    old, new = tmp_path / "old.so", tmp_path / "new.so"
    for path in (old, new):
        path.write_bytes(b"x")
    started = old.stat().st_ctime + 1
    os.utime(new, (started + 5, started + 5))
    origins = Origins((), None, EventLog(()), started, {})

    def kind(path: str, library: str = "") -> str:
        image = Image("cubin", 1, None, path)
        load = Load(1, 1.0, "cuModuleLoadData", image, False, 0.0, 0, Caller("x"), library)
        return origins.of(load).kind

    assert [kind(str(old)), kind(str(new)), kind("/gone")] == ["file", "built", "unknown"]
    assert kind("/usr/bin/env") == "installed"
    assert kind("", f"{SITE}/nvidia/cu13/lib/libcublasLt.so.13") == "installed"
    assert kind("", f"{SITE}/cupy/_core.so") == "unknown"
