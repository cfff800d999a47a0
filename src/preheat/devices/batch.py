"""Kernels that are requested together: those that no cache has are compiled on all processors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from preheat.build.batch import compile_builds, list_pairs, raise_all
from preheat.build.code import Code, compiled_code
from preheat.build.obtain import Build
from preheat.build.reload import TrackedFiles
from preheat.build.request import ModuleRequest
from preheat.devices.kernel import Kernel
from preheat.devices.session import Prepared, Session
from preheat.errors import PreheatError, SealedError
from preheat.model.arch import Arch
from preheat.model.artifact import check_name
from preheat.model.program import Program

__all__ = ["kernel_requests", "kernels"]

KernelRequest = tuple[ModuleRequest, str]  # a program, and the name of a kernel in it


def kernel_requests(requests: Iterable[Any], **more: Any) -> list[KernelRequest]:
    """Check list_pairs of a source and a name; `more` are the arguments that all programs have."""
    checked = []
    for source, name in list_pairs(requests, "a name", 'gpu.kernels([(source, "saxpy")])'):
        check_name("a kernel", name)
        checked.append((ModuleRequest.of(source, **more), name))
    return checked


def kernels(session: Session, wanted: Sequence[KernelRequest]) -> list[Kernel]:
    """Return kernels in order. Programs are all read, then all looked up, then compiled together."""
    prepared: dict[ModuleRequest, Prepared] = {}
    if not session.context.active_captures():  # In a capture, only what is loaded can be used.
        prepared = _prepare(session, wanted)
    made: list[Kernel] = []
    errors: list[PreheatError] = []
    for request, name in wanted:
        ready = prepared.get(request.for_kernel(name))
        given = None if ready is None else partial(_same, ready)
        try:
            made.append(session.kernel(request, name, given))
        except PreheatError as error:
            errors.append(_name_error(error, name))
    raise_all(errors)
    return made


def _same(ready: Prepared) -> Prepared:
    return ready


def _prepare(session: Session, wanted: Sequence[KernelRequest]) -> dict[ModuleRequest, Prepared]:
    """Return what is not loaded yet, by request."""
    session.context.require_alive()
    names: dict[ModuleRequest, str] = {}  # of the first kernel of each program
    for request, name in wanted:
        if not _is_loaded(session, request, name):
            names.setdefault(request.for_kernel(name), name)
    if not names:
        return {}
    read = [(request, session.track_files(request), request.program()) for request in names]
    codes = _find_codes(session, names, read)
    return {
        request: Prepared(program, files, code)
        for (request, files, program), code in zip(read, codes, strict=True)
    }


def _find_codes(
    session: Session,
    names: Mapping[ModuleRequest, str],
    read: Sequence[tuple[ModuleRequest, TrackedFiles | None, Program]],
) -> list[Code]:
    """Return the code of each program, in order.

    Programs that no cache has are compiled in parallel.
    """
    results: list[Code | Build] = []
    errors: list[PreheatError] = []
    for request, _, program in read:
        try:
            results.append(session.find_code(program, request.arch, strict=request.strict))
        except PreheatError as error:
            errors.append(_name_error(error, names[request]))
    raise_all(errors)
    builds = {_key(each): each for each in results if isinstance(each, Build)}
    made = dict(zip(builds, compile_builds(list(builds.values())), strict=True))
    return [
        compiled_code(each, made[_key(each)]) if isinstance(each, Build) else each for each in results
    ]


def _key(build: Build) -> tuple[Program, Arch]:
    return build.request.program, build.request.arch


def _is_loaded(session: Session, request: ModuleRequest, name: str) -> bool:
    for entry in (
        session.kernels.get((request, name)),
        session.modules.get(request.for_kernel(name)),
    ):
        if entry is not None and entry.current:
            return True
    return False


def _name_error(error: PreheatError, name: str) -> PreheatError:
    return error.naming(name) if isinstance(error, SealedError) else error
