"""What Triton computes about itself in every process, which the store remembers.

Its key hashes the whole compiler library, which takes half a second, and asks `ptxas` for its version
in a process of its own. Both change only when files do.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from typing import Any

from preheat.adapters.base import replace_everywhere
from preheat.build.foreign_store import ForeignStore
from preheat.model.foreign import ForeignEntry, ForeignRequest

__all__ = ["KIND", "build_digest", "install", "replace_in_triton", "tool_versions"]

KIND = "triton"  # of all entries of this adapter

_TOOL = "tool/"  # the beginning of the keys of versions of tools
_tool_versions: dict[str, ForeignRequest] = {}  # those that this process needed, by key


def install(store: ForeignStore) -> None:
    """Replace `triton_key` and the versions of tools by remembered ones."""
    import triton.backends.nvidia.compiler as nvidia
    import triton.runtime.cache as cache
    from triton import knobs

    stock_key: Callable[[], str] = cache.triton_key
    stock_version: Callable[[int], str] = nvidia.get_ptxas_version

    @functools.cache
    def triton_key() -> str:
        return _remembered(store, f"build/{_stamp_of_triton()}", "identity of the compiler", stock_key)

    @functools.cache
    def version_text(path: str) -> str:
        build = hashlib.sha256(triton_key().encode()).hexdigest()[:32]
        return _remembered(
            store,
            f"{_TOOL}{_place(path)}/{build}",
            f"version of {os.path.basename(path)}",
            lambda: subprocess.check_output([path, "--version"]).decode(),
        )

    @functools.cache
    def from_path(path: str) -> Any:
        try:
            release = re.search(r"release (\d+\.\d+)", version_text(path))
        except (subprocess.CalledProcessError, OSError):
            return None
        return None if release is None else knobs.NvidiaTool(path, release[1])

    def get_ptxas_version(arch: int = 80) -> str:
        if knobs.nvidia.mock_ptx_version is not None:
            return stock_version(arch)
        return version_text(nvidia.get_ptxas(arch).path)

    replace_in_triton("triton_key", stock_key, triton_key)
    nvidia.get_ptxas_version = get_ptxas_version
    knobs.NvidiaTool.from_path = staticmethod(from_path)


def tool_versions() -> list[ForeignRequest]:
    """Return the entries with the versions of the tools that this process needed."""
    return list(_tool_versions.values())


def replace_in_triton(name: str, stock: object, new: object) -> None:
    """Replace a function of Triton in all modules of Triton and Inductor that have a name for it."""
    replace_everywhere(("triton", "torch._inductor"), name, stock, new)


def build_digest() -> str:
    """Return a short digest of the build of Triton, which is part of every key."""
    from triton.runtime import cache

    return hashlib.sha256(cache.triton_key().encode()).hexdigest()[:16]


def _remembered(store: ForeignStore, key: str, label: str, compute: Callable[[], str]) -> str:
    """Return a stored text; store what `compute` returns when there is none.

    A sealed process also computes it, because that compiles nothing.
    """
    found = store.get(ForeignRequest(KIND, key, label=label))
    if found is None or "text" not in found.files:
        found = ForeignEntry(KIND, key, {"text": compute().encode()}, label=label)
        store.put(found)
    if key.startswith(_TOOL):
        _tool_versions[key] = found.request
        # A bundle needs it even if all its kernels are copied, such as those of Inductor.
        if store.events.has_sink("foreign_request"):
            store.events.emit("foreign_request", entry=found, row=None, site=(None, 0))
    return found.files["text"].decode()


def _stamp_of_triton() -> str:
    """Return a digest of name, size, time and inode of every file that `triton_key` reads."""
    import triton

    root = os.path.dirname(os.path.abspath(triton.__file__))
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    hasher = hashlib.sha256(f"{triton.__version__} {suffix} {root}".encode())
    for part in ("runtime/cache.py", "_C", "compiler", "backends", "language"):
        for path in _files(os.path.join(root, part)):
            status = os.stat(path)
            stamp = (path, status.st_size, status.st_mtime_ns, status.st_ino)
            hasher.update(repr(stamp).encode())
    return hasher.hexdigest()[:32]


def _files(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    return sorted(
        os.path.join(directory, name)
        for directory, _, names in os.walk(path)
        for name in names
        if name.endswith((".py", ".so"))
    )


def _place(path: str) -> str:
    """Return where a tool is and its size, and outside of the package of Triton also its time.

    What is in the package is the same on every machine, so a bundle can answer for it.
    """
    import triton

    root = os.path.dirname(os.path.abspath(triton.__file__)) + os.sep
    status = os.stat(path)
    if path.startswith(root):
        return f"{path.removeprefix(root)} {status.st_size}"
    return f"{path} {status.st_size} {status.st_mtime_ns}"
