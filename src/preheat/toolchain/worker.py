"""The compiler process: reads requests from stdin, compiles, and writes replies to stdout.

Only this process loads NVRTC and nvJitLink. If they abort, hang or lose track of headers after an
error, only this process is affected, and `pool.py` starts another one. Callers wait for its start, so
modules that take long to import are imported only where they are needed.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import re
import select
import sys
import time

from preheat.toolchain import frames, nvrtc, scratch
from preheat.toolchain.binaries.demangle import demangle
from preheat.toolchain.binaries.elf import build_id
from preheat.toolchain.loaded import loaded_builds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Answer = tuple[dict[str, Any], dict[str, bytes]]

__all__ = ["main"]

_IDLE = 120.0  # Seconds without a request after which the worker exits.
# `-v` reports resource usage. The compilers' own caches, which exist where there is a driver, would
# suppress that report. A fixed seed keeps the names of anonymous namespaces the same in every process.
_NVRTC_OPTIONS = ("-Xptxas=-v", "--no-cache", "--frandom-seed=preheat")
_NVJITLINK_OPTIONS = ("-Xptxas=-v", "-no-cache")
_ENTRY = re.compile(rb"\.entry\s+([\w$%]+)")


def main() -> None:
    """Answer requests until stdin closes or no request arrives for a while."""
    requests = sys.stdin.fileno()
    # Replies have their own descriptor: the output of a compiler must not get between them.
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _thread.start_new_thread(_leave_with_parent, (requests,))

    while select.select([requests], [], [], _IDLE)[0]:
        try:
            message, blocks = frames.read(functools.partial(os.read, requests))
        except EOFError:
            return
        view = memoryview(frames.encode(*_ANSWERS[message["do"]](message, blocks)))
        while view:
            view = view[os.write(replies, view) :]


def _leave_with_parent(requests: int) -> None:
    """Exit at once, even during a compile, when the parent process is gone."""
    hang_up = select.poll()
    hang_up.register(requests, 0)
    hang_up.poll()
    scratch.remove_all()
    os._exit(0)


def _locate(message: dict[str, Any], blocks: dict[str, bytes]) -> Answer:
    """Locate and describe the compilers and the CUDA headers on this machine.

    It runs in a new process, because the search would return a library that is already loaded.
    """
    del message, blocks
    from cuda.pathfinder import (
        DynamicLibNotFoundError,
        find_nvidia_header_directory,
        load_nvidia_dynamic_lib,
    )

    paths = {}
    missing = {}
    for name in ("nvrtc", "nvJitLink"):
        try:
            paths[name] = os.path.realpath(str(load_nvidia_dynamic_lib(name).abs_path))
        except (DynamicLibNotFoundError, RuntimeError) as error:
            missing[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
    roots = {}
    for label, header in (("cuda", "cudart"), ("cccl", "cccl")):
        if directory := find_nvidia_header_directory(header):
            roots[label] = os.path.realpath(directory)
    libraries: dict[str, Any] = {}
    archs: list[int] = []
    if "nvrtc" in paths:
        try:
            nvrtc.load(paths["nvrtc"])
        except OSError as fault:
            missing["nvrtc"] = str(fault)
        else:
            version, archs = nvrtc.version_and_archs()
            libraries["nvrtc"] = {"version": version, **_files_and_build("nvrtc")}
    if "nvJitLink" in paths:
        version = _nvjitlink_version(paths["nvJitLink"])
        libraries["nvJitLink"] = {"version": version, **_files_and_build("nvJitLink")}
    return {"libraries": libraries, "archs": archs, "missing": missing, "roots": roots}, {}


def _load(library: str) -> dict[str, Any] | None:
    """Load NVRTC from a file, or return the answer to a request that needs it."""
    try:
        nvrtc.load(library)
    except nvrtc.OtherLibraryError:
        return {"status": "OTHER_LIBRARY"}
    except OSError as fault:
        return {"status": "NOT_LOADED", "log": str(fault)}
    return None


def _nvjitlink_version(path: str) -> str:
    numbers = ctypes.c_uint(), ctypes.c_uint()
    ctypes.CDLL(path).nvJitLinkVersion(*map(ctypes.byref, numbers))
    return ".".join(str(number.value) for number in numbers)


def _cuda(message: dict[str, Any], blocks: dict[str, bytes]) -> Answer:
    """Compile CUDA C++ to cubin and PTX, or to LTO-IR, and report every header that was opened."""
    if fault := _load(message["library"]):
        return fault, {}
    options = [f"--gpu-architecture={message['arch']}", *_NVRTC_OPTIONS]
    roots: dict[str, str] = message["roots"]
    # The compiler sees the include roots through a directory of links `@0`, `@cuda`, …, so that no path
    # of this machine reaches the binary, and opened files are reported as (root, name). The trace is
    # written through a link into memory: NVRTC aborts if it cannot write it.
    trace = os.memfd_create("preheat-trace", os.MFD_CLOEXEC)
    links = {f"@{label}": directory for label, directory in roots.items()}
    links["trace.json"] = f"/proc/self/fd/{trace}"
    home = scratch.make(links) if message["trace"] else None
    try:
        if home is not None:
            os.fchdir(home.lock)
            options += [*(f"-I@{label}" for label in roots), "--fdevice-time-trace=trace"]
        else:
            options += [f"-I{directory}" for directory in roots.values()]
        started = time.perf_counter()
        done = nvrtc.compile_program(
            blocks.pop("source"),
            f"/preheat/{message['label']}",
            [*options, *message["options"]],
            names=message["names"],
            headers={name.removeprefix("header:"): text for name, text in blocks.items()},
        )
        answer: dict[str, Any] = {
            "status": done.status,
            "log": done.log,
            "lowered": done.lowered,
            "seconds": time.perf_counter() - started,
            "opened": None,
        }
        if home is not None and done.status == "NVRTC_SUCCESS":
            answer["opened"] = nvrtc.opened_headers(f"/proc/self/fd/{trace}")
    finally:
        os.chdir("/")
        os.close(trace)
        if home is not None:
            home.remove()
    symbols = {*done.lowered.values(), *(m.decode() for m in _ENTRY.findall(done.ptx))}
    answer["demangled"] = {name: text for name in symbols if (text := demangle(name))}
    answer["build"] = _build("nvrtc")
    return answer, {"cubin": done.cubin or done.ltoir, "ptx": done.ptx}


def _ptx(message: dict[str, Any], blocks: dict[str, bytes]) -> Answer:
    """Assemble PTX to a cubin."""
    from preheat.toolchain import nvjitlink

    started = time.perf_counter()
    options = [f"-arch={message['arch']}", *_NVJITLINK_OPTIONS, *message["options"]]
    done = nvjitlink.assemble(blocks["source"], message["label"], options)
    symbols = (m.decode() for m in _ENTRY.findall(blocks["source"]))
    return {
        "status": done.status,
        "log": done.log,
        "seconds": time.perf_counter() - started,
        "demangled": {name: text for name in symbols if (text := demangle(name))},
        "build": _build("nvJitLink"),
    }, {"cubin": done.cubin}


def _link(message: dict[str, Any], blocks: dict[str, bytes]) -> Answer:
    """Link parts to a cubin and, where some are LTO-IR, return the PTX that they were linked to.

    Blocks are named by the index of their part.
    """
    from preheat.toolchain import nvjitlink

    started = time.perf_counter()
    options = [f"-arch={message['arch']}", *_NVJITLINK_OPTIONS, *message["options"]]
    inputs = [
        nvjitlink.Input(kind, label, blocks[f"{index}"])
        for index, (kind, label) in enumerate(message["inputs"])
    ]
    done = nvjitlink.link(inputs, options)
    symbols = {*message["symbols"], *(m.decode() for m in _ENTRY.findall(done.ptx))}
    return {
        "status": done.status,
        "log": done.log,
        "seconds": time.perf_counter() - started,
        "demangled": {name: text for name in sorted(symbols) if (text := demangle(name))},
        "build": _build("nvJitLink"),
    }, {"cubin": done.cubin, "ptx": done.ptx}


def _demangle(message: dict[str, Any], blocks: dict[str, bytes]) -> Answer:
    """Return the C++ names of mangled names."""
    del blocks
    return {"names": {name: text for name in message["names"] if (text := demangle(name))}}, {}


_ANSWERS = {
    "locate": _locate,
    "cuda": _cuda,
    "ptx": _ptx,
    "link": _link,
    "demangle": _demangle,
}


@functools.cache
def _build(name: str) -> str:
    """Return the build of the compiler that this process has loaded. Keys must contain the same."""
    return str(_files_and_build(name)["build"])


def _files_and_build(name: str) -> dict[str, Any]:
    """Return the files of a compiler that has compiled, its own first, and the build of all of them.

    NVRTC consists of two libraries: its first compile loads the built-ins of the same version.
    """
    builds = loaded_builds()
    if name == "nvrtc":
        files = nvrtc.loaded_files()
        files += sorted(p for p in builds if os.path.basename(p).startswith("libnvrtc-builtins.so"))
    else:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        files = [os.path.realpath(str(load_nvidia_dynamic_lib(name).abs_path))]
    return {"files": files, "build": "+".join(builds.get(file) or build_id(file) for file in files)}


if __name__ == "__main__":
    main()
