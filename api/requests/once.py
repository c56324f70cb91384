"""Work that several responses of one request share."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from common.errors import ServingError

T = TypeVar("T")


class Once(Generic[T]):
    """A result that is computed once. For one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._results: list[T] = []  # at most one
        self._error: ServingError | None = None

    async def get(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first `work` that completes. All other callers wait for it.

        If the caller is cancelled, the next one does the work. Work that fails is not tried again,
        so 128 choices cost no more than one.

        Raises:
            ServingError: the error of that work.
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
