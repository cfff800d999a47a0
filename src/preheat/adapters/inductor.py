"""The adapter for Inductor, the compiler of `torch.compile`.

Its Triton kernels come through the adapter for Triton. Its own artifacts are the compiled graphs and
the results of tuning. Their keys hold the name of the GPU, so they cannot be made without one: they are
collected at the end of a recorded run, and given back to Inductor before a later run compiles.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

from preheat.adapters.base import Adapter, RequiredEntries, Row
from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.build.foreign_store import ForeignStore, created_now
from preheat.callsite import call_site, format_site
from preheat.config import SealMode
from preheat.errors import AdapterError
from preheat.foreign import ForeignEntry, ForeignRequest
from preheat.locks import Lock

__all__ = ["InductorAdapter"]

_LABEL = "compiled graphs"
_FILE = "artifacts"
_ABSENT = "absent: no collected artifact has this graph"


class InductorAdapter(Adapter):
    """Loads collected artifacts when Inductor is imported, and collects them while recording."""

    name = "inductor"
    module = "torch._inductor.compile_fx"

    def install(self, builder: Builder) -> None:
        """Load artifacts before the first compile, and let the code generation obey the seal.

        Nothing here may initialize CUDA: a process may import Inductor and fork afterwards.
        """
        store = builder.foreign
        _load_before_first_compile(store)
        _obey_seal(store)
        if store.events.has_sink("foreign_request"):
            atexit.register(_collect, store)

    def bake(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Raise `AdapterError`: artifacts of Inductor are kept as they were made."""
        del row, arch, coverage
        raise AdapterError("artifacts of Inductor cannot be made without their GPU")

    def count(self, row: Row, coverage: str) -> int:
        """Return 0: nothing is made."""
        del row, coverage
        return 0

    def keys(self, row: Row, arch: Arch, coverage: str) -> RequiredEntries:
        """Raise `AdapterError`: artifacts of Inductor are kept as they were made."""
        return self.bake(row, arch, coverage)


def _properties() -> dict[str, str]:
    """Return what artifacts depend on."""
    import torch

    return {"torch": str(torch.__version__), "device": torch.cuda.get_device_name()}


def _arch() -> Arch | None:
    """Return the architecture of the GPU; None where Inductor compiles for the CPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return Arch(major, minor)


def _load_before_first_compile(store: ForeignStore) -> None:
    """Give the artifacts of all bundles and caches to Inductor when it first compiles a graph."""
    from torch._inductor import compile_fx

    stock: Callable[..., Any] = compile_fx.compile_fx
    loading = Lock()
    loaded = False

    @functools.wraps(stock)
    def compile_fx_with_artifacts(*arguments: Any, **options: Any) -> Any:
        nonlocal loaded
        with loading:
            if not loaded:
                loaded = True
                _load(store)
        return stock(*arguments, **options)

    compile_fx.compile_fx = compile_fx_with_artifacts


def _load(store: ForeignStore) -> None:
    """Load the artifacts of this version of torch and this GPU."""
    import torch

    entries = list(store.all("inductor"))
    if not entries or not torch.cuda.is_available():
        return
    wanted = _properties()
    for entry in entries:
        if dict(entry.properties) == wanted:
            found = store.get(ForeignRequest("inductor", entry.key, label=_LABEL, arch=entry.arch))
            if found is not None:
                torch.compiler.load_cache_artifacts(found.files[_FILE])


def _collect(store: ForeignStore) -> None:
    """Store what Inductor compiled in this process."""
    import torch

    artifacts = torch.compiler.save_cache_artifacts() if torch.cuda.is_available() else None
    if artifacts is None:
        return
    content: bytes = artifacts[0]
    entry = ForeignEntry(
        "inductor",
        hashlib.sha256(content).hexdigest(),
        {_FILE: content},
        label=_LABEL,
        arch=_arch(),
        properties=_properties(),
        provenance=created_now(0.0),
    )
    store.put(entry)
    store.events.emit("foreign_request", entry=entry, row=None, site=(None, 0))


def _obey_seal(store: ForeignStore) -> None:
    """Raise `SealedError` where a sealed process would generate code for a graph."""
    from torch._inductor import compile_fx

    stock: Callable[..., Any] = compile_fx.fx_codegen_and_compile

    @functools.wraps(stock)
    def fx_codegen_and_compile(gm: Any, *arguments: Any, **options: Any) -> Any:
        if store.sealed is not SealMode.OFF:
            request = ForeignRequest("inductor", "graph", label=_label(gm), arch=_arch())
            store.permit(request, _ABSENT, called_by=_caller)
            store.missed(request, _ABSENT)
        return stock(gm, *arguments, **options)

    compile_fx.fx_codegen_and_compile = fx_codegen_and_compile


def _label(graph: Any) -> str:
    """Return what people know a graph by: its operations."""
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    shown = ", ".join(targets[:4])
    return f"graph of {len(targets)} operations ({shown}{', …' if len(targets) > 4 else ''})"


def _caller() -> str:
    import torch

    return format_site(call_site(os.path.dirname(os.path.abspath(torch.__file__)) + os.sep))
