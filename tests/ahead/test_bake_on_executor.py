"""Bakes in other processes make the same bundle, and report workers that differ."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import preheat
from preheat.ahead import bake_on_executor
from preheat.ahead.bake import bake
from preheat.ahead.fleets import fleet
from preheat.ahead.manifest import ForeignProgram, Manifest, ManifestProgram
from preheat.build.builder import Builder
from preheat.errors import InputError, LostJobError, ToolchainError
from preheat.model.arch import Arch
from preheat.model.config import Config
from preheat.model.linked_program import LinkedProgram
from preheat.model.program import Program
from tests.adapters.fake import write_library

SM_90 = Arch(9, 0)


def text(name: str) -> str:
    return f'extern "C" __global__ void {name}(int* x) {{ *x = {len(name)}; }}\n'


def listed(*programs: Program) -> Manifest:
    return Manifest(tuple(ManifestProgram(each, (SM_90,)) for each in programs))


class Worker(Executor):
    """Runs each job at once in this process, between two changes of the world that it sees."""

    def __init__(self, before: Callable[[], Any], after: Callable[[], Any] = lambda: None) -> None:
        self._before = before
        self._after = after

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._before()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        finally:
            self._after()
        return future


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a directory with `k.cu`, which includes `v.h` of the directory `include`."""
    place = tmp_path / "project"
    (place / "include").mkdir(parents=True)
    (place / "include" / "v.h").write_text("#define V 7\n")
    (place / "k.cu").write_text('#include "v.h"\nextern "C" __global__ void k(int* x) { *x = V; }\n')
    return place


def program(project: Path) -> Program:
    return Program.from_file(project / "k.cu", include=[project / "include"])


# What workers must have


def test_a_worker_without_an_include_directory_is_named(project: Path, config: Config) -> None:
    lost = Worker(lambda: shutil.rmtree(project / "include"))
    (failed,) = bake(listed(program(project)), config=config, executor=lost).failures
    assert isinstance(failed.error, InputError)
    first, *rest = str(failed.error).splitlines()
    host = socket.gethostname()
    assert first == f"{host} has no directory {project}/include, where k.cu for sm_90 may have headers"
    assert "v.h" in "\n".join(rest)
    assert "at the same paths" in str(failed.error.hint)


@pytest.mark.parametrize("linked", [False, True])
def test_directories_that_no_header_is_found_in_may_be_missing(
    project: Path, config: Config, tmp_path: Path, linked: bool
) -> None:
    (project / "k.cu").write_text("#include <cuda_fp16.h>\n" + text("k"))
    made = program(project)
    asked = LinkedProgram.of([text("other"), made], label="app") if linked else made
    assert bake(listed(asked), config=config, output=tmp_path / "here.heat").ok
    lost = Worker(lambda: shutil.rmtree(project))
    other = replace(config, cache_dirs=(tmp_path / "other",))
    there = bake(listed(asked), config=other, output=tmp_path / "there.heat", executor=lost)
    assert [row.source for row in there.rows] == ["compiler"]
    assert (tmp_path / "here.heat").read_bytes() == (tmp_path / "there.heat").read_bytes()


def test_a_directory_that_is_missing_everywhere_is_reported_as_in_a_local_bake(
    project: Path, config: Config
) -> None:
    asked = program(project)
    shutil.rmtree(project / "include")
    (failed,) = bake(listed(asked), config=config, executor=Worker(lambda: None)).failures
    assert str(failed.error) == f"k.cu: include directory {project}/include does not exist"


@pytest.mark.parametrize("linked", [False, True])
def test_a_worker_with_another_header_is_named(project: Path, config: Config, linked: bool) -> None:
    header = project / "include" / "v.h"
    other = Worker(
        lambda: header.write_text("#define V 8\n"), lambda: header.write_text("#define V 7\n")
    )
    made = program(project)
    asked = LinkedProgram.of([text("other"), made], label="app") if linked else made
    (failed,) = bake(listed(asked), config=config, executor=other).failures
    name = f"{socket.gethostname()}:{os.getpid()}"
    assert f"was baked on {name} with headers that differ from those here: header v.h changed" in str(
        failed.error
    )


def test_a_header_that_a_worker_lacks_and_finds_elsewhere_is_named(
    project: Path, config: Config, tmp_path: Path
) -> None:
    """Its include directory is missing on the worker, and the next one has a file of the same name."""
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "v.h").write_text("#define V 8\n")
    first = project / "include"
    hidden = Worker(lambda: first.rename(tmp_path / "gone"), lambda: (tmp_path / "gone").rename(first))
    asked = Program.from_file(project / "k.cu", include=[first, tmp_path / "next"])
    (failed,) = bake(listed(asked), config=config, executor=hidden).failures
    assert f"a new v.h in {first} may hide a tracked header" in str(failed.error)


def test_a_worker_with_another_version_of_preheat_is_named(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = preheat.__version__
    older = Worker(
        lambda: monkeypatch.setattr(bake_on_executor, "__version__", "0.0.1"),
        lambda: monkeypatch.setattr(bake_on_executor, "__version__", ours),
    )
    (failed,) = bake(listed(Program.of(text("a"))), config=config, executor=older).failures
    assert isinstance(failed.error, ToolchainError)
    assert f"{socket.gethostname()} has preheat 0.0.1" in str(failed.error)
    assert f"pip install preheat=={ours}" in str(failed.error.hint)


def test_a_worker_without_preheat_fails_its_jobs_with_one_message(config: Config) -> None:
    def lacking() -> None:
        raise ModuleNotFoundError("No module named 'preheat'")

    class Lacking(Worker):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            del fn, args, kwargs
            return super().submit(lacking)

    manifest = listed(Program.of(text("a"), label="a.cu"), Program.of(text("b"), label="b.cu"))
    failures = bake(manifest, config=config, executor=Lacking(lambda: None)).failures
    assert len(failures) == 2
    assert {str(failed.error) for failed in failures} == {
        "a worker could not run a job: ModuleNotFoundError: No module named 'preheat'"
    }


def test_an_executor_that_is_shut_down_is_named_as_the_reason(config: Config) -> None:
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    manifest = listed(Program.of(text("a"), label="a.cu"))
    (failed,) = bake(manifest, config=config, executor=executor).failures
    assert str(failed.error) == (
        "a.cu for sm_90 was not baked, because the executor did not accept it: "
        "RuntimeError: cannot schedule new futures after shutdown"
    )
    assert failed.error.hint == "pass an executor that is open and connected to its workers"


# Results


def test_threads_of_an_executor_share_a_builder_and_are_named(config: Config, tmp_path: Path) -> None:
    manifest = listed(*(Program.of(text(f"k{n}"), label=f"k{n}.cu") for n in range(3)))
    with ThreadPoolExecutor(3) as executor:
        baked = bake(manifest, config=config, executor=executor, output=tmp_path / "there.heat")
    assert {row.worker for row in baked.rows} == {f"{socket.gethostname()}:{os.getpid()}"}
    here = bake(manifest, config=config, output=tmp_path / "here.heat")
    assert [row.worker for row in here.rows] == [""] * 3
    assert (tmp_path / "here.heat").read_bytes() == (tmp_path / "there.heat").read_bytes()


def test_results_are_on_the_shared_store_when_a_worker_answers(config: Config, tmp_path: Path) -> None:
    manifest = listed(*(Program.of(text(f"k{n}"), label=f"k{n}.cu") for n in range(3)))
    shared = {"remote": ((tmp_path / "store").as_uri(),), "remote_unsigned": True}
    config = replace(config, **shared)  # type: ignore[arg-type]
    stored: list[bool] = []

    def look(_: object, row: Any) -> None:
        stored.append(bool([*tmp_path.glob(f"store/**/{row.key}")]))

    with ThreadPoolExecutor(2) as executor:
        assert bake(manifest, config=config, executor=executor, on_done=look).ok
    assert stored == [True] * 3
    other = replace(config, cache_dirs=(tmp_path / "other",))
    assert {row.source for row in bake(manifest, config=other).rows}.isdisjoint({"compiler", "disk"})


def _ends_process(config: Config) -> None:
    """Make the job of `killer.cu` end its process, in the processes of a pool."""
    del config
    run = bake_on_executor._run

    def run_or_die(work: Any) -> Any:
        if work.job.item.program.label == "killer.cu":
            os.kill(os.getpid(), signal.SIGKILL)
        return run(work)

    bake_on_executor._run = run_or_die


def test_a_program_that_ends_its_worker_fails_and_the_others_are_baked(
    config: Config, tmp_path: Path
) -> None:
    names = ("a", "bb", "killer", "ccc", "dddd")
    manifest = listed(*(Program.of(text(name), label=f"{name}.cu") for name in names))

    def make() -> Executor:
        return ProcessPoolExecutor(
            1, mp_context=get_context("fork"), initializer=_ends_process, initargs=(config,)
        )

    baked = bake(manifest, config=config, executor=make, output=tmp_path / "k.heat")
    assert [row.label for row in baked.rows] == ["a.cu", "bb.cu", "ccc.cu", "dddd.cu"]
    (failed,) = baked.failures
    assert isinstance(failed.error, LostJobError)
    assert str(failed.error).startswith("killer.cu for sm_90 was not baked: 3 workers died")


def test_requests_of_other_libraries_are_made_by_workers_and_copied_here(
    builder: Builder, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(write_library(tmp_path / "library")))
    request = json.dumps({"function": "add", "env": {}})
    made = ForeignProgram("fakelib", "add", request, "{}", archs=(SM_90,))
    manifest = Manifest(foreign=(made,))
    store = tmp_path / "store"
    shared = {"remote": (store.as_uri(),), "remote_unsigned": True}
    with ThreadPoolExecutor(1) as executor:
        there = bake(
            manifest,
            config=replace(config, **shared),  # type: ignore[arg-type]
            executor=executor,
            output=tmp_path / "there.heat",
        )
    assert [*store.glob(f"**/{there.rows[0].key}")]
    with ThreadPoolExecutor(1) as executor:
        copied = ForeignProgram("fakelib", "add", archs=(SM_90,), entries=("add/1/sm_90",))
        kept = bake(Manifest(foreign=(copied,)), config=config, executor=executor, builder=builder)
    bake(
        manifest,
        config=replace(config, cache_dirs=(tmp_path / "other",)),
        output=tmp_path / "here.heat",
    )
    assert (tmp_path / "here.heat").read_bytes() == (tmp_path / "there.heat").read_bytes()
    assert [(row.source, bool(row.worker)) for row in there.rows] == [("compiler", True)]
    assert [(row.source, row.worker) for row in kept.rows] == [("cache", "")]


# Addresses


@pytest.mark.parametrize(
    "address", ["", "dask", "dask://", "slurm://x:1", "dask://auto", "ray://x", "ray://x:y"]
)
def test_what_is_no_address_of_a_fleet_is_refused(address: str) -> None:
    with pytest.raises(InputError, match="is not the address of a fleet") as caught:
        fleet(address)
    assert "dask://HOST:PORT" in str(caught.value.hint)


@pytest.mark.parametrize(("engine", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_package_that_is_not_installed_is_named(
    engine: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"needs the package {package}") as caught:
        fleet(f"{engine}://local")()
    assert caught.value.hint == f"pip install 'preheat[{engine}]'"
