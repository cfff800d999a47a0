"""Machines that share a Redis and an S3 server, under random faults: every result is right.

`make torture-remote` causes a thousand faults. Sixteen processes with disks of their own request
entries all the time. Processes are killed and stopped, their clocks jump, connections stall and are
refused and reset, objects on the servers are damaged, and servers are killed and started again.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("opendal", reason="opendal is not installed")

from preheat.model import codec
from preheat.model.foreign import ForeignEntry, foreign_digest
from preheat.store.base import UntrustedError
from preheat.store.remote.url import entry_name
from preheat.store.signing import entries as envelope
from preheat.store.signing.keys import Keyring, SigningKey
from tests.conftest import LONG
from tests.processes import expect_success
from tests.torture import remote_faults
from tests.torture.conftest import Campaign as Extent
from tests.torture.remote_load import KIND, entry_of

KEYS = 3000 if LONG else 60
PROCESSES = 16 if LONG else 8


def read_logs(folder: Path) -> dict[str, list[list[str]]]:
    """Return the lines of all logs by their first word."""
    lines: dict[str, list[list[str]]] = {}
    for log in folder.glob("*.log"):
        if re.fullmatch(r"\d+\.log", log.name):
            for line in log.read_text().splitlines():
                words = line.split()
                lines.setdefault(words[0], []).append([log.stem, *words[1:]])
    return lines


def inspect(store: remote_faults.Shared, keys: Keyring) -> tuple[int, int, list[str]]:
    """Return how many entries a store has, how many are damaged, and what is wrong otherwise."""
    right = damaged = 0
    wrong = []
    for key in range(KEYS):
        digest = foreign_digest(KIND, str(key), "")
        name = entry_name(digest)
        data = store.read(name)
        if data is None:
            continue
        try:
            blob = envelope.unwrap(digest, data, keys)
        except UntrustedError:
            damaged += 1
            if name not in store.flipped:
                wrong.append(f"{name} is damaged, and nobody damaged it")
            continue
        assert codec.damage(digest, blob) is None
        right += 1
        entry = ForeignEntry.decode(digest, *codec.unpack(digest, blob))
        if entry.files != {"file": entry_of(key)}:
            wrong.append(f"{name} is signed and has another content")
    return right, damaged, wrong


def test_every_result_is_right_under_random_faults(tmp_path: Path, campaign: Extent) -> None:
    faults = campaign.rounds(quick=24, long=1000)
    seed = campaign.seed
    with remote_faults.campaign(tmp_path, seed, processes=PROCESSES, keys=KEYS) as running:
        running.run(faults, every=0.05 if LONG else 0.02, requests=3 if LONG else 1)
        ended, killed, failed = expect_success(running.load.nursery).split(maxsplit=2)
        lines = read_logs(tmp_path)
        assert failed.strip() == "[]", "a process failed: see its message"
        assert int(ended) == PROCESSES == len(lines["ended"])
        assert int(killed) == running.counts["kill"]
        assert running.counts.total() == faults
        # Every request of a process that was not killed has ended.
        survivors = {words[0] for words in lines["ended"]}
        wanted = Counter(words[0] for words in lines["wants"])
        got = Counter(words[0] for words in lines["has"])
        assert {number: wanted[number] for number in survivors} == {n: got[n] for n in survivors}
        # What a server has acknowledged is there, unless somebody damaged it.
        keys = Keyring.load((), SigningKey.load(tmp_path / "key.pem"))
        found = [inspect(store, keys) for store in running.stores]
        report(campaign, running, lines, found)
        assert [row for _, _, wrong in found for row in wrong] == []
        for store in running.stores:
            rows = lines["stored"]
            names = {entry_name(digest) for _, scheme, digest in rows if scheme == store.scheme}
            assert len(names) > 0
            assert names - store.engine.exists(names) == set(), "a server acknowledged them"


def report(
    extent: Extent,
    running: remote_faults.Campaign,
    lines: dict[str, list[list[str]]],
    found: list[tuple[int, int, list[str]]],
) -> None:
    """Print what was done, and add it to the summary of a long campaign."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(running.counts.items()))
    made = Counter(words[1] for words in lines["makes"])
    counted: Counter[str] = Counter()
    for _, *fields in lines.get("closed", []):
        for text in fields:
            name, _, value = text.partition("=")
            counted[name] += int(float(value))
    stores = ", ".join(f"{right} entries and {damaged} damaged" for right, damaged, _ in found)
    text = (
        f"seed {extent.seed}: {running.counts.total()} faults ({kinds}); {len(lines['has'])} requests, "
        f"all right; {len(made)} keys, {made.total()} compiles; {dict(counted)}; stores: {stores}"
    )
    extent.note(text)
    sys.stdout.write(f"{text}\n")
