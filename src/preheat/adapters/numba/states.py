"""Converts a compiled kernel of Numba to files, and such files to a kernel.

Numba's own cache pickles the state of a kernel. Here, an entry is code and JSON. The types and the
extensions of a kernel come from the call that requests it. Loading an entry runs no code from the
entry.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping, Sequence
from typing import Any

from numba.cuda import types, typing
from numba.cuda.codegen import CUDACodeLibrary
from numba.cuda.core.callconv import _MinimalCallHelper
from numba.cuda.cudadrv.driver import ObjectCode, _Linker
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import _Kernel

from preheat.adapters.base import NotKeyableError
from preheat.devices import base
from preheat.toolchain.binaries.ptx_section import detach_ptx

__all__ = ["decode", "encode"]

_KERNEL, _CUBIN, _PTX, _LLVM = "kernel.json", "kernel.cubin", "kernel.ptx", "kernel.ll"
_LINKED = "linked.ptx"  # of linked sources; a kernel that links none has no such file
_SOURCES = ("cu", "ptx")  # kinds of linked files that have PTX
_PLAIN = (bool, int, str, type(None))
_SEPARATOR = "\n// preheat: the next module\n"
# The parts of the state that are files, or that come from the call.
_FILES = ("ptx_cache", "cubin_cache", "llvm_strs")
_OF_THE_CALL = ("signature", "extensions", "codelibrary", "call_helper")


def encode(kernel: Any, argument_types: Sequence[Any]) -> dict[str, bytes]:
    """Return a kernel as files. Raises `NotKeyableError` for one that files cannot hold."""
    if tuple(kernel.signature.args) != tuple(argument_types):
        raise NotKeyableError("Numba compiled it for other types than those of its arguments")
    if getattr(kernel, "launch_config_sensitive", False):
        raise NotKeyableError("its code depends on the configuration of the launch")
    library = _library_state(kernel.library)
    ((target, cubin),) = library["cubin_cache"].items()
    state = {
        "target": target,
        "kernel": _plain(kernel._reduce_states(), _OF_THE_CALL),
        "library": _plain(library, (*_FILES, "linkerinfo_cache")),
        "exceptions": _exceptions(kernel),
    }
    linked = _compile_linked_sources(kernel.library, target)
    return {
        _KERNEL: json.dumps(state).encode(),
        _CUBIN: detach_ptx(bytes(cubin.code)),  # Entries are the same on the CPU driver.
        _PTX: _SEPARATOR.join(library["ptx_cache"].get(target, ())).encode(),
        _LLVM: _SEPARATOR.join(library["llvm_strs"]).encode(),
        **({_LINKED: _SEPARATOR.join(linked).encode()} if linked else {}),
    }


def _compile_linked_sources(library: Any, target: tuple[int, ...]) -> list[str]:
    """Return the PTX of the sources that are linked, which the CPU driver executes.

    Numba forgets it after the link, so CUDA C++ is compiled once more.
    """
    linker = _Linker(cc=target)
    for linked in library._linking_files:
        kind = linked.rpartition(".")[2] if isinstance(linked, str) else linked.kind
        if kind in _SOURCES:
            linker.add_file_guess_ext(linked)
    return sorted(bytes(each.code).decode() for each in linker._object_codes)


def _library_state(library: Any) -> dict[str, Any]:
    """Return the state of a library of code, whose linked files are part of the cubin."""
    if library._setup_functions or library._teardown_functions:
        raise NotKeyableError("it calls Python functions when its module is loaded")
    if getattr(library, "referenced_objects", None):
        raise NotKeyableError("its code holds the address of an array")
    alone = object.__new__(type(library))  # `copy.copy` would reduce the state, which is refused.
    vars(alone).update(vars(library), _linking_files=set())
    state: dict[str, Any] = alone._reduce_states()
    return state


def _plain(state: Mapping[str, Any], without: Sequence[str]) -> dict[str, Any]:
    """Return the part of a state that is JSON. Raises `NotKeyableError` for any other value in it."""
    kept = {name: value for name, value in state.items() if name not in without}
    for name, value in kept.items():
        inner = value.values() if isinstance(value, dict) else (value,)
        if not all(isinstance(each, _PLAIN) for each in inner):
            raise NotKeyableError(f"its {name} is a {type(value).__qualname__}")
    return kept


def _exceptions(kernel: Any) -> list[Any]:
    """Return the exceptions of a kernel with checks. Other kernels do not need them."""
    if not kernel.debug:
        return []
    found = []
    for code, (kind, arguments, place) in kernel.call_helper.exceptions.items():
        name = getattr(kind, "__name__", "nothing")
        plain = all(isinstance(each, _PLAIN) for each in (*(arguments or ()), *(place or ())))
        if not plain or getattr(builtins, name, None) is not kind:
            raise NotKeyableError(f"it raises a {name} that files cannot hold")
        found.append([code, name, arguments, place])
    return found


def decode(files: Mapping[str, bytes], argument_types: Sequence[Any], extensions: Sequence[Any]) -> Any:
    """Return the kernel of files. Raises `ValueError`, `KeyError` or `TypeError` for bad files."""
    state = json.loads(files[_KERNEL])
    target = tuple(state["target"])
    name = state["kernel"]["name"]
    modules = files[_PTX].decode().split(_SEPARATOR)
    linked = files[_LINKED].decode().split(_SEPARATOR) if _LINKED in files else []
    for listener in base.before_foreign_load:
        listener(files[_CUBIN], "\0".join([*modules, *linked]).encode())
    library = CUDACodeLibrary._rebuild(
        **state["library"],
        cubin_cache={target: ObjectCode.from_cubin(files[_CUBIN], name=name)},
        ptx_cache={target: modules},
        llvm_strs=files[_LLVM].decode().split(_SEPARATOR),
        linkerinfo_cache={target: ""},
    )
    kernel = _Kernel._rebuild(
        **state["kernel"],
        signature=typing.signature(types.void, *argument_types),
        codelibrary=library,
        call_helper=_call_helper(state["exceptions"]),
        extensions=extensions,
    )
    # Numba sets these when it compiles a kernel, and not when it loads one.
    kernel.objectmode = False
    kernel.target_context = cuda_target.target_context
    return kernel


def _call_helper(exceptions: Sequence[Any]) -> Any:
    helper = _MinimalCallHelper()
    for code, kind, arguments, place in exceptions:
        raised = getattr(builtins, kind)
        if not (isinstance(raised, type) and issubclass(raised, Exception)):
            raise TypeError(f"{kind} is not an exception")
        helper.exceptions[int(code)] = (
            raised,
            None if arguments is None else tuple(arguments),
            None if place is None else tuple(place),
        )
    return helper
