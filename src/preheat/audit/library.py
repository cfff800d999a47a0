"""The audit library, and the environment in which the processes of a command load it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from preheat.audit.compiler_libraries import file_patterns
from preheat.audit.nested import outer_audit
from preheat.errors import InputError
from preheat.model.config import Config, SealMode
from preheat.native.build import BUILD_AGAIN, is_stale

__all__ = ["LIBRARY", "Audited", "audited_environment", "loadable_library", "require_library"]

LIBRARY = Path(__file__).with_name("libpreheat_audit.so")
_SOURCES = Path(__file__).with_name("native")
_INJECTION = "CUDA_INJECTION64_PATH"
#: LD_PRELOAD separates paths by colons and white space, and expands names after a dollar sign.
_UNSAFE = frozenset(": \t\n$")
_CUPTI = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")


class Audited(NamedTuple):
    """The environment of an audited command, and what the audit will not see in it."""

    env: dict[str, str]
    notes: tuple[str, ...]


def require_library() -> Path:
    """Return the path of the library. Raises `InputError` if it was not built from these sources."""
    if not LIBRARY.is_file():
        raise InputError(
            "the audit library was not built when preheat was installed",
            hint="install preheat again where there is a C compiler, such as gcc",
        )
    if is_stale(LIBRARY, _SOURCES):
        raise InputError(
            "the audit library was built from other sources, and might overlook something",
            hint=BUILD_AGAIN,
        )
    return LIBRARY


@contextmanager
def loadable_library() -> Iterator[Path]:
    """Yield the path of the library, or that of a copy if LD_PRELOAD cannot hold the path.

    The parts of such a path would name other files, which may belong to another user. Only the owner
    can write beside the copy, and every user can load it.
    """
    library = require_library().resolve()
    if _UNSAFE.isdisjoint(str(library)):
        yield library
        return
    with TemporaryDirectory(prefix="preheat-library-", ignore_cleanup_errors=True) as place:
        if not _UNSAFE.isdisjoint(place):
            raise InputError(
                f"LD_PRELOAD can hold neither {library} nor a path in {place}",
                hint="set TMPDIR to a directory whose path has no space, colon or dollar sign",
            )
        copy = Path(shutil.copy(library, place))
        copy.chmod(0o755)
        os.chmod(place, 0o755)
        yield copy


def audited_environment(
    env: Mapping[str, str],
    directory: Path,
    library: Path,
    *,
    seal: SealMode = SealMode.OFF,
    cupti: bool = True,
    reports: bool = True,
) -> Audited:
    """Return an environment whose processes load `library` and report to `directory`, which exists.

    Without `reports`, they report refusals only, which takes little space however long they run. A
    sealed process refuses to compile. Without `cupti`, only explicit loads are seen. An injection
    library and a choice of CUPTI (PREHEAT_AUDIT_CUPTI) that the environment has already stay, unless
    they are those of an outer audit. The file of PREHEAT_EVENTS also gets the refusals of the audit
    library, and its path becomes absolute, because the processes may have other directories.
    """
    notes = []
    env = _without_outer(env)
    made = {
        **env,
        "PREHEAT_AUDIT": str(directory),
        "PREHEAT_AUDIT_LIBRARY": str(library),
        "PREHEAT_AUDIT_SEAL": seal.name.lower(),
        "PREHEAT_AUDIT_COMPILERS": file_patterns(),
        "LD_PRELOAD": ":".join(filter(None, (str(library), env.get("LD_PRELOAD")))),
    }
    for name in ("PREHEAT_AUDIT_CUPTI", "PREHEAT_AUDIT_PROBE"):
        made.pop(name, None)
    if events := Config.from_env(env).events:
        made["PREHEAT_EVENTS"] = str(events)
    if not reports:
        return Audited({**made, "PREHEAT_AUDIT_ONLY": "refusals"}, ())
    if cupti and env.get(_INJECTION):
        notes.append(f"modules loaded by the CUDA runtime: {_INJECTION} is {env[_INJECTION]}")
    elif cupti:
        made[_INJECTION] = str(library)
        found = env.get("PREHEAT_AUDIT_CUPTI") or ":".join(map(str, _find_cupti(env)))
        made["PREHEAT_AUDIT_CUPTI"] = found or "libcupti.so"
    return Audited(made, tuple(notes))


def _without_outer(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the settings of an audit in which this process runs."""
    kept = {name: value for name, value in env.items() if name != "PREHEAT_AUDIT_ONLY"}
    if outer_audit(env) is None:
        return kept
    library = kept.get("PREHEAT_AUDIT_LIBRARY")
    if library and kept.get(_INJECTION) == library:
        del kept[_INJECTION]
    preloads = kept.get("LD_PRELOAD", "").split(":")
    kept["LD_PRELOAD"] = ":".join(path for path in preloads if path != library)
    return kept


def _find_cupti(env: Mapping[str, str]) -> Iterator[Path]:
    """Yield the libraries of CUPTI on this machine, newest first, whose paths fit into a list."""
    places = list(_cupti_directories(env))
    for name in _CUPTI:
        for place in places:
            if (place / name).is_file() and ":" not in str(place):
                yield place / name


def _cupti_directories(env: Mapping[str, str]) -> Iterator[Path]:
    found = importlib.util.find_spec("nvidia")
    for package in (found.submodule_search_locations if found else None) or ():
        yield from (Path(package) / name / "lib" for name in ("cu13", "cuda_cupti"))
    homes = [env.get("CUDA_HOME"), env.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in filter(None, homes):
        yield from (Path(home) / name for name in ("lib64", "lib", "extras/CUPTI/lib64"))
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        yield Path(os.path.dirname(triton.origin)) / "backends" / "nvidia" / "lib" / "cupti"
