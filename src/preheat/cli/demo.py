"""`preheat demo`: the whole story, from a cold compile to a sealed run, on the device there is."""

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
from preheat.cli.output import columns, count, data, duration, emit_json, say, size
from preheat.config import environ
from preheat.errors import PreheatError

__all__ = ["APP", "KERNELS", "Row", "bare_python", "closing", "command"]

KERNELS = Path(__file__).with_name("demo_kernels")
APP = Path(__file__).with_name("demo_app")
_STEPS = Path(__file__).with_name("demo_steps")

_TOLERANCE = 1e-4  # of float32 against float64, as the steps here take them
_SEALED = "PREHEAT_BUNDLE=kernels.heat PREHEAT_SEALED=1 python server.py"
_NEEDED = ("preheat", "numpy", "xxhash", "cuda")  # what an application with preheat imports
_TO_COMPILERS = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH")

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

Takes half a minute. Needs no GPU, uses a cache of its own and leaves yours alone. Exit status 1 when a
step fails, or when a result is not what NumPy says.
"""


@click.command(epilog=_EPILOG)
@click.option(
    "--arch",
    "archs",
    multiple=True,
    metavar="ARCH",
    default=("sm_80", "sm_90", "sm_100"),
    show_default=True,
    help="Bake for it, beside the device's own; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(archs: tuple[str, ...], as_json: bool) -> None:
    """Compile, find again, replay, record, bake and run sealed, with results compared to NumPy."""
    wanted = [Arch.parse(arch) for arch in archs]
    with tempfile.TemporaryDirectory(prefix="preheat-demo-", ignore_cleanup_errors=True) as place:
        demo = _Demo(Path(place).resolve(), wanted)
        rows = list(demo.run())
    if as_json:
        emit_json({**demo.facts, "steps": [row._asdict() for row in rows]})
        return
    for line in closing(rows, demo.facts):
        data(line)


class Row(NamedTuple):
    """One line of the closing table."""

    step: str
    what: str
    seconds: float
    note: str


def closing(rows: Iterable[Row], facts: Mapping[str, Any]) -> Iterator[str]:
    """The closing table, and what it was measured on."""
    table = [(row.step, row.what, duration(row.seconds), row.note) for row in rows]
    yield from columns([("STEP", "WHAT", "TIME", "NOTE"), *table], right=(2,))
    device = facts["device"]
    ran = f"\nRan on {device['name']}, {device['model']}, {device['arch']}"
    yield f"{ran}; every result agrees with NumPy in float64, to {facts['error']:.0e} at worst."
    if device["name"].startswith("emulator"):
        yield "On the PTX emulator: times of kernels say nothing about a GPU."


class _Demo:
    """One run of the story in a directory of its own; `facts` is what it found."""

    def __init__(self, place: Path, archs: Sequence[Arch]) -> None:
        self.place, self.here, self.archs = place, place / "here", archs
        self.facts: dict[str, Any] = {"error": 0.0}
        self._interpreter, self._env = sys.executable, _environment(place)

    def run(self) -> Iterator[Row]:
        """Every step, each told before it begins."""
        self.here.mkdir()
        shutil.copytree(KERNELS, self.here / "kernels")
        for file in APP.glob("*.*"):
            shutil.copy(file, self.here)
        device = self.facts["device"] = json.loads(self._python("-c", _ASK_DEVICE))
        say(f"On {device['name']}: {device['model']}, {device['arch']}")
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
        arch, files = self.facts["device"]["arch"], sorted(self.here.glob("kernels/*.cu"))
        names = [f"kernels/{file.name}" for file in files]
        say(f"  $ preheat compile kernels/*.cu --arch {arch} -o build")
        started = time.perf_counter()
        self._preheat("compile", *names, "--arch", arch, "-o", "build", "--json", show=True)
        seconds = time.perf_counter() - started
        return Row("cold", f"{count(len(files), 'program')} compiled", seconds, "an empty cache")

    def _hot(self, cold: float) -> Row:
        _headline(2, "Hot: a fresh process wants the same")
        arch = self.facts["device"]["arch"]
        found = json.loads(self._python(_STEPS / "hot.py", "kernels", arch, str(time.monotonic())))
        for name, digest in found["cubins"].items():
            compiled = (self.here / "build" / f"{name}.{arch}.cubin").read_bytes()
            _require(hashlib.sha256(compiled).hexdigest() == digest, f"{name}: other code was found")
        _require(not found["compiles"] and not found["processes"], "the fresh process compiled again")
        self._compare("the fresh process", found["error"])
        self.facts["hot"] = {name: found[name] for name in ("compiles", "processes")}
        what = f"the same {len(found['cubins'])} found by a fresh process"
        seconds = found["seconds"]
        return Row("hot", what, seconds, f"{cold / seconds:,.0f} x; no compiler was started")

    def _replayed(self) -> Iterator[Row]:
        _headline(3, "Graphs: the same launches one by one, and replayed")
        found = json.loads(self._python(_STEPS / "replay.py", "kernels/stencil.cu"))
        self._compare("the replayed graph", found["error"])
        _require(found["same_bits"], "the replayed graph gave other results than its launches")
        eager, replay = found["eager"], found["replay"]
        yield Row("eager", f"{found['launches']} launches, one by one", eager, "until the last is done")
        note = f"{eager / replay:.1f} x; captured in {duration(found['capture'])}; the same bits"
        yield Row("replay", "the same as one graph", replay, note)

    def _recorded(self) -> Row:
        _headline(4, "Record: an application runs, and what it needs is written down")
        say("  $ preheat record -o kernels.toml -- python server.py")
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
        _headline(5, "Bake: all of that ahead of time, for machines that are not here")
        words = [word for arch in self.archs for word in ("--arch", str(arch))]
        say(f"  $ preheat bake kernels.toml {' '.join(words)} -o kernels.heat")
        bake = ("bake", "kernels.toml", *words, "-o", "kernels.heat", "--json")
        started = time.perf_counter()
        baked = json.loads(self._preheat(*bake, show=True))
        seconds = time.perf_counter() - started
        made = sum(row["source"] == "compiler" for row in baked["baked"])
        what = f"kernels.toml for {', '.join(map(str, self.archs))}"
        note = f"{made} compiled, {len(baked['baked']) - made} found; {size(baked['bytes'])}"
        return Row("bake", what, seconds, note)

    def _sealed(self) -> Iterator[Row]:
        _headline(6, "Sealed: the application and the moved bundle alone, where nothing can compile")
        self._move()
        reach = self.facts["in_reach"] = json.loads(self._python("-c", _ASK_COMPILERS))
        self._env |= {"PREHEAT_BUNDLE": "kernels.heat", "PREHEAT_SEALED": "1"}
        say(f"  $ {_SEALED}")
        started = time.perf_counter()
        server = self.facts["sealed"] = json.loads(self._python("server.py"))
        seconds = time.perf_counter() - started
        self._compare("server.py, sealed", server["error"])
        _require(server["compiles"] == 0, "the sealed server.py compiled")
        known = [f"{path} was not used" for path in reach["compilers"]] or ["no compiler to be found"]
        cold, ready = duration(self.facts["cold_ready"]), duration(server["ready"])
        note = f"ready in {ready}, cold in {cold}; 0 compiled; {known[0]}"
        yield Row("sealed", "server.py from the bundle alone", seconds, note)
        yield self._refused()

    def _move(self) -> None:
        """Leave everything behind but the application and its bundle."""
        image = self.place / "image"
        image.mkdir()
        for file in (*APP.glob("*.*"), self.here / "kernels.heat"):
            shutil.copy(file, image)
        shutil.rmtree(self.here)
        shutil.rmtree(self.place / "cache")
        self.here = image
        self._interpreter = bare_python(self.place / "bare")
        self._env = _out_of_reach(self._env, self.place / "home")

    def _refused(self) -> Row:
        say(f"  $ {_SEALED} --width 96")
        started = time.perf_counter()
        ran = self._finish([self._interpreter, "server.py", "--width", "96"])
        seconds = time.perf_counter() - started
        _, sealed, told = ran.stderr.rpartition("preheat.errors.SealedError: ")
        _require(bool(sealed) and ran.returncode == 1, f"the seal let it pass\n{ran.stderr}")
        self.facts["refusal"] = told.strip()
        for line in f"{sealed}{told.strip()}".splitlines():
            say(f"  {line}")
        return Row("sealed", "server.py --width 96", seconds, "SealedError: that was not baked")

    # What they are made of

    def _python(self, *words: str | Path) -> str:
        return self._run([self._interpreter, *map(str, words)])

    def _preheat(self, *words: str, show: bool = False) -> str:
        return self._run([self._interpreter, "-m", "preheat.cli", *words], show=show)

    def _run(self, words: Sequence[str], *, show: bool = False) -> str:
        """What a command prints; an error with its last words when it fails."""
        ran = self._finish(words, show=show)
        if ran.returncode:
            title = " ".join(["python", *words[1:4]]).partition("\n")[0]
            told = f"\n{ran.stderr.strip()}" if ran.stderr else ""
            raise PreheatError(f"{title} failed with status {ran.returncode}{told}")
        return ran.stdout

    def _finish(self, words: Sequence[str], *, show: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; with `show` it talks to the terminal, where there is one."""
        talk = None if show and sys.stderr.isatty() else subprocess.PIPE
        child = None
        try:
            with _uninterrupted():
                child = subprocess.Popen(
                    words, env=self._env, cwd=self.here, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=talk, text=True, start_new_session=True,
                )  # fmt: skip
            out, err = child.communicate()
        except BaseException:  # nothing may go on in a directory that is about to be removed
            if child is not None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.communicate()
            raise
        return subprocess.CompletedProcess(words, child.returncode, out, err)

    def _compare(self, what: str, error: float) -> None:
        _require(error < _TOLERANCE, f"{what}: a result is off by {error:.1e} from NumPy's in float64")
        self.facts["error"] = max(self.facts["error"], error)


def _headline(number: int, text: str) -> None:
    say(f"\n{number}/6 {text}")


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise PreheatError(otherwise)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C counts when the block has ended."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


def _environment(place: Path) -> dict[str, str]:
    """The environment without the user's settings, but for the device, and with a cache of its own."""
    theirs = environ()
    env = {name: value for name, value in theirs.items() if not name.startswith("PREHEAT_")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return {
        **env,
        "PYTHONPATH": path,
        "PREHEAT_DEVICE": theirs.get("PREHEAT_DEVICE", "auto"),
        "PREHEAT_CACHE_DIR": str(place / "cache"),
        "PREHEAT_LOCK_DIR": str(place / "locks"),
    }


# Where nothing can be compiled


def bare_python(place: Path) -> str:
    """A Python that can import what an application needs, and no package with a compiler in it."""
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
        (packages / name).mkdir()  # a namespace: its parts may be installed in several places
        for part in (part for path in places for part in path.iterdir()):
            with suppress(FileExistsError):
                (packages / name / part.name).symlink_to(part)
    return str(place / "bin" / "python")


def _out_of_reach(env: Mapping[str, str], home: Path) -> dict[str, str]:
    """An environment that leads to no compiler, no header and nothing that was cached."""
    home.mkdir()
    kept = {name: value for name, value in env.items() if name not in _TO_COMPILERS}
    searched = filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep))  # the driver may be there
    rest = [path for path in searched if not any(Path(path).glob("libnv[rJ]*"))]
    if rest:
        kept["LD_LIBRARY_PATH"] = os.pathsep.join(rest)
    return {**kept, "HOME": str(home), "PATH": "", "PREHEAT_CACHE_DIR": str(home / "cache")}
