"""Objects on S3, Google Cloud Storage, Azure, WebDAV and HTTP, by the package opendal."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import opendal
from opendal import AsyncOperator, Operator, exceptions

from preheat.model.config import environ
from preheat.process.lazy import LazyModule
from preheat.store.remote.engine import LEASE_BYTES, Engine, ObjectError, RemoteError
from preheat.store.remote.opendal_errors import (
    ERRORS,
    NO_CONNECTION,
    is_unsupported,
    restore_error,
    translate_error,
)
from preheat.store.remote.url import Remote

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import thread
else:  # They take milliseconds to import.
    asyncio = LazyModule("asyncio", logs=True)
    thread = LazyModule("concurrent.futures.thread", logs=True)

__all__ = ["OpendalEngine", "S3Engine"]

_PARALLEL_REQUESTS = 16
_LISTED = 8  # From this number of names on, listing their folder takes fewer requests.
_PAGE = 1000  # objects and folders that are taken from the event loop at once
_PARALLEL_LISTS = 16  # folders that are listed at the same time
_PIECE = 1 << 20  # bytes that are read at once, at most
_UNMET = (exceptions.ConditionNotMatch, exceptions.AlreadyExists)


class OpendalEngine(Engine):
    """Objects on a server that opendal has a client for.

    A forked child cannot close it: it does not have the threads of opendal.
    """

    def __init__(self, remote: Remote, *, timeout: float) -> None:
        super().__init__(remote.name, timeout=timeout)
        self._remote = remote
        with self._errors():
            limit = opendal.layers.TimeoutLayer(timeout=self._timeout, io_timeout=self._timeout)
            _require_own_threads(remote.name)
            self._operator = opendal.Operator(remote.service, **_make_settings(remote)).layer(limit)

    def _get(self, name: str, limit: int) -> bytes | None:
        with self._errors():
            try:
                return self._read_content(name, limit=limit)
            except exceptions.NotFound:
                return None

    def _put(self, name: str, data: bytes) -> None:
        with self._errors():
            self._operator.write(name, data)

    def _remove(self, name: str) -> None:
        with self._errors():
            self._operator.delete(name)

    def _existing(self, names: list[str]) -> set[str]:
        listed, single = self._plan(names)
        with self._errors():
            found = self._find_present(single)
            if listed:
                found |= _list_objects(self._operator, listed) & set(names)
        return found

    def _pages(self, prefix: str) -> Iterator[list[str]]:
        with self._errors():
            yield from _list_pages(self._operator, prefix or "/")

    def _groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        listed, single = self._plan(names)
        yield from _groups([[name] for name in single])
        yield from _groups(list(listed.values()))

    def _read_content(self, name: str, *, limit: int, if_match: str | None = None) -> bytes:
        """Return an object of at most `limit` bytes. It raises what `Operator.read` raises.

        It is read in pieces: `Operator.read` takes whatever a server sends, also after its time limit.
        """
        condition = {} if if_match is None else {"if_match": if_match}
        try:
            with self._operator.open(name, "rb", **condition) as file:  # type: ignore[arg-type]
                return self._read_pieces(file, limit)
        except RemoteError:
            raise
        except OSError as fault:
            if NO_CONNECTION in str(fault):
                self._operator.stat(name)  # Its exception says why, and a stream's does not.
            raise restore_error(fault) from None

    def _read_pieces(self, file: opendal.file.File, limit: int) -> bytes:
        deadline = time.monotonic() + self._timeout
        content = bytearray()
        while piece := file.read(min(_PIECE, limit + 1)):
            content += piece
            if len(content) > limit:
                raise ObjectError(f"{self.name}: the object has more than {limit:,} bytes")
            if time.monotonic() > deadline:
                raise RemoteError(f"{self.name} did not answer in time")
        return bytes(content)

    def _plan(self, names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Return the names in each folder to list, and the names to ask for one by one."""
        groups = defaultdict(list)
        for name in names:
            groups[f"{name.rpartition('/')[0]}/"].append(name)
        lists = self._operator.capability().list
        listed = {folder: g for folder, g in groups.items() if lists and len(g) >= _LISTED}
        return listed, [name for folder in groups.keys() - listed.keys() for name in groups[folder]]

    def _find_present(self, names: list[str]) -> set[str]:
        if len(names) <= 1:
            return {name for name in names if self._operator.exists(name)}
        with thread.ThreadPoolExecutor(min(_PARALLEL_REQUESTS, len(names))) as pool:
            found = list(pool.map(self._operator.exists, names))
        return {name for name, exists in zip(names, found, strict=True) if exists}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Make a `RemoteError` of every exception of opendal."""
        try:
            yield
        except ERRORS as error:
            raise translate_error(error, self._remote) from None


def _groups(parts: list[list[str]]) -> Iterator[list[str]]:
    """Yield the names in `parts`, each of which takes one request, as many as are made together."""
    for start in range(0, len(parts), _PARALLEL_REQUESTS):
        yield [name for part in parts[start : start + _PARALLEL_REQUESTS] for name in part]


_first_user: list[int] = []  # the id of the process that made the first operator


def _require_own_threads(name: str) -> None:
    """Raise `RemoteError` in a child that was forked after its parent had made an operator.

    All operators use threads that the first one starts, and a child does not have them. Every call of
    an operator would wait for ever, also of one that the child makes.
    """
    if not _first_user:
        _first_user.append(os.getpid())
    if _first_user[0] != os.getpid():
        raise RemoteError(
            f"{name} is not used in this process, which was forked after its parent had used opendal: "
            "use the start method 'spawn' of multiprocessing, or a store on Redis"
        )


def _is_unmet(act: Callable[[], object]) -> bool:
    """Return whether a server refuses a request because its condition is not met."""
    try:
        act()
    except _UNMET:
        return True
    except ERRORS as error:
        if not is_unsupported(error):
            raise
    return False


class S3Engine(OpendalEngine):
    """Objects on S3, where the server itself checks that an object is absent or unchanged.

    The condition on a write or a delete is the ETag that the object had when its content was compared.
    A server that does not implement conditions (501) sets `conditional` to False, and `create`, `swap`
    and `discard` then look before they write.
    """

    def __init__(self, remote: Remote, *, timeout: float) -> None:
        super().__init__(remote, timeout=timeout)
        self.conditional = True

    def _create(self, name: str, data: bytes, seconds: float) -> bool:
        def create() -> bool:
            self._operator.write(name, data, if_not_exists=True)
            return True

        done = self._if_supported(create, unmet=_UNMET)
        return super()._create(name, data, seconds) if done is None else done

    def _swap(self, name: str, old: bytes, new: bytes, seconds: float) -> bool:
        def swap() -> bool:
            if (etag := self._find_etag(name, old)) is None:
                return False
            self._operator.write(name, new, if_match=etag)
            return True

        done = self._if_supported(swap)
        return super()._swap(name, old, new, seconds) if done is None else done

    def _discard(self, name: str, old: bytes) -> bool:
        def discard() -> bool:
            if (etag := self._find_etag(name, old)) is None:
                return False
            self._operator.delete(name, if_match=etag)
            return True

        done = self._if_supported(discard)
        return super()._discard(name, old) if done is None else done

    def _if_supported(
        self,
        act: Callable[[], bool],
        *,
        unmet: tuple[type[Exception], ...] = (*_UNMET, exceptions.NotFound),
    ) -> bool | None:
        """Return what `act` returns, or False after an exception of `unmet`.

        Returns None if the server does not implement conditions.
        """
        if not self.conditional:
            return None
        with self._errors():
            try:
                return act()
            except unmet:
                return False
            except ERRORS as error:
                if not is_unsupported(error):
                    raise
                self.conditional = False
                return None

    def refuses_stale_conditions(self, name: str) -> bool:
        with self._errors():
            stale = self._operator.stat(name).etag
            self._operator.write(name, b"changed")
            return _is_unmet(
                lambda: self._operator.write(name, b"must not be written", if_match=stale)
            ) and _is_unmet(lambda: self._operator.delete(name, if_match=stale))

    def _find_etag(self, name: str, content: bytes) -> str | None:
        """Return the ETag of an object if it has this content, else None."""
        etag = self._operator.stat(name).etag
        if not etag:
            raise RemoteError(f"{self.name}: the server returns no ETag")
        found = self._read_content(name, limit=LEASE_BYTES, if_match=etag)
        return etag if found == content else None


# Lists of objects
#
# The synchronous call that lists objects holds the interpreter lock while it waits for the server, so
# that every thread of the process stops. All other synchronous calls let other threads run.


def _list_pages(operator: Operator, folder: str) -> Iterator[list[str]]:
    """Yield the names of the objects in a folder and in the folders below it.

    A page that has only folders is empty.
    """
    paths = _list_paths(operator.to_async_operator(), folder, recursive=True)
    with asyncio.Runner() as runner:
        while page := runner.run(_take_page(paths)):
            yield [path for path in page if not path.endswith("/")]


def _list_objects(operator: Operator, folders: Iterable[str]) -> set[str]:
    """Return the names of the objects that are directly in these folders."""
    return asyncio.run(_gather_objects(operator.to_async_operator(), list(folders)))


async def _gather_objects(operator: AsyncOperator, folders: list[str]) -> set[str]:
    names: set[str] = set()

    async def work() -> None:
        while folders:
            async for path in _list_paths(operator, folders.pop(), recursive=False):
                if not path.endswith("/"):
                    names.add(path)

    await asyncio.gather(*(work() for _ in range(min(_PARALLEL_LISTS, len(folders)))))
    return names


async def _take_page(paths: AsyncIterator[str]) -> list[str]:
    page: list[str] = []
    async for path in paths:
        page.append(path)
        if len(page) == _PAGE:
            break
    return page


async def _list_paths(operator: AsyncOperator, folder: str, *, recursive: bool) -> AsyncIterator[str]:
    """Yield the objects in a folder, and the folders, whose paths end in `/`."""
    try:
        async for entry in await operator.list(folder, recursive=recursive):
            yield entry.path
    except exceptions.NotFound:  # WebDAV has folders, and this one does not exist.
        return


# Settings


def _make_settings(remote: Remote) -> dict[str, str]:
    """Return the settings of a service of opendal.

    Credentials that the URL does not have come from the usual variables and files of the service, such
    as `AWS_ACCESS_KEY_ID` and `~/.aws`: opendal reads them itself.
    """
    settings = {
        "s3": _s3,
        "gcs": _gcs,
        "azblob": _azblob,
        "http": _web,
        "webdav": _web,
    }[remote.service](remote)
    given = {name: value for name, value in settings.items() if value}
    return {"root": f"/{remote.path}", **given}


def _s3(remote: Remote) -> dict[str, str | None]:
    env = environ()
    endpoint = remote.option("endpoint")
    region = remote.option("region") or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    return {
        "bucket": remote.host,
        "endpoint": endpoint,
        # Servers other than Amazon's seldom have regions, and every request names one.
        "region": region or ("us-east-1" if endpoint else None),
        "access_key_id": remote.user,
        "secret_access_key": remote.password,
        "disable_ec2_metadata": _switch(remote.user is not None),
        "skip_signature": _switch(remote.option("anonymous") == "1"),
        "enable_virtual_host_style": _switch(remote.option("addressing") == "virtual"),
    }


def _gcs(remote: Remote) -> dict[str, str | None]:
    return {
        "bucket": remote.host,
        "endpoint": remote.option("endpoint"),
        "skip_signature": _switch(remote.option("anonymous") == "1"),
    }


def _azblob(remote: Remote) -> dict[str, str | None]:
    env = environ()
    account = remote.option("account") or remote.user or env.get("AZURE_STORAGE_ACCOUNT")
    return {
        "container": remote.host,
        "endpoint": remote.option("endpoint")
        or (f"https://{account}.blob.core.windows.net" if account else None),
        "account_name": account,
        "account_key": remote.password or env.get("AZURE_STORAGE_KEY"),
        "sas_token": env.get("AZURE_STORAGE_SAS_TOKEN"),
    }


def _web(remote: Remote) -> dict[str, str | None]:
    scheme, host = "https" if remote.secure else "http", remote.host
    host = f"[{host}]" if ":" in host else host
    return {
        "endpoint": f"{scheme}://{host}" + (f":{remote.port}" if remote.port else ""),
        "username": remote.user,
        "password": remote.password,
    }


def _switch(on: bool) -> str | None:
    return "true" if on else None
