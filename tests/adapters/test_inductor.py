"""The adapter for Inductor, on a stand-in for torch: what is collected, loaded and refused."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from preheat.adapters.inductor import InductorAdapter
from preheat.build.builder import Builder
from preheat.errors import AdapterError, SealedError
from preheat.model.arch import Arch
from preheat.model.config import Config, SealMode
from preheat.model.foreign import ForeignEntry
from tests.conftest import Recorder


class FakeTorch:
    """Modules with the few names of torch that the adapter uses."""

    def __init__(self) -> None:
        self.initialized = 0  # how often CUDA was asked for the device
        self.loaded: list[tuple[str, str, bytes]] = []
        self.recorded: list[tuple[str, str, object]] = []  # by torch itself
        self.cuda = True
        self.cuda_used = True
        self.codegen: list[str] = []
        self.torch = ModuleType("torch")
        self.torch.__file__ = "/nowhere/torch/__init__.py"
        self.torch.__dict__.update(
            __version__="2.11.0",
            cuda=SimpleNamespace(
                is_available=lambda: self.cuda,
                is_initialized=lambda: self.cuda and self.cuda_used,
                get_device_name=self._name,
                get_device_capability=lambda: (9, 0),
            ),
        )
        self.cache = ModuleType("torch.compiler._cache")
        self.cache.__dict__.update(
            CacheArtifactFactory=SimpleNamespace(create=self._artifact, encode_create=self._encode),
            CacheArtifactManager=SimpleNamespace(
                record_artifact=lambda *artifact: self.recorded.append(artifact),
                _ensure_cache_artifacts_registered=lambda: None,
            ),
        )
        self.compile_fx = ModuleType("torch._inductor.compile_fx")
        self.compile_fx.__dict__.update(compile_fx=self._compile, fx_codegen_and_compile=self._codegen)
        self.package = ModuleType("torch._inductor")
        self.package.__dict__.update(compile_fx=self.compile_fx)

    def _name(self) -> str:
        self.initialized += 1
        return "NVIDIA H200"

    def _artifact(self, kind: str, key: str, content: bytes) -> SimpleNamespace:
        load = functools.partial(self.loaded.append, (kind, key, content))
        return SimpleNamespace(content=content, populate_cache=load)

    def _encode(self, kind: str, key: str, content: object) -> SimpleNamespace:
        return self._artifact(
            kind, key, content if isinstance(content, bytes) else repr(content).encode()
        )

    def record(self, kind: str, key: str, content: object) -> None:
        """Record an artifact as the caches of torch do."""
        self.cache.CacheArtifactManager.record_artifact(kind, key, content)

    def _compile(self, graph: Any) -> Any:
        return self.compile_fx.fx_codegen_and_compile(graph)

    def _codegen(self, graph: Any, *_: Any) -> str:
        self.codegen.append(graph.title)
        return "code"

    def modules(self) -> dict[str, ModuleType]:
        return {
            "torch": self.torch,
            "torch.compiler": ModuleType("torch.compiler"),
            "torch.compiler._cache": self.cache,
            "torch._inductor": self.package,
            "torch._inductor.compile_fx": self.compile_fx,
        }


def graph(device: str = "cuda") -> SimpleNamespace:
    value = SimpleNamespace(device=SimpleNamespace(type=device))
    nodes = [
        SimpleNamespace(op="call_function", target=f"aten.op{n}", meta={"val": value} if n else {})
        for n in range(6)
    ]
    return SimpleNamespace(title="graph", graph=SimpleNamespace(nodes=nodes))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    made = FakeTorch()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def entries(builder: Builder) -> list[ForeignEntry]:
    return list(builder.foreign.all("inductor"))


def record(
    torch: FakeTorch, builder: Builder, *artifacts: tuple[str, str, object]
) -> list[ForeignEntry]:
    """Record artifacts in a process that is recorded, and return what the recording has seen."""
    seen: list[ForeignEntry] = []
    builder.events.subscribe(lambda _, fields: seen.append(fields["entry"]), "foreign_request")
    InductorAdapter().install(builder)
    for artifact in artifacts:
        torch.record(*artifact)
    assert torch.recorded == [*artifacts]
    return seen


ARTIFACTS = [
    ("inductor", "fabc", b"a graph"),
    ("inductor", "fabc", b"the graph for other guards"),
    ("aot_autograd", "aabc", b"a traced graph"),
    ("autotune", "xy/best_config", {"num_warps": 4}),
]


def test_each_artifact_of_a_recorded_run_is_stored_at_once_and_given_back(
    torch: FakeTorch, builder: Builder, open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    seen = record(torch, builder, *ARTIFACTS)
    assert [entry.key for entry in seen] == ["fabc", "fabc", "aabc", "xy/best_config"]
    assert {str(entry.arch) for entry in seen} == {"sm_90"}
    assert dict(seen[0].properties) == {"torch": "2.11.0", "device": "NVIDIA H200"}
    assert [entry.label for entry in seen][1:] == ["compiled graphs", "traced graphs", "tuning results"]
    torch.compile_fx.__dict__["compile_fx"] = torch._compile  # as in a new process
    InductorAdapter().install(open_builder())
    assert torch.loaded == []  # It may fork first.
    for _ in range(2):
        torch.compile_fx.compile_fx(graph())
    assert sorted(torch.loaded) == sorted(
        [*ARTIFACTS[:3], ("autotune", "xy/best_config", b"{'num_warps': 4}")]
    )
    assert not recorder.named("sealed")


def test_an_artifact_that_is_found_again_is_reported_once(torch: FakeTorch, builder: Builder) -> None:
    assert len(record(torch, builder, ARTIFACTS[0], ARTIFACTS[0])) == 1


def test_the_last_result_of_tuning_replaces_earlier_ones(torch: FakeTorch, builder: Builder) -> None:
    tuned = [("autotune", "xy/best_config", {"num_warps": warps}) for warps in (4, 8)]
    assert len(record(torch, builder, *tuned)) == 2
    assert [entry.files for entry in entries(builder)] == [{"artifact": b"{'num_warps': 8}"}]


@pytest.mark.parametrize("change", [{"torch": "2.12.0"}, {"device": "NVIDIA B200"}])
def test_artifacts_of_another_version_or_gpu_are_not_loaded(
    torch: FakeTorch, builder: Builder, change: dict[str, str]
) -> None:
    record(torch, builder, ARTIFACTS[0])
    (entry,) = entries(builder)
    builder.foreign.put(replace(entry, properties={**entry.properties, **change}))
    torch.compile_fx.compile_fx(graph())
    assert torch.loaded == []


@pytest.mark.parametrize("version", ["2.10.0", "2.14.0", "3.0.0"])
def test_an_unknown_version_is_refused(torch: FakeTorch, builder: Builder, version: str) -> None:
    torch.torch.__dict__["__version__"] = version
    with pytest.raises(AdapterError, match=rf"torch {version} is not known"):
        InductorAdapter().install(builder)


def test_installing_and_compiling_without_artifacts_does_not_initialize_cuda(
    torch: FakeTorch, builder: Builder
) -> None:
    InductorAdapter().install(builder)
    assert torch.compile_fx.compile_fx(graph()) == "code"
    assert torch.initialized == 0


def test_artifacts_of_the_cpu_are_not_stored(torch: FakeTorch, builder: Builder) -> None:
    torch.cuda = False
    assert record(torch, builder, ARTIFACTS[0]) == []
    assert torch.compile_fx.compile_fx(graph()) == "code"
    assert entries(builder) == []


def test_storing_an_artifact_does_not_initialize_cuda(torch: FakeTorch, builder: Builder) -> None:
    torch.cuda_used = False
    assert record(torch, builder, ARTIFACTS[0]) == []
    assert torch.initialized == 0


def test_a_sealed_process_generates_no_code(
    torch: FakeTorch, config: Config, open_builder: Callable[..., Builder]
) -> None:
    InductorAdapter().install(open_builder(replace(config, sealed=SealMode.ERROR)))
    with pytest.raises(SealedError, match=r"test_inductor\.py:\d+: inductor graph of 6 operations"):
        torch.compile_fx.compile_fx(graph())
    assert torch.codegen == []


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_graph_for_the_cpu_is_refused_with_its_own_reason(
    torch: FakeTorch, config: Config, open_builder: Callable[..., Builder], has_gpu: bool
) -> None:
    """No recording has such a graph, so that the hint does not ask for one."""
    torch.cuda = has_gpu
    InductorAdapter().install(open_builder(replace(config, sealed=SealMode.ERROR)))
    why = "preheat has no adapter for what torch compiles with g\\+\\+ for the CPU"
    with pytest.raises(SealedError, match=why) as error:
        torch.compile_fx.compile_fx(graph("cpu"))
    assert error.value.hint == "run the graph without torch.compile; a recording does not have it"
    assert torch.codegen == []


def test_a_seal_that_warns_reports_the_graph_and_compiles_it(
    torch: FakeTorch, config: Config, open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    InductorAdapter().install(open_builder(replace(config, sealed=SealMode.WARN)))
    assert torch.compile_fx.compile_fx(graph()) == "code"
    assert [event["mode"] for event in recorder.named("sealed")] == ["warn"]
    assert len(recorder.named("miss")) == 1


def test_artifacts_cannot_be_baked(torch: FakeTorch) -> None:
    del torch
    with pytest.raises(AdapterError, match="without their GPU"):
        InductorAdapter().bake({}, Arch(9, 0), "recorded")
    assert InductorAdapter().count({}, "recorded") == 0
