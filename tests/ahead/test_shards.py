"""Shards: a partition of jobs on which all machines agree."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preheat.ahead.bake import plan_all
from preheat.ahead.foreign import ForeignJob
from preheat.ahead.jobs import Job
from preheat.ahead.manifest import ForeignProgram, Manifest, ManifestProgram
from preheat.ahead.shards import Shard, _weight
from preheat.errors import InputError
from preheat.model.arch import Arch
from preheat.model.program import Program
from tests.processes import expect_success, start_python

SM_90 = Arch(9, 0)


def kernel(name: str) -> Program:
    return Program.of(f'extern "C" __global__ void {name}() {{}}', label=f"{name}.cu")


def jobs_of(seconds: list[float]) -> list[Job | ForeignJob]:
    """Return jobs with these estimates; every fifth is a request of another library."""
    jobs: list[Job | ForeignJob] = []
    for index, each in enumerate(seconds):
        if index % 5 == 4:
            item = ForeignProgram("triton", f"m:f{index}", json.dumps({"n": index}), archs=(SM_90,))
            jobs.append(ForeignJob(item, SM_90, each))
        else:
            jobs.append(Job(ManifestProgram(kernel(f"k{index}")), SM_90, each))
    return jobs


ESTIMATES = st.lists(st.floats(0, 100), max_size=40)
COUNTS = st.integers(1, 12)


@given(ESTIMATES, COUNTS, st.randoms(use_true_random=False))
def test_shards_are_a_balanced_partition_whatever_the_order(
    seconds: list[float], count: int, draw: random.Random
) -> None:
    jobs = jobs_of(seconds)
    shards = [Shard(number, count).select(jobs) for number in range(1, count + 1)]
    assert sorted(map(str, jobs)) == sorted(str(job) for shard in shards for job in shard)
    shuffled = list(jobs)
    draw.shuffle(shuffled)
    for number, shard in enumerate(shards, start=1):
        assert sorted(map(str, Shard(number, count).select(shuffled))) == sorted(map(str, shard))
        assert [job for job in jobs if job in shard] == shard  # in the order of the jobs
    sums = [sum(map(_weight, shard)) for shard in shards]
    for total, shard in zip(sums, shards, strict=True):
        assert total - min(sums) <= min(map(_weight, shard), default=0)


def test_one_shard_has_everything() -> None:
    jobs = jobs_of([3.0, 1.0, 2.0, 0.5, 4.0])
    assert Shard(1, 1).select(jobs) == jobs


def test_shards_do_not_depend_on_where_a_manifest_is(tmp_path: Path) -> None:
    """A checkout in another directory, read by another process, gives the same shards."""
    code = """
import sys
from preheat.ahead.bake import plan_all
from preheat.ahead.manifest import Manifest
manifest = Manifest.read(sys.argv[1])
print(*(f"{job}:{number}" for number in "123" for job in plan_all(manifest, ["sm_90"], f"{number}/3")))
"""
    seen: list[list[str]] = []
    for place in ("here", "there/deep"):
        directory = tmp_path / place
        (directory / "include").mkdir(parents=True)
        rows = []
        for index in range(7):
            text = f'#include "v.h"\nextern "C" __global__ void k{index}() {{}}\n'
            (directory / f"k{index}.cu").write_text(text)
            rows.append(f'[[program]]\nfile = "k{index}.cu"\ninclude = ["include"]\n')
        rows = rows if place == "here" else rows[::-1]
        (directory / "k.toml").write_text("version = 1\n" + "".join(rows))
        process = start_python(code, str(directory / "k.toml"), env={"PYTHONHASHSEED": str(len(seen))})
        seen.append(sorted(expect_success(process).split()))
    assert seen[0] == seen[1]
    assert (
        len(seen[0]) == 7 * 3 // 1 // 3 * 3
    )  # "k.cu for sm_90:1" is three words for each of the seven


def test_two_answers_to_one_request_are_in_one_shard(tmp_path: Path) -> None:
    """Their bake has to see both, in order to refuse them."""
    programs = []
    for name in ("one", "two"):
        (tmp_path / name / "inc").mkdir(parents=True)
        (tmp_path / name / "k.cu").write_text('#include "v.h"\n__global__ void k() {}\n')
        programs.append(Program.from_file(tmp_path / name / "k.cu", include=[tmp_path / name / "inc"]))
    manifest = Manifest(tuple(ManifestProgram(each, (SM_90,)) for each in programs))
    sizes = [len(plan_all(manifest, None, Shard(number, 4))) for number in range(1, 5)]
    assert sorted(sizes) == [0, 0, 0, 2]


def test_entries_that_are_copied_do_not_take_the_place_of_compiles() -> None:
    """Their recorded seconds are those of a measurement, which a bake does not repeat."""
    measured = json.dumps({"function": "m:f", "kept": True})
    requests = [
        *(ForeignProgram("triton", f"m:c{n}", json.dumps({"n": n}), seconds=2.0) for n in range(4)),
        *(ForeignProgram("triton", f"m:t{n}", measured, seconds=10.0) for n in range(2)),
        *(ForeignProgram("inductor", f"i{n}") for n in range(2)),
    ]
    manifest = Manifest(foreign=tuple(replace(item, archs=(SM_90,)) for item in requests))
    shards = [plan_all(manifest, None, Shard(number, 2)) for number in (1, 2)]
    assert [sum(map(_compiles, shard)) for shard in shards] == [2, 2]
    assert sorted(str(job) for shard in shards for job in shard) == sorted(
        str(job) for job in plan_all(manifest)
    )
    assert all(map(_compiles, plan_all(manifest)[:4]))  # The longest jobs start first.


def _compiles(job: Job | ForeignJob) -> bool:
    return isinstance(job, Job) or not job.item.kept


# The command line


@pytest.mark.parametrize(
    "text", ["", "2", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/4/2", "auto/", "auto/0"]
)
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Shard.parse(text, {"JOB_COMPLETION_INDEX": "0"})
    assert "--shard 1/4" in str(caught.value.hint)


def slurm(task: int, first: int, last: int, count: int) -> dict[str, str]:
    names = {"ID": task, "MIN": first, "MAX": last, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}


@pytest.mark.parametrize(
    ("text", "env", "shard"),
    [
        ("2/8", {}, Shard(2, 8)),
        (" 2/8 ", slurm(5, 1, 8, 8), Shard(2, 8)),
        ("auto", slurm(0, 0, 15, 16), Shard(1, 16)),
        ("auto", slurm(16, 1, 16, 16), Shard(16, 16)),
        ("auto", slurm(9, 1, 13, 4), Shard(3, 4)),
        ("auto", slurm(7, 7, 7, 1), Shard(1, 1)),
        ("auto/16", slurm(3, 0, 15, 16), Shard(4, 16)),
        ("auto/8", {"JOB_COMPLETION_INDEX": "7"}, Shard(8, 8)),
    ],
)
def test_a_shard_is_given_or_that_of_an_array(text: str, env: Mapping[str, str], shard: Shard) -> None:
    assert Shard.parse(text, env) == shard


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "there is no array of jobs"),
        ({"JOB_COMPLETION_INDEX": "3"}, "does not say how many shards"),
        ({"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX is 'x'"),
        (slurm(3, 1, 7, 3), "not evenly spaced"),
        (slurm(10, 1, 7, 3), "there is no shard"),
        ({"SLURM_ARRAY_TASK_ID": "1"}, "SLURM_ARRAY_TASK_MIN is ''"),
    ],
)
def test_an_array_that_does_not_tell_the_shard_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Shard.parse("auto", env)


def test_the_guide_repeats_the_number_of_completions_of_its_job() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "fleet.md").read_text()
    job = guide[guide.index("apiVersion: batch/v1") :]
    (completions,) = re.findall(r"completions: (\d+)", job)
    assert Shard.parse(f"auto/{completions}", {"JOB_COMPLETION_INDEX": "0"}).count == int(completions)
    assert f"--shard, auto/{completions}," in job
    (last,) = re.findall(r"--array=1-(\d+)", guide)
    assert f"kernels.*-of-{last}.heat" in guide
