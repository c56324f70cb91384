"""Listens to what nodes have cached, one WatchCache call to each, for the prefix index.

A node that cannot be heard is no failure: the index goes on with what this router remembers.
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
_MAX_PAGES = 1 << 16  # that come or go in one message; a node says half as much at most


class CacheWatch:
    """For one event loop."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    async def run(self, address: str, channel: grpc.aio.Channel) -> None:
        """Keeps the index up to date about one node, until cancelled: then it forgets the node."""
        stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        backoff_s = _MIN_BACKOFF_S
        told = ""
        try:
            while True:
                heard, reason = await self._listen(address, stub)
                rpc.raise_if_cancelled()
                if reason != told:
                    told = reason
                    log.info(
                        "a node's cache cannot be watched %s", kv(node=address, because=reason)
                    )
                if heard:
                    backoff_s = _MIN_BACKOFF_S
                self._index.silent(address)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        finally:
            self._index.forget(address)

    async def _listen(self, address: str, stub: node_pb2_grpc.NodeStub) -> tuple[bool, str]:
        """Until the call ends; returns whether anything was heard, and why it has ended."""
        heard = False
        # Not wait_for_ready: a call that waits keeps the certificates that it began with.
        call = stub.WatchCache(node_pb2.WatchCacheRequest())
        try:
            async for events in call:
                if events is None:  # what grpcio makes of bytes that it cannot parse
                    raise ProtocolViolation("it has sent bytes that are no message")
                if len(events.stored) > _MAX_PAGES or len(events.removed) > _MAX_PAGES:
                    raise ProtocolViolation("it says too much at once")
                if not heard:
                    if not events.cleared:
                        raise ProtocolViolation("it began in the middle")
                    heard = True
                    log.info("a node's cache is watched %s", kv(node=address))
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
