"""Lists of objects, by the asynchronous interface of opendal.

The list of its synchronous interface holds the lock of the interpreter while it waits for the server,
so that every thread of the process stops. All its other calls let other threads run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

from opendal import AsyncOperator, Operator, exceptions

__all__ = ["objects_of", "pages"]

_PAGE = 1000  # names that are taken from the event loop at once
_TOGETHER = 16  # folders that are listed at the same time


def pages(operator: Operator, folder: str) -> Iterator[list[str]]:
    """Yield the names of the objects in a folder and in the folders below it."""
    names = _names(operator.to_async_operator(), folder, recursive=True)
    with asyncio.Runner() as runner:
        while page := runner.run(_page(names)):
            yield page


def objects_of(operator: Operator, folders: Iterable[str]) -> set[str]:
    """Return the names of the objects that are directly in these folders."""
    return asyncio.run(_objects_of(operator.to_async_operator(), list(folders)))


async def _objects_of(operator: AsyncOperator, folders: list[str]) -> set[str]:
    found: set[str] = set()

    async def work() -> None:
        while folders:
            async for name in _names(operator, folders.pop(), recursive=False):
                found.add(name)

    await asyncio.gather(*(work() for _ in range(min(_TOGETHER, len(folders)))))
    return found


async def _page(names: AsyncIterator[str]) -> list[str]:
    page: list[str] = []
    async for name in names:
        page.append(name)
        if len(page) == _PAGE:
            break
    return page


async def _names(operator: AsyncOperator, folder: str, *, recursive: bool) -> AsyncIterator[str]:
    try:
        async for entry in await operator.list(folder, recursive=recursive):
            if not entry.path.endswith("/"):
                yield entry.path
    except exceptions.NotFound:  # WebDAV has folders, and this one does not exist.
        return
