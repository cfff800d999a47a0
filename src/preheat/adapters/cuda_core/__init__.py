"""cuda.core: its programs in the caches and bundles of preheat.

    import preheat.adapters.cuda_core

    program.compile("cubin", cache=preheat.adapters.cuda_core.cache())

`preheat.adapters.install("cuda_core")` does this for every program of the process, including those
that cuda.core's own cache refuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preheat.adapters.cuda_core.program_cache import ProgramCache
    from preheat.build.builder import Builder

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
    from preheat.adapters.cuda_core.adapter import require_cuda_core
    from preheat.build.default import default_builder

    require_cuda_core()
    from preheat.adapters.cuda_core.program_cache import ProgramCache

    return ProgramCache((builder or default_builder()).foreign)
