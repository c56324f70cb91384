"""Which LoRA adapters requests may name, as the decode nodes say it of themselves."""

import asyncio
import contextlib
from collections.abc import Mapping

from common.errors import NotKnown
from common.requests.adapter import NO_ADAPTER, AdapterId
from router.cluster.decode_client import DecodeClient


class KnownAdapters:
    """For one event loop.

    Args:
        clients: the decode nodes, by address; their owner's.
    """

    def __init__(self, clients: Mapping[str, DecodeClient]) -> None:
        self._clients = clients
        self._news = asyncio.Event()  # of those who wait for something to be said

    def by_name(self) -> Mapping[str, AdapterId]:
        """Those that some node has. Where nodes mean different ones by a name, the first node's."""
        found: dict[str, AdapterId] = {}
        for _, client in sorted(self._clients.items()):
            for name, adapter in client.adapters.items():
                found.setdefault(name, adapter)
        return found

    def of(self, name: str) -> AdapterId:
        """
        Args:
            name: "": none.
        Raises:
            NotKnown: no node has it.
        """
        if not name:
            return NO_ADAPTER
        adapter = self.by_name().get(name)
        if adapter is None:
            raise NotKnown(f"adapter: no {name!r} is loaded")
        return adapter

    def told(self) -> None:
        """A node has said something."""
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, name: str, adapter: AdapterId | None, longest_s: float) -> None:
        """Returns once all nodes that have said something have this by that name, or after
        `longest_s`. None: they have nothing by it."""

        def says(client: DecodeClient) -> bool:
            return client.status is None or client.adapters.get(name) == adapter

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                while not all(says(client) for client in self._clients.values()):
                    await self._news.wait()
