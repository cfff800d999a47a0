"""A fleet without workers is reported once, after a minute."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from preheat.ahead import run_on_executor as run_module
from preheat.ahead.fleets import FleetWatch
from preheat.ahead.run_on_executor import run_on_executor
from preheat.model.events import Events
from tests.conftest import Recorder


class IdleFleet(Executor):
    """An engine that accepts jobs. It answers how many workers it has from a list."""

    def __init__(self, *answers: int | OSError) -> None:
        self.answers = list(answers)
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        del fn, args, kwargs
        self.futures.append(Future())
        return self.futures[-1]

    def slots(self) -> int:
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(events: Events, recorder: Recorder, clock: Clock) -> FleetWatch:
    recorder.forgive = True
    return FleetWatch("dask://scheduler:8786", events, clock=clock)


def test_a_fleet_without_workers_is_one_event_after_a_minute(
    watch: FleetWatch, clock: Clock, recorder: Recorder
) -> None:
    fleet = IdleFleet(0)
    for clock.now in (0.0, 59.0):
        watch(fleet)
    assert not recorder.named("fault")
    for clock.now in (60.0, 120.0, 180.0):
        watch(fleet)
    (event,) = recorder.named("fault")
    assert event["where"] == "dask://scheduler:8786"
    assert "the cluster has no workers" in event["error"]


def test_workers_that_leave_later_are_noticed(
    watch: FleetWatch, clock: Clock, recorder: Recorder
) -> None:
    fleet = IdleFleet(4, OSError("the connection was lost"), 0)
    for clock.now in (60.0, 61.0, 120.0):
        watch(fleet)
    assert fleet.answers == [0]
    assert not recorder.named("fault")
    clock.now = 180.0
    watch(fleet)
    assert len(recorder.named("fault")) == 1


def test_other_executors_are_not_asked(watch: FleetWatch, clock: Clock, recorder: Recorder) -> None:
    clock.now = 600.0
    watch(Executor())
    assert not recorder.named("fault")


def test_a_bake_asks_while_no_job_ends(
    watch: FleetWatch, clock: Clock, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_POLL", 0.001)
    fleet = IdleFleet(0)

    def wait(executor: Executor) -> None:
        clock.now += 30
        watch(executor)
        if recorder.named("fault") and not fleet.futures[0].done():
            fleet.futures[0].set_result("baked")

    ended: Iterator[tuple[str, Any]]
    ended = run_on_executor(fleet, ["a"], lambda e, job: e.submit(print, job), None, wait)
    assert list(ended) == [("a", "baked")]
