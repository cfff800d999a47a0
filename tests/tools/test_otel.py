"""OpenTelemetry: the counters and compiles of this process, by the providers of the program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from preheat.errors import PreheatError
from preheat.telemetry import install
from preheat.tools.metrics.metrics import METRICS
from tests.processes import expect_success, start_python, wait_for_exit

#: Installs before and after a builder is opened, and prints what OpenTelemetry has got.
REPORT = """
import json, os, sys
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import preheat, preheat.telemetry

reader, spans, tracing = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider()
tracing.add_span_processor(SimpleSpanProcessor(spans))

def configure():
    metrics.set_meter_provider(MeterProvider([reader]))
    trace.set_tracer_provider(tracing)

if sys.argv[1] == "before":
    configure()
builder = preheat.Builder.open()
if sys.argv[1] != "variable":
    preheat.telemetry.install()
preheat.telemetry.install()
if sys.argv[1] != "before":
    configure()
program = preheat.Program.of('extern "C" __global__ void k(int* x) { *x = 1; }', label="k.cu")
builder.build(program, "sm_90")
builder.build(program, "sm_90")
try:
    builder.build(preheat.Program.of("nonsense", label="bad.cu"), "sm_90")
except preheat.CompileError:
    pass
(resource,) = reader.get_metrics_data().resource_metrics
(scope,) = resource.scope_metrics
counters = {
    m.name: [m.unit, [[dict(p.attributes), p.value] for p in m.data.data_points]] for m in scope.metrics
}
made = [
    [s.name, dict(s.attributes), s.status.status_code.name, (s.end_time - s.start_time) / 1e9]
    for s in spans.get_finished_spans()
]
print(json.dumps([scope.scope.name, counters, made, builder.events.stats()]))
"""


@pytest.mark.parametrize("order", ["before", "after", "variable"])
def test_counters_and_compiles_reach_the_providers(order: str, tmp_path: Path) -> None:
    env = {
        "PREHEAT_CACHE_DIR": str(tmp_path / "cache"),
        "PREHEAT_LOCK_DIR": str(tmp_path / "locks"),
        "PREHEAT_OTEL": str(int(order == "variable")),
    }
    name, counters, spans, stats = json.loads(expect_success(start_python(REPORT, order, env=env)))
    assert name == "preheat"
    assert counters["preheat.compiles"] == ["1", [[{}, 1]]]
    assert counters["preheat.hits"] == ["1", [[{"tier": "memory"}, 1]]]
    assert counters["preheat.compiling"] == ["s", [[{}, stats["seconds_compiling"]]]]
    assert counters["preheat.read"][0] == "By"
    assert set(counters) <= {metric.name for metric in METRICS}
    assert [(each[0], each[1]["preheat.program"], each[2]) for each in spans] == [
        ("preheat compile", "k.cu", "UNSET"),
        ("preheat compile", "bad.cu", "ERROR"),
    ]
    assert spans[0][1]["preheat.arch"] == "sm_90"
    assert spans[0][3] == pytest.approx(stats["seconds_compiling"], abs=1e-6)


def test_a_missing_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(PreheatError, match="OpenTelemetry is not installed") as caught:
        install()
    assert caught.value.hint == "pip install 'preheat[otel]'"


def test_the_variable_without_the_package_is_one_event(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
import preheat
for _ in range(2):
    preheat.Builder.open()
"""
    process = start_python(code, env={"PREHEAT_OTEL": "1", "PREHEAT_CACHE_DIR": str(tmp_path)})
    _, err = wait_for_exit(process)
    assert process.returncode == 0
    assert err.count("OpenTelemetry is not installed: pip install 'preheat[otel]'") == 1
