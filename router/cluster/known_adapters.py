"""LoRA adapters that requests may name, as reported by the decode nodes."""

import asyncio
import contextlib
from collections.abc import Mapping

from common.errors import NotFound
from common.requests.namespace import NO_ADAPTER, AdapterId
from router.cluster.decode_client import DecodeClient


class KnownAdapters:
    """Adapters of all decode nodes. For one event loop.

    Args:
        clients: the decode nodes by address, kept up to date by the caller.
    """

    def __init__(self, clients: Mapping[str, DecodeClient]) -> None:
        self._clients = clients
        self._news = asyncio.Event()  # set when a node has reported something

    def by_name(self) -> Mapping[str, AdapterId]:
        """Return the adapters of all nodes.

        If one name has several, the first node's adapter counts.
        """
        found: dict[str, AdapterId] = {}
        for _, client in sorted(self._clients.items()):
            for name, adapter in client.adapters.items():
                found.setdefault(name, adapter)
        return found

    def of(self, name: str) -> AdapterId:
        """Return the id of an adapter.

        Args:
            name: "" is no adapter.
        Raises:
            NotFound: no node has it.
        """
        if not name:
            return NO_ADAPTER
        adapter = self.by_name().get(name)
        if adapter is None:
            raise NotFound(f"adapter: no {name!r} is loaded")
        return adapter

    def told(self) -> None:
        """Note that a node has reported something."""
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, name: str, adapter: AdapterId | None, longest_s: float) -> None:
        """Wait until all nodes with a Status have this adapter by that name, at most `longest_s`.

        `adapter` None: until none of them has an adapter by that name.
        """

        def says(client: DecodeClient) -> bool:
            return client.status is None or client.adapters.get(name) == adapter

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                while not all(says(client) for client in self._clients.values()):
                    await self._news.wait()
