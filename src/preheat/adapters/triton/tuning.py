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
from typing import Any, NamedTuple

from preheat.adapters.base import HiddenFrames, RequiredEntries, Row
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
from preheat.adapters.triton.state import state
from preheat.model.arch import Arch
from preheat.model.foreign import ForeignEntry, ForeignRequest

__all__ = ["Tuning", "install", "is_tuned", "known_results", "required", "tuned_label", "tuning_row"]

_CONFIGS = "its configurations have changed"
_TUNED_FOR = " tuned for "
_MAX_KEYS = 8  # that an error lists


class Tuning(NamedTuple):
    """The function that is being tuned, the values that its choice depends on, and the target.

    `configs` are the configurations to choose from, as Triton writes them.
    """

    function: str
    key: str
    arch: Arch
    autotuner: Any
    configs: tuple[str, ...]


def tuned_label(function: str, key: str) -> str:
    """Return the label of the result of tuning a function for the values of a key."""
    return f"{function}{_TUNED_FOR}{key}"


def install() -> None:
    """Store the results of all autotuned functions, also of those that were decorated before."""
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    stock_run: Callable[..., Any] = Autotuner.run
    stock_check: Callable[..., bool] = Autotuner.check_disk_cache

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        # Triton reads its knob when a function is decorated, which may be before an install.
        self.cache_results = not knobs.runtime.interpret
        with HiddenFrames():
            return stock_run(self, *arguments, **options)

    def check_disk_cache(self: Any, tuning_key: Any, configs: Any, bench_fn: Any) -> bool:
        def measure() -> Any:
            with state().work.setting(
                tuning=None
            ):  # Kernels that are compiled meanwhile have their own names.
                return bench_fn()

        python = self.base_fn
        name = f"{module_name(python)}:{python.__qualname__}"
        arch = _current_arch()
        if why := _unstorable(tuning_key, configs):
            label = tuned_label(name, str(tuning_key))
            state().connection.uncached(ForeignRequest(KIND, name, "", label, arch), why)
            measure()
            return False
        texts = tuple(map(str, configs))
        with state().work.setting(tuning=Tuning(name, str(tuning_key), arch, self, texts)):
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


def tuning_row(tuning: Tuning, key: str) -> Row | None:
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


def known_results(request: ForeignRequest, tuning: Tuning) -> str:
    """Return for which keys of a function there are results."""
    start = f"{tuning.function}{_TUNED_FOR}"
    found = {
        f"{entry.label.removeprefix(start)}{_difference(request, entry)}"
        for entry in state().connection.store.all(KIND)
        if entry.label.startswith(start)
    }
    if not found:
        return f"there is no result of {tuning.function}"
    more = f" and {len(found) - _MAX_KEYS} more" if len(found) > _MAX_KEYS else ""
    return f"there are results for {', '.join(sorted(found)[:_MAX_KEYS])}{more}"


def _difference(request: ForeignRequest, entry: ForeignEntry) -> str:
    """Return how a result differs from the requested one, except for the values of its key."""
    if entry.target != request.target:
        return f" on {entry.target}"
    other = "of another source, other configurations or another build of Triton"
    return f" ({other})" if entry.label == request.label else ""


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
