"""A bake does not take architectures from a bundle that it replaces, unless it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from preheat.ahead import output as output_module
from preheat.ahead.bake import bake, plan_all
from preheat.ahead.bundles import lost_archs, meta
from preheat.ahead.manifest import Manifest, ManifestProgram
from preheat.ahead.output import BundleOutput
from preheat.ahead.shards import Shard
from preheat.build.builder import Builder
from preheat.build.bundles import baked_archs
from preheat.errors import BundleError, InputError
from preheat.model.arch import Arch
from preheat.model.program import Program
from preheat.store.bundle import Bundle, write

SM_80, SM_90, SM_90A, SM_100 = Arch(8, 0), Arch(9, 0), Arch(9, 0, "a"), Arch(10, 0)


def listed(*texts: str, archs: tuple[Arch, ...] = (SM_90,)) -> Manifest:
    programs = (Program.of(text, label=f"{number}.cu") for number, text in enumerate(texts))
    return Manifest(tuple(ManifestProgram(program, archs) for program in programs))


ONE = listed('extern "C" __global__ void one(int* x) { *x = 1; }')
BAD = listed("__global__ void bad(int* x) { *x = missing; }")


def existing(path: Path, *archs: Arch, shard: Shard | None = None) -> Path:
    """Write a bundle that lists architectures; it has no programs, which do not matter here."""
    noted = {} if shard is None else {"shard": str(shard)}
    write(path, {}, {**meta((), archs, ()), **noted})
    return path


def about(path: Path) -> dict[str, Any]:
    with Bundle.open(path) as bundle:
        return {**bundle.meta}


def archs_in(path: Path) -> list[str]:
    with Bundle.open(path) as bundle:
        return [str(arch) for arch in baked_archs(bundle)]


def never(*_: object) -> None:
    pytest.fail("a job was started")


def test_a_bake_that_would_lose_an_architecture_is_refused_before_it_compiles(
    builder: Builder, tmp_path: Path
) -> None:
    path = existing(tmp_path / "k.heat", SM_80, SM_90, SM_100)
    before = path.read_bytes()
    with pytest.raises(InputError) as caught:
        bake(ONE, "sm_90", output=path, builder=builder, on_start=never)
    assert "k.heat has code for sm_80, sm_100, which this bake does not make" in str(caught.value)
    assert "--replace (replace=True)" in str(caught.value.hint)
    assert path.read_bytes() == before


def test_a_bake_of_all_architectures_replaces_the_programs(builder: Builder, tmp_path: Path) -> None:
    path = tmp_path / "k.heat"
    for text in ("{ *x = 1; }", "{ *x = 2; }"):
        changed = listed(f'extern "C" __global__ void k(int* x) {text}')
        assert bake(changed, output=path, builder=builder).path == path
    assert bake(ONE, ["sm_80", "sm_90"], output=path, builder=builder).ok
    assert archs_in(path) == ["sm_80", "sm_90"]


def test_a_bundle_is_replaced_on_demand(builder: Builder, tmp_path: Path) -> None:
    path = existing(tmp_path / "k.heat", SM_80)
    assert bake(ONE, output=path, replace=True, builder=builder).ok
    assert archs_in(path) == ["sm_90"]


@pytest.mark.parametrize("content", [b"", b"\x89BAKE\r\n\x1a", b"\x89BAKE\r\n\x1a\x09\x00rest"])
def test_a_bundle_that_nobody_can_use_has_nothing_to_lose(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "k.heat").write_bytes(content)
    BundleOutput(tmp_path / "k.heat", plan_all(ONE), plan_all(ONE), replace=False)


def test_a_suffix_is_another_architecture(tmp_path: Path) -> None:
    path = existing(tmp_path / "k.heat", SM_90A)
    with pytest.raises(InputError, match="has code for sm_90a"):
        BundleOutput(path, plan_all(ONE), plan_all(ONE), replace=False)


def test_a_bundle_is_kept_if_all_programs_of_an_architecture_fail(
    builder: Builder, tmp_path: Path
) -> None:
    path = existing(tmp_path / "k.heat", SM_80, SM_90)
    mixed = Manifest((*ONE.programs, ManifestProgram(BAD.programs[0].program, (SM_80,))))
    result = bake(mixed, output=path, builder=builder)
    assert (result.path, result.nbytes, len(result.rows)) == (None, 0, 1)
    first, last = result.failures
    assert first.title == "0.cu"
    assert last.title == str(path)
    assert "has code for sm_80" in str(last.error)
    assert archs_in(path) == ["sm_80", "sm_90"]


def test_a_shard_may_have_fewer_architectures_than_the_whole_bake(tmp_path: Path) -> None:
    """Which shard has which jobs may change from bake to bake."""
    whole = plan_all(ONE, ["sm_80", "sm_90"])
    for shard in (Shard(1, 2), Shard(2, 2)):
        (job,) = own = shard.select(whole)
        path = existing(tmp_path / f"k.{shard.number}-of-2.heat", SM_80, SM_90, shard=shard)
        place = BundleOutput(path, whole, own, shard=shard, replace=False)
        written = place.write({}, meta((), [job.arch or SM_80], ()), [job.arch], None)
        assert isinstance(written, int)
        assert about(path)["shard"] == str(shard)
    existing(path, SM_80, SM_90, SM_100, shard=shard)
    with pytest.raises(InputError, match="has code for sm_100"):
        BundleOutput(path, whole, own, shard=shard, replace=False)
    existing(path, *{job.arch for job in own if job.arch}, shard=shard)
    lost = BundleOutput(path, whole, own, shard=shard, replace=False).write({}, {}, [], None)
    assert isinstance(lost, InputError)  # Its only job has failed.


@pytest.mark.parametrize("other", [None, Shard(2, 2), Shard(1, 3)])
def test_a_shard_takes_no_architecture_from_another_bundle(
    other: Shard | None, builder: Builder, tmp_path: Path
) -> None:
    """The other bundle may be the only one with the code."""
    both = ["sm_80", "sm_90"]
    (job,) = Shard(1, 2).select(plan_all(ONE, both))
    path = existing(tmp_path / "k.heat", SM_80, SM_90, shard=other)
    with pytest.raises(InputError) as caught:
        bake(ONE, both, output=path, shard="1/2", builder=builder, on_start=never)
    (kept,) = {SM_80, SM_90} - {job.arch}
    assert f"k.heat has code for {kept}, which shard 1/2 does not make" in str(caught.value)
    assert caught.value.hint == "name another file for the shard, or pass --replace (replace=True)"
    assert archs_in(path) == both


def test_only_the_bundle_of_a_shard_names_a_shard(builder: Builder, tmp_path: Path) -> None:
    for shard in (None, "2/2"):
        path = tmp_path / f"{shard is None}.heat"
        assert bake(ONE, ["sm_80", "sm_90"], output=path, shard=shard, builder=builder).ok
        assert about(path).get("shard") == shard


class _Refused(Executor):
    """An executor that must not be used."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        pytest.fail("a job was submitted")


def test_a_fleet_gets_no_job_of_a_bake_that_is_refused(tmp_path: Path) -> None:
    path = existing(tmp_path / "k.heat", SM_80)
    with pytest.raises(InputError, match="has code for sm_80"):
        bake(ONE, output=path, executor=_Refused())


def test_of_two_bakes_for_different_architectures_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that there is no bundle, and reach the end together."""
    path = tmp_path / "k.heat"
    places = [
        BundleOutput(path, plan_all(ONE, arch), plan_all(ONE, arch), replace=False)
        for arch in (SM_80, SM_90)
    ]
    compared = lost_archs
    meeting = threading.Barrier(2)

    def compare_slowly(place: Path, made: Iterable[Arch]) -> list[Arch]:
        found = compared(place, made)
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.3)  # Without a lock, both are here at the same time.
        return found

    monkeypatch.setattr(output_module, "lost_archs", compare_slowly)
    results: dict[Arch, int | InputError] = {}

    def finish(place: BundleOutput, arch: Arch) -> None:
        results[arch] = place.write({}, meta((), [arch], ()), [arch], None)

    threads = [
        threading.Thread(target=finish, args=pair) for pair in zip(places, (SM_80, SM_90), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = [arch for arch, result in results.items() if isinstance(result, int)]
    (error,) = [result for result in results.values() if isinstance(result, InputError)]
    assert archs_in(path) == [str(winner)]
    assert f"has code for {winner}" in str(error)
    assert [*tmp_path.glob(".*")] == []


def test_a_place_that_cannot_be_written_is_an_error_with_or_without_replacing(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for replace in (False, True):
        with pytest.raises(InputError, match="it exists and is not a bundle"):
            BundleOutput(tmp_path / "notes", [], [], replace=replace)


def test_a_fault_of_the_disk_is_raised_and_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise BundleError("the disk is full")

    monkeypatch.setattr(output_module, "write", full)
    place = BundleOutput(tmp_path / "k.heat", [], [], replace=False)
    with pytest.raises(BundleError, match="the disk is full"):
        place.write({}, {}, [], None)
    assert [*tmp_path.glob(".*")] == []
