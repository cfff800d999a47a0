"""Processes that make entries of other libraries: one for each adapter and environment at a time.

They import the library and modules of the application, which this process must not do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from preheat.ahead.manifest import ForeignProgram
from preheat.build.builder import Builder
from preheat.build.foreign_store import ForeignStore
from preheat.errors import AdapterError
from preheat.model.arch import Arch
from preheat.model.config import VARIABLES, environ
from preheat.model.foreign import ForeignRequest
from preheat.process.locks import Lock

__all__ = ["AdapterAnswer", "AdapterProcesses"]

# The adapter, the directory of modules, and the environment of a process. Modules of two directories
# may have the same name.
_GROUP = tuple[str, str, tuple[tuple[str, str], ...]]


# Settings of shared stores, which a process gets if its builder uses shared stores.
_SHARED = (
    *("PREHEAT_REMOTE", "PREHEAT_REMOTE_TIMEOUT", "PREHEAT_REMOTE_UNSIGNED"),
    *("PREHEAT_SIGNING_KEY", "PREHEAT_TRUSTED_KEYS"),
)


class AdapterAnswer(NamedTuple):
    """The entries that a request needs, notes about them, and whether any had to be made.

    `outdated` says why the recording cannot be used; it is empty otherwise.
    """

    entries: list[ForeignRequest]
    notes: list[str]
    made: bool
    outdated: str = ""


class AdapterProcesses:
    """Starts processes when they are needed, and keeps them for the next request."""

    def __init__(self, builder: Builder) -> None:
        self._directory: str | None = None
        self._disk = builder.disk
        self._passed = {
            *("PREHEAT_LOCK_DIR", "PREHEAT_TRUST_CACHE_DIR"),
            *(_SHARED if builder.cache.shared else ()),
        }
        self._idle: dict[_GROUP, list[_Process]] = {}
        self._all: list[_Process] = []
        self._lock = Lock()
        self._own_builder: Builder | None = None

    @property
    def own_cache(self) -> bool:
        """True if the processes have their own cache, because the builder has no cache directory."""
        return self._disk is None

    def store(self, builder: Builder) -> ForeignStore:
        """Return where the processes store entries: with `builder`, or in their own cache."""
        if not self.own_cache:
            return builder.foreign
        cache_dir = self._cache_dir()
        with self._lock:
            if self._own_builder is None:
                self._own_builder = Builder.open(cache_dir=cache_dir)
            return self._own_builder.foreign

    def _temporary(self) -> str:
        """Return the directory of these processes, which the first use makes and `close` removes."""
        with self._lock:
            if self._directory is None:
                self._directory = tempfile.mkdtemp(prefix="preheat-adapters-")
            return self._directory

    def _cache_dir(self) -> str:
        return f"{self._temporary()}/cache" if self._disk is None else str(self._disk.root)

    def bake(self, item: ForeignProgram, arch: Arch) -> AdapterAnswer:
        """Make the entries of a request."""
        env: dict[str, str] = item.row.get("env", {})
        return self._entries("bake", item, arch, env)

    def keys(self, item: ForeignProgram, arch: Arch) -> AdapterAnswer:
        """Return the entries that a request needs in the environment of this process."""
        return self._entries("keys", item, arch, {})

    def count(self, item: ForeignProgram) -> int:
        """Return the largest number of kernels that a bake of a request makes for one architecture."""
        answer = self._ask("count", item, {}, item.title)
        number: int = answer["count"]
        return number

    def _entries(
        self, verb: str, item: ForeignProgram, arch: Arch, env: Mapping[str, str]
    ) -> AdapterAnswer:
        answer = self._ask(verb, item, env, f"{item.title} for {arch}", arch=str(arch))
        entries = [
            ForeignRequest(kind, key, variant, label, arch)
            for kind, key, variant, label in answer["entries"]
        ]
        return AdapterAnswer(entries, answer["notes"], answer["made"], answer["outdated"])

    def _ask(
        self, verb: str, item: ForeignProgram, env: Mapping[str, str], title: str, **more: str
    ) -> dict[str, Any]:
        """Return the answer of a process.

        If it is an error, raise it as an `AdapterError` with `title`.
        """
        group = (item.kind, item.import_root, tuple(sorted(env.items())))
        process = self._take(group)
        row = {**item.row, "root": item.import_root}
        answer = process.ask({"verb": verb, "row": row, "coverage": item.coverage, **more})
        with self._lock:
            self._idle.setdefault(group, []).append(process)
        if "error" in answer:
            raise AdapterError(f"{title}: {answer['error']}", hint=answer["hint"])
        return answer

    def _take(self, group: _GROUP) -> _Process:
        with self._lock:
            if idle := self._idle.get(group):
                return idle.pop()
        kind, _, env = group
        process = _Process(kind, self._environment(dict(env)))
        with self._lock:
            self._all.append(process)
        return process

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return an environment that stores entries in the cache, without the settings of a run."""
        settings = {variable.name for variable in VARIABLES} - self._passed
        kept = {name: value for name, value in environ().items() if name not in settings}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return {
            **kept,
            **env,
            "PYTHONPATH": path,
            "PREHEAT_CACHE_DIR": self._cache_dir(),
            "TRITON_CACHE_DIR": f"{self._temporary()}/triton",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            processes, self._all = self._all, []
            self._idle.clear()
        try:
            for process in processes:
                process.close()
        finally:
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)


class _Process:
    """One process, which answers one request at a time."""

    def __init__(self, kind: str, env: Mapping[str, str]) -> None:
        self._kind = kind
        self._child = subprocess.Popen(
            [sys.executable, "-m", "preheat.adapters", kind],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raises `AdapterError` when the process ends instead."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except OSError:
            line = ""
        if not line:
            status = self._child.wait()
            raise AdapterError(
                f"the process of the adapter for {self._kind} ended with status {status}",
                hint="its messages are above",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._child.poll() is None:
            self._child.kill()
        with suppress(OSError), self._child:  # Closing the pipe of a process that died is an error.
            pass
