"""The adapter for Inductor, on a stand-in for torch: what is collected, loaded and refused."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from preheat.adapters import inductor
from preheat.adapters.inductor import InductorAdapter
from preheat.arch import Arch
from preheat.build.builder import Builder
from preheat.config import Config, SealMode
from preheat.errors import AdapterError, SealedError
from preheat.foreign import ForeignEntry
from tests.conftest import Recorder


class FakeTorch:
    """Modules with the few names of torch that the adapter uses."""

    def __init__(self) -> None:
        self.initialized = 0  # how often CUDA was asked for the device
        self.loaded: list[bytes] = []
        self.artifacts: tuple[bytes, object] | None = (b"graphs", None)
        self.cuda = True
        self.codegen: list[str] = []
        self.torch = ModuleType("torch")
        self.torch.__file__ = "/nowhere/torch/__init__.py"
        self.torch.__dict__.update(
            __version__="2.11.0",
            cuda=SimpleNamespace(
                is_available=lambda: self.cuda,
                get_device_name=self._name,
                get_device_capability=lambda: (9, 0),
            ),
            compiler=SimpleNamespace(
                save_cache_artifacts=lambda: self.artifacts, load_cache_artifacts=self.loaded.append
            ),
        )
        self.compile_fx = ModuleType("torch._inductor.compile_fx")
        self.compile_fx.__dict__.update(compile_fx=self._compile, fx_codegen_and_compile=self._codegen)
        self.package = ModuleType("torch._inductor")
        self.package.__dict__.update(compile_fx=self.compile_fx)

    def _name(self) -> str:
        self.initialized += 1
        return "NVIDIA H200"

    def _compile(self, graph: Any) -> Any:
        return self.compile_fx.fx_codegen_and_compile(graph)

    def _codegen(self, graph: Any, *_: Any) -> str:
        self.codegen.append(graph.title)
        return "code"

    def modules(self) -> dict[str, ModuleType]:
        return {
            "torch": self.torch,
            "torch._inductor": self.package,
            "torch._inductor.compile_fx": self.compile_fx,
        }


def graph() -> SimpleNamespace:
    nodes = [SimpleNamespace(op="call_function", target=f"aten.op{n}") for n in range(6)]
    return SimpleNamespace(title="graph", graph=SimpleNamespace(nodes=nodes))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    made = FakeTorch()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    return made


def entries(builder: Builder) -> list[ForeignEntry]:
    return list(builder.foreign.all("inductor"))


def test_what_a_recorded_run_compiled_is_collected_and_loaded_again(
    torch: FakeTorch, builder: Builder, open_builder: Callable[..., Builder], recorder: Recorder
) -> None:
    seen: list[ForeignEntry] = []
    builder.events.subscribe(lambda _, fields: seen.append(fields["entry"]), "foreign_request")
    inductor._collect(builder.foreign)
    assert [entry.files for entry in seen] == [{"artifacts": b"graphs"}]
    assert str(seen[0].arch) == "sm_90"
    assert dict(seen[0].properties) == {"torch": "2.11.0", "device": "NVIDIA H200"}
    other = open_builder()
    InductorAdapter().install(other)
    assert torch.loaded == []  # It may fork first.
    for _ in range(2):
        torch.compile_fx.compile_fx(graph())
    assert torch.loaded == [b"graphs"]
    assert not recorder.named("sealed")


@pytest.mark.parametrize("change", [{"torch": "2.12.0"}, {"device": "NVIDIA B200"}])
def test_artifacts_of_another_version_or_gpu_are_not_loaded(
    torch: FakeTorch, builder: Builder, change: dict[str, str]
) -> None:
    inductor._collect(builder.foreign)
    (entry,) = entries(builder)
    builder.foreign.put(replace(entry, properties={**entry.properties, **change}))
    InductorAdapter().install(builder)
    torch.compile_fx.compile_fx(graph())
    assert torch.loaded == []


def test_installing_and_compiling_without_artifacts_does_not_initialize_cuda(
    torch: FakeTorch, builder: Builder
) -> None:
    InductorAdapter().install(builder)
    assert torch.compile_fx.compile_fx(graph()) == "code"
    assert torch.initialized == 0


def test_a_compile_for_the_cpu_works(torch: FakeTorch, builder: Builder) -> None:
    torch.cuda = False
    InductorAdapter().install(builder)
    assert torch.compile_fx.compile_fx(graph()) == "code"
    inductor._collect(builder.foreign)
    assert entries(builder) == []


def test_nothing_is_collected_where_nothing_was_compiled(torch: FakeTorch, builder: Builder) -> None:
    torch.artifacts = None
    inductor._collect(builder.foreign)
    assert entries(builder) == []


@pytest.mark.parametrize("cuda", [True, False])
def test_a_sealed_process_generates_no_code(
    torch: FakeTorch, config: Config, open_builder: Callable[..., Builder], cuda: bool
) -> None:
    torch.cuda = cuda
    InductorAdapter().install(open_builder(replace(config, sealed=SealMode.ERROR)))
    with pytest.raises(SealedError, match=r"test_inductor\.py:\d+: inductor graph of 6 operations"):
        torch.compile_fx.compile_fx(graph())
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
