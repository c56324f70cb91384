"""Manual migration of one running request to another decode node, across worker processes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from common.errors import FailedPrecondition, InvalidRequest, NodeUnavailable, NotFound
from protos.router_pb2 import MoveResponse
from router.cluster.cluster import Cluster
from router.workers.asking import LONGEST_S, SiblingProcesses

_MOVE, _MOVABLE = "/move", "/movable"  # paths between worker processes
MOVE_S = 20.0  # longest wait: the nodes may have to pair, and the target may have to free capacity
_MOST_NAMED = 64


class MigrationResult(msgspec.Struct, frozen=True):
    """The result of a migration command. `because` is the reason for no migration, else empty."""

    source: str
    target: str
    because: str


_read_moved = msgspec.json.Decoder(MigrationResult | None).decode
_read_ids = msgspec.json.Decoder(list[str]).decode


class LocalMigrations:
    """Migrations of requests of this process."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def movable(self, source: str) -> list[str]:
        """Return ids of requests at a node that can migrate, up to a limit."""
        here = (each for each in self._cluster.migratable() if each.address == source)
        return [each.request_id for each in here if each.movable][:_MOST_NAMED]

    async def move(self, request_id: str, target: str) -> MigrationResult | None:
        """Migrate a request, within MOVE_S. Return None if no such request runs in this process."""
        for running in self._cluster.migratable():
            if running.request_id == request_id:
                break
        else:
            return None
        source = running.address
        if not running.movable:
            return MigrationResult(
                source, "", "it has no token yet, or is being moved, or was just now"
            )
        if source == target:
            return MigrationResult(source, "", "it runs there")
        task = running.migrate(target)
        await asyncio.wait({task}, timeout=MOVE_S)
        if not task.done():
            return MigrationResult(source, "", "it is still on its way")
        if task.cancelled():
            return MigrationResult(source, "", "it has ended, or its node has")
        outcome = task.result()
        return MigrationResult(source, outcome.target, outcome.because)

    @property
    def tells(self) -> Mapping[str, Callable[[Mapping[str, str]], Awaitable[bytes]]]:
        """Return the handlers for queries of other worker processes."""

        async def tell_movable(query: Mapping[str, str]) -> bytes:
            return msgspec.json.encode(self.movable(query["source"]))

        async def move(query: Mapping[str, str]) -> bytes:
            return msgspec.json.encode(await self.move(query["request_id"], query["target"]))

        return {_MOVABLE: tell_movable, _MOVE: move}


class MigrationService:
    """Migrations of requests of all processes. For one event loop."""

    def __init__(self, own: LocalMigrations, siblings: SiblingProcesses) -> None:
        self._own = own
        self._siblings = siblings

    async def move(self, request_id: str, source: str, target: str) -> MoveResponse:
        """Migrate one request to another decode node.

        Args:
            request_id: the request. Empty: any request at `source`, which is ignored otherwise.
            target: address of the target node. Empty: any node.

        Raises:
            InvalidRequest: neither request nor source is given.
            NotFound: there is no such request.
            NodeUnavailable: the request is unknown, but a process of this router did not respond.
            FailedPrecondition: the request stays where it is.
        """
        if not (request_id or source):
            raise InvalidRequest("request_id and source are empty")
        request_id = request_id or await self._movable(source)
        moved = await self._own.move(request_id, target)
        if moved is None:
            others = await self._siblings.ask(
                _MOVE, MOVE_S + LONGEST_S, request_id=request_id, target=target
            )
            found = [one for one in map(_read_moved, others.bodies.values()) if one is not None]
            if not found:
                sentence = f"no request {request_id[:256]!r} runs at a decode node"
                raise _unknown(sentence, others.num_silent)
            (moved,) = found
        if moved.because:
            raise FailedPrecondition(f"not migrated: {moved.because}")
        return MoveResponse(request_id=request_id, source=moved.source, target=moved.target)

    async def _movable(self, source: str) -> str:
        own = self._own.movable(source)
        if own:
            return own[0]
        others = await self._siblings.ask(_MOVABLE, source=source)
        for ids in map(_read_ids, others.bodies.values()):
            if ids:
                return ids[0]
        sentence = f"no request that could be moved runs at {source[:256]!r}"
        raise _unknown(sentence, others.num_silent)


def _unknown(sentence: str, num_silent: int) -> NotFound | NodeUnavailable:
    if not num_silent:
        return NotFound(sentence)
    return NodeUnavailable(f"{sentence}; {num_silent} processes of this router have not answered")
