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
from typing import Any, NamedTuple

import click

from preheat.ahead.manifest import Manifest
from preheat.arch import Arch
from preheat.cli.output import columns, count, duration, print_json, print_message, size
from preheat.config import environ
from preheat.errors import PreheatError

__all__ = ["APP", "KERNELS", "Row", "bare_python", "closing", "command"]

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

The demo takes half a minute. It needs no GPU, and it uses a cache of its own. Exit status 1 when a
step fails, or when a result differs from that of NumPy.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    default=("sm_80", "sm_90", "sm_100"),
    show_default=True,
    help="Architecture to bake for, besides that of the device; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(archs: tuple[str, ...], as_json: bool) -> None:
    """Compile, look up, replay, record, bake and run sealed, and compare every result with NumPy."""
    wanted = [Arch.parse(arch) for arch in archs]
    with tempfile.TemporaryDirectory(prefix="preheat-demo-", ignore_cleanup_errors=True) as place:
        demo = _Demo(Path(place).resolve(), wanted)
        rows = list(demo.run())
    if as_json:
        print_json({**demo.facts, "steps": [row._asdict() for row in rows]})
        return
    for line in closing(rows, demo.facts):
        click.echo(line)


class Row(NamedTuple):
    """One line of the closing table."""

    step: str
    what: str
    seconds: float
    note: str


def closing(rows: Iterable[Row], facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the closing table, and the device on which it was measured."""
    table = [(row.step, row.what, duration(row.seconds), row.note) for row in rows]
    yield from columns([("STEP", "WHAT", "TIME", "NOTE"), *table], right=(2,))
    device = facts["device"]
    ran = f"\nRan on {device['name']}, {device['model']}, {device['arch']}"
    yield f"{ran}; every result agrees with NumPy in float64, to {facts['error']:.0e} at worst."
    if device["name"].startswith("emulator"):
        yield "These are times of the PTX emulator: they say nothing about a GPU."


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
        print_message(f"On {device['name']}: {device['model']}, {device['arch']}")
        self.archs = sorted({*self.archs, Arch.parse(device["arch"])})
        cold = self._cold()
        yield cold
        yield self._hot(cold.seconds)
        yield from self._replayed()
        yield self._recorded()
        yield self._baked()
        yield from self._sealed()

    # The steps

    def _cold(self) -> Row:
        _headline(1, "Cold: kernels are compiled into an empty cache")
        arch = self.facts["device"]["arch"]
        files = sorted(self.here.glob("kernels/*.cu"))
        names = [f"kernels/{file.name}" for file in files]
        print_message(f"  $ preheat compile kernels/*.cu --arch {arch} -o build")
        started = time.perf_counter()
        self._preheat("compile", *names, "--arch", arch, "-o", "build", "--json", show=True)
        seconds = time.perf_counter() - started
        return Row("cold", f"{count(len(files), 'program')} compiled", seconds, "an empty cache")

    def _hot(self, cold: float) -> Row:
        _headline(2, "Hot: a new process needs the same kernels")
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
        what = f"the same {len(found['cubins'])} found by a new process"
        seconds = found["seconds"]
        return Row("hot", what, seconds, f"{cold / seconds:,.0f} x; no compiler was started")

    def _replayed(self) -> Iterator[Row]:
        _headline(3, "Graphs: the same launches one by one, and as a replayed graph")
        found = json.loads(self._python(_STEPS / "replay.py", "kernels/stencil.cu"))
        self._compare("the replayed graph", found["error"])
        _require(
            found["same_bits"], "the results of the replayed graph differ from those of the launches"
        )
        eager, replay = found["eager"], found["replay"]
        yield Row(
            "eager", f"{found['launches']} launches, one by one", eager, "until the last has completed"
        )
        note = f"{eager / replay:.1f} x; captured in {duration(found['capture'])}; the same bits"
        yield Row("replay", "the same as one graph", replay, note)

    def _recorded(self) -> Row:
        _headline(4, "Record: an application runs, and the kernels it needs are recorded")
        print_message("  $ preheat record -o kernels.toml -- python server.py")
        started = time.perf_counter()
        server_py = (self._interpreter, "server.py")
        server = json.loads(self._preheat("record", "-o", "kernels.toml", "--", *server_py))
        seconds = time.perf_counter() - started
        recorded = Manifest.read(self.here / "kernels.toml")
        self._compare("server.py", server["error"])
        self.facts["cold_ready"] = server["ready"]
        keys = sum(len(graph.keys) for graph in recorded.graphs)
        what = f"server.py: {count(len(recorded.programs), 'program')}, {count(keys, 'graph')}"
        return Row("record", what, seconds, f"{server['compiles']:.0f} compiled, into kernels.toml")

    def _baked(self) -> Row:
        _headline(5, "Bake: the recorded kernels are compiled ahead of time, also for other GPUs")
        words = [word for arch in self.archs for word in ("--arch", str(arch))]
        print_message(f"  $ preheat bake kernels.toml {' '.join(words)} -o kernels.heat")
        bake = ("bake", "kernels.toml", *words, "-o", "kernels.heat", "--json")
        started = time.perf_counter()
        baked = json.loads(self._preheat(*bake, show=True))
        seconds = time.perf_counter() - started
        made = sum(row["source"] == "compiler" for row in baked["baked"])
        what = f"kernels.toml for {', '.join(map(str, self.archs))}"
        note = f"{made} compiled, {len(baked['baked']) - made} found; {size(baked['bytes'])}"
        return Row("bake", what, seconds, note)

    def _sealed(self) -> Iterator[Row]:
        _headline(6, "Sealed: only the application and its bundle, where nothing can be compiled")
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
        cold = duration(self.facts["cold_ready"])
        note = f"ready in {duration(server['ready'])}, cold in {cold}; 0 compiled; {known[0]}"
        yield Row("sealed", "server.py from the bundle alone", seconds, note)
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
        return Row("sealed", "server.py --width 96", seconds, "SealedError: it was not baked")

    # Running commands

    def _python(self, *words: str | Path) -> str:
        return self._run([self._interpreter, *map(str, words)])

    def _preheat(self, *words: str, show: bool = False) -> str:
        return self._run([self._interpreter, "-m", "preheat.cli", *words], show=show)

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
    """Return the environment with a cache of its own, and of the PREHEAT variables only the device."""
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
    import venv

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
        (
            packages / name
        ).mkdir()  # a namespace package: its parts may be installed in several directories
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
