"""Triton's cache manager on the store of preheat.

Triton makes one manager for each compile, each module of host code and each tuning result. It asks for
a group of files by `get_group`. On a miss it compiles, and calls `put` for each file and `put_group`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from _thread import get_ident
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import CacheManager as _CacheManager
from triton.runtime.cache import FileCacheManager

from preheat import adapters
from preheat.adapters.triton.identity import KIND
from preheat.adapters.triton.request import request_of_call, take_request
from preheat.adapters.triton.state import MissedError, state, tuned_label
from preheat.build.compile_lock import CompileLock
from preheat.build.foreign_store import ABSENT, UNMEASURED, created_now
from preheat.cache.publish import replace as publish
from preheat.cache.trust import make_private, read_file
from preheat.config import SealMode
from preheat.devices import base
from preheat.errors import InputError
from preheat.foreign import ForeignEntry, ForeignRequest
from preheat.toolchain.ptx_section import detach_ptx

__all__ = ["CacheManager"]


class CacheManager(_CacheManager):  # type: ignore[misc]
    """Finds the files of one key in the store, and stores them.

    The files are also written to the directory of Triton's own cache, where Inductor and users look for
    them. A process that cannot write there uses a temporary directory, and so does a process that must
    not trust the directory, because another user could change the code in it. Only what the store
    verified is returned.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        request = take_request(key)
        if KIND not in adapters.installed():  # A child process knows this class by its environment.
            adapters.install(KIND)
            # The frame is that of the caller of Triton's `get_cache_manager`.
            request = request_of_call(sys._getframe(2), key)
        self.key = key
        # Overrides and dumps of IR are files of the user, not a cache.
        self._stock = FileCacheManager(key, override, dump) if override or dump else None
        self._compile_request = request = None if self._stock else request
        # Triton reads the files again by their paths. Two variants of one key must not share them.
        self._variant = "" if request is None else request.identity.variant[:16]
        self._files: dict[str, bytes] = {}
        self._paths: dict[str, str] = {}
        self._compile_lock: CompileLock | None = None
        self._started = 0.0

    # Compiled kernels

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files of a compiled kernel, or None when Triton has to compile it."""
        if self._stock:
            group: dict[str, str] | None = self._stock.get_group(filename)
            return group
        request = self._request(filename)
        store = state().store
        entry = None if knobs.compilation.always_compile else store.get(request)
        if entry is None:
            self._permit(request)
            # The lock belongs to the call of `compile`: a compile that fails gives it up.
            self._compile_lock, entry = store.lock(request, sys._getframe(1))
            if entry is None or knobs.compilation.always_compile:
                store.missed(request, ABSENT, called_by=state().caller)
                self._started = time.perf_counter()
                return None
            self._compile_lock.release()
        if self._compile_request is not None:
            state().report_kernel(self._compile_request, entry)
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
        entry = ForeignEntry(
            KIND, request.key, files, request.variant, request.label, request.arch,
            properties={} if self._compile_request is None else self._compile_request.properties,
            provenance=created_now(time.perf_counter() - self._started),
        )  # fmt: skip
        if knobs.compilation.override:  # The code may be the user's, under the key of the original.
            reason = "TRITON_KERNEL_OVERRIDE is set"
            state().store.events.emit("uncached", program=entry.title, arch=entry.target, reason=reason)
            if self._compile_lock is not None:
                self._compile_lock.give_up()
        else:
            state().store.made(entry)
            if self._compile_request is not None:
                state().report_kernel(self._compile_request, entry)
            if self._compile_lock is not None:
                self._compile_lock.release()
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
        entry = state().store.get(request)
        if entry is None or filename not in entry.files:
            self._permit(request)
            reason = ABSENT if state().tuning is None else UNMEASURED
            state().store.missed(request, reason, called_by=state().caller)
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
            state().store.put(entry)
            self._report_file(entry)
        else:
            self._files[filename] = content
        return self._write(filename, content)

    # The entry

    def _request(self, filename: str) -> ForeignRequest:
        if self._compile_request is not None:
            return self._compile_request.identity
        tuning = state().tuning
        if tuning is None:
            return ForeignRequest(KIND, self.key, filename, label=filename)
        label = tuned_label(tuning.function, tuning.key)
        return ForeignRequest(KIND, self.key, filename, label, tuning.arch)

    def _report_file(self, entry: ForeignEntry) -> None:
        """Report the use of an entry that is a single file."""
        tuning = state().tuning
        if tuning is None:
            state().report_entry(entry)
        else:
            state().report_tuning(tuning, entry)

    def _permit(self, request: ForeignRequest) -> None:
        """Raise in a sealed process."""
        store = state().store
        if store.sealed is not SealMode.ERROR:
            return
        if state().weak_allowed:
            raise MissedError
        if knobs.compilation.always_compile:
            store.permit(request, "TRITON_ALWAYS_COMPILE is set", called_by=state().caller)
        if self._compile_request is None and (tuning := state().tuning) is not None:
            state().refuse_tuning(request, tuning)
        state().refuse(request, self._compile_request, ABSENT)

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
        if os.path.basename(filename) != filename:
            raise InputError(f"{filename!r} is not the name of a file of a kernel")
        place = state().private_directory
        if place is None:
            try:
                return self._write_below(knobs.cache.dir, filename, content, trust=state().trust)
            except OSError as fault:  # There is no home, it is read-only, or others can write there.
                place = state().use_private_directory(knobs.cache.dir, fault)
        return self._write_below(place, filename, content, trust=True)

    def _write_below(self, cache: str, filename: str, content: bytes, *, trust: bool) -> str:
        directory = os.path.join(cache, self.key)
        path = self._paths[filename] = os.path.join(directory, self._variant, filename)
        _write_once(path, content, trust=trust)
        if self._variant:
            _link_once(path, os.path.join(directory, filename), content, trust=trust)
        return path


def _hand_over(files: Mapping[str, bytes]) -> None:
    """Tell the PTX of a kernel to a driver that executes PTX in the place of machine code."""
    for name, content in files.items():
        ptx = files.get(name.removesuffix("cubin") + "ptx")
        if name.endswith(".cubin") and ptx is not None:
            for listener in base.before_foreign_load:
                listener(content, ptx)


def _write_once(path: str, content: bytes, *, trust: bool) -> None:
    """Write a file in one step, unless it has this content already and no other user can change it.

    Unless it is trusted, a directory in which another user could replace the file raises
    `DistrustedError`.
    """
    make_private(Path(path).parent, trust=trust)
    with suppress(OSError):
        if read_file(path, trust=trust)[0] == content:
            return
    publish(path, [content], durable=False)


def _link_once(path: str, other: str, content: bytes, *, trust: bool) -> None:
    """Make `other` the same file as `path`, which has this content, in one step."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path), os.stat(other)):
            return
    staged = f"{other}.{os.getpid()}.{get_ident()}"
    try:
        os.link(path, staged)
    except OSError:  # The file system has no hard links.
        _write_once(other, content, trust=trust)
    else:
        os.replace(staged, other)
