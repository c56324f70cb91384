"""Follows the cache events of all nodes for the prefix index, by one WatchCache call to each.

If the call fails, the index continues with this router's history of placements.
"""

import asyncio
import logging
import random

import grpc.aio

from common import rpc
from common.errors import ProtocolViolation
from common.logs import kv
from protos import node_pb2, node_pb2_grpc
from router.policy.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

_MIN_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 5.0
_MAX_PAGES = 1 << 16  # stored or removed in one message; a node sends at most half as many


class CacheWatch:
    """Subscriptions to cache events. For one event loop."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    async def run(self, address: str, channel: grpc.aio.Channel) -> None:
        """Keep the index of one node up to date until cancelled.

        Then the index forgets the node.
        """
        stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        backoff_s = _MIN_BACKOFF_S
        told = ""
        try:
            while True:
                heard, reason = await self._listen(address, stub)
                rpc.raise_if_cancelled()
                if reason != told:
                    told = reason
                    log.info("prefix cache subscription failed %s", kv(node=address, reason=reason))
                if heard:
                    backoff_s = _MIN_BACKOFF_S
                self._index.silent(address)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        finally:
            self._index.forget(address)

    async def _listen(self, address: str, stub: node_pb2_grpc.NodeStub) -> tuple[bool, str]:
        """Follow one call to its end. Returns whether events came, and why it ended."""
        heard = False
        # wait_for_ready is off: a waiting call would keep old certificates.
        call = stub.WatchCache(node_pb2.WatchCacheRequest())
        try:
            async for events in call:
                if events is None:  # grpcio returns None for bytes that it cannot parse
                    raise ProtocolViolation("invalid message")
                if len(events.stored) > _MAX_PAGES or len(events.removed) > _MAX_PAGES:
                    raise ProtocolViolation("it says too much at once")
                if not heard:
                    if not events.cleared:
                        raise ProtocolViolation("it began in the middle")
                    heard = True
                    log.info("prefix cache subscription started %s", kv(node=address))
                self._index.changed(
                    address,
                    events.page_size,
                    cleared=events.cleared,
                    stored=events.stored,
                    removed=events.removed,
                )
        except (grpc.aio.AioRpcError, ProtocolViolation) as error:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            return heard, details or "no reason given"
        finally:
            call.cancel()
        return heard, "the node has ended the call"
