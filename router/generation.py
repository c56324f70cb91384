"""One request on the decode nodes: placement, replay after a lost node, and live migration.

Each submission to a node is an Attempt. AttemptLosses limits how many nodes a request may lose.

For a live migration, the request is also submitted to another node as the successor. The successor
waits until the current node has stopped and handed off the request. It then sends all tokens since
its submission, and tokens that the client already has are dropped. It replaces the attempt once it
has sent a token, or once the attempt has ended without a crash. If the successor fails first, the
attempt continues.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from common.errors import NodeUnavailable, RequestFailed, ServingError
from common.request import CRASHED_TWICE, QUARANTINE_TOKENS, Remaining, RequestSpec
from common.requests.namespace import made_with
from protos.decode_pb2 import MoveFrom
from router.cluster.cluster import Cluster, FingerprintUnavailable, Placed
from router.cluster.decode_client import DecodeCall, MigrationOutcome
from router.policy.load import WHENEVER, PlacementKey, RequestDue
from router.policy.policies import encode_nodes
from router.record import AttemptTimings, RequestRecord, RequestTimeline
from router.token_buffer import LossCause, ModelVersion, NodeLost, NodeOutput, may_have_crashed

MAX_REPLAYS = 2  # charged losses without progress
MAX_ENGINE_CRASHES = 4  # engine crashes during the request, with or without progress
# Factor by which a node may exceed the router's estimate of the queue time. The node knows better,
# and a late rejection costs a round trip, so it rejects only if the estimate was far off.
_LENIENCE = 2.0


class TokenSink(Protocol):
    """The response to a request: turns tokens into data for the client."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens of the response so far."""
        ...

    @property
    def version(self) -> ModelVersion:
        """Version of the last token."""
        ...

    @property
    def ended(self) -> bool:
        """True if the response is complete, so the request must end on its node."""
        ...

    def add(self, output: NodeOutput) -> bool:
        """Add output, which never repeats a token. Return whether `flush` must be called."""
        ...

    def note_cached_tokens(self, cached_tokens: int | None) -> None:
        """Keep the first reported number of cached prompt tokens. None: not reported yet."""
        ...

    async def flush(self) -> None:
        """Write added output to the client."""
        ...


class Attempt:
    """A request at one decode node, until `close`. For one event loop.

    Attributes:
        spec: the request as submitted, including the tokens generated before.
        move_from: identifies this attempt to the target node of a live migration.
    """

    def __init__(
        self, spec: RequestSpec, placed: Placed, call: DecodeCall, timings: AttemptTimings
    ) -> None:
        self.spec = spec
        self.placed = placed
        self.timings = timings
        self.move_from = call.move_from
        self._call = call
        self._tokens = call.tokens
        self._position = spec.num_generated  # position in the response of the node's next token

    @property
    def address(self) -> str:
        return self.placed.decode.address

    @property
    def cached_tokens(self) -> int | None:
        return self._tokens.cached_tokens

    async def next(self, sink: TokenSink) -> None:
        """Add output to `sink` until it must be flushed or has ended.

        Tokens that the sink has already are dropped. A migration target repeats tokens that the
        source generated after the submission.

        Raises:
            NodeUnavailable: the node is lost, accepts no more requests, or repeated other tokens.
                All its output is in `sink`.
            ServingError: the request failed.
        """
        await self._tokens.consume(partial(self._add, sink))

    def _add(self, sink: TokenSink, output: NodeOutput) -> bool | None:
        position = self._position
        self._position += len(output.token_ids)
        if len(sink.token_ids) > position:
            output = _without_repeats(output, sink.token_ids[position:])
            if not output.token_ids and output.end is None:
                return None
        if position == self.spec.num_generated:
            self.placed.charge.first_token()
        return sink.add(output) or None

    async def begun(self) -> ServingError | None:
        """Wait for the first token, which stays in the buffer, or for `wake`.

        Returns the error if the request ended without a token, else None.
        """
        tokens = self._tokens
        await tokens.news()
        return None if tokens.has_begun else tokens.error()

    def wake(self) -> None:
        """End a wait in `begun`."""
        self._tokens.wake()

    def hand_over(self) -> None:
        """End this attempt because another one continues the request.

        Only the first end counts, so an end that the node reported before is kept.
        """
        self._tokens.end(NodeLost("it continues on another node", LossCause.UNRELATED))
        self._tokens.wake()

    def close(self) -> None:
        """Cancel the request on the node, unless it has ended, and release its charged load."""
        self._call.cancel()
        self.placed.charge.close()


def submit(
    spec: RequestSpec,
    placed: Placed,
    deadline: float,
    timeline: RequestTimeline,
    timings: AttemptTimings,
    move_from: MoveFrom | None = None,
) -> Attempt:
    """Submit a request to a decode node.

    Args:
        spec: the request with all tokens of the response so far.
        deadline: end of the request's budget, in time.monotonic() seconds.
        timings: times of this submission, which belong or will belong to the timeline.
        move_from: the attempt to migrate from. The node fetches the request from its node.
    Raises:
        NodeUnavailable: the node is lost.
    """
    now = time.monotonic()
    left_s, queue_s = max(0.0, deadline - now), math.inf
    if placed.start_by > -math.inf:
        queue_s = min(max(0.0, placed.start_by - now) * _LENIENCE, left_s)
    try:
        call = placed.decode.submit(
            spec,
            placed.prefill,
            Remaining(left_s, queue_s),
            partial(timeline.receive, timings),
            move_from=move_from,
            prefix_hints=placed.prefix_at,
            encode_addresses=encode_nodes(spec, placed.encoders, placed.charge),
        )
    except NodeUnavailable:
        placed.charge.close()
        raise
    return Attempt(spec, placed, call, timings)


def _without_repeats(output: NodeOutput, expected: Sequence[int]) -> NodeOutput:
    """Return the output without its first tokens, which must repeat `expected`.

    Raises:
        NodeUnavailable: the tokens differ, so the node cannot continue this response.
    """
    num_again = min(len(expected), len(output.token_ids))
    if list(output.token_ids[:num_again]) != list(expected[:num_again]):
        raise NodeUnavailable("a decode node continued after different tokens than were generated")
    return replace(
        output, token_ids=output.token_ids[num_again:], logprobs=output.logprobs[num_again:]
    )


class AttemptLosses:
    """Nodes that one request has lost, with the limit after which it fails.

    A loss is not charged if the node was draining, or if its engine crashed while it ran another
    request in quarantine (common/request.py). Charges are dropped once the request has progressed
    beyond the position of the loss.

    Attributes:
        addresses: addresses of the lost nodes, in order.
        engine_crashes: number of crashes to report to the next node.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.engine_crashes = 0
        self._charged = 0
        self._all_engine_crashes = 0
        self._num_tokens = 0  # length of the response at the last loss

    def add(self, address: str, error: NodeUnavailable, num_tokens: int) -> None:
        """Record a loss.

        Args:
            num_tokens: length of the response now.
        Raises:
            RequestFailed: the request crashes engines.
            NodeUnavailable: `error`, once the limit of lost nodes is reached.
        """
        self.addresses.append(address)
        if num_tokens >= self._num_tokens + QUARANTINE_TOKENS:
            self.engine_crashes = self._charged = 0
        self._num_tokens = num_tokens
        match error.cause if isinstance(error, NodeLost) else LossCause.UNKNOWN:
            case LossCause.CERTAIN:
                raise RequestFailed(CRASHED_TWICE)
            case LossCause.POSSIBLE if not self.engine_crashes:
                # A request in quarantine was waiting for its turn alone and computed nothing.
                self.engine_crashes = 1
                self._all_engine_crashes += 1
                if self._all_engine_crashes > MAX_ENGINE_CRASHES:
                    raise error
            case LossCause.UNKNOWN:
                self._charged += 1
                if self._charged > MAX_REPLAYS:
                    raise error


_AGAIN_S = 1.0  # seconds to wait after a failed migration


class Generation:
    """Runs one request on the decode nodes. Can be migrated while it runs. For one event loop."""

    def __init__(
        self,
        spec: RequestSpec,
        due: RequestDue,  # times by which it must start and end
        sink: TokenSink,  # gets the output of all attempts
        record: RequestRecord,  # gets the timings of all attempts
        cluster: Cluster,
        session_id: str = "",  # see PlacementKey
    ) -> None:
        passed_on = record.timeline.trace.passed_on
        self._spec = replace(spec, traceparent=passed_on) if passed_on else spec
        self._due = due
        self._sink = sink
        self._record = record
        self._cluster = cluster
        self._session_id = session_id
        self._losses = AttemptLosses()
        self._attempt: Attempt
        self._successor: Attempt | None = None  # migration target, in progress or finished
        self._migration: asyncio.Task[MigrationOutcome] | None = None
        self._again_at = 0.0

    async def run(self) -> None:
        """Run the request until its response has ended. Cancellation cancels it on its nodes.

        The caller flushes the last output after this returns. The request has then left its node,
        so a slow client does not occupy the node.

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
                quarantined = self._losses.engine_crashes > 0
                timings = self._record.replay(placed.decode.address, error, quarantined=quarantined)

    async def _follow(self, attempt: Attempt) -> Attempt | None:
        """Pass the output of an attempt to the sink, then close the attempt.

        Returns its successor after a migration, or None if the response has ended.

        Raises:
            NodeUnavailable: the node is lost or accepts no more requests.
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
        """Submit the rest of the request. `source` is the attempt to migrate from, if any."""
        return submit(
            self._spec.continued(self._sink.token_ids, self._losses.engine_crashes),
            placed,
            self._due.deadline,
            self._record.timeline,
            timings,
            None if source is None else source.move_from,
        )

    async def _place(self, due: RequestDue = WHENEVER, avoid: Sequence[str] = ()) -> Placed:
        if not self._cluster.ready:
            await self._cluster.until_ready()
        return self._cluster.choose(self._key(self._spec), avoid, due)

    async def _place_again(self, lost: NodeUnavailable) -> Placed:
        """Choose another node after a loss. If there is none, raise `lost`."""
        timeline, num_tokens = self._record.timeline, len(self._sink.token_ids)
        timeline.lose(str(lost))
        self._losses.add(timeline.submissions[-1].decode, lost, num_tokens)
        if num_tokens >= self._spec.sampling.max_tokens:
            raise lost
        try:
            return await self._place(avoid=self._losses.addresses)
        except FingerprintUnavailable as other:
            raise NodeUnavailable(f"{lost}; {other}") from None
        except NodeUnavailable:
            raise lost from None

    def _key(self, spec: RequestSpec) -> PlacementKey:
        namespace = made_with(spec.cache_namespace, self._cluster.weights)
        fingerprint = self._sink.version.invariant_fingerprint
        return PlacementKey(spec.tokens, self._session_id, namespace, spec.adapter, fingerprint)

    @property
    def request_id(self) -> str:
        return self._spec.request_id

    @property
    def address(self) -> str:
        return self._attempt.address

    @property
    def movable(self) -> bool:
        idle = self._successor is None and time.monotonic() >= self._again_at
        return idle and bool(self._sink.token_ids) and not self._losses.engine_crashes

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
        if self._successor is not successor:  # its own node handed it off and reported that first
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
        """Return the successor. The caller closes it. A migration in progress becomes final."""
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
