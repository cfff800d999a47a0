"""The adapter for Inductor, the compiler of `torch.compile`.

Its Triton kernels come through the adapter for Triton. Its own artifacts are the compiled graphs and
the results of tuning. Their keys hold the name of the GPU, so they cannot be made without one: they are
collected at the end of a recorded run, and given back to Inductor before a later run compiles.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Callable
from typing import Any

from preheat.adapters.base import Adapter, Needed, Row
from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.build.foreign_store import ForeignRequest, ForeignStore, created_now
from preheat.callsite import call_site, format_site
from preheat.errors import AdapterError
from preheat.foreign import ForeignEntry

__all__ = ["InductorAdapter"]

_LABEL = "compiled graphs"
_FILE = "artifacts"


class InductorAdapter(Adapter):
    """Loads collected artifacts when Inductor is imported, and collects them while recording."""

    name = "inductor"
    module = "torch._inductor.compile_fx"

    def install(self, builder: Builder) -> None:
        """Load the artifacts of this version of torch and this GPU, and seal the code generation."""
        store = builder.foreign
        _load(store)
        _refuse_when_sealed(store)
        if store.events.has_sink("foreign_request"):
            atexit.register(_collect, store)

    def bake(self, row: Row, arch: Arch, coverage: str) -> Needed:
        """Raise `AdapterError`: artifacts of Inductor are kept as they were made."""
        del row, arch, coverage
        raise AdapterError("artifacts of Inductor cannot be made without their GPU")

    def count(self, row: Row, coverage: str) -> int:
        """Return 0: nothing is made."""
        del row, coverage
        return 0

    def keys(self, row: Row, arch: Arch, coverage: str) -> Needed:
        """Raise `AdapterError`: artifacts of Inductor are kept as they were made."""
        return self.bake(row, arch, coverage)


def _properties() -> dict[str, str]:
    """Return what artifacts depend on."""
    import torch

    return {"torch": str(torch.__version__), "device": torch.cuda.get_device_name()}


def _arch() -> Arch:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return Arch(major, minor)


def _load(store: ForeignStore) -> None:
    """Give the artifacts of all bundles and caches to Inductor."""
    import torch

    if not torch.cuda.is_available():
        return
    wanted = _properties()
    for entry in store.all("inductor"):
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


def _refuse_when_sealed(store: ForeignStore) -> None:
    """Raise `SealedError` where a sealed process would generate code for a graph."""
    from torch._inductor import compile_fx

    stock: Callable[..., Any] = compile_fx.fx_codegen_and_compile

    def fx_codegen_and_compile(gm: Any, *arguments: Any, **options: Any) -> Any:
        request = ForeignRequest("inductor", str(gm.__class__.__name__), label=_label(gm), arch=_arch())
        store.permit(request, "absent: no collected artifact has this graph", called_by=_caller)
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
