"""Bakes fill shared stores, also with entries that the cache of this machine already has."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from preheat.store.signing.keys import SigningKey
from tests.adapters.fake import write_library
from tests.processes import start_process, wait_for_exit
from tests.store.remote.proxy import Proxy
from tests.store.remote.stores import Store

_MANIFEST = """\
version = 1

[[program]]
file = "plain.cu"

[[program]]
file = "scaled.cu"

[[foreign]]
kind = "fakelib"
name = "twice"
request = '{"function": "twice", "env": {}}'
arch = ["sm_90"]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with a manifest: programs without and with a header, and another library."""
    (tmp_path / "plain.cu").write_text('extern "C" __global__ void k(int* x) { *x = 1; }\n')
    (tmp_path / "by.h").write_text("#define BY 2\n")
    source = '#include "by.h"\nextern "C" __global__ void s(int* x) { *x = BY; }\n'
    (tmp_path / "scaled.cu").write_text(source)
    (tmp_path / "kernels.toml").write_text(_MANIFEST)
    write_library(tmp_path / "lib")
    return tmp_path


def run(place: Path, cache: str, *words: str, **variables: str) -> tuple[str, str]:
    """Run a command of preheat with a cache of its own, and return its output and its messages."""
    env: Mapping[str, str] = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PREHEAT_")},
        "PYTHONPATH": os.pathsep.join([str(place / "lib"), *filter(None, sys.path)]),
        "PREHEAT_CACHE_DIR": str(place / cache),
        "PREHEAT_LOCK_DIR": str(place / f"{cache}-locks"),
        **variables,
    }
    command = [sys.executable, "-m", "preheat", *words]
    process = start_process(command, env=env, cwd=place)
    output, messages = wait_for_exit(process)
    assert process.returncode == 0, messages
    return output, messages


def shared(url: str) -> dict[str, str]:
    return {"PREHEAT_REMOTE": url, "PREHEAT_REMOTE_UNSIGNED": "1"}


def objects(store: Store) -> list[str]:
    return [name for name in store.open().names() if "/leases/" not in name]


def test_a_bake_of_what_the_cache_has_fills_an_empty_redis(
    place: Path, open_store: Callable[[str], Store]
) -> None:
    store = open_store("redis")
    run(place, "baker", "bake", "kernels.toml", "--arch", "sm_90")
    assert objects(store) == []
    output, messages = run(
        place, "baker", "bake", "kernels.toml", "--arch", "sm_90", **shared(store.url())
    )
    assert output.splitlines()[1].split()[:4] == ["sm_90", "3", "0", "3"]  # Nothing was compiled.
    assert "the shared store remote has 3 entries, 3 of them copied from this machine" in messages
    assert len(objects(store)) == 4  # with the list of header states
    _, messages = run(place, "other", "check", "kernels.toml", "--arch", "sm_90", **shared(store.url()))
    assert "everything is in the cache" in messages
    _, messages = run(place, "baker", "bake", "kernels.toml", "--arch", "sm_90", **shared(store.url()))
    assert "the shared store remote has 3 entries\n" in messages


def test_a_bake_without_its_redis_succeeds_and_says_what_is_missing_there(
    place: Path, open_store: Callable[[str], Store], open_proxy: Callable[..., Proxy]
) -> None:
    store = open_store("redis")
    assert store.server is not None
    proxy = open_proxy(store.server.port)
    url = store.url(port=proxy.port)
    run(place, "baker", "bake", "kernels.toml", "--arch", "sm_90")
    proxy.refuse()
    bake = ("bake", "kernels.toml", "--arch", "sm_90", "-o", "again.heat")
    _, messages = run(place, "baker", *bake, **shared(url))
    assert "again.heat: 3 baked" in messages
    assert "warning: the shared store remote lacks 3 of 3 entries: " in messages
    output, _ = run(place, "baker", *bake, "--json", **shared(url))
    (row,) = json.loads(output)["stores"]
    assert (row["present"], row["written"], row["missing"]) == (0, 0, 3)
    assert objects(store) == []


def test_a_store_that_is_dead_or_refused_is_reported_once(place: Path) -> None:
    """The parts of a bake share a builder, and with it what it knows of its stores."""
    (place / "programs.toml").write_text(_MANIFEST.partition("[[foreign]]")[0])
    bake = ("bake", "programs.toml", "--arch", "sm_90")
    _, messages = run(place, "one", *bake, **shared("redis://127.0.0.1:1"))
    assert messages.count("remote: cannot ") == 1, messages
    assert "lacks 2 of 2 entries: redis://127.0.0.1:1: Connection refused" in messages
    _, messages = run(place, "two", *bake, PREHEAT_REMOTE="redis://127.0.0.1:1")
    assert messages.count("redis://127.0.0.1:1 is not used") == 1, messages


def test_a_bake_without_a_key_to_sign_says_that_it_fills_nothing(
    place: Path, open_store: Callable[[str], Store]
) -> None:
    SigningKey.new().public.save(place / "trusted.pem", comment="# for a reader")
    bake = ("bake", "kernels.toml", "--arch", "sm_90")
    keys = {"PREHEAT_TRUSTED_KEYS": str(place / "trusted.pem")}
    store = open_store("redis")
    _, messages = run(place, "reader", *bake, PREHEAT_REMOTE=store.url(), **keys)
    assert "no shared store was filled, because PREHEAT_SIGNING_KEY is not set" in messages
    assert objects(store) == []
