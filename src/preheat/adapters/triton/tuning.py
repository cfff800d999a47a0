"""Results of `triton.autotune`: measured once, stored under the key of Triton, and recorded.

A result belongs to the source and the line of the function, to its configurations, to the values of
its `key`, to the build of Triton and to the architecture. It is measured on a GPU, so a bake copies it.
It is looked up by the key that Triton would compute now, so a result for an earlier source is not
found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from preheat.adapters.base import RequiredEntries, Row
from preheat.adapters.modules import (
    RECORD_AGAIN,
    NotPortableError,
    import_module,
    importable_module,
    module_name,
    object_in,
)
from preheat.adapters.triton.identity import KIND
from preheat.adapters.triton.request import key_of
from preheat.adapters.triton.rows import changes, enter_root, facts_of
from preheat.adapters.triton.state import Tuning, state, tuned_label
from preheat.arch import Arch
from preheat.errors import PreheatError
from preheat.foreign import ForeignRequest
from preheat.tracebacks import hide_frames

__all__ = ["install", "is_tuned", "required", "row_of"]

_CONFIGS = "its configurations have changed"


def install() -> None:
    """Store the results of all autotuned functions, also of those that were decorated before."""
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    stock_run: Callable[..., Any] = Autotuner.run
    stock_check: Callable[..., bool] = Autotuner.check_disk_cache

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        # Triton reads its knob when a function is decorated, which may be before an install.
        self.cache_results = not knobs.runtime.interpret
        try:
            return stock_run(self, *arguments, **options)
        except PreheatError as error:
            hide_frames(error)
            raise

    def check_disk_cache(self: Any, tuning_key: Any, configs: Any, bench_fn: Any) -> bool:
        def measure() -> Any:
            with state().tuning_of(None):  # Kernels that are compiled meanwhile have their own names.
                return bench_fn()

        python = self.base_fn
        name = f"{module_name(python)}:{python.__qualname__}"
        arch = _current_arch()
        if why := _unstorable(tuning_key, configs):
            program = f"{KIND} {tuned_label(name, str(tuning_key))}"
            state().store.events.emit("uncached", program=program, arch=str(arch), reason=why)
            measure()
            return False
        texts = tuple(map(str, configs))
        with state().tuning_of(Tuning(name, str(tuning_key), arch, self, texts)):
            return stock_check(self, tuning_key, configs, measure)

    Autotuner.run = run
    Autotuner.check_disk_cache = check_disk_cache


def _unstorable(tuning_key: Any, configs: Any) -> str:
    """Return why a result cannot be stored, so that each process measures it; else an empty text."""
    if not tuning_key:
        return "its key is empty, and Triton does not store such a result"
    if any(config.pre_hook for config in configs):
        return "a configuration has a pre_hook, and Triton does not store such a result"
    values = [list(tuning_key), *(config.kwargs for config in configs)]
    try:  # Triton would fail to store it, or change it.
        same = json.loads(json.dumps(values)) == values
    except (TypeError, ValueError):
        same = False
    return "" if same else "its key or a configuration has a value that JSON cannot store"


def _current_arch() -> Arch:
    from triton.runtime import driver

    return Arch.parse(f"sm_{driver.active.get_current_target().arch}")


# Recorded results


def is_tuned(row: Row) -> bool:
    """Return whether a recorded row describes a result of tuning."""
    return "tuning_key" in row


def row_of(tuning: Tuning, key: str) -> Row | None:
    """Return the row of a result under Triton's `key`; None when another process cannot verify it."""
    python = tuning.autotuner.base_fn
    try:
        module, root = importable_module(python)
        found = _autotuner(sys.modules[python.__module__], python.__qualname__)
    except NotPortableError:
        return None
    if found is not tuning.autotuner or _key(found, tuning.arch, tuning.key, tuning.configs) != key:
        return None
    return {
        "function": f"{module}:{python.__qualname__}",
        "root": root,
        "tuning_key": tuning.key,
        "env": _environment(),
        "kept": True,
        # A new recording with other configurations takes the place of this one.
        "recorded": {**facts_of(_kernel(found)), "configs": list(tuning.configs)},
    }


def required(row: Row, arch: Arch) -> RequiredEntries:
    """Return the result that a launch looks up, for the present source and configurations.

    Raises `NotPortableError` when the function cannot be imported, or is not autotuned.
    """
    enter_root(row)
    name = row["function"]
    found = _autotuner(import_module(name), name.partition(":")[2])
    function = _kernel(found)
    now = [str(config) for config in found.configs]
    before = row["recorded"]["configs"]
    pruned = found.early_config_prune is not None or found.perf_model is not None
    same = {*before} <= {*now} if pruned else before == now
    key = _key(found, arch, row["tuning_key"], before if same else now)
    label = tuned_label(row["function"], row["tuning_key"])
    request = ForeignRequest(KIND, key, f"{function.__name__[:150]}.autotune.json", label, arch)
    return RequiredEntries((request,), (*changes(row, function), *([] if same else [_CONFIGS])))


def _autotuner(module: ModuleType, path: str) -> Any:
    """Return the autotuner that a module has under a name."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    found = object_in(module, path, kind=KernelInterface)
    while not isinstance(found, Autotuner):  # heuristics around it
        if not hasattr(found, "fn"):
            raise NotPortableError(f"{module.__name__}:{path} is not autotuned", hint=RECORD_AGAIN)
        found = found.fn
    return found


def _kernel(autotuner: Any) -> Any:
    """Return the function of Triton that is tuned."""
    from triton.runtime.jit import JITFunction

    found = autotuner
    while not isinstance(found, JITFunction):
        found = found.fn
    return found


def _key(autotuner: Any, arch: Arch, tuning_key: str, configs: Any) -> str:
    """Return the key that Triton gives to its cache manager for a result."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    target = GPUTarget("cuda", arch.major * 10 + arch.minor, 32)
    parts = (
        triton_key(),
        make_backend(target).hash(),
        _kernel(autotuner).cache_key,
        str(sorted(_environment().items())),
        tuning_key,
    )
    return key_of("-".join([*parts, *configs]))


def _environment() -> dict[str, str]:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return dict(get_cache_invalidating_env_vars())
