"""`preheat cache`: list, explain, verify and clean the cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from preheat.build.builder import Builder
from preheat.build.refusal import Near, choose_nearest
from preheat.model import setting_values
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact
from preheat.model.config import Config
from preheat.model.events import Stats, logged_events
from preheat.model.key import explain
from preheat.model.program import Program
from preheat.process.lazy import LazyModule
from preheat.process.progress import progress
from preheat.store import DiskStore
from preheat.store.layer import Item
from preheat.tools.cli import cache_metrics, cache_sync
from preheat.tools.cli.details import details, details_as_json, file_of, ptx_of
from preheat.tools.cli.output import (
    columns,
    count,
    duration,
    print_json,
    print_line,
    print_message,
    print_raw,
    size,
)
from preheat.tools.cli.programs import (
    LinkOptions,
    ProgramOptions,
    link_options,
    program_options,
    require_known_archs,
    targets,
)
from preheat.tools.cli.stored import (
    CUDA,
    Stored,
    artifact_at,
    artifacts,
    damage,
    digest_at,
    entries,
    entry_at,
    header_lists,
    items_by_kind,
    kind_of,
    open_cache,
    require_kind,
)

if TYPE_CHECKING:
    from preheat.tools.cli import remotes
else:
    remotes = LazyModule("preheat.tools.cli.remotes")  # Only `verify --remote` needs it.

__all__ = ["command"]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
_KIND = click.option(
    "--kind", metavar="KIND", help="Only entries of this kind, such as cuda or triton."
)


@click.group()
def command() -> None:
    """Inspect and clean the cache.

    An entry is one compiled program, or the files of another library. KEY is the start of its key, as
    `preheat cache ls` shows it. Programs that preheat compiled have the kind cuda. The limits count
    files: a program with header files also has a header list, by which it is found.

    \b
    Examples:
      preheat cache ls
      preheat cache why saxpy.cu --arch sm_90
      preheat cache prune --limit 2G
    """


command.add_command(cache_metrics.command)
command.add_command(cache_sync.command)


@command.command("dir")
def directory() -> None:
    """Print the directory of the cache.

    \b
    Example:
      du -sh "$(preheat cache dir)"
    """
    print_line(str(open_cache().root))


@command.command()
@click.option("--reset", is_flag=True, help="Set all counters to zero.")
@_JSON
def stats(reset: bool, as_json: bool) -> None:
    """Show the size and the counters of the cache.

    The counters are those of all processes that used the cache.

    \b
    Examples:
      preheat cache stats
      preheat cache stats --reset
    """
    config = Config.from_env()
    disk = open_cache()
    journal = disk.journal()
    if reset:
        journal.clear()
    counters = journal.total()
    by_kind = items_by_kind(disk)
    files = sum(map(len, by_kind.values()))
    held = sum(item.bytes for items in by_kind.values() for item in items)
    kinds = {kind: len(items) for kind, items in sorted(_entries(by_kind))}
    number = sum(kinds.values())
    if as_json:
        now = {"directory": str(disk.root), "entries": number, "files": files, "bytes": held}
        now["kinds"] = {
            kind: {"entries": len(items), "bytes": sum(item.bytes for item in items)}
            for kind, items in sorted(_entries(by_kind))
        }
        limits = {"bytes": config.cache_limit, "files": config.cache_files}
        print_json({**now, "limits": limits, "counters": dict(sorted(counters.items()))})
        return
    rows = [
        ("directory", str(disk.root)),
        ("entries", _split(kinds) if len(kinds) > 1 else f"{number:,}"),
        ("files", f"{files:,} of at most {config.cache_files:,}"),
        ("size", f"{size(held)} of at most {size(config.cache_limit)}"),
        *_counter_rows(counters),
    ]
    for line in columns(rows):
        print_line(line)


def _counter_rows(counters: Stats) -> Iterator[tuple[str, str]]:
    """Yield the counters as rows, the most useful first."""
    hits = {k.removeprefix("hits."): v for k, v in counters.items() if k.startswith("hits.")}
    misses = {k.removeprefix("misses."): v for k, v in counters.items() if k.startswith("misses.")}
    yield "hits", _split(hits)
    yield "misses", _split(misses)
    yield "compiles", f"{counters.get('compiles', 0):,.0f}"
    yield "time compiling", duration(counters.get("seconds_compiling", 0))
    yield "time saved", duration(counters.get("seconds_saved", 0))
    rejected = f"{counters.get('rejections', 0):,.0f}"
    wasted = counters.get("seconds_rejecting", 0)
    yield "rejected programs", f"{rejected} in {duration(wasted)}" if wasted else rejected
    yield "damaged entries", f"{counters.get('damaged', 0):,.0f}"
    yield "faults", f"{counters.get('faults', 0):,.0f}"
    yield from _shared_rows(counters)


def _shared_rows(counters: Stats) -> Iterator[tuple[str, str]]:
    """Yield the traffic with shared stores, if there was any."""
    requests: dict[str, float] = {}
    for counter, value in counters.items():
        if counter.startswith("requests."):
            verb = counter.rpartition(".")[2]
            requests[verb] = requests.get(verb, 0) + value
    if requests:
        yield "requests to shared stores", _split(requests)
        yield "requests that failed", f"{_sum(counters, 'failed_requests.'):,.0f}"
        yield (
            "received and sent",
            " and ".join(size(_sum(counters, prefix)) for prefix in ("bytes_received.", "bytes_sent.")),
        )
        yield "entries not trusted", f"{counters.get('untrusted', 0):,.0f}"
        yield "entries not written", f"{counters.get('dropped', 0):,.0f}"


def _sum(counters: Stats, prefix: str) -> float:
    return sum(value for counter, value in counters.items() if counter.startswith(prefix))


def _entries(by_kind: Mapping[str | None, list[Item]]) -> Iterator[tuple[str, list[Item]]]:
    """Yield the kinds of entries and the files of each, without header lists."""
    for kind, items in by_kind.items():
        if kind is not None:
            yield kind, items


def _split(kinds: Mapping[str, float]) -> str:
    total = f"{sum(kinds.values()):,.0f}"
    parts = ", ".join(f"{name} {number:,.0f}" for name, number in sorted(kinds.items()))
    return f"{total} ({parts})" if parts else total


@command.command()
@_KIND
@_JSON
def ls(kind: str | None, as_json: bool) -> None:
    """List the entries, most recently used first.

    \b
    Examples:
      preheat cache ls
      preheat cache ls --kind triton
    """
    rows = list(entries("reading", kind))
    if as_json:
        print_json([_summary(item, entry) for item, entry in rows])
        return
    if not rows:
        print_message("The cache is empty")
        return
    now = time.time()
    table = (
        (
            entry.digest[:12],
            *_kind_and_label(entry),
            str(entry.arch or "any"),
            size(item.bytes),
            f"{duration(max(now - item.last_read, 1))} ago" + (" pinned" if item.pinned else ""),
            ", ".join(_contents(entry)) or _purpose(entry),
        )
        for item, entry in rows
    )
    head = ("KEY", "KIND", "PROGRAM", "ARCH", "SIZE", "USED", "KERNELS")
    for line in columns([head, *table], right=(4,)):
        print_line(line)
    print_message(f"{count(len(rows), 'entry')}, {size(sum(item.bytes for item, _ in rows))}")


def _kind_and_label(entry: Stored) -> tuple[str, str]:
    return (CUDA, entry.label) if isinstance(entry, Artifact) else (entry.kind, entry.label or "-")


def _contents(entry: Stored) -> list[str]:
    """Return the kernels of an artifact, or the files of a foreign entry."""
    if isinstance(entry, Artifact):
        return [kernel.title for kernel in entry.entries]
    return list(entry.files)


def _purpose(entry: Stored) -> str:
    """Return what an artifact without kernels is for, if that is known."""
    is_part = isinstance(entry, Artifact) and "relocatable" in dict(entry.parts)
    return "(part of a link)" if is_part else ""


def _summary(item: Item, entry: Stored) -> dict[str, Any]:
    kind, label = _kind_and_label(entry)
    row = {
        "key": entry.digest,
        "kind": kind,
        "program": label,
        "arch": str(entry.arch or "any"),
        "bytes": item.bytes,
        "last_read": item.last_read,
        "pinned": item.pinned,
    }
    if isinstance(entry, Artifact):
        return {**row, "toolchain": entry.toolchain, "kernels": _contents(entry)}
    return {**row, "foreign_key": entry.key, "files": _contents(entry)}


@command.command()
@click.argument("key")
@click.option("--ptx", is_flag=True, help="Print the PTX instead.")
@click.option("--file", "name", metavar="NAME", help="Write this file of the entry to stdout instead.")
@click.option("--headers", is_flag=True, help="List every header file, including those of the toolkit.")
@_JSON
def show(key: str, ptx: bool, name: str | None, headers: bool, as_json: bool) -> None:
    """Print the details of one entry.

    \b
    Examples:
      preheat cache show 3f9a12
      preheat cache show 3f9a12 --file cubin > saxpy.cubin
    """
    entry = entry_at(key)
    if name is not None:
        print_raw(file_of(entry, name))
    elif ptx:
        print_raw(f"{ptx_of(entry).decode('utf-8', 'replace')}\n")
    elif as_json:
        print_json(details_as_json(entry))
    else:
        for line in details(entry, all_headers=headers):
            print_line(line)


@command.command()
@click.argument("what", nargs=-1, required=True, metavar="FILE... | KEY KEY")
@click.option(
    "--arch",
    metavar="ARCH",
    callback=require_known_archs,
    help="Architecture of FILE, such as sm_90.",
)
@program_options
@link_options
@_JSON
def why(
    what: tuple[str, ...],
    arch: str | None,
    given: ProgramOptions,
    link: LinkOptions,
    as_json: bool,
) -> None:
    """Explain why FILE compiles again, or how two entries differ.

    \b
    Examples:
      preheat cache why saxpy.cu --arch sm_90
      preheat cache why main.cu helper.cu --link --arch sm_90
      preheat cache why 3f9a12 77b0c4
    """
    if link.wanted:
        linked = given.read_linked(what, link)
        (target,) = targets(linked, [arch] if arch else [])
        _explain_program(linked, target, as_json)
        return
    if len(what) == 2:
        differences = explain(artifact_at(what[0]).parts, artifact_at(what[1]).parts)
        if as_json:
            print_json({"differences": list(differences)})
            return
        for line in differences:
            print_line(line)
        if not differences:
            print_message("The two entries have the same key parts")
        return
    if len(what) != 1:
        raise click.UsageError("pass one file or two keys")
    program = given.read(what[0])
    (target,) = targets(program, [arch] if arch else [])
    _explain_program(program, target, as_json)


def _explain_program(program: Program, arch: Arch, as_json: bool) -> None:
    if program.uncacheable:
        _print_miss(f"never cached: {program.uncacheable}", None, as_json)
        return
    builder = Builder.open(events=logged_events())
    found = builder.explain_lookup(program, arch)
    if isinstance(found, Artifact):
        if as_json:
            print_json({"hit": True, "key": found.digest})
        else:
            print_line(f"{program.label} for {arch} is cached: {found.digest[:12]}")
        return
    stored = (artifact for _, artifact in artifacts("comparing"))
    near = choose_nearest(builder.key(program, arch).table, program.label, stored)
    _print_miss(found.reason, near, as_json)


def _print_miss(reason: str, near: Near | None, as_json: bool) -> None:
    if as_json:
        key, differences = (near.artifact.digest, near.differences) if near else (None, ())
        row = {"hit": False, "reason": reason, "nearest": key, "differences": list(differences)}
        print_json(row)
        return
    print_line(f"not cached: {reason}")
    if near is None:
        return
    print_line(f"nearest entry: {near}")
    for line in near.differences or ("all key parts are equal; a header file differs",):
        print_line(f"  {line}")


@command.command()
@click.option("--repair", is_flag=True, help="Remove the damaged files.")
@click.option("--remote", is_flag=True, help="Check the shared stores of PREHEAT_REMOTE instead.")
@_KIND
@_JSON
def verify(repair: bool, remote: bool, kind: str | None, as_json: bool) -> int:
    """Read every file of the cache and check it. The exit status is 1 if one is damaged.

    With --remote, the command reads every object of the shared stores. It lists objects that are
    damaged, unsigned, signed by an untrusted key, or not entries. It removes nothing.

    \b
    Examples:
      preheat cache verify --repair
      preheat cache verify --remote --json
    """
    if remote:
        if repair or kind is not None:
            raise click.UsageError("--remote takes neither --repair nor --kind")
        return remotes.verify_remotes(Config.from_env(), as_json=as_json)
    disk = open_cache()
    by_kind = items_by_kind(disk)
    require_kind(kind, by_kind)
    items = [item for each, listed in by_kind.items() if kind in (None, each) for item in listed]
    damaged: dict[str, str] = {}
    with progress("verifying", len(items)) as bar:
        for item in items:
            bar.step(item.digest[:12])
            if why := damage(disk, item.digest):
                damaged[item.digest] = why
    if repair:
        for digest in damaged:
            disk.remove(digest)
    if as_json:
        print_json({"checked": len(items), "damaged": damaged, "repaired": repair})
    else:
        for digest, reason in damaged.items():
            print_line(f"{digest}  {reason}")
        removed = ", removed" if repair and damaged else ""
        print_message(f"Checked {count(len(items), 'file')}: {len(damaged)} damaged{removed}")
    return 1 if damaged and not repair else 0


@command.command()
@click.option("--limit", metavar="SIZE", help="Bytes to keep. Default: the limit of the cache.")
@click.option("--files", type=click.IntRange(min=0), metavar="N", help="Number of files to keep.")
@_KIND
@_JSON
def prune(limit: str | None, files: int | None, kind: str | None, as_json: bool) -> None:
    """Remove the least recently used entries.

    Entries are removed until the cache is within its limits. With --kind, entries of that kind are
    removed until they alone are within the limits. Files of writers that were killed are removed as
    well.

    \b
    Examples:
      preheat cache prune --limit 2G
      preheat cache prune --kind triton --limit 500M
    """
    most = None if limit is None else setting_values.size("--limit", limit)
    disk = open_cache()
    removed = (0, 0) if kind is None else _prune_kind(disk, kind, most, files)
    swept = disk.sweep() if kind is not None else disk.sweep(limit=most, max_files=files)
    gone, freed = removed[0] + swept.files, removed[1] + swept.bytes
    if as_json:
        print_json({"removed_files": gone, "removed_bytes": freed})
    elif gone:
        print_message(f"Removed {count(gone, 'file')} ({size(freed)})")
    else:
        print_message("Nothing was removed")


def _prune_kind(disk: DiskStore, kind: str, limit: int | None, files: int | None) -> tuple[int, int]:
    """Remove entries of one kind, the least recently used first; return their number and size."""
    config = Config.from_env()
    max_bytes = config.cache_limit if limit is None else limit
    most_files = config.cache_files if files is None else files
    by_kind = items_by_kind(disk)
    require_kind(kind, by_kind)
    items = sorted(by_kind[kind], key=lambda item: item.last_read)
    left, held = len(items), sum(item.bytes for item in items)
    for item in items:
        if left <= most_files and held <= max_bytes:
            break
        if not item.pinned:
            disk.remove(item.digest)
            left, held = left - 1, held - item.bytes
    return len(items) - left, sum(item.bytes for item in items) - held


@command.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@_JSON
def clear(keys: tuple[str, ...], as_json: bool) -> None:
    """Remove the entries named by KEY, or all entries. Pinned entries are removed as well.

    \b
    Examples:
      preheat cache clear
      preheat cache clear 3f9a12 77b0c4
    """
    disk = open_cache()
    items = {item.digest: item for item in disk.items()}
    if keys:
        chosen = {digest_at(disk, key) for key in keys}
        lists = header_lists(disk, chosen)
        unused = [listing for listing, referred in lists.items() if referred <= chosen]
        gone = [items[digest] for digest in (*chosen, *unused) if digest in items]
        for item in gone:
            disk.unpin(item.digest)
            disk.remove(item.digest)
    else:
        chosen = {digest for digest in items if kind_of(disk, digest)}
        gone = list(items.values())
        disk.clear()
    freed = sum(item.bytes for item in gone)
    if as_json:
        counts = {"removed_entries": len(chosen), "removed_files": len(gone)}
        print_json({**counts, "removed_bytes": freed})
    elif gone:
        print_message(f"Removed {count(len(chosen), 'entry')} ({size(freed)})")
    else:
        print_message("The cache is empty")


@command.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@_JSON
def pin(keys: tuple[str, ...], as_json: bool) -> None:
    """Never evict these entries. Their header lists are not evicted either.

    \b
    Example:
      preheat cache pin 3f9a12
    """
    disk = open_cache()
    chosen = list(dict.fromkeys(digest_at(disk, key) for key in keys))
    lists = header_lists(disk, chosen)
    for digest in chosen:
        disk.pin(digest, *(listing for listing, referred in lists.items() if digest in referred))
    _report_pins("pinned", chosen, as_json)


@command.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@_JSON
def unpin(keys: tuple[str, ...], as_json: bool) -> None:
    """Allow the eviction of entries again.

    \b
    Example:
      preheat cache unpin 3f9a12
    """
    disk = open_cache()
    chosen = list(dict.fromkeys(digest_at(disk, key) for key in keys))
    for digest in chosen:
        disk.unpin(digest)
    _report_pins("unpinned", chosen, as_json)


def _report_pins(what: str, chosen: list[str], as_json: bool) -> None:
    if as_json:
        print_json({what: chosen})
    else:
        print_message(f"{what.capitalize()} {count(len(chosen), 'entry')}")
