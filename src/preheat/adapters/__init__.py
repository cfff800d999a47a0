"""Other libraries: their compilers use the cache of preheat, and its kernels use their tensors.

    import preheat.adapters
    preheat.adapters.install("triton")        # before the first kernel is launched

`PREHEAT_ADAPTERS=auto` installs the adapter of every library that the process imports, once preheat is
imported. Inside `preheat record -- COMMAND` and `preheat run -- COMMAND` that happens without a change
of the application.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from preheat.process.locks import Lock

if TYPE_CHECKING:
    from preheat.adapters.base import Adapter
    from preheat.build.builder import Builder

__all__ = ["adapter", "install", "installed", "known"]

# The module and the class of each adapter.
_ADAPTERS = {
    "triton": ("preheat.adapters.triton.adapter", "TritonAdapter"),
    "inductor": ("preheat.adapters.inductor", "InductorAdapter"),
    "torch": ("preheat.adapters.torch.compile_kernel", "TorchAdapter"),
    "cupy": ("preheat.adapters.cupy.adapter", "CupyAdapter"),
    "cuda_core": ("preheat.adapters.cuda_core.adapter", "CudaCoreAdapter"),
    "numba": ("preheat.adapters.numba.adapter", "NumbaAdapter"),
}

_lock = Lock()
_installed: dict[str, Adapter] = {}


def known() -> tuple[str, ...]:
    """Return the names of the libraries that have an adapter.

    Examples:
        >>> from preheat import adapters
        >>> adapters.known()
        ('triton', 'inductor', 'torch', 'cupy', 'cuda_core', 'numba')
    """
    return tuple(_ADAPTERS)


def installed() -> tuple[str, ...]:
    """Return the names of the adapters that are installed in this process.

    Examples:
        >>> from preheat import adapters
        >>> adapters.installed()
        ()
    """
    return tuple(_installed)


def adapter(name: str) -> Adapter:
    """Return the adapter of a library, which need not be installed.

    Raises:
        InputError: No adapter has this name.

    Examples:
        >>> from preheat import adapters
        >>> adapters.adapter("triton").name
        'triton'
    """
    from preheat.errors import InputError, did_you_mean  # Imports are late: see `imports.activate`.

    if name not in _ADAPTERS:
        hint = did_you_mean(name, _ADAPTERS) or f"the adapters are {', '.join(_ADAPTERS)}"
        raise InputError(f"there is no adapter for {name!r}", hint=hint)
    module, cls = _ADAPTERS[name]
    made: Adapter = getattr(importlib.import_module(module), cls)()
    return made


def install(*names: str, builder: Builder | None = None) -> None:
    """Let the compilers of these libraries use the cache of preheat.

    What they compile is looked up in bundles and caches first, and stored. A sealed process compiles
    nothing. Installing an adapter again changes nothing.

    Args:
        names: The names of libraries, as `known` returns them.
        builder: The builder with the store. The default is the process's.

    Raises:
        InputError: The name is unknown, or the library is not installed.
        AdapterError: The adapter does not know this version of the library.

    Examples:
        >>> from preheat import adapters
        >>> adapters.install("tritn")
        Traceback (most recent call last):
        preheat.errors.InputError: ...
    """
    from preheat.build.default import default_builder
    from preheat.errors import InputError

    if not names:
        raise InputError("no library was named", hint=f"the adapters are {', '.join(_ADAPTERS)}")
    for name in names:
        made = adapter(name)
        # The import is outside the lock, because it may itself install the adapter, even in another
        # thread.
        if made.module not in sys.modules:
            try:
                importlib.import_module(made.module)
            except ModuleNotFoundError as missing:
                package = made.package or made.module.partition(".")[0]
                raise InputError(
                    f"{name} is not installed: {missing}", hint=f"pip install {package}"
                ) from None
        used = builder or default_builder()
        with _lock:
            if name not in _installed:
                made.install(used)
                _installed[name] = made
