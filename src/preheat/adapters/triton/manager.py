"""Triton's cache manager on the store of preheat.

Triton makes one manager for each compile, each module of host code and each tuning result. It asks for
a group of files by `get_group`. On a miss it compiles, and calls `put` for each file and `put_group`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import CacheManager as _CacheManager
from triton.runtime.cache import FileCacheManager

from preheat import adapters
from preheat.adapters.base import Compile
from preheat.adapters.triton.identity import KIND
from preheat.adapters.triton.request import request_of_call, take_request, variant_text
from preheat.adapters.triton.state import MissedError, state
from preheat.adapters.triton.tuning import known_results, tuned_label, tuning_row
from preheat.build.foreign_store import ABSENT, UNMEASURED, created_now
from preheat.devices import base
from preheat.model.config import SealMode
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.toolchain.binaries.ptx_section import detach_ptx

__all__ = ["CacheManager"]

# How two kernels differ of which everything that is listed is the same.
_UNLISTED = "nothing that the entry lists: another build of Triton, or the line of the function"


class CacheManager(_CacheManager):  # type: ignore[misc]
    """Finds the files of one key in the store, and stores them.

    The files are also written to a `KernelDirectory`. Only what the store verified is returned.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        request = take_request(key)
        if KIND not in adapters.installed():  # A child process knows this class by its environment.
            adapters.install(KIND)
            # It is the frame of the caller of Triton's `get_cache_manager`.
            request = request_of_call(sys._getframe(2), key)
        self.key = key
        # Overrides and dumps of IR are files of the user, not a cache.
        self._stock = FileCacheManager(key, override, dump) if override or dump else None
        self._compile_request = request = None if self._stock else request
        # Triton reads the files again by their paths. Two variants of one key must not share them.
        self._variant = "" if request is None else request.identity.variant[:16]
        self._files: dict[str, bytes] = {}
        self._paths: dict[str, str] = {}
        self._compile = Compile(state().connection)

    # Compiled kernels

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files of a compiled kernel, or None when Triton has to compile it."""
        if self._stock:
            group: dict[str, str] | None = self._stock.get_group(filename)
            return group
        request = self._request(filename)
        store = state().connection.store
        entry = None if knobs.compilation.always_compile else store.get(request)
        if entry is None:
            self._permit(request)
            # The lock belongs to the call of `compile`: a compile that fails gives it up.
            entry = self._compile.lock(request, sys._getframe(1))
            if entry is None or knobs.compilation.always_compile:
                self._compile.begin(request)
                return None
            self._compile.end()
        if self._compile_request is not None:
            state().report(entry, self._compile_request.row)
        _hand_over(entry.files)
        return self._materialise(entry.files, filename)

    def put_group(self, filename: str, group: Mapping[str, str]) -> str:
        """Store the files of a compiled kernel."""
        if self._stock:
            path: str = self._stock.put_group(filename, group)
            return path
        request = self._request(filename)
        found = {name: self._files.get(name) or Path(path).read_bytes() for name, path in group.items()}
        # Entries are the same on the CPU driver, where ptxas adds the PTX to the cubin.
        files = {name: detach_ptx(content) for name, content in found.items()}
        if knobs.compilation.override:  # The code may be the user's, under the key of the original.
            state().connection.uncached(request, "TRITON_KERNEL_OVERRIDE is set")
            self._compile.give_up()
        elif self._compile_request is None:
            self._compile.made(request, files, {})
        else:
            entry = self._compile.made(request, files, self._compile_request.properties)
            state().report(entry, self._compile_request.row)
        self._compile.end()
        return self._write_group(filename, dict(group))

    # Single files: host code and tuning results

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file; None when there is none."""
        if self._stock:
            path: str | None = self._stock.get_file(filename)
            return path
        if filename in self._files:  # a file of the kernel that is being compiled
            return self._paths[filename]
        if filename.endswith(".so"):  # `host.build` answers by the content of the source.
            return None
        request = self._request(filename)
        connection = state().connection
        entry = connection.store.get(request)
        if entry is None or filename not in entry.files:
            self._permit(request)
            connection.missed(request, ABSENT if state().work.tuning is None else UNMEASURED)
            return None
        self._report_file(entry)
        return self._materialise(entry.files)[filename]

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file, and store it unless it belongs to a group."""
        if self._stock:
            path: str = self._stock.put(data, filename, binary)
            return path
        content = data if isinstance(data, bytes) else str(data).encode()
        if self._compile_request is None and not filename.endswith(".so"):
            request = self._request(filename)
            entry = ForeignEntry(
                KIND, self.key, {filename: content}, request.variant, request.label, request.arch,
                provenance=created_now(0.0),
            )  # fmt: skip
            state().connection.store.put(entry)
            self._report_file(entry)
        else:
            self._files[filename] = content
        return self._write(filename, content)

    # The entry

    def _request(self, filename: str) -> ForeignRequest:
        if self._compile_request is not None:
            return self._compile_request.identity
        tuning = state().work.tuning
        if tuning is None:
            return ForeignRequest(KIND, self.key, filename, label=filename)
        label = tuned_label(tuning.function, tuning.key)
        return ForeignRequest(KIND, self.key, filename, label, tuning.arch)

    def _report_file(self, entry: ForeignEntry) -> None:
        """Report the use of an entry that is a single file."""
        tuning = state().work.tuning
        if tuning is None:
            state().report(entry)
        else:
            state().report(entry, lambda: tuning_row(tuning, entry.key))

    def _permit(self, request: ForeignRequest) -> None:
        """Raise in a sealed process."""
        connection, work, _ = state()
        if connection.store.sealed is not SealMode.ERROR:
            return
        if work.weak_allowed:
            raise MissedError
        if knobs.compilation.always_compile:
            connection.permit(request, "TRITON_ALWAYS_COMPILE is set")
        if self._compile_request is not None:
            nearest, differences = connection.nearest(
                self._compile_request, _variant_of, absent="not set"
            )
            if nearest is not None and not differences:
                differences = (_UNLISTED,)
            connection.permit(request, ABSENT, nearest=nearest, differences=differences)
        elif work.tuning is not None:
            connection.permit(request, f"{UNMEASURED}; {known_results(request, work.tuning)}")
        else:
            connection.permit(request, ABSENT)

    # The files

    def _materialise(self, files: Mapping[str, bytes], group: str | None = None) -> dict[str, str]:
        """Write files where Triton reads them, and return their paths by name."""
        paths = {name: self._write(name, content) for name, content in files.items()}
        if group is not None:
            self._write_group(group, paths)
        return paths

    def _write_group(self, filename: str, paths: dict[str, str]) -> str:
        return self._write(f"__grp__{filename}", json.dumps({"child_paths": paths}).encode())

    def _write(self, filename: str, content: bytes) -> str:
        """Write a file, and return its path in the directory of this variant."""
        path = state().directory.write(self.key, self._variant, filename, content)
        self._paths[filename] = path
        return path


def _variant_of(entry: ForeignEntry) -> str:
    """Return the variant of a stored kernel on one line."""
    return f"{variant_text({'arch': entry.target, **entry.properties})} ({entry.digest[:12]})"


def _hand_over(files: Mapping[str, bytes]) -> None:
    """Tell the PTX of a kernel to a driver that executes PTX in the place of machine code."""
    for name, content in files.items():
        ptx = files.get(name.removesuffix("cubin") + "ptx")
        if name.endswith(".cubin") and ptx is not None:
            for listener in base.before_foreign_load:
                listener(content, ptx)
