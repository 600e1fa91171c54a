"""From the engine's thread to a task: whatever came since the task last looked, in one piece.

A queue of the standard library wakes its reader for every item and makes it ask for each; here a
reader that fell behind gets all at once, and its cost for an item falls as the load rises.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Read by one task at a time, on the event loop; `put` is called there too."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Leave something for the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[T]:
        """All that is there, at least one item; waits for it."""
        if not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items
