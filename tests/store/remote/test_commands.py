"""Shared stores on the command line: `preheat doctor`, `cache verify --remote` and `cache stats`."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from preheat.store.remote.checks import permissions_of, verify
from preheat.store.remote.engine import Engine, RemoteError
from preheat.store.remote.resp import Connection
from preheat.store.remote.url import entry_name, parse_remote
from preheat.store.signing import entries as envelope
from preheat.store.signing.keys import SigningKey
from preheat.tools.cli import doctor
from tests.command import Cli, command_line
from tests.conftest import SAXPY
from tests.processes import expect_success, start_process
from tests.store.entries import blob_of, digest_of
from tests.store.remote.memory_engine import MemoryEngine
from tests.store.remote.servers import PASSWORD, Server
from tests.store.remote.stores import Store

PAGE = Path(__file__).parents[3] / "docs" / "shared.md"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    monkeypatch.setattr(doctor, "_test_compiles", lambda _: [])
    return command_line(capsys, monkeypatch, tmp_path, tmp_path / "cache")


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    key = SigningKey.new()
    key.save(tmp_path / "signing")
    (tmp_path / "trusted").write_text(key.public.pem())
    return key


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets the variables of shared stores."""

    def set_them(*urls: str, keys: str = "", unsigned: bool = False) -> None:
        monkeypatch.setenv("PREHEAT_REMOTE", " ".join(urls))
        if unsigned:
            monkeypatch.setenv("PREHEAT_REMOTE_UNSIGNED", "1")
        for name in keys.split():
            monkeypatch.setenv(
                {"signing": "PREHEAT_SIGNING_KEY", "trusted": "PREHEAT_TRUSTED_KEYS"}[name],
                str(tmp_path / name),
            )

    return set_them


def store_lines(cli: Cli) -> list[dict[str, Any]]:
    return [each for each in cli("doctor", "--json").json() if each["what"] == "shared store"]


# doctor


@pytest.mark.usefixtures("key")
def test_doctor_shows_what_each_server_does(served: Store, cli: Cli, use: Callable[..., None]) -> None:
    use(served.url(), keys="signing")
    (found,) = store_lines(cli)
    assert found["verdict"] == "ok"
    assert " a request, entries are signed, writable, " in found["detail"]
    conditional = served.kind in ("s3", "redis")
    assert "one compile among hosts" in found["detail"]
    assert ("best effort" not in found["detail"]) == conditional
    assert list(served.open().names()) == []  # Nothing is left behind.


@pytest.mark.parametrize(
    ("refused", "detail", "fix"),
    [
        ("write", ", not writable", "it is only read: memory://test: no write"),
        ("delete", ", writable, objects cannot be deleted", "permit deletes: "),
        ("create", ", writable, one compile among hosts is best effort", "conditional writes"),
    ],
)
def test_doctor_says_what_a_server_refuses(
    cli: Cli,
    use: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    key: SigningKey,
    refused: str,
    detail: str,
    fix: str,
) -> None:
    del key

    def refuse(verb: str, name: str) -> None:
        del name
        if verb == refused:
            raise RemoteError(f"memory://test: no {verb}")

    engine = MemoryEngine(before=refuse)
    monkeypatch.setattr("preheat.build.remotes.open_engine", lambda *_, **__: engine)
    use("redis://127.0.0.1:1/0", keys="signing")
    (found,) = store_lines(cli)
    assert found["verdict"] == "warn"
    assert detail in found["detail"]
    assert fix in found["fix"]
    assert f"no {refused}" in found["fix"]


WRITABLE = {
    "s3://bucket/kernels?region=us-east-1": ("s3:PutObject", "s3:DeleteObject", "leases"),
    "gs://bucket/kernels": ("storage.objects.create", "storage.objects.delete", "replaces no object"),
    "azblob://container/kernels?account=name": ("permissions c and w", "permission d", "this check"),
    "dav://127.0.0.1:1/kernels": ("PUT and MKCOL", "DELETE", "this check"),
    "redis://127.0.0.1:1/0": ("+set", "+del", "leases"),
    "file:///nowhere/kernels": ("write to the directory", "remove files", "leases"),
}


@pytest.mark.parametrize("url", WRITABLE)
@pytest.mark.parametrize("refused", ["write", "delete"])
@pytest.mark.usefixtures("key")
def test_doctor_names_the_permission_of_each_kind_of_store(
    cli: Cli, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch, url: str, refused: str
) -> None:
    def refuse(verb: str, name: str) -> None:
        del name
        if verb == refused:
            raise RemoteError(f"memory://test: no {verb}")

    engine = MemoryEngine(before=refuse)
    monkeypatch.setattr("preheat.build.remotes.open_engine", lambda *_, **__: engine)
    use(url, keys="signing")
    (found,) = store_lines(cli)
    write, delete, meaning = WRITABLE[url]
    assert (write if refused == "write" else delete) in found["fix"]
    assert (meaning in found["fix"]) == (refused == "delete")
    others = {each for row in WRITABLE.values() for each in row[:2]} - set(WRITABLE[url])
    assert not [each for each in others if each in found["fix"]]


def test_the_documentation_names_the_permission_of_each_kind_of_store() -> None:
    page = " ".join(PAGE.read_text().split())
    for url in WRITABLE:
        permissions = permissions_of(parse_remote(url))
        assert permissions is not None
        named = re.findall(r"[\w.]+[.:][\w.:/]+|Storage Blob [\w ]+|\b[A-Z]{3,}\b", str(permissions))
        assert [word for word in named if word not in page] == []


@pytest.mark.usefixtures("key")
def test_doctor_names_the_method_that_a_webdav_server_refuses(
    webdav: Server, cli: Cli, use: Callable[..., None]
) -> None:
    use(webdav.url("doctor").replace("/stores/", "/undeletable/"), keys="signing")
    (found,) = store_lines(cli)
    assert found["verdict"] == "warn"
    assert "writable, objects cannot be deleted" in found["detail"]
    assert "let the server accept DELETE from this user (nginx: dav_methods)" in found["fix"]


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("set", "to permit writes, let the user run SET on the keys of the store"),
        ("del", "permit deletes: let the user run DEL on the keys of the store"),
        ("eval", "to permit them, let the user run EVAL"),
    ],
)
@pytest.mark.usefixtures("key")
def test_doctor_names_the_command_that_an_acl_of_redis_refuses(
    redis: Server, cli: Cli, use: Callable[..., None], command: str, hint: str
) -> None:
    rules = ["on", ">secret", "~*", "+@all", f"-{command}"]
    with closing(Connection.open("127.0.0.1", redis.port, secure=False, timeout=10)) as administrator:
        login = ["AUTH", PASSWORD]
        administrator.call([login, ["ACL", "SETUSER", f"no-{command}", *rules]], 10)
        use(f"redis://no-{command}:secret@127.0.0.1:{redis.port}/0?prefix=doctor", keys="signing")
        (found,) = store_lines(cli)
        administrator.call([["ACL", "DELUSER", f"no-{command}"]], 10)
    assert found["verdict"] == "warn"
    assert hint in found["fix"]
    assert "this user may not run the command" in found["fix"]


def test_doctor_says_that_unsigned_entries_are_accepted(
    open_store: Callable[[str], Store], cli: Cli, use: Callable[..., None]
) -> None:
    use(open_store("redis").url(), unsigned=True)
    (found,) = store_lines(cli)
    assert found["verdict"] == "warn"
    assert "unsigned entries are accepted" in found["detail"]
    assert "can run code here" in found["fix"]


@pytest.mark.usefixtures("key")
def test_doctor_says_that_a_process_without_a_key_only_reads(
    open_store: Callable[[str], Store], cli: Cli, use: Callable[..., None]
) -> None:
    use(open_store("file").url(), keys="trusted")
    (found,) = store_lines(cli)
    assert found["verdict"] == "ok"
    assert "read only, because there is no key to sign with" in found["detail"]


def test_doctor_reports_a_store_that_is_refused_and_one_that_is_dead(
    cli: Cli, use: Callable[..., None]
) -> None:
    use("redis://:secret@127.0.0.1:1/0")
    (refused,) = store_lines(cli)
    assert refused["verdict"] == "warn"
    assert "PREHEAT_TRUSTED_KEYS" in refused["fix"]
    use("redis://:secret@127.0.0.1:1/0", unsigned=True)
    (dead,) = store_lines(cli)
    assert dead["verdict"] == "warn"
    assert "cannot be used" in dead["detail"]
    assert "secret" not in cli("doctor").out


def test_doctor_shows_urls_without_passwords(
    cli: Cli, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preheat.tools.cli.doctor._test_compiles", lambda _: [])
    use("redis://:secret", "redis://:secret@127.0.0.1:1/0")
    rows = {row["what"]: row["detail"] for row in cli("doctor", "--json").json()}
    assert rows["PREHEAT_REMOTE"] == "redis://… redis://127.0.0.1:1/0"
    for value in ("redis://:top secret@127.0.0.1:1/0", "default:secret@127.0.0.1:1"):
        use(value)
        assert "secret" not in cli("doctor").out


def test_doctor_names_a_dead_store_once(cli: Cli, use: Callable[..., None]) -> None:
    use("redis://127.0.0.1:1/0", unsigned=True)
    (found,) = store_lines(cli)
    assert found["detail"].count("redis://127.0.0.1:1/0") == 1


def test_doctor_reports_a_malformed_url(cli: Cli, use: Callable[..., None]) -> None:
    use("s3://")
    (found,) = store_lines(cli)
    assert found["verdict"] == "fail"


# cache verify --remote


def fill(engine: Engine, key: SigningKey) -> None:
    """Store one object of each kind."""
    good = envelope.wrap(digest_of(1), blob_of(1), key)
    damaged = blob_of(5)[:-1] + b"?"
    contents = {
        entry_name(digest_of(1)): good,
        entry_name(digest_of(2)): envelope.wrap(digest_of(2), blob_of(2), None),
        entry_name(digest_of(3)): envelope.wrap(digest_of(3), blob_of(3), SigningKey.new()),
        entry_name(digest_of(4)): good,
        entry_name(digest_of(5)): envelope.wrap(digest_of(5), damaged, key),
        entry_name(digest_of(6)): b"<html>",
        "notes/readme.txt": b"not ours",
        f"v1/leases/{digest_of(1)}": b"token 1",
        f"bundles/{digest_of(1)}": b"bundle",
    }
    for name, data in contents.items():
        engine.put(name, data)


def test_verify_reports_what_is_wrong_with_each_object(
    store: Store, cli: Cli, use: Callable[..., None], key: SigningKey
) -> None:
    if store.kind == "memory":
        pytest.skip("it has no URL")
    fill(store.open(), key)
    use(store.url(), keys="trusted")
    ran = cli("cache", "verify", "--remote", "--json")
    assert ran.code == 1
    (report,) = ran.json().values()
    assert report["checked"] == 7
    problems = {kind: set(found) for kind, found in report["problems"].items()}
    assert problems == {
        "unsigned": {entry_name(digest_of(2))},
        "wrongly signed": {entry_name(digest_of(3)), entry_name(digest_of(4))},
        "damaged": {entry_name(digest_of(5))},
        "foreign": {entry_name(digest_of(6)), "notes/readme.txt"},
    }


def test_verify_accepts_a_sound_store_and_says_so(
    open_store: Callable[[str], Store], cli: Cli, use: Callable[..., None], key: SigningKey
) -> None:
    store = open_store("file")
    engine = store.open()
    for number in range(3):
        engine.put(
            entry_name(digest_of(number)), envelope.wrap(digest_of(number), blob_of(number), key)
        )
    use(store.url(), keys="signing")
    ran = cli("cache", "verify", "--remote")
    assert (ran.code, ran.out) == (0, "")
    assert "checked 3 objects: no problem" in ran.err
    engine.put(entry_name(digest_of(1)), b"")
    ran = cli("cache", "verify", "--remote")
    assert ran.code == 1
    assert ran.out == f"{entry_name(digest_of(1))}  foreign: it is too short\n"
    assert "1 foreign" in ran.err


def test_verify_accepts_unsigned_objects_where_they_are_used(
    open_store: Callable[[str], Store], cli: Cli, use: Callable[..., None]
) -> None:
    store = open_store("file")
    store.open().put(entry_name(digest_of(1)), envelope.wrap(digest_of(1), blob_of(1), None))
    use(store.url(), unsigned=True)
    assert cli("cache", "verify", "--remote").code == 0
    names = [entry_name(digest_of(1))]
    assert [each.verdict for each in verify(store.open().get, names, None)] == ["ok"]


def test_verify_has_retries_and_the_time_of_a_sync(
    cli: Cli, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = MemoryEngine()
    for number in range(40):
        data = envelope.wrap(digest_of(number), blob_of(number), None)
        engine.objects[entry_name(digest_of(number))] = data
    timeouts: list[float] = []
    reads = itertools.count()

    def reset(verb: str, name: str) -> None:
        del name
        if verb == "read" and next(reads) in (5, 20):
            raise RemoteError("memory://test: connection reset", retryable=True)

    def open_engine(_: object, *, timeout: float, private: bool) -> MemoryEngine:
        del private
        timeouts.append(timeout)
        return engine

    engine.before = reset
    monkeypatch.setattr("preheat.build.remotes.open_engine", open_engine)
    use("redis://127.0.0.1:1/0", unsigned=True)
    ran = cli("cache", "verify", "--remote")
    assert (ran.code, ran.out) == (0, "")
    assert "checked 40 objects: no problem" in ran.err
    assert timeouts == [30.0]

    def refuse(verb: str, name: str) -> None:
        del name
        if verb == "read":
            raise RemoteError("memory://test: it refuses the credentials")

    engine.before = refuse
    engine.closed = False
    ran = cli("cache", "verify", "--remote")
    assert ran.code == 1
    assert "it refuses the credentials" in ran.err


def test_verify_says_what_is_missing(cli: Cli, use: Callable[..., None]) -> None:
    ran = cli("cache", "verify", "--remote")
    assert ran.code == 2
    assert "PREHEAT_REMOTE" in ran.err
    use("redis://127.0.0.1:1/0", unsigned=True)
    ran = cli("cache", "verify", "--remote")
    assert ran.code == 1
    assert "cannot be used" in ran.err
    assert cli("cache", "verify", "--remote", "--repair").code == 2


def test_verify_checks_the_other_stores_of_one_that_is_dead(
    open_store: Callable[[str], Store], cli: Cli, use: Callable[..., None]
) -> None:
    store = open_store("file")
    store.open().put(entry_name(digest_of(1)), b"")
    use("redis://127.0.0.1:1/0", store.url(), unsigned=True)
    ran = cli("cache", "verify", "--remote")
    assert ran.code == 1
    assert ran.out == f"{entry_name(digest_of(1))}  foreign: it is too short\n"
    assert "redis://127.0.0.1:1/0 cannot be used: Connection refused" in ran.err
    assert list(cli("cache", "verify", "--remote", "--json").json()) == [store.url()]


# check


def test_check_says_that_a_store_could_not_be_asked(
    cli: Cli, use: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k() {}')
    manifest = tmp_path / "k.toml"
    manifest.write_text('version = 1\n[[program]]\nfile = "k.cu"\n')
    use("redis://127.0.0.1:1/0", unsigned=True)
    ran = cli("check", str(manifest), "--arch", "sm_90")
    assert ran.code == 1
    assert "k.cu sm_90: not on this machine, and a shared store could not be used" in ran.out
    assert "1 of them may be on a shared store" in ran.err
    assert "preheat doctor" in ran.err


# cache stats


def test_the_traffic_with_stores_is_in_the_statistics(
    open_store: Callable[[str], Store], cli: Cli, use: Callable[..., None], tmp_path: Path
) -> None:
    use(open_store("file").url())
    (tmp_path / "saxpy.cu").write_text(SAXPY)
    command = [sys.executable, "-m", "preheat", "compile", "saxpy.cu", "--arch", "sm_90"]
    expect_success(start_process(command, cwd=tmp_path))  # What is queued is written at its end.
    counters = cli("cache", "stats", "--json").json()["counters"]
    assert counters["requests.remote.write"] == counters["puts.remote"] == 1
    lines = cli("cache", "stats").out.splitlines()
    (requests,) = (line for line in lines if line.startswith("requests to shared stores"))
    assert "write 1" in requests
