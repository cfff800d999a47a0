"""The table of metrics: the name, unit and label that each counter of `model.events` has outside.

Prometheus and OpenTelemetry share the table. A name for Prometheus follows from that for OpenTelemetry
by the rules of the latter: `preheat.compiling` in seconds is `preheat_compiling_seconds_total`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from preheat.model.events import Stats

__all__ = [
    "CONTENT_TYPE",
    "METRICS",
    "OTHER",
    "Family",
    "Metric",
    "Sample",
    "counter_families",
    "exposition",
    "gauge",
    "measured",
]

_UNITS = {"": "", "s": "_seconds", "By": "_bytes"}


class Metric(NamedTuple):
    """One metric. With `labels`, `counter` is the first part of the names of several counters.

    `unit` is OpenTelemetry's: `s`, `By`, or empty for a number of things.
    """

    name: str
    counter: str
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()

    def labelled(self, rest: str) -> tuple[tuple[str, str], ...]:
        """Return the labels of a counter whose name ends in `rest`. Only the first may have dots.

        They are empty if `rest` has fewer parts than the metric has labels.
        """
        values = rest.rsplit(".", len(self.labels) - 1)
        return tuple(zip(self.labels, values, strict=True)) if len(values) == len(self.labels) else ()

    @property
    def prometheus(self) -> str:
        """The name for Prometheus, with its unit."""
        return f"{self.name.replace('.', '_')}{_UNITS[self.unit]}_total"


#: Every metric of a process or a cache, in the order of docs/metrics.md. Names are stable.
METRICS: tuple[Metric, ...] = (
    Metric("preheat.hits", "hits", "Lookups that found an artifact, by tier.", labels=("tier",)),
    Metric("preheat.read", "bytes_read", "Bytes of code that hits returned.", "By"),
    Metric("preheat.saved", "seconds_saved", "Compile time that hits saved.", "s"),
    Metric("preheat.misses", "misses", "Lookups that found nothing usable.", labels=("reason",)),
    Metric("preheat.compiles", "compiles", "Programs that were compiled."),
    Metric("preheat.compiling", "seconds_compiling", "Time of the compiles.", "s"),
    Metric("preheat.rejections", "rejections", "Programs that the compiler rejected."),
    Metric("preheat.rejecting", "seconds_rejecting", "Time of compiles that were rejected.", "s"),
    Metric("preheat.recalls", "recall", "Rejections that were raised again without a compile."),
    Metric("preheat.uncached", "uncached", "Artifacts that were made and not stored."),
    Metric("preheat.sealed", "sealed", "Requests for a compile in a sealed process."),
    Metric("preheat.stale", "stale", "Programs in a sealed process whose headers differ."),
    Metric("preheat.headers", "headers", "Builders that do not refuse code of other headers."),
    Metric("preheat.puts", "puts", "Entries that a tier stored.", labels=("tier",)),
    Metric("preheat.written", "bytes_written", "Bytes that a tier stored.", "By", ("tier",)),
    Metric("preheat.faults", "faults", "Tiers and files that could not be used.", labels=("where",)),
    Metric("preheat.damaged", "damaged", "Entries that failed their check."),
    Metric("preheat.untrusted", "untrusted", "Entries without a trusted signature.", labels=("tier",)),
    Metric("preheat.dropped", "dropped", "Entries not written to a remote.", labels=("tier",)),
    Metric("preheat.requests", "requests", "Requests to a remote.", labels=("tier", "verb")),
    Metric("preheat.requests.failed", "failed_requests", "Requests that failed.", labels=("tier",)),
    Metric("preheat.requesting", "seconds_of_requests", "Time of requests.", "s", ("tier",)),
    Metric("preheat.sent", "bytes_sent", "Bytes sent to a remote.", "By", ("tier",)),
    Metric("preheat.received", "bytes_received", "Bytes received from a remote.", "By", ("tier",)),
    Metric("preheat.leases", "leases", "Leases among hosts, by outcome.", labels=("outcome",)),
    Metric("preheat.leases.requests", "lease_requests", "Requests for leases."),
    Metric("preheat.recoveries", "recovered", "Remotes that work again after a fault."),
    Metric("preheat.evicted.files", "evicted_files", "Files that were evicted."),
    Metric("preheat.evicted", "evicted_bytes", "Bytes that were evicted.", "By"),
    Metric("preheat.refused", "refused", "Directories and files that were not trusted."),
    Metric("preheat.waits", "waits", "Waits for another thread or process that compiled."),
    Metric("preheat.waiting", "seconds_waiting", "Time of these waits.", "s"),
    Metric("preheat.kernels", "resolve", "Kernels of loaded programs that were first asked for."),
    Metric("preheat.loads", "load", "Programs that were loaded on a device."),
    Metric("preheat.devices.lost", "lost", "Devices that can no longer be used."),
    Metric("preheat.graphs", "graph", "Graphs that were captured, evicted or quarantined."),
    Metric("preheat.replays.sampled", "replay", "Replays of graphs that were timed."),
    Metric("preheat.slow_paths", "slow_path", "Shipped kernels that take a slower path."),
    Metric("preheat.blas", "blas", "Decisions between cuBLAS and shipped kernels."),
    Metric("preheat.workers", "workers", "Compiler processes, started and ended.", labels=("what",)),
    Metric("preheat.weak", "weak", "Kernels in a sealed process that assume less than the launch."),
)
#: For counters of a journal that this release does not know, because another release wrote them.
OTHER = Metric("preheat.other", "", "Counters that this release does not know.", labels=("counter",))

_PLAIN = {metric.counter: metric for metric in METRICS if not metric.labels}
_LABELLED = {metric.counter: metric for metric in METRICS if metric.labels}


class Sample(NamedTuple):
    """One value, and its labels."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()


class Family(NamedTuple):
    """The samples of one metric, by its name for Prometheus. `type` is `counter` or `gauge`."""

    name: str
    type: str
    help: str
    samples: tuple[Sample, ...]


def measured(stats: Stats) -> dict[Metric, list[Sample]]:
    """Return the samples of every metric. One without a label is zero where it was not counted."""
    found: dict[Metric, list[Sample]] = {
        metric: [] if metric.labels else [Sample(stats.get(metric.counter, 0))] for metric in METRICS
    }
    for counter, value in sorted(stats.items()):
        first, dot, rest = counter.partition(".")
        metric = _LABELLED.get(first) if dot else None
        if metric is not None and (labels := metric.labelled(rest)):
            found[metric].append(Sample(value, labels))
        elif counter not in _PLAIN and counter not in _LABELLED:  # `faults` is the sum of its parts.
            found.setdefault(OTHER, []).append(Sample(value, OTHER.labelled(counter)))
    return found


def counter_families(stats: Stats) -> Iterator[Family]:
    """Yield the counters as families, those without a sample too."""
    for metric, samples in measured(stats).items():
        yield Family(metric.prometheus, "counter", metric.help, tuple(samples))


def gauge(name: str, help: str, value: float | Mapping[str, float], label: str = "") -> Family:
    """Return a gauge. With a `label`, `value` has a number for each of its values."""
    rows: Iterable[Sample]
    if isinstance(value, Mapping):
        rows = (Sample(number, ((label, key),)) for key, number in sorted(value.items()))
    else:
        rows = (Sample(value),)
    return Family(name, "gauge", help, tuple(rows))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Iterable[Family]) -> str:
    """Return the text of `families`. A family without samples is announced and has no value."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escape(family.help)}"
    yield f"# TYPE {family.name} {family.type}"
    for sample in family.samples:
        yield f"{family.name}{_labels(sample)} {_number(sample.value)}"


def _labels(sample: Sample) -> str:
    quoted = (f'{name}="{_escape(value, quote=True)}"' for name, value in sample.labels)
    return f"{{{','.join(quoted)}}}" if sample.labels else ""


def _escape(text: str, *, quote: bool = False) -> str:
    """Escape what would end a line or a quoted value. Bytes that are no text become `?`."""
    text = text.encode(errors="replace").decode()
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
