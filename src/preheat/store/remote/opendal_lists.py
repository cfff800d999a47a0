"""Lists of objects, by the asynchronous interface of opendal.

The synchronous call that lists objects holds the interpreter lock while it waits for the server, so
that every thread of the process stops. All other synchronous calls let other threads run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

from opendal import AsyncOperator, Operator, exceptions

__all__ = ["objects_of", "pages"]

_PAGE = 1000  # objects and folders that are taken from the event loop at once
_PARALLEL_LISTS = 16  # folders that are listed at the same time


def pages(operator: Operator, folder: str) -> Iterator[list[str]]:
    """Yield the names of the objects in a folder and in the folders below it.

    A page that has only folders is empty.
    """
    paths = _paths(operator.to_async_operator(), folder, recursive=True)
    with asyncio.Runner() as runner:
        while page := runner.run(_page(paths)):
            yield [path for path in page if not path.endswith("/")]


def objects_of(operator: Operator, folders: Iterable[str]) -> set[str]:
    """Return the names of the objects that are directly in these folders."""
    return asyncio.run(_objects_of(operator.to_async_operator(), list(folders)))


async def _objects_of(operator: AsyncOperator, folders: list[str]) -> set[str]:
    found: set[str] = set()

    async def work() -> None:
        while folders:
            async for path in _paths(operator, folders.pop(), recursive=False):
                if not path.endswith("/"):
                    found.add(path)

    await asyncio.gather(*(work() for _ in range(min(_PARALLEL_LISTS, len(folders)))))
    return found


async def _page(paths: AsyncIterator[str]) -> list[str]:
    page: list[str] = []
    async for path in paths:
        page.append(path)
        if len(page) == _PAGE:
            break
    return page


async def _paths(operator: AsyncOperator, folder: str, *, recursive: bool) -> AsyncIterator[str]:
    """Yield the objects in a folder, and the folders, whose paths end in `/`."""
    try:
        async for entry in await operator.list(folder, recursive=recursive):
            yield entry.path
    except exceptions.NotFound:  # WebDAV has folders, and this one does not exist.
        return
