"""The adapter for Inductor, the compiler of `torch.compile`.

Its Triton kernels come through the adapter for Triton. Its own artifacts are the compiled graphs and
the results of tuning. Their keys hold the name of the GPU, so they cannot be made without one. A
recorded run stores each artifact when Inductor makes or finds it, so nothing is lost when the process
is killed. A later run gives the artifacts back to Inductor before its first compile.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

from preheat.adapters.base import Adapter, Connection, require_version
from preheat.build.builder import Builder
from preheat.build.foreign_store import ForeignStore
from preheat.model.arch import Arch
from preheat.model.config import SealMode
from preheat.model.foreign import ForeignEntry, ForeignRequest
from preheat.process.locks import Lock

__all__ = ["InductorAdapter"]

_OLDEST, _NEWEST = (2, 11), (2, 13)  # of the versions of torch that are accepted
_KIND = "inductor"
_FILE = "artifact"
_ABSENT = "absent: no stored artifact has this graph"
_FOR_CPU = "uncovered: preheat has no adapter for what torch compiles with g++ for the CPU"
_FOR_CPU_HINT = "run the graph without torch.compile; a recording does not have it"
# What people call the types of artifacts.
_LABELS = {
    "inductor": "compiled graphs",
    "aot_autograd": "traced graphs",
    "autotune": "tuning results",
    "pgo": "profiles of shapes",
}
# Types of which Inductor keeps several artifacts for one key, one for each set of guards.
_SEVERAL = {"inductor", "aot_autograd"}


class InductorAdapter(Adapter):
    """Gives stored artifacts back to Inductor, and stores new ones while a run is recorded."""

    name = _KIND
    module = "torch._inductor.compile_fx"
    not_baked = "artifacts of Inductor cannot be made without their GPU"

    def install(self, builder: Builder) -> None:
        """Load artifacts before the first compile, and let the code generation obey the seal.

        Nothing here may initialize CUDA: a process may import Inductor and fork afterwards.
        """
        import torch

        require_version("torch", str(torch.__version__), _OLDEST, _NEWEST)
        store = builder.foreign
        connection = Connection(store, torch)
        _load_before_first_compile(store)
        _obey_seal(connection)
        if store.events.has_sink("foreign_request"):
            _store_artifacts(connection)


def _properties() -> dict[str, str]:
    """Return what artifacts depend on."""
    import torch

    return {"torch": str(torch.__version__), "device": torch.cuda.get_device_name()}


def _arch() -> Arch | None:
    """Return the architecture of the GPU; None if Inductor compiles for the CPU."""
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
    """Give the stored artifacts of this version of torch and this GPU to Inductor."""
    entries = list(store.all(_KIND))
    if not entries:
        return
    import torch
    from torch.compiler._cache import CacheArtifactFactory, CacheArtifactManager

    if not torch.cuda.is_available():
        return
    CacheArtifactManager._ensure_cache_artifacts_registered()
    wanted = _properties()
    for entry in entries:
        if dict(entry.properties) == wanted and store.get(entry.request) is not None:
            kind = entry.variant.partition(" ")[0]
            CacheArtifactFactory.create(kind, entry.key, entry.files[_FILE]).populate_cache()


def _store_artifacts(connection: Connection) -> None:
    """Store each artifact that Inductor makes or finds, at once."""
    from torch.compiler._cache import CacheArtifactManager

    stock: Callable[..., None] = CacheArtifactManager.record_artifact
    stored: set[tuple[str, str]] = set()

    def record_artifact(artifact_type: str, key: str, content: Any) -> None:
        stock(artifact_type, key, content)
        _store_artifact(connection, artifact_type, key, content, stored)

    CacheArtifactManager.record_artifact = staticmethod(record_artifact)


def _store_artifact(
    connection: Connection, artifact_type: str, key: str, content: Any, stored: set[tuple[str, str]]
) -> None:
    """Store one artifact, unless this process does not use a GPU.

    `stored` are the artifacts that this process has stored: it is updated.
    """
    import torch
    from torch.compiler._cache import CacheArtifactFactory

    if not torch.cuda.is_initialized():
        return
    encoded: bytes = CacheArtifactFactory.encode_create(artifact_type, key, content).content
    digest = hashlib.sha256(encoded).hexdigest()[:32]
    entry = ForeignEntry(
        _KIND,
        key,
        {_FILE: encoded},
        variant=f"{artifact_type} {digest}" if artifact_type in _SEVERAL else artifact_type,
        label=_LABELS.get(artifact_type, f"artifacts of type {artifact_type}"),
        arch=_arch(),
        properties=_properties(),
    )
    if (entry.digest, digest) not in stored:
        stored.add((entry.digest, digest))
        connection.store.put(entry)
        connection.report(entry, lambda: None)


def _obey_seal(connection: Connection) -> None:
    """Raise `SealedError` if a sealed process would generate code for a graph."""
    from torch._inductor import compile_fx

    stock: Callable[..., Any] = compile_fx.fx_codegen_and_compile

    @functools.wraps(stock)
    def fx_codegen_and_compile(gm: Any, *arguments: Any, **options: Any) -> Any:
        if connection.store.sealed is not SealMode.OFF:
            on_gpu = _uses_gpu(gm)
            request = ForeignRequest(_KIND, "graph", label=_label(gm), arch=_arch() if on_gpu else None)
            reason, hint = (_ABSENT, None) if on_gpu else (_FOR_CPU, _FOR_CPU_HINT)
            connection.permit(request, reason, hint=hint)
            connection.missed(request, reason)
        return stock(gm, *arguments, **options)

    compile_fx.fx_codegen_and_compile = fx_codegen_and_compile


def _uses_gpu(graph: Any) -> bool:
    """Return whether a graph has a tensor that is not in the memory of the CPU."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    devices = (getattr(value, "device", None) for value in values)
    return any(device is not None and device.type not in ("cpu", "meta") for device in devices)


def _label(graph: Any) -> str:
    """Return a label for a graph: its operations."""
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    shown = ", ".join(targets[:4])
    return f"graph of {len(targets)} operations ({shown}{', …' if len(targets) > 4 else ''})"
