"""cuda.core: its programs in the caches and bundles of preheat.

    import preheat.adapters.cuda_core

    program.compile("cubin", cache=preheat.adapters.cuda_core.cache())

`preheat.adapters.install("cuda_core")` does this for every program of the process, including those
that cuda.core's own cache refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from preheat.process.lazy import LazyModule

if TYPE_CHECKING:
    from preheat.adapters.cuda_core import adapter, program_cache
    from preheat.adapters.cuda_core.program_cache import ProgramCache
    from preheat.build import default
    from preheat.build.builder import Builder
else:
    adapter = LazyModule("preheat.adapters.cuda_core.adapter")
    default = LazyModule("preheat.build.default")
    program_cache = LazyModule("preheat.adapters.cuda_core.program_cache")  # It imports cuda.core.

__all__ = ["cache"]


def cache(builder: Builder | None = None) -> ProgramCache:
    """Return a `ProgramCacheResource` of cuda.core that keeps programs in the cache of preheat.

    Args:
        builder: The builder with the store. The default is the process's.

    Raises:
        InputError: cuda.core is not installed.
        AdapterError: The adapter does not know this version of cuda.core.

    Examples:
        >>> from cuda.core import Program, ProgramOptions
        >>> import preheat.adapters.cuda_core
        >>> program = Program(SAXPY, "c++", ProgramOptions(arch="sm_90"))
        >>> code = program.compile("cubin", cache=preheat.adapters.cuda_core.cache())
    """
    adapter.require_cuda_core()
    return program_cache.ProgramCache((builder or default.default_builder()).foreign)
