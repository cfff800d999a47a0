"""What `preheat doctor` and `preheat cache verify` learn of a server.

Whether it answers, how fast, and what it permits; and whether its objects can be used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from preheat.model import codec
from preheat.process.lazy import LazyModule
from preheat.process.messages import printable
from preheat.store.base import UntrustedError
from preheat.store.remote.engine import Engine, ObjectError, RemoteError
from preheat.store.remote.url import BUNDLES, LEASES, PROBE, Remote, digest_of
from preheat.store.signing import entries
from preheat.store.signing.keys import Keyring

if TYPE_CHECKING:
    from concurrent.futures import thread
else:  # It takes milliseconds to import.
    thread = LazyModule("concurrent.futures.thread", logs=True)

__all__ = [
    "PROBLEMS",
    "Permissions",
    "Probe",
    "Verified",
    "list_objects",
    "permissions_of",
    "probe",
    "probe_conditional",
    "verify",
]

#: What may be wrong with an object.
PROBLEMS = ("unsigned", "wrongly signed", "damaged", "foreign")
_THREADS = 8  # They read objects at the same time.
_READS = 3


class Probe(NamedTuple):
    """What a server does. Each refusal is the reason of an error, and empty without one.

    `seconds` is the time of a request after the first one. `conditional` is whether the server keeps
    the conditions of writes. They are not tried if objects cannot be written and removed.
    """

    seconds: float
    write_refusal: str = ""
    delete_refusal: str = ""
    condition_refusal: str = ""
    conditional: bool = False


def probe(engine: Engine, *, write: bool) -> Probe:
    """Read an object that need not exist. With `write`, write and remove one, and try conditions.

    Raises `RemoteError` when the server cannot be read.
    """
    name = f"{PROBE}/read"
    engine.get(name)  # It also connects.
    seconds = min(_seconds_to_read(engine, name) for _ in range(_READS))
    if not write:
        return Probe(seconds)
    name = f"{PROBE}/write"
    if refusal := _refusal(lambda: engine.put(name, b"")):
        return Probe(seconds, write_refusal=refusal)
    if refusal := _refusal(lambda: engine.remove(name)):
        return Probe(seconds, delete_refusal=refusal)
    try:
        return Probe(seconds, conditional=probe_conditional(engine))
    except RemoteError as error:
        return Probe(seconds, condition_refusal=str(error))


def probe_conditional(engine: Engine) -> bool:
    """Return whether the server keeps the conditions of `create`, `swap` and `discard`.

    Some gateways to S3 accept a conditional request and ignore the condition. A separate object is
    written and removed. The calls come one after the other, so that this is no proof of atomicity.
    """
    if not engine.conditional:
        return False
    name = f"{PROBE}/{os.urandom(16).hex()}"
    try:
        return _keeps_conditions(engine, name)
    finally:
        engine.remove(name)


def _keeps_conditions(engine: Engine, name: str) -> bool:
    def create(data: bytes) -> bool:
        return engine.create(name, data, seconds=60)

    def swap(old: bytes, new: bytes) -> bool:
        return engine.swap(name, old, new, seconds=60)

    if not create(b"1") or create(b"2") or swap(b"2", b"3") or not swap(b"1", b"2"):
        return False
    if engine.discard(name, b"1") or engine.get(name) != b"2" or not engine.conditional:
        return False
    return engine.refuses_stale_conditions(name)


def _refusal(call: Callable[[], None]) -> str:
    """Return the reason why a call fails, or an empty string if it succeeds."""
    try:
        call()
    except RemoteError as error:
        return str(error)
    return ""


def _seconds_to_read(engine: Engine, name: str) -> float:
    started = time.perf_counter()
    engine.get(name)
    return time.perf_counter() - started


# Permissions

_LEASES = "without deletes, hosts cannot release leases, so that each host compiles for itself"
_NOT_NEEDED = "entries are stored without deletes, and only the object of this check stays"
_CONTRIBUTOR = "assign the role Storage Blob Data Contributor"


class Permissions(NamedTuple):
    """What permits each operation, as the words after "to permit it,".

    `without_delete` says what does not work where objects cannot be deleted. `condition` is empty where
    conditional writes need no permission of their own.
    """

    write: str
    delete: str
    without_delete: str
    condition: str = ""


_PERMISSIONS = {
    "s3": Permissions(
        "allow s3:PutObject in the policy of the user or of the bucket",
        "allow s3:DeleteObject in the policy of the user or of the bucket",
        _LEASES,
    ),
    "gcs": Permissions(
        "grant storage.objects.create and storage.objects.delete, for example by the role "
        "roles/storage.objectUser",
        "grant storage.objects.delete, for example by the role roles/storage.objectUser",
        "without deletes, Google Cloud Storage replaces no object, so that lists of header states stay "
        "as they are",
    ),
    "azblob": Permissions(
        f"{_CONTRIBUTOR}, or use a SAS token with the permissions c and w",
        f"{_CONTRIBUTOR}, or use a SAS token with the permission d",
        _NOT_NEEDED,
    ),
    "webdav": Permissions(
        "let the server accept PUT and MKCOL from this user (nginx: dav_methods)",
        "let the server accept DELETE from this user (nginx: dav_methods)",
        _NOT_NEEDED,
    ),
    "redis": Permissions(
        "let the user run SET on the keys of the store (ACL SETUSER NAME +set)",
        "let the user run DEL on the keys of the store (ACL SETUSER NAME +del)",
        _LEASES,
        "let the user run EVAL (ACL SETUSER NAME +eval)",
    ),
    "file": Permissions(
        "let this user write to the directory and its folders",
        "let this user remove files from the directory and its folders",
        _LEASES,
        "let this user link and rename files in the directory and its folders",
    ),
}


def permissions_of(remote: Remote) -> Permissions | None:
    """Return the permissions for `remote`; None for a kind that nobody can write."""
    return _PERMISSIONS.get(remote.service)


# Objects


class Verified(NamedTuple):
    """An object and its verdict: "ok", or one of `PROBLEMS` with the reason.

    An unsigned object is "ok" where no key is trusted.
    """

    name: str
    verdict: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether the object can be used."""
        return self.verdict == "ok"


def list_objects(engine: Engine) -> list[str]:
    """Return the names of all objects but leases, bundles and probes. Raises `RemoteError`."""
    others = (LEASES, BUNDLES, PROBE)
    return sorted(name for name in engine.names() if not name.startswith(others))


def verify(
    read: Callable[[str], bytes | None], names: Sequence[str], trusted: Keyring | None
) -> Iterator[Verified]:
    """Read and check objects, and yield the results in order.

    `read` returns an object by its name, or None if it was removed in the meantime. Such an object is
    left out. An `ObjectError` of `read` is a result, and every other exception ends the check.
    """
    with thread.ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(partial(_verify, read, trusted), names)
        yield from (each for each in found if each is not None)


def _verify(read: Callable[[str], bytes | None], trusted: Keyring | None, name: str) -> Verified | None:
    digest = digest_of(name)
    if digest is None:
        return Verified(printable(name), "foreign", "its name is not that of an entry")
    try:
        data = read(name)
    except ObjectError as error:
        return Verified(name, "foreign", str(error))
    return None if data is None else Verified(name, *_verdict(digest, data, trusted))


def _verdict(digest: str, data: bytes, trusted: Keyring | None) -> tuple[str, str]:
    try:
        signed = entries.key_id(data) is not None
    except UntrustedError as bad:
        return "damaged" if data.startswith(entries.MAGIC) else "foreign", str(bad)
    if trusted is not None and not signed:
        return "unsigned", "it is not signed"
    try:
        blob = entries.unwrap(digest, data, trusted)
    except UntrustedError as bad:
        return "wrongly signed" if trusted is not None else "damaged", str(bad)
    if why := codec.damage(digest, blob):
        return "damaged", why
    return "ok", ""
