"""Entries of every kind, and stores of tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from preheat.ahead.stores import open_directory
from preheat.model.arch import Arch
from preheat.model.artifact import Artifact, Header
from preheat.model.config import Config
from preheat.model.events import Events
from preheat.model.foreign import ForeignEntry
from preheat.store import DiskStore, LayerStore
from preheat.store.remote.server import Server
from preheat.store.remote.store import RemoteStore
from preheat.store.signing.keys import Keys
from preheat.toolchain.headers.states import HeaderState, decode_states, pack_states
from tests.store.remote.memory_engine import MemoryEngine

__all__ = ["artifact", "code_of", "directory", "foreign", "listing", "remote", "settings"]

States = list[tuple[HeaderState, str]]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def artifact(name: str, arch: str = "sm_90") -> Artifact:
    code = name.encode() * 100
    return Artifact(digest(name), name, Arch.parse(arch), "nvrtc", (), (), cubin=code, ptx=b"")


def foreign(name: str, arch: str | None = "sm_90", kind: str = "triton") -> ForeignEntry:
    target = None if arch is None else Arch.parse(arch)
    return ForeignEntry(kind, name, {"cubin": name.encode() * 50}, "", name, target)


def listing(program: str, *codes: str) -> tuple[str, bytes]:
    """Return the digest and the bytes of the header list of a program that leads to `codes`."""
    states: States = [
        (HeaderState((Header("0", "a.h", digest(code)),), ()), digest(code)) for code in codes
    ]
    return digest(f"list of {program}"), pack_states(digest(f"list of {program}"), program, states)


def code_of(blob: bytes | None) -> list[str]:
    """Return the digests that a header list leads to."""
    from preheat.model import codec

    assert blob is not None
    return [code for _, code in decode_states(codec.unpack_checked(blob).meta)]


def settings(tmp_path: Path, **more: str) -> Config:
    """Return settings with locks of the test's own, and no cache of the user."""
    env = {"PREHEAT_CACHE_DIR": tmp_path / "unused", "PREHEAT_LOCK_DIR": tmp_path / "locks"}
    return Config.from_env({**{name: str(path) for name, path in env.items()}, **more})


def directory(tmp_path: Path, name: str, entries: Mapping[str, bytes], *, write: bool) -> LayerStore:
    """Return a directory that holds `entries`."""
    config = settings(tmp_path)
    disk = DiskStore(tmp_path / name, Events(), lock_dir=config.lock_dir)
    for key, blob in entries.items():
        disk.put(key, blob)
    (tmp_path / name).mkdir(mode=0o700, exist_ok=True)
    return open_directory(tmp_path / name, config, write=write)


def remote(engine: MemoryEngine, keys: Keys = Keys()) -> RemoteStore:  # noqa: B008 - frozen
    """Return a store on a server in memory."""
    events = Events()
    server = Server("remote", lambda: engine, events, timeout=30.0)
    store = RemoteStore(server, events, read_keys=lambda: keys)
    store.name = engine.name
    return store
