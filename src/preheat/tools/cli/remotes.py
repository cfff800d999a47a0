"""Shared stores on the command line: `preheat doctor`, and `preheat cache verify --remote`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from preheat.build.remotes import TrustPolicy, for_command, open_remotes, remotes_of, trust_policy
from preheat.errors import InputError, PreheatError
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.process.progress import progress
from preheat.store.remote.checks import (
    PROBLEMS,
    Probe,
    Verified,
    list_objects,
    permissions_of,
    probe,
    verify,
)
from preheat.store.remote.engine import Engine, RemoteError
from preheat.store.remote.store import RemoteStore
from preheat.store.remote.url import Remote
from preheat.tools.cli.findings import Finding
from preheat.tools.cli.output import count, duration, print_error, print_json, print_line, print_message

__all__ = ["remote_findings", "verify_remotes"]

_AMONG_HOSTS = "one compile among hosts"
_UNSIGNED = (
    "who can write to it can run code here: sign entries ('preheat keys new'), and unset "
    "PREHEAT_REMOTE_UNSIGNED"
)


def remote_findings(config: Config) -> Iterator[Finding]:
    """Yield what `preheat doctor` says of each shared store of the settings."""
    try:
        stores = _stores(config)
    except PreheatError as error:
        yield Finding("shared store", "fail", str(error), error.hint or "correct PREHEAT_REMOTE")
        return
    for remote, alone in stores:
        try:
            with _open(remote, alone) as (engine, tier):
                tier.keys()
                yield _finding(remote, tier, probe(engine, write=tier.writable), config)
        except _UnusableError as error:
            fix = "preheat works without it; start the server, or correct the settings"
            yield Finding("shared store", "warn", str(error), error.hint or fix)


def _finding(remote: Remote, tier: RemoteStore, found: Probe, config: Config) -> Finding:
    unsigned = trust_policy(remote, config) is not TrustPolicy.SIGNED
    properties = _properties(tier, found, unsigned=unsigned, read_only=remote.read_only)
    detail = f"{remote.name}: {', '.join(properties)}"
    if fix := _fix(remote, found):
        return Finding("shared store", "warn", detail, fix)
    if unsigned and remote.network:
        return Finding("shared store", "warn", detail, _UNSIGNED)
    return Finding("shared store", "ok", detail)


def _fix(remote: Remote, found: Probe) -> str | None:
    """Return what a refusal of the server means, its reason, and how to permit it, or None."""
    permissions = permissions_of(remote)
    if permissions is None:  # Nothing was written, so nothing was refused.
        return None
    if found.write_refusal:
        return f"it is only read: {found.write_refusal}; to permit writes, {permissions.write}"
    if found.delete_refusal:
        refused = f"permit deletes: {permissions.delete}; {permissions.without_delete}"
        return f"{refused}; the server says: {found.delete_refusal}"
    if found.condition_refusal:
        remedy = f"; to permit them, {permissions.condition}" if permissions.condition else ""
        return f"it refuses the conditional writes that leases need: {found.condition_refusal}{remedy}"
    return None


def _stores(config: Config) -> list[tuple[Remote, Config]]:
    """Return each shared store, with settings that have only this store. Raises `ConfigError`."""
    alone = [replace(config, remote=(url,)) for url in config.remote]
    return [(remotes_of(each)[0], each) for each in alone]


class _UnusableError(PreheatError):
    """A shared store cannot be used."""


@contextmanager
def _open(remote: Remote, alone: Config) -> Iterator[tuple[Engine, RemoteStore]]:
    """Open a shared store; `_UnusableError` when it cannot be, or fails in the block."""
    refused: list[str] = []
    events = Events()
    events.subscribe(lambda _, fields: refused.append(str(fields["reason"])), "refused")
    tiers = open_remotes(alone, events)
    if not tiers:
        raise _UnusableError(f"{remote.name} is not used", hint=refused[0])
    (tier,) = tiers
    try:
        yield tier.server.engine(), tier
    except RemoteError as error:
        reason = str(error).removeprefix(f"{remote.name}: ")
        raise _UnusableError(f"{remote.name} cannot be used: {reason}") from None
    finally:
        tier.server.close()


def _properties(tier: RemoteStore, found: Probe, *, unsigned: bool, read_only: bool) -> Iterator[str]:
    yield f"{duration(found.seconds)} a request"
    yield "unsigned entries are accepted, and none is signed" if unsigned else "entries are signed"
    if read_only:
        yield "read only"
        return
    if not tier.writable:
        yield "read only, because there is no key to sign with"
        return
    if found.write_refusal:
        yield "not writable"
        return
    yield "writable"
    if found.delete_refusal:
        yield "objects cannot be deleted"
    elif found.conditional:
        yield _AMONG_HOSTS
    else:
        yield f"{_AMONG_HOSTS} is best effort: no atomic operations"


# Verifying


def verify_remotes(config: Config, *, as_json: bool) -> int:
    """Read and check every object of all shared stores; return the exit status.

    A store that cannot be used is an error after the others were checked.
    """
    if not config.remote:
        raise InputError("there is no shared store", hint="set PREHEAT_REMOTE to its URL")
    reports: dict[str, list[Verified]] = {}
    unusable: list[_UnusableError] = []
    for remote, alone in _stores(config):
        try:
            reports[remote.name] = _verify(remote, alone)
        except _UnusableError as error:
            unusable.append(error)
    if as_json and reports:
        print_json({name: _as_json(found) for name, found in reports.items()})
    elif not as_json:
        for name, found in reports.items():
            _print(name, found)
    for each in unusable[:-1]:
        print_error(str(each), each.hint)
    if unusable:
        raise unusable[-1]
    return 1 if any(not each.ok for found in reports.values() for each in found) else 0


def _verify(remote: Remote, alone: Config) -> list[Verified]:
    with _open(remote, for_command(alone)) as (_, tier):
        server = tier.server
        names = server.call("names", list_objects)
        found = []
        with progress(f"verifying {remote.name}", len(names)) as bar:
            for each in verify(server.get, names, tier.keys().trusted):
                bar.step(each.name.rpartition("/")[2][:12])
                found.append(each)
        return found


def _as_json(found: list[Verified]) -> dict[str, object]:
    problems = {kind: {e.name: e.reason for e in found if e.verdict == kind} for kind in PROBLEMS}
    return {"checked": len(found), "problems": problems}


def _print(name: str, found: list[Verified]) -> None:
    for each in found:
        if not each.ok:
            print_line(f"{each.name}  {each.verdict}: {each.reason}")
    counted = Counter(each.verdict for each in found)
    problems = ", ".join(f"{counted[kind]} {kind}" for kind in PROBLEMS if counted[kind])
    print_message(f"{name}: checked {count(len(found), 'object')}: {problems or 'no problem'}")
