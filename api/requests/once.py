"""Work that several answers of one request share."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from common.errors import ServingError

T = TypeVar("T")


class Once(Generic[T]):
    """One result. For one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._results: list[T] = []  # one at most
        self._error: ServingError | None = None

    async def get(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what the first `work` gives that ends. All others wait for it.

        A caller that is cancelled leaves the work to the next one. Work that fails is not tried
        again: 128 choices cost no more than one.

        Raises:
            ServingError: as that work has.
        """
        if not self._results:
            async with self._turn:
                if self._error is not None:
                    raise self._error.with_traceback(None)
                if not self._results:
                    try:
                        self._results.append(await work())
                    except ServingError as error:
                        self._error = error
                        raise
        return self._results[0]
