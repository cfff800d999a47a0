"""cuda.core: its programs in the caches and bundles of preheat.

    import preheat.adapters.cuda_core

    program.compile("cubin", cache=preheat.adapters.cuda_core.cache())

`preheat.adapters.install("cuda_core")` does it for every program of the process, also for those that
cuda.core's own cache refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preheat.adapters.cuda_core.program_cache import ProgramCache
    from preheat.build.builder import Builder

__all__ = ["cache"]


def cache(builder: Builder | None = None) -> ProgramCache:
    """Return a `ProgramCacheResource` on the store of `builder`, the default one if not given.

    Raises `InputError` where cuda.core is not installed, and `AdapterError` for a version of it that
    the adapter does not know.
    """
    from preheat.adapters.cuda_core.adapter import require_cuda_core
    from preheat.default import default_builder

    require_cuda_core()
    from preheat.adapters.cuda_core.program_cache import ProgramCache

    return ProgramCache((builder or default_builder()).foreign)
