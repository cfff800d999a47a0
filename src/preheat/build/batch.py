"""Programs that are compiled together: the longest first, with a progress bar and all errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from preheat.build.builder import Builder
from preheat.build.compile_lock import Attempt
from preheat.build.lookup import Hit
from preheat.build.obtain import Build
from preheat.build.parallel import Task, run_all
from preheat.errors import InputError, PreheatError, short_repr, with_others
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.linked_program import LinkedProgram
from preheat.model.program import Program
from preheat.process.progress import DelayedProgress

__all__ = ["build_all", "compile_batch", "compile_builds", "estimate", "list_pairs", "raise_all"]

T = TypeVar("T")
_ESTIMATE = {True: 2.0, False: 0.2}  # seconds of a compile: with includes, or not
_CHARACTERS = 1e-6  # seconds for each character of the source: it only orders similar programs


def estimate(program: Program) -> float:
    """Return the seconds that a compile of `program` may take, where no measurement is known."""
    if isinstance(program, LinkedProgram):
        return sum(map(estimate, program.sources.values()), _ESTIMATE[False])
    return _ESTIMATE[program.may_include] + _CHARACTERS * len(program.source)


def compile_batch(
    programs: Sequence[Program], run: Callable[[int, Attempt], T]
) -> list[T | PreheatError]:
    """Call `run` with the index of each program, on all processors; return results or errors in order.

    A progress bar appears when it takes over two seconds and stderr is a terminal.
    """
    if not programs:
        return []
    seconds = [estimate(program) for program in programs]
    order = sorted(range(len(programs)), key=lambda index: -seconds[index])
    running: dict[int, None] = {}

    with DelayedProgress("compiling", len(programs), work=sum(seconds)) as bar:

        def labels() -> str:
            return ", ".join(programs[order[place]].label for place in running)

        def start(place: int) -> None:
            running[place] = None
            bar.step(labels(), 0, 0.0)

        def end(place: int, _: Task[T]) -> None:
            del running[place]
            bar.step(labels(), 1, seconds[order[place]])

        if bar.can_appear:
            tasks = run_all(order, run, on_start=start, on_done=end, on_tick=bar.tick)
        else:
            tasks = run_all(order, run)
    outcomes: dict[int, T | PreheatError] = {}
    for index, task in zip(order, tasks, strict=True):
        error = task.error
        outcomes[index] = error if isinstance(error, PreheatError) else task.outcome()
    return [outcomes[index] for index in range(len(programs))]


def raise_all(errors: Sequence[PreheatError]) -> None:
    """Raise the first error, if there is one, with the others in a note. Equal errors count once."""
    different = list({(type(error), str(error)): error for error in reversed(errors)}.values())[::-1]
    if different:
        raise with_others(different)


def list_pairs(requests: Any, second: str, example: str) -> list[tuple[Any, Any]]:
    """Return requests as pairs of a source and a second value, which errors call `second`."""
    kind = f"a pair of a source and {second}"
    if isinstance(requests, str | Program) or not isinstance(requests, Iterable):
        raise InputError(f"each request is {kind}, in a list, not {short_repr(requests)}", hint=example)
    checked = []
    for number, request in enumerate(requests, 1):
        if not isinstance(request, tuple | list) or len(request) != 2:
            raise InputError(f"request {number} is not {kind}: {short_repr(request)}", hint=example)
        checked.append((request[0], request[1]))
    return checked


def build_all(builder: Builder, wanted: Sequence[tuple[Program, Arch]]) -> list[Artifact]:
    """Return the artifacts of programs, in order.

    Programs that no cache has are compiled in parallel.
    """
    hits: dict[tuple[Program, Arch], Hit] = {}
    builds: dict[tuple[Program, Arch], Build] = {}
    errors: list[PreheatError] = []
    for request in dict.fromkeys(wanted):
        try:
            result = builder.find(*request)
        except PreheatError as error:
            errors.append(error)
            continue
        if isinstance(result, Build):
            builds[request] = result
        else:
            hits[request] = result
    raise_all(errors)
    hits.update(zip(builds, compile_builds(list(builds.values())), strict=True))
    return [hits[request].artifact for request in wanted]


def compile_builds(builds: Sequence[Build]) -> list[Hit]:
    """Compile programs on all processors. Raises the errors of all compiles."""
    made = compile_batch(
        [build.request.program for build in builds],
        lambda index, attempt: builds[index].obtain(attempt),
    )
    raise_all([hit for hit in made if isinstance(hit, PreheatError)])
    return [hit for hit in made if not isinstance(hit, PreheatError)]
