"""`preheat cache`: list, explain, verify and clean the cache."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import click

from preheat import config as settings
from preheat.arch import Arch
from preheat.artifact import Artifact, EntryPoint, Header
from preheat.build.builder import Builder
from preheat.build.cache_directory import open_disk
from preheat.build.nearest import Near, nearest
from preheat.cache import DiskTier, codec
from preheat.cache.layer import Item
from preheat.cli.output import columns, count, duration, print_json, print_message, size
from preheat.cli.programs import ProgramOptions, program_options, targets
from preheat.config import Config
from preheat.errors import InputError, PreheatError
from preheat.events import Events, Stats, logged_events
from preheat.key import explain
from preheat.program import Program
from preheat.progress import progress
from preheat.toolchain.headers import TOOLKIT, decode_states, is_header_list

__all__ = ["artifact_at", "artifacts", "command"]

_JSON = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")


@click.group()
def command() -> None:
    """Inspect and clean the cache.

    An entry is one compiled program. KEY is the start of its key, as `preheat cache ls` shows it. The
    limits count files: a program with header files also has a header list, by which it is found.
    """


@command.command("dir")
def directory() -> None:
    """Print the directory of the cache."""
    click.echo(str(_open().root))


@command.command()
@click.option("--reset", is_flag=True, help="Set all counters to zero.")
@_JSON
def stats(reset: bool, as_json: bool) -> None:
    """Show the size of the cache, and counters of all processes that used it."""
    config = Config.from_env()
    disk = _open()
    journal = disk.journal()
    if reset:
        journal.clear()
    counters = journal.total()
    items = list(disk.items())
    entries = sum(_is_entry(disk, item) for item in items)
    held = sum(item.bytes for item in items)
    if as_json:
        now = {"directory": str(disk.root), "entries": entries, "files": len(items), "bytes": held}
        limits = {"bytes": config.cache_limit, "files": config.cache_files}
        print_json({**now, "limits": limits, "counters": dict(sorted(counters.items()))})
        return
    rows = [
        ("directory", str(disk.root)),
        ("entries", f"{entries:,}"),
        ("files", f"{len(items):,} of at most {config.cache_files:,}"),
        ("size", f"{size(held)} of at most {size(config.cache_limit)}"),
        *_counter_rows(counters),
    ]
    for line in columns(rows):
        click.echo(line)


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


def _split(kinds: dict[str, float]) -> str:
    total = f"{sum(kinds.values()):,.0f}"
    parts = ", ".join(f"{name} {number:,.0f}" for name, number in sorted(kinds.items()))
    return f"{total} ({parts})" if parts else total


@command.command()
@_JSON
def ls(as_json: bool) -> None:
    """List the entries, most recently used first."""
    rows = list(artifacts("reading"))
    if as_json:
        print_json([_summary(item, artifact) for item, artifact in rows])
        return
    if not rows:
        print_message("The cache is empty")
        return
    now = time.time()
    table = (
        (
            artifact.digest[:12],
            artifact.label,
            str(artifact.arch),
            size(item.bytes),
            f"{duration(max(now - item.last_read, 1))} ago" + (" pinned" if item.pinned else ""),
            ", ".join(entry.title for entry in artifact.entries),
        )
        for item, artifact in rows
    )
    for line in columns([("KEY", "PROGRAM", "ARCH", "SIZE", "USED", "KERNELS"), *table], right=(3,)):
        click.echo(line)
    print_message(f"{count(len(rows), 'entry')}, {size(sum(item.bytes for item, _ in rows))}")


def _summary(item: Item, artifact: Artifact) -> dict[str, Any]:
    return {
        "key": artifact.digest,
        "program": artifact.label,
        "arch": str(artifact.arch),
        "bytes": item.bytes,
        "last_read": item.last_read,
        "pinned": item.pinned,
        "toolchain": artifact.toolchain,
        "kernels": [entry.title for entry in artifact.entries],
    }


@command.command()
@click.argument("key")
@click.option("--ptx", is_flag=True, help="Print the PTX instead.")
@click.option("--headers", is_flag=True, help="List every header file, those of the toolkit too.")
@_JSON
def show(key: str, ptx: bool, headers: bool, as_json: bool) -> None:
    """Print the details of one entry."""
    artifact = artifact_at(key)
    if ptx:
        click.echo(artifact.ptx.decode("utf-8", "replace"))
    elif as_json:
        print_json(
            {
                "key": artifact.digest,
                "program": artifact.label,
                "arch": str(artifact.arch),
                "toolchain": artifact.toolchain,
                "parts": [list(part) for part in artifact.parts],
                "names": dict(artifact.names),
                "kernels": [_as_dict(entry) for entry in artifact.entries],
                "headers": [header._asdict() for header in artifact.headers],
                "cubin_bytes": len(artifact.cubin),
                "ptx_bytes": len(artifact.ptx),
                "provenance": artifact.provenance._asdict(),
                "log": artifact.log,
            }
        )
    else:
        for line in _described(artifact, all_headers=headers):
            click.echo(line)


def _described(artifact: Artifact, *, all_headers: bool) -> Iterator[str]:
    made = artifact.provenance
    yield from columns(
        [
            ("key", artifact.digest),
            ("program", artifact.label),
            ("architecture", str(artifact.arch)),
            ("compiler", artifact.toolchain),
            ("compiled", f"{made.created} in {duration(made.seconds)}"),
            ("code", f"cubin {size(len(artifact.cubin))}, PTX {size(len(artifact.ptx))}"),
        ]
    )
    yield "\nkernels"
    for entry in artifact.entries:
        yield from (f"  {line}" for line in _kernel(entry))
    yield "\nkey parts"
    yield from (f"  {line}" for line in columns(artifact.parts))
    if artifact.headers:
        yield f"\nheaders ({len(artifact.headers):,})"
        yield from (f"  {line}" for line in _headers(artifact.headers, everything=all_headers))
    if artifact.log.strip():
        yield "\ncompiler log"
        yield from (f"  {line}" for line in artifact.log.rstrip().split("\n"))


def _headers(headers: Sequence[Header], *, everything: bool) -> Iterator[str]:
    """Yield name and digest of header files. Without `everything`, count those of the toolkit."""
    own = [header for header in headers if everything or header.root not in TOOLKIT]
    yield from columns((h.root, h.name, h.digest[:12]) for h in own)
    if len(own) < len(headers):
        yield f"{len(headers) - len(own):,} of the CUDA toolkit; --headers lists them"


def _as_dict(entry: EntryPoint) -> dict[str, Any]:
    return {
        **entry._asdict(),
        "parameters": [parameter._asdict() for parameter in entry.parameters],
        "resources": entry.resources._asdict() if entry.resources else None,
    }


def _kernel(entry: EntryPoint) -> Iterator[str]:
    yield str(entry) + (f"  [{entry.name}]" if entry.cpp else "")
    for index, parameter in enumerate(entry.parameters):
        where = f"offset {parameter.offset}, {count(parameter.size, 'byte')}, {parameter.kind}"
        yield f"  {index}: {parameter}  ({where})"
    if used := entry.resources:
        yield (
            f"  {count(used.registers, 'register')}, shared {size(used.shared)}, "
            f"stack {size(used.stack)}, spills {size(used.spill_stores)} out "
            f"{size(used.spill_loads)} in, {count(used.barriers, 'barrier')}"
        )


@command.command()
@click.argument("what", nargs=-1, required=True, metavar="FILE | KEY KEY")
@click.option("--arch", metavar="ARCH", help="Architecture of FILE, such as sm_90.")
@program_options
@_JSON
def why(what: tuple[str, ...], arch: str | None, given: ProgramOptions, as_json: bool) -> None:
    """Explain why FILE compiles again, or how two entries differ.

    \b
    Examples:
      preheat cache why saxpy.cu --arch sm_90
      preheat cache why 3f9a12 77b0c4
    """
    if len(what) == 2:
        differences = explain(artifact_at(what[0]).parts, artifact_at(what[1]).parts)
        if as_json:
            print_json({"differences": list(differences)})
            return
        for line in differences:
            click.echo(line)
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
    found = builder.why(program, arch)
    if isinstance(found, Artifact):
        if as_json:
            print_json({"hit": True, "key": found.digest})
        else:
            click.echo(f"{program.label} for {arch} is cached: {found.digest[:12]}")
        return
    stored = (artifact for _, artifact in artifacts("comparing"))
    near = nearest(builder.key(program, arch).table, program.label, stored)
    _print_miss(found.reason, near, as_json)


def _print_miss(reason: str, near: Near | None, as_json: bool) -> None:
    if as_json:
        key, differences = (near.artifact.digest, near.differences) if near else (None, ())
        row = {"hit": False, "reason": reason, "nearest": key, "differences": list(differences)}
        print_json(row)
        return
    click.echo(f"not cached: {reason}")
    if near is None:
        return
    click.echo(f"nearest entry: {near}")
    for line in near.differences or ("all key parts are equal; a header file differs",):
        click.echo(f"  {line}")


@command.command()
@click.option("--repair", is_flag=True, help="Remove the damaged files.")
@_JSON
def verify(repair: bool, as_json: bool) -> int:
    """Read every file of the cache and check it. Exit status 1 when one is damaged."""
    disk = _open()
    items = list(disk.items())
    damaged: dict[str, str] = {}
    with progress("verifying", len(items)) as bar:
        for item in items:
            bar.step(item.digest[:12])
            if why := _damage(disk, item.digest):
                damaged[item.digest] = why
    if repair:
        for digest in damaged:
            disk.remove(digest)
    if as_json:
        print_json({"checked": len(items), "damaged": damaged, "repaired": repair})
    else:
        for digest, reason in damaged.items():
            click.echo(f"{digest}  {reason}")
        removed = ", removed" if repair and damaged else ""
        print_message(f"Checked {count(len(items), 'file')}: {len(damaged)} damaged{removed}")
    return 1 if damaged and not repair else 0


def _damage(disk: DiskTier, digest: str) -> str | None:
    """Return why an entry is damaged, or None when it is intact or missing."""
    reasons: list[str] = []
    found = Events(lambda _, fields: reasons.append(str(fields.get("reason") or fields.get("error"))))
    blob = disk.reader(found).get(digest)
    if blob is None:
        return reasons[0] if reasons else None
    try:
        meta, sections = codec.unpack_checked(blob)
        if meta.get("kind") == "artifact":
            Artifact.decode(digest, meta, sections)
        elif meta.get("kind") == "headers":
            decode_states(meta)
    except codec.DamagedEntryError as bad:
        return str(bad)
    return None


@command.command()
@click.option("--limit", metavar="SIZE", help="Bytes to keep. Default: the limit of the cache.")
@click.option("--files", type=click.IntRange(min=0), metavar="N", help="Number of files to keep.")
@_JSON
def prune(limit: str | None, files: int | None, as_json: bool) -> None:
    """Remove the least recently used entries until the cache is within its limits.

    Files of writers that were killed are removed as well.
    """
    most = None if limit is None else settings.size("--limit", limit)
    swept = _open().sweep(limit=most, max_files=files)
    if as_json:
        print_json({"removed_files": swept.files, "removed_bytes": swept.bytes})
    elif swept.files:
        print_message(f"Removed {count(swept.files, 'file')} ({size(swept.bytes)})")
    else:
        print_message("Nothing was removed")


@command.command()
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@_JSON
def clear(keys: tuple[str, ...], as_json: bool) -> None:
    """Remove the entries named by KEY, or all of them, pinned ones too."""
    disk = _open()
    items = {item.digest: item for item in disk.items()}
    if keys:
        entries = {_digest(disk, key) for key in keys}
        lists = _header_lists(disk, entries)
        unused = [listing for listing, referred in lists.items() if referred <= entries]
        gone = [items[digest] for digest in (*entries, *unused) if digest in items]
        for item in gone:
            disk.unpin(item.digest)
            disk.remove(item.digest)
    else:
        entries = {item.digest for item in items.values() if _is_entry(disk, item)}
        gone = list(items.values())
        disk.clear()
    freed = sum(item.bytes for item in gone)
    if as_json:
        counts = {"removed_entries": len(entries), "removed_files": len(gone)}
        print_json({**counts, "removed_bytes": freed})
    elif gone:
        print_message(f"Removed {count(len(entries), 'entry')} ({size(freed)})")
    else:
        print_message("The cache is empty")


@command.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@_JSON
def pin(keys: tuple[str, ...], as_json: bool) -> None:
    """Never evict these entries, nor the header lists by which they are found."""
    disk = _open()
    entries = list(dict.fromkeys(_digest(disk, key) for key in keys))
    lists = _header_lists(disk, entries)
    for digest in entries:
        disk.pin(digest, *(listing for listing, referred in lists.items() if digest in referred))
    _report_pins("pinned", entries, as_json)


@command.command()
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@_JSON
def unpin(keys: tuple[str, ...], as_json: bool) -> None:
    """Allow the eviction of entries again."""
    disk = _open()
    entries = list(dict.fromkeys(_digest(disk, key) for key in keys))
    for digest in entries:
        disk.unpin(digest)
    _report_pins("unpinned", entries, as_json)


def _report_pins(what: str, entries: list[str], as_json: bool) -> None:
    if as_json:
        print_json({what: entries})
    else:
        print_message(f"{what.capitalize()} {count(len(entries), 'entry')}")


def _is_entry(disk: DiskTier, item: Item) -> bool:
    """Return True if a file of the cache is a compiled program, not a header list or a note."""
    first_bytes = disk.first_bytes(item.digest)
    return first_bytes is not None and not is_header_list(first_bytes)


def _header_lists(disk: DiskTier, entries: Collection[str]) -> dict[str, set[str]]:
    """Return the header lists that refer to any of `entries`, each with all entries it refers to."""
    reader = disk.reader(Events())
    found = {}
    for item in disk.items():
        if not _is_entry(disk, item) and (blob := reader.get(item.digest)):
            with suppress(codec.DamagedEntryError):
                meta, _ = codec.unpack_checked(blob)
                found[item.digest] = {digest for _, digest in decode_states(meta)}
    return {listing: referred for listing, referred in found.items() if referred & set(entries)}


def _open() -> DiskTier:
    """Open the cache of the settings. Raises when it is off or no directory can be used."""
    config = Config.from_env()
    if not config.cache:
        raise InputError("the cache is off", hint="unset PREHEAT_CACHE")
    disk = open_disk(config, logged_events())
    if disk is None:
        raise PreheatError("no cache directory can be used; see 'preheat doctor'")
    return disk


def artifacts(doing: str) -> Iterator[tuple[Item, Artifact]]:
    """Yield every intact artifact, most recently used first. The cache is only read."""
    disk = _open()
    reader = disk.reader(Events())
    items = sorted(disk.items(), key=lambda item: -item.last_read)
    with progress(doing, len(items), show=None if len(items) > 1000 else False) as bar:
        for item in items:
            bar.step(item.digest[:12])
            blob = reader.get(item.digest)
            if blob is None:
                continue
            with suppress(codec.DamagedEntryError):
                meta, sections = codec.unpack_checked(blob)
                if meta.get("kind") == "artifact":
                    yield item, Artifact.decode(item.digest, meta, sections)


def _digest(disk: DiskTier, key: str) -> str:
    """Return the digest of the only entry whose key starts with `key`."""
    prefix = key.strip().lower()
    if len(prefix) < 4 or any(char not in "0123456789abcdef" for char in prefix):
        hint = "use at least 4 digits of a key from 'preheat cache ls'"
        raise InputError(f"{key!r} is not a key", hint=hint)
    alike = [item for item in disk.items() if item.digest.startswith(prefix)]
    found = [item.digest for item in alike if _is_entry(disk, item)]
    if not found:
        raise InputError(f"no entry has the key {key}", hint="'preheat cache ls' lists the entries")
    if len(found) > 1:
        raise InputError(f"{key} is the start of {len(found)} keys", hint="give more digits")
    return found[0]


def artifact_at(key: str) -> Artifact:
    """Return the artifact whose key starts with `key`."""
    disk = _open()
    digest = _digest(disk, key)
    blob = disk.reader(Events()).get(digest)
    try:
        if blob is None:
            raise codec.DamagedEntryError
        return Artifact.decode(digest, *codec.unpack_checked(blob))
    except codec.DamagedEntryError:
        raise PreheatError(
            f"entry {digest[:12]} is damaged; 'preheat cache verify --repair' removes it"
        ) from None
