"""One request on the decode nodes: placement, replay after a lost node, and live migration.

A migration submits the request to another node as well. This successor runs nothing until the node
of the attempt has stopped the request and handed it off. It then sends all tokens from its
submission on. Tokens that the client already has are dropped. So the successor replaces the attempt
once it has sent a token, or once the attempt has ended without a crash. If the successor ends
first, the attempt continues.
"""

import asyncio
import time
from collections.abc import Sequence

from msgspec.structs import replace

from common.errors import NodeUnavailable
from common.request import RequestSpec
from common.requests.namespace import made_with
from router.attempt import Attempt, AttemptLosses, TokenSink, submit
from router.cluster.cluster import Cluster, Placed
from router.cluster.migratable import MigrationOutcome
from router.cluster.node_ends import may_have_crashed
from router.policy.backlogs import WHENEVER, RequestDue
from router.policy.choices import PlacementKey
from router.record import RequestRecord
from router.timelines import AttemptTimings

_AGAIN_S = 1.0  # wait after a failed migration


class Generation:
    """One request on the decode nodes, a MigratableRequest while it runs. For one event loop."""

    def __init__(
        self,
        spec: RequestSpec,
        due: RequestDue,
        sink: TokenSink,
        record: RequestRecord,
        cluster: Cluster,
        session_id: str = "",
    ) -> None:
        """
        Args:
            due: times by which it must start and end.
            sink: gets the output of all attempts.
            record: gets the attempts.
            session_id: see PlacementKey.
        """
        passed_on = record.timeline.trace.passed_on
        self._spec = replace(spec, traceparent=passed_on) if passed_on else spec
        self._due = due
        self._sink = sink
        self._record = record
        self._cluster = cluster
        self._session_id = session_id
        self._losses = AttemptLosses()
        self._attempt: Attempt
        self._successor: Attempt | None = None  # of a migration in progress, or a finished one
        self._migration: asyncio.Task[MigrationOutcome] | None = None
        self._again_at = 0.0

    async def run(self) -> None:
        """Run the request until its response has ended.

        The last piece is not flushed: the caller does that, after the request has left its node, so
        that the node need not wait for a slow client. Cancelling this call cancels the request on
        its nodes.

        Raises:
            ServingError: the request failed.
        """
        placed = await self._place(self._due)
        timings = self._record.accept(self._spec.num_tokens, placed.decode.address)
        while True:
            try:
                following: Attempt | None = self._submit(placed, timings)
                while following is not None:
                    following = await self._follow(following)
                return
            except NodeUnavailable as error:
                placed = await self._place_again(error)
                suspect = self._losses.engine_deaths > 0
                timings = self._record.replay(placed.decode.address, error, suspect=suspect)

    async def _follow(self, attempt: Attempt) -> Attempt | None:
        """Pass the output of an attempt to the client, and leave the attempt.

        Returns its successor after a migration, or None if the response has ended.

        Raises:
            NodeUnavailable: the node takes no more requests or is gone.
        """
        sink, guests = self._sink, attempt.placed.decode.migratable
        self._attempt, self._again_at = attempt, 0.0
        guests.add(self)
        try:
            while True:
                await attempt.next(sink)
                if sink.ended:
                    return None
                await sink.flush()
        except NodeUnavailable as lost:
            sink.note_cached_tokens(attempt.cached_tokens)
            successor = None if may_have_crashed(lost) else self._take_successor()
            if successor is None:
                raise
            self._record.move(successor.timings)
            return successor
        finally:
            guests.discard(self)
            self._end_migration()
            attempt.close()

    def _submit(
        self, placed: Placed, timings: AttemptTimings, source: Attempt | None = None
    ) -> Attempt:
        """Submit the rest of the request. `source`: the attempt that it migrates from."""
        return submit(
            self._spec.continued(self._sink.token_ids, self._losses.engine_deaths),
            placed,
            self._due.deadline,
            self._record.timeline,
            timings,
            None if source is None else source.move_from,
        )

    # Placement ------------------------------------------------------------------------------------

    async def _place(self, due: RequestDue = WHENEVER, avoid: Sequence[str] = ()) -> Placed:
        if not self._cluster.ready:
            await self._cluster.until_ready()
        return self._cluster.choose(self._key(self._spec), avoid, due)

    async def _place_again(self, lost: NodeUnavailable) -> Placed:
        """Choose another node after the loss of one. If there is none, raise `lost`."""
        timeline, num_tokens = self._record.timeline, len(self._sink.token_ids)
        timeline.lose(str(lost))
        self._losses.add(timeline.submissions[-1].decode, lost, num_tokens)
        if num_tokens >= self._spec.sampling.max_tokens:
            raise lost
        try:
            return await self._place(avoid=self._losses.addresses)
        except NodeUnavailable:
            raise lost from None

    def _key(self, spec: RequestSpec) -> PlacementKey:
        namespace = made_with(spec.cache_namespace, self._cluster.weights)
        return PlacementKey(spec.tokens, self._session_id, namespace, spec.adapter)

    # Migration ------------------------------------------------------------------------------------

    @property
    def request_id(self) -> str:
        return self._spec.request_id

    @property
    def address(self) -> str:
        return self._attempt.address

    @property
    def movable(self) -> bool:
        idle = self._successor is None and time.monotonic() >= self._again_at
        return idle and bool(self._sink.token_ids) and not self._losses.engine_deaths

    def migrate(self, target: str = "") -> asyncio.Task[MigrationOutcome]:
        self._migration = asyncio.create_task(self._migrate(self._attempt, target))
        return self._migration

    async def _migrate(self, attempt: Attempt, target: str) -> MigrationOutcome:
        self._again_at = time.monotonic() + _AGAIN_S
        try:
            placed = self._cluster.choose_target(self._key(attempt.spec), attempt.address, target)
            timings = AttemptTimings(placed.decode.address, time.monotonic())
            successor = self._successor = self._submit(placed, timings, attempt)
        except NodeUnavailable as nowhere:
            return MigrationOutcome("", str(nowhere))
        error = await successor.begun()
        if self._successor is not successor:  # its own node handed it off and reported so first
            return MigrationOutcome(successor.address)
        if error is None:
            attempt.hand_over()
            return MigrationOutcome(successor.address)
        self._again_at = time.monotonic() + _AGAIN_S
        self._successor = None
        successor.close()
        self._record.stay(successor.address, error)
        return MigrationOutcome(successor.address, str(error))

    def _take_successor(self) -> Attempt | None:
        """Return the successor, which the caller must close. A migration in progress succeeds."""
        successor, self._successor = self._successor, None
        if successor is not None:
            self._migration = None
            successor.wake()
        return successor

    def _end_migration(self) -> None:
        if self._migration is not None:
            self._migration.cancel()
            self._migration = None
        if self._successor is not None:
            self._successor.close()
            self._successor = None
