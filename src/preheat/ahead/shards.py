"""Shards: the jobs of a bake in parts, one for each machine, without any communication between them."""

from __future__ import annotations

import hashlib
import heapq
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from preheat.ahead.foreign import ForeignJob
from preheat.ahead.jobs import Job
from preheat.errors import InputError
from preheat.model.config import environ
from preheat.model.key import bundle_key

__all__ = ["Shard"]

J = TypeVar("J", bound=Job | ForeignJob)

_HINT = "shards are numbered from 1: --shard 1/4 to --shard 4/4; or --shard auto in an array of jobs"


@dataclass(frozen=True)
class Shard:
    """One of `count` parts of a bake, by its `number` from 1 on; `InputError` for any other number."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str, env: Mapping[str, str] | None = None) -> Shard:
        """Parse `2/8`, `auto` or `auto/8`.

        `auto` is the place of this process in an array of jobs: of Slurm, or of an indexed job of
        Kubernetes. The latter does not know its size, so the number of shards must be given.

        Raises `InputError` for every other text, and where the environment has no array.
        """
        match = re.fullmatch(r"(auto|\d{1,9})(?:/(\d{1,9}))?", text.strip())
        if match is None or (match[1] != "auto" and match[2] is None):
            raise InputError(f"{text!r} is not a shard", hint=_HINT)
        if match[1] == "auto":
            number, count = _place_in_array(environ() if env is None else env)
        else:
            number, count = int(match[1]), None
        given = int(match[2]) if match[2] else count
        if given is None:
            hint = "add the number of completions of the job: --shard auto/8"
            raise InputError("JOB_COMPLETION_INDEX does not say how many shards there are", hint=hint)
        return cls(number, given)

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise InputError(f"there is no shard {self.number} of {self.count}", hint=_HINT)

    def select(self, jobs: Iterable[J]) -> list[J]:
        """Return the jobs of this shard, in their order.

        Every job is in exactly one shard. Which shard has a job depends on the set of jobs and
        on their estimates alone, so that machines agree. Jobs of one request are in one shard. The
        sums of the estimates of two shards differ by at most the shortest request of the larger one.
        """
        jobs = list(jobs)
        requests: dict[str, list[int]] = {}
        for index, job in enumerate(jobs):
            requests.setdefault(_identity(job), []).append(index)
        sizes = {name: sum(_weight(jobs[i]) for i in indexes) for name, indexes in requests.items()}
        mine = _shares(sizes, self.count)[self.number - 1]
        return [jobs[i] for i in sorted(i for name in mine for i in requests[name])]


def _shares(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Distribute names: the largest first, each to the share with the smallest sum."""
    shares: list[list[str]] = [[] for _ in range(count)]
    sums = [(0, number) for number in range(count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        total, number = sums[0]
        shares[number].append(name)
        heapq.heapreplace(sums, (total + sizes[name], number))
    return shares


def _weight(job: Job | ForeignJob) -> int:
    """Return the expected microseconds. Sums of whole numbers do not depend on their order."""
    return max(1, round(job.estimate * 1e6))


def _identity(job: Job | ForeignJob) -> str:
    """Return a digest of what a job makes. It does not depend on the machine or on paths."""
    if isinstance(job, Job):
        return bundle_key(job.item.program, job.arch).digest
    words = [*job.item.identity, "" if job.arch is None else str(job.arch)]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _place_in_array(env: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the number of this process in its array, from 1 on, and the size of the array if known."""
    if "SLURM_ARRAY_TASK_ID" in env:
        return _place_in_slurm_array(env)
    if "JOB_COMPLETION_INDEX" in env:
        return _number(env, "JOB_COMPLETION_INDEX") + 1, None
    raise InputError(
        "there is no array of jobs: neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set",
        hint=_HINT,
    )


def _place_in_slurm_array(env: Mapping[str, str]) -> tuple[int, int]:
    names = ("ID", "MIN", "MAX", "COUNT")
    task, first, last, count = (_number(env, f"SLURM_ARRAY_TASK_{name}") for name in names)
    step = (last - first) // (count - 1) if count > 1 else 1
    if step < 1 or first + step * (count - 1) != last or (task - first) % step:
        raise InputError(
            f"the indexes of the Slurm array are not evenly spaced: {count} from {first} to {last}",
            hint="number it without gaps, such as --array=1-8, or give the shard: --shard 2/8",
        )
    return (task - first) // step + 1, count


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        raise InputError(f"{name} is {text!r}, not a number", hint=_HINT)
    return int(text)
