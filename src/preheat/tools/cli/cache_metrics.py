"""`preheat cache metrics`: the cache and its counters as text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import click

from preheat._version import __version__
from preheat.model.config import Config
from preheat.store import DiskStore
from preheat.tools.cli.output import print_raw
from preheat.tools.cli.stored import items_by_kind, open_cache
from preheat.tools.metrics.metrics import Family, counter_families, exposition, gauge

__all__ = ["command"]


@click.command("metrics")
def command() -> None:
    """Print the cache and its counters as text for Prometheus.

    The counters are those of every process that used this cache. docs/metrics.md describes each one.
    A process can also serve its own counters: set PREHEAT_METRICS=host:port for it.

    \b
    Examples:
      preheat cache metrics
      preheat cache metrics > preheat.prom.new && mv preheat.prom.new preheat.prom
    """
    disk = open_cache()
    families = [*_gauges(disk, Config.from_env()), *counter_families(disk.journal().total())]
    print_raw(exposition(families))


def _gauges(disk: DiskStore, config: Config) -> Iterator[Family]:
    """Yield what the cache holds now, and its limits."""
    by_kind = items_by_kind(disk)
    entries = {kind: items for kind, items in by_kind.items() if kind is not None}
    files = sum(map(len, by_kind.values()))
    held = sum(item.bytes for items in by_kind.values() for item in items)
    numbers = {kind: len(items) for kind, items in entries.items()}
    yield gauge("preheat_info", "The release of preheat.", {__version__: 1}, "version")
    yield gauge("preheat_cache_entries", "Entries of the cache, by kind.", numbers, "kind")
    yield gauge("preheat_cache_files", "Files of the cache: entries and header lists.", files)
    yield gauge("preheat_cache_bytes", "Size of the cache.", held)
    yield gauge("preheat_cache_limit_files", "Most files before eviction.", config.cache_files)
    yield gauge("preheat_cache_limit_bytes", "Largest size before eviction.", config.cache_limit)
    yield gauge("preheat_cache_pinned", "Entries and lists that are never evicted.", len(disk.pinned()))
