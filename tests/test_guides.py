"""The guide to containers: each instruction of its image runs, without an engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from preheat.ahead.manifest import Manifest
from preheat.build.bundles import entries_of
from preheat.store.bundle import Bundle
from preheat.tools.cli.demo import bare_python
from tests.stories import blocks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "containers.md"
FILES = {block.title: block.text for block in blocks(PAGE) if block.title}
DOCKERFILE = FILES["Dockerfile"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def write_context(place: Path) -> None:
    """Write the files of the application, as the page shows them."""
    place.mkdir()
    for name, text in FILES.items():
        (place / name).write_text(text)


def clean(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a new machine: an empty home, no cache, preheat and its compilers."""
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path if place),
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
    }


@dataclass
class Stage:
    """A stage of an image as a directory: `/app` is `root/app`."""

    root: Path
    env: dict[str, str]
    workdir: Path
    user: str = "0"
    command: list[str] = field(default_factory=list)

    def here(self, text: str) -> str:
        """Absolute paths of the image as those of its directory."""
        return re.sub(r"(^|[\s=:])/(?=\w)", rf"\1{self.root}/", text)

    def run(self, words: list[str], *, status: int = 0, **more: str) -> str:
        """Return the output of a command, or its stderr if the command is expected to fail."""
        env = {**self.env, **more}
        words = [shutil.which(words[0], path=env["PATH"]) or words[0], *words[1:]]
        ran = subprocess.run(words, cwd=self.workdir, env=env, capture_output=True, text=True)
        assert ran.returncode == status, f"{words}\n{ran.stdout}\n{ran.stderr}"
        return ran.stderr if status else ran.stdout

    def files(self) -> set[Path]:
        return {path for path in self.root.rglob("*") if not path.is_symlink()}


class Image:
    """Executes a Dockerfile as far as that goes: a directory a stage, `pip install` not at all."""

    def __init__(self, text: str, context: Path, scratch: Path, **arguments: str) -> None:
        self.context, self.scratch = context, scratch
        self.stages: dict[str, Stage] = {}
        self.installed: dict[str, str] = {}  # what each stage was given by pip
        self.arguments = arguments
        for verb, rest in instructions(text):
            getattr(self, f"do_{verb.lower()}")(rest)

    @property
    def stage(self) -> Stage:
        return list(self.stages.values())[-1]

    def do_from(self, rest: str) -> None:
        name = rest.partition(" AS ")[2] or "last"
        root = self.scratch / name
        root.mkdir(parents=True)
        self.stages[name] = Stage(root, clean(self.scratch / f"{name} machine"), root)

    def do_arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self.arguments.setdefault(name, default)

    def do_workdir(self, rest: str) -> None:
        self.stage.workdir = Path(self.stage.here(rest))
        self.stage.workdir.mkdir(parents=True, exist_ok=True)

    def do_env(self, rest: str) -> None:
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            self.stage.env[name] = self.stage.here(value)

    def do_user(self, rest: str) -> None:
        self.stage.user = rest

    def do_copy(self, rest: str) -> None:
        words = shlex.split(rest)
        source = self.context
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        place = self.stage.workdir / self.stage.here(target)
        for name in names:
            path = source / name.lstrip("/")
            if path.is_dir():
                shutil.copytree(path, place, dirs_exist_ok=True)
            else:
                shutil.copy2(path, place)

    def do_run(self, rest: str) -> None:
        rest = re.sub(r"^(--mount=\S+\s+)+", "", rest)
        if rest.startswith("pip install "):
            (requirement,) = shlex.split(rest)[2:]
            self.install(requirement.replace("$PREHEAT", self.arguments.get("PREHEAT", "")))
        else:
            self.stage.run(["sh", "-c", self.stage.here(rest)])

    def install(self, requirement: str) -> None:
        """Install the package: its dependencies, and the compilers with the extra."""
        self.installed[next(reversed(self.stages))] = requirement
        if "[" not in requirement:
            python = bare_python(self.stage.root.parent / f"{self.stage.root.name}-python")
            self.stage.env["PATH"] = str(Path(python).parent)
            del self.stage.env["PYTHONPATH"]

    def do_cmd(self, rest: str) -> None:
        self.stage.command = json.loads(rest)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the instructions of a Dockerfile, in their lines put together."""
    whole = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.M))
    for line in filter(None, whole.splitlines()):
        verb, _, rest = line.partition(" ")
        yield verb, rest


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Return the image of the page. The application was recorded on another machine."""
    root = tmp_path_factory.mktemp("image")
    write_context(root / "context")
    env = {**clean(root / "another"), "PREHEAT_DEVICE": "emulator"}
    recording = Stage(root, env, root / "context")
    recording.run(["preheat", "record", "-o", "kernels.toml", "--", "python", "server.py"])
    return Image(DOCKERFILE, root / "context", root / "stages")


def test_the_image_starts_sealed_compiles_nothing_and_answers_right(image: Image) -> None:
    stage = image.stage
    assert (stage.env["PREHEAT_SEALED"], stage.command) == ("1", ["python", "server.py"])
    reported = json.loads(stage.run(stage.command, PREHEAT_DEVICE="emulator"))
    assert (reported["compiles"], reported["graphs"]) == (0, 4)


def test_the_image_holds_no_compiler_no_manifest_and_no_header(image: Image) -> None:
    assert {path.name for path in image.stage.files()} == {
        "app",
        "server.py",
        "layers.cu",
        "kernels.heat",
    }
    found = image.stage.run(["python", "-c", "import nvidia"], status=1)
    assert "No module named 'nvidia'" in found


def test_the_image_has_code_for_every_architecture_it_was_baked_for(image: Image) -> None:
    archs = set(re.findall(r"--arch (\w+)", DOCKERFILE))
    assert len(archs) == 2
    with Bundle.open(image.stage.root / "kernels.heat") as bundle:
        assert {str(promise.artifact.arch) for promise in entries_of(bundle)} == archs


def test_a_started_image_writes_nothing_anywhere(image: Image) -> None:
    stage = image.stage
    places = [stage.root, Path(stage.env["HOME"]), Path(stage.env["TMPDIR"])]

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for place in places for path in place.rglob("*")}

    before = files()
    stage.run(stage.command, PREHEAT_DEVICE="emulator")
    assert files() == before


def test_a_bundle_out_of_an_image_belongs_to_its_maker_and_nobody_else_can_write_it(
    image: Image,
) -> None:
    found = (image.stage.root / "kernels.heat").stat()
    assert (found.st_uid, found.st_mode & 0o777) == (os.getuid(), 0o644)
    assert image.stage.user.partition(":")[0] not in ("0", "root")


def test_only_the_stage_that_bakes_installs_compilers(image: Image) -> None:
    assert image.installed == {"bake": "preheat[cu13]", "last": "preheat"}
    extras = PROJECT["optional-dependencies"]["cu13"]
    assert any(name.startswith("nvidia-cuda-nvrtc") for name in extras)
    assert not any(name.startswith("nvidia") for name in PROJECT["dependencies"])


def test_a_program_that_was_not_baked_is_refused_in_the_image(image: Image) -> None:
    words = [*image.stage.command, "--width", "96"]
    reported = image.stage.run(words, status=1, PREHEAT_DEVICE="emulator")
    assert "SealedError: server.py:19: rms_norm (layers.cu, sm_90)" in reported
    assert "header:model.h: 'constexpr int WIDTH = 64;" in reported


def test_a_canary_compiles_what_is_missing_and_brings_it_home(image: Image, tmp_path: Path) -> None:
    shutil.copytree(image.context, tmp_path / "context")
    canary = Image(DOCKERFILE, tmp_path / "context", tmp_path / "canary", PREHEAT="preheat[cu13]").stage
    (canary.workdir / "records").mkdir()
    record = canary.here("/app/records/missed.toml")
    canary.env |= {"PREHEAT_DEVICE": "emulator", "PREHEAT_SEALED": "warn", "PREHEAT_RECORD": record}
    assert json.loads(canary.run([*canary.command, "--width", "96"]))["compiles"] == 1
    shutil.move(canary.workdir / "records", tmp_path / "context")
    shutil.rmtree(canary.root)
    home = Stage(tmp_path, clean(tmp_path / "home machine"), tmp_path / "context")
    home.run(["preheat", "record", "-o", "kernels.toml", "--merge", "records/missed.toml"])
    assert len(Manifest.read(tmp_path / "context" / "kernels.toml").programs) == 3
