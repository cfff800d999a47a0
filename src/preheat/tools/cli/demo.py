"""`preheat demo`: run all steps, from a cold compile to a sealed run, on the device of this machine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from preheat.ahead.manifest import Manifest
from preheat.errors import PreheatError
from preheat.model.arch import Arch
from preheat.model.config import environ
from preheat.process.lazy import LazyModule
from preheat.tools.cli.output import columns, count, duration, print_json, print_message, size
from preheat.tools.cli.programs import require_known_archs

if TYPE_CHECKING:
    import venv
else:
    venv = LazyModule("venv")

__all__ = [
    "APP",
    "COMMIT",
    "DATE",
    "GPU",
    "KERNELS",
    "MEASURED",
    "Measured",
    "Row",
    "bare_python",
    "closing",
    "command",
    "summary",
]

KERNELS = Path(__file__).with_name("demo_kernels")
APP = Path(__file__).with_name("demo_app")
_STEPS = Path(__file__).with_name("demo_steps")

_TOLERANCE = 1e-4  # the largest difference between float32 and float64 in these steps
_SEALED = "PREHEAT_BUNDLE=kernels.heat PREHEAT_SEALED=1 python server.py"
_NEEDED = ("preheat", "numpy", "xxhash", "cuda")  # packages that an application with preheat imports
_COMPILER_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH")

_ASK_DEVICE = """\
import json, preheat
gpu = preheat.device()
print(json.dumps({"name": gpu.name, "model": gpu.model, "arch": str(gpu.arch)}))
"""
_ASK_COMPILERS = """\
import json, preheat
found = preheat.default_builder().toolchain.located
compilers = [library.path for library in found.libraries.values()]
print(json.dumps({"compilers": compilers, "headers": [*found.roots.values()]}))
"""

_EPILOG = """\b
Examples:
  preheat demo
  preheat demo --arch sm_80 --arch sm_120
  PREHEAT_DEVICE=emulator preheat demo --json

The demo takes less than a minute. It needs no GPU, and it uses a separate cache. Without a GPU,
the closing table has figures that were measured on one. Exit status 1 when a step fails, or when a
result differs from that of NumPy.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    default=("sm_80", "sm_90", "sm_100"),
    show_default=True,
    callback=require_known_archs,
    help="Architecture to bake for, besides that of the device; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(archs: tuple[str, ...], as_json: bool) -> None:
    """Compile, look up, replay, record, bake and run sealed, and compare every result with NumPy."""
    wanted = [Arch.parse(arch) for arch in archs]
    with tempfile.TemporaryDirectory(prefix="preheat-demo-", ignore_cleanup_errors=True) as place:
        demo = _Demo(Path(place).resolve(), wanted)
        rows = []
        for row in demo.run():
            print_message(f"  {summary(row, demo.facts)}")
            rows.append(row)
    if as_json:
        measured = {step: figure._asdict() for step, figure in MEASURED.items()}
        measured_on = {"gpu": GPU, "date": DATE, "steps": measured}
        print_json(
            {**demo.facts, "steps": [row._asdict() for row in rows], "measured_on_a_gpu": measured_on}
        )
        return
    click.echo()
    for line in closing(rows, demo.facts):
        click.echo(line)


class Row(NamedTuple):
    """One line of the closing table."""

    step: str
    what: str
    seconds: float
    note: str


def summary(row: Row, facts: Mapping[str, Any]) -> str:
    """Return the line that is shown when a step has ended."""
    if _emulate(facts) and row.step in _LAUNCHES:
        return f"done: {row.what}{f'; {_SAME_BITS}' if row.step == 'replay' else ''}"
    return f"done in {duration(row.seconds)}: {row.what}; {row.note}"


def closing(rows: Iterable[Row], facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the closing table, and the device on which it was measured.

    Without a GPU, the table has the figures that were measured on one. The times of launches on the
    emulator are left out, because they would mislead.
    """
    device = facts["device"]
    if _emulate(facts):
        table = [_emulate_row(row) for row in rows]
        yield from columns([("STEP", "WHAT HAPPENED", "HERE", f"ON AN {GPU} *"), *table], right=(2,))
        yield ""
        yield f"* Measured on {DATE} at commit {COMMIT}, in benchmarks/results: from the start of a"
        yield "  process to the first launch of its last kernel, and launches from end to end."
    else:
        table = [(row.step, row.what, duration(row.seconds), row.note) for row in rows]
        yield from columns([("STEP", "WHAT HAPPENED", "TIME", "NOTE"), *table], right=(2,))
        yield ""
    yield f"Ran on {device['name']}, {device['model']}, {device['arch']}."
    yield f"Every result agrees with NumPy in float64, to {facts['error']:.0e} at worst."


_LAUNCHES = ("eager", "replay")
_SAME_BITS = "the same bits"


def _emulate(facts: Mapping[str, Any]) -> bool:
    return str(facts["device"]["name"]).startswith("emulator")


def _emulate_row(row: Row) -> tuple[str, str, str, str]:
    here = "-" if row.step in _LAUNCHES else duration(row.seconds)
    figure = None if row.what.endswith("refused") else MEASURED.get(row.step)
    return row.step, row.what, here, "" if figure is None else f"{figure.value} for {figure.what}"


class _Demo:
    """One run of all steps in a temporary directory. `facts` are the values that it measured."""

    def __init__(self, place: Path, archs: Sequence[Arch]) -> None:
        self.place = place
        self.here = place / "here"
        self.archs = archs
        self.facts: dict[str, Any] = {"error": 0.0}
        self._interpreter = sys.executable
        self._env = _environment(place)

    def run(self) -> Iterator[Row]:
        """Run every step, and yield its row of the closing table. Each step is announced first."""
        self.here.mkdir()
        shutil.copytree(KERNELS, self.here / "kernels")
        for file in APP.glob("*.*"):
            shutil.copy(file, self.here)
        device = self.facts["device"] = json.loads(self._python("-c", _ASK_DEVICE))
        print_message(f"This demo runs on {device['name']}: {device['model']}, {device['arch']}.")
        self.archs = sorted({*self.archs, Arch.parse(device["arch"])})
        cold = self._cold()
        yield cold
        yield self._hot(cold.seconds)
        yield from self._replay()
        yield self._record()
        yield self._bake()
        yield from self._sealed()

    # The steps

    def _cold(self) -> Row:
        _headline(1, "Cold: the first process compiles its kernels")
        arch = self.facts["device"]["arch"]
        files = sorted(self.here.glob("kernels/*.cu"))
        names = [f"kernels/{file.name}" for file in files]
        print_message(f"  $ preheat compile kernels/*.cu --arch {arch} -o build")
        started = time.perf_counter()
        self._preheat("compile", *names, "--arch", arch, "-o", "build", "--json", show=True)
        seconds = time.perf_counter() - started
        return Row("cold", f"{count(len(files), 'program')} compiled", seconds, "the cache was empty")

    def _hot(self, cold: float) -> Row:
        _headline(2, "Hot: a new process asks for the same kernels, and finds them")
        arch = self.facts["device"]["arch"]
        found = json.loads(self._python(_STEPS / "hot.py", "kernels", arch, str(time.monotonic())))
        for name, digest in found["cubins"].items():
            compiled = (self.here / "build" / f"{name}.{arch}.cubin").read_bytes()
            _require(
                hashlib.sha256(compiled).hexdigest() == digest,
                f"{name}: the code that was found differs",
            )
        _require(not found["compiles"] and not found["processes"], "the new process compiled again")
        self._compare("the new process", found["error"])
        self.facts["hot"] = {name: found[name] for name in ("compiles", "processes")}
        what = f"the same {len(found['cubins'])} found by a new process, 0 compiled"
        seconds = found["seconds"]
        return Row("hot", what, seconds, f"{cold / seconds:,.0f} x as fast; no compiler was started")

    def _replay(self) -> Iterator[Row]:
        _headline(3, "Graphs: a step of many launches is captured, and replayed with one call")
        found = json.loads(self._python(_STEPS / "replay.py", "kernels/stencil.cu"))
        self._compare("the replayed graph", found["error"])
        _require(
            found["same_bits"], "the results of the replayed graph differ from those of the launches"
        )
        eager, replay = found["eager"], found["replay"]
        yield Row(
            "eager", f"{found['launches']} launches, one by one", eager, "until the last has completed"
        )
        note = f"{eager / replay:.1f} x as fast; captured in {duration(found['capture'])}; {_SAME_BITS}"
        yield Row("replay", "the same launches as one graph", replay, note)

    def _record(self) -> Row:
        _headline(4, "Record: a server runs once, and preheat notes the kernels that it needs")
        print_message("  $ preheat record -o kernels.toml -- python server.py")
        started = time.perf_counter()
        server_py = (self._interpreter, "server.py")
        server = json.loads(self._preheat("record", "-o", "kernels.toml", "--", *server_py))
        seconds = time.perf_counter() - started
        recorded = Manifest.read(self.here / "kernels.toml")
        self._compare("server.py", server["error"])
        self.facts["cold_ready"] = server["ready"]
        keys = sum(len(graph.keys) for graph in recorded.graphs)
        what = f"server.py has {count(len(recorded.programs), 'program')} and {count(keys, 'graph')}"
        return Row("record", what, seconds, f"{server['compiles']:.0f} compiled, into kernels.toml")

    def _bake(self) -> Row:
        _headline(5, "Bake: they are compiled ahead of time, for GPUs that this machine does not have")
        words = [word for arch in self.archs for word in ("--arch", str(arch))]
        print_message(f"  $ preheat bake kernels.toml {' '.join(words)} -o kernels.heat")
        bake = ("bake", "kernels.toml", *words, "-o", "kernels.heat", "--json")
        started = time.perf_counter()
        baked = json.loads(self._preheat(*bake, show=True))
        seconds = time.perf_counter() - started
        made = sum(row["source"] == "compiler" for row in baked["baked"])
        what = f"one file for {', '.join(map(str, self.archs))}"
        note = f"{made} compiled, {len(baked['baked']) - made} found; {size(baked['bytes'])}"
        return Row("bake", what, seconds, note)

    def _sealed(self) -> Iterator[Row]:
        _headline(6, "Sealed: the server starts from that file, on a machine without a compiler")
        self._move()
        reach = self.facts["in_reach"] = json.loads(self._python("-c", _ASK_COMPILERS))
        self._env |= {"PREHEAT_BUNDLE": "kernels.heat", "PREHEAT_SEALED": "1"}
        print_message(f"  $ {_SEALED}")
        started = time.perf_counter()
        server = self.facts["sealed"] = json.loads(self._python("server.py"))
        seconds = time.perf_counter() - started
        self._compare("server.py, sealed", server["error"])
        _require(server["compiles"] == 0, "the sealed server.py compiled")
        known = [f"{path} was not used" for path in reach["compilers"]] or ["no compiler was found"]
        note = known[0]
        if not _emulate(self.facts):
            cold = duration(self.facts["cold_ready"])
            note = f"ready in {duration(server['ready'])}, cold in {cold}; {note}"
        yield Row("sealed", "server.py from the bundle alone, 0 compiled", seconds, note)
        yield self._refused()

    def _move(self) -> None:
        """Move the application and its bundle to a new directory, and remove everything else."""
        image = self.place / "image"
        image.mkdir()
        for file in (*APP.glob("*.*"), self.here / "kernels.heat"):
            shutil.copy(file, image)
        shutil.rmtree(self.here)
        shutil.rmtree(self.place / "cache")
        self.here = image
        self._interpreter = bare_python(self.place / "bare")
        self._env = _without_compilers(self._env, self.place / "home")

    def _refused(self) -> Row:
        print_message(f"  $ {_SEALED} --width 96")
        started = time.perf_counter()
        ran = self._finish([self._interpreter, "server.py", "--width", "96"])
        seconds = time.perf_counter() - started
        _, name, message = ran.stderr.rpartition("preheat.errors.SealedError: ")
        _require(bool(name) and ran.returncode == 1, f"the seal was not enforced\n{ran.stderr}")
        self.facts["refusal"] = message.strip()
        for line in f"{name}{message.strip()}".splitlines():
            print_message(f"  {line}")
        return Row("sealed", "server.py --width 96 refused", seconds, "SealedError: it was not baked")

    # Running commands

    def _python(self, *words: str | Path) -> str:
        return self._run([self._interpreter, *map(str, words)])

    def _preheat(self, *words: str, show: bool = False) -> str:
        return self._run([self._interpreter, "-m", "preheat", *words], show=show)

    def _run(self, words: Sequence[str], *, show: bool = False) -> str:
        """Run a command and return its output; `PreheatError` with its messages when it fails."""
        ran = self._finish(words, show=show)
        if ran.returncode:
            title = " ".join(["python", *words[1:4]]).partition("\n")[0]
            messages = f"\n{ran.stderr.strip()}" if ran.stderr else ""
            raise PreheatError(f"{title} failed with status {ran.returncode}{messages}")
        return ran.stdout

    def _finish(self, words: Sequence[str], *, show: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command until it exits. With `show`, its messages go to a terminal, if there is one."""
        stderr = None if show and sys.stderr.isatty() else subprocess.PIPE
        child = None
        try:
            with _uninterrupted():
                child = subprocess.Popen(
                    words, env=self._env, cwd=self.here, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
                )  # fmt: skip
            out, err = child.communicate()
        except BaseException:  # Its directory is about to be removed.
            if child is not None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
            raise
        return subprocess.CompletedProcess(words, child.returncode, out, err)

    def _compare(self, what: str, error: float) -> None:
        _require(error < _TOLERANCE, f"{what}: a result differs from NumPy in float64 by {error:.1e}")
        self.facts["error"] = max(self.facts["error"], error)


def _headline(number: int, text: str) -> None:
    print_message(f"\n{number}/6 {text}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PreheatError(message)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay `KeyboardInterrupt` until the block has ended."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


def _environment(place: Path) -> dict[str, str]:
    """Return the environment with a separate cache, and the device as the only other setting."""
    users = environ()
    env = {name: value for name, value in users.items() if not name.startswith("PREHEAT_")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return {
        **env,
        "PYTHONPATH": path,
        "PREHEAT_DEVICE": users.get("PREHEAT_DEVICE", "auto"),
        "PREHEAT_CACHE_DIR": str(place / "cache"),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
    }


# The environment of the sealed run


def bare_python(place: Path) -> str:
    """Create a Python environment without compilers, and return its interpreter."""
    venv.EnvBuilder(symlinks=True).create(place)
    (packages,) = place.glob("lib/python*/site-packages")
    for name in _NEEDED:
        found = find_spec(name)
        if found is None:
            continue
        places = [Path(path) for path in found.submodule_search_locations or [found.origin or ""]]
        if found.origin is not None:
            (packages / places[0].name).symlink_to(places[0])
            continue
        # A namespace package: its parts may be installed in several directories.
        (packages / name).mkdir()
        for part in (part for path in places for part in path.iterdir()):
            with suppress(FileExistsError):
                (packages / name / part.name).symlink_to(part)
    return str(place / "bin" / "python")


def _without_compilers(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return an environment in which no compiler, no header and no cache entry is found."""
    home.mkdir()
    kept = {name: value for name, value in env.items() if name not in _COMPILER_VARIABLES}
    # The driver may be in one of these directories.
    searched = filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    rest = [path for path in searched if not any(Path(path).glob("libnv[rJ]*"))]
    if rest:
        kept["LD_LIBRARY_PATH"] = os.pathsep.join(rest)
    return {**kept, "HOME": str(home), "PATH": "", "PREHEAT_CACHE_DIR": str(home / "cache")}


# The figures of benchmarks/results, which is not installed. A test compares the two.

GPU = "NVIDIA H200"
DATE = "2026-11-16"
COMMIT = "6dbb71d7"


class Measured(NamedTuple):
    """One cell of a table of benchmarks/results, and what was measured."""

    value: str
    what: str
    results: str
    table: str
    row: str
    column: str


_START = ("bench_coldstart", "A new process, 50 cached kernels, first launch of each")
_GRAPH = ("bench_replay", "End to end, 320 kernels (60 times and one wait)")

#: By the step of the demo.
MEASURED = {
    "cold": Measured("2.221 s", "50 kernels", *_START, "preheat, nothing cached", "to last launch"),
    "hot": Measured("0.296 s", "50 kernels", *_START, "preheat", "to last launch"),
    "eager": Measured("1.58 ms", "320 launches", *_GRAPH, "preheat, eager", "a replay"),
    "replay": Measured("345 µs", "320 launches", *_GRAPH, "preheat", "a replay"),
    "sealed": Measured("0.284 s", "50 kernels", *_START, "preheat, sealed", "to last launch"),
}
