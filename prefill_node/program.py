"""The gRPC services of a prefill node's process, including the one for embeddings and scores."""

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from common import rpc
from common.config import PrefillConfig
from common.errors import (
    REQUEST_ERRORS,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    QueueFull,
    RequestFailed,
    ServingError,
)
from common.identity.guard import CallAuthenticator
from common.request import MAX_ENGINE_CRASHES
from common.requests import pooling
from common.requests.namespace import check_identity
from common.requests.pooling import PoolingMode, PoolingParams
from common.requests.sampling import MAX_TOKEN_ID
from kvtransfer.pairs.dialer import NamedProducers, PairDialer
from kvtransfer.pairs.streams import PairService, PairStreams
from node.frontend import spans
from node.frontend.engine_link import EngineLink, NodeFrontend, RoleProgram, RoleServices
from node.messages import CancelPooling, PoolingDone, SubmitPooling
from protos import pooling_pb2, pooling_pb2_grpc

MAX_PROMPTS = 256  # per call
MAX_TOKENS = 1 << 20
MAX_CALLS = 1024  # waiting calls
MAX_BUDGET_S = 7 * 24 * 3600.0
MAX_REQUEST_ID = 256  # characters
_POOLS = frozenset(map(int, PoolingMode))
_PATIENCE_S = 5.0  # seconds after the budget in which the engine should end a late call


class PoolingServicer(pooling_pb2_grpc.PoolingServicer):
    """The Pooling service: connects router calls to the engine thread. Event loop only.

    It checks sizes, forwards calls, and computes vectors from the engine's sums. The engine owns
    the state of prompts. The service knows only which calls are waiting.

    Args:
        check_length: raises InvalidRequest for a prompt that is too long for this node.
    """

    def __init__(self, engine: EngineLink, check_length: Callable[[int], None]) -> None:
        self._engine = engine
        self._check_length = check_length
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[PoolingDone]] = {}
        self._draining = False

    def register(
        self, server: grpc.aio.Server, guard: CallAuthenticator | None = None
    ) -> tuple[str, ...]:
        """Add the service to a server. Returns its name."""
        add = pooling_pb2_grpc.add_PoolingServicer_to_server
        return rpc.add_service(server, add, self, guard)

    async def Pool(
        self, request: pooling_pb2.PoolRequest, context: Any
    ) -> pooling_pb2.PoolResponse:
        """Return the vectors of the prompts.

        Status code UNAVAILABLE: the model is loading, the node is draining, or its engine has
        ended.
        """
        self._engine.check_ready()
        if self._draining:
            raise NodeUnavailable("this prefill node is draining")
        if len(self._calls) >= MAX_CALLS:
            raise Overloaded(f"{MAX_CALLS} calls wait here already")
        try:
            pooled = await self._pooled(self._parsed(request), request.budget_s)
        except QueueFull as late:
            context.set_trailing_metadata((("retry-after", str(ceil(late.retry_after_s))),))
            raise
        lengths = [len(prompt.ids) for prompt in request.prompts]
        return pooling_pb2.PoolResponse(
            vectors=[
                _finished(np.frombuffer(vector, "<f4"), length, request).tobytes()
                for vector, length in zip(pooled.vectors, lengths, strict=True)
            ],
            cached_tokens=pooled.cached_tokens,
        )

    def pooled(self, message: PoolingDone) -> None:
        """Complete a call with the engine's response."""
        call = self._calls.get(message.number)
        if call is not None and not call.done():
            call.set_result(message)

    def drain(self) -> None:
        """Reject new calls. Waiting calls are still completed."""
        self._draining = True

    def resume(self) -> None:
        self._draining = False

    def end(self, error: ServingError) -> None:
        """End all calls with this error, and reject new ones."""
        self._draining = True
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)

    async def _pooled(self, message: SubmitPooling, budget_s: float) -> PoolingDone:
        """Wait for the engine's response. Raises ServingError if it has no vectors."""
        answer = asyncio.get_running_loop().create_future()
        self._calls[message.number] = answer
        try:
            self._engine.submit(message, self._engine.lane())
            async with asyncio.timeout(budget_s + _PATIENCE_S):
                pooled: PoolingDone = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within the budget of {budget_s:g} s") from None
        finally:
            del self._calls[message.number]
            if not answer.done() or answer.cancelled() or answer.exception() is not None:
                self._engine.send(CancelPooling(message.number))
        if not pooled.error_code:
            return pooled
        if pooled.retry_after_s:
            raise QueueFull(pooled.error, pooled.retry_after_s)
        raise REQUEST_ERRORS.get(pooled.error_code, RequestFailed)(pooled.error)

    def _parsed(self, request: pooling_pb2.PoolRequest) -> SubmitPooling:
        """Check sizes and convert the call to the engine's message. Raises InvalidRequest."""
        if not 1 <= len(request.prompts) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompts has {len(request.prompts)}, 1 to {MAX_PROMPTS} allowed")
        lengths = [len(prompt.ids) for prompt in request.prompts]
        if sum(lengths) > MAX_TOKENS:
            raise InvalidRequest(f"prompts has {sum(lengths)} tokens, {MAX_TOKENS} allowed")
        for length in lengths:
            self._check_length(length)
        if not 0.0 < request.budget_s <= MAX_BUDGET_S:  # rejects NaN too
            raise InvalidRequest(f"budget_s must be in (0, {MAX_BUDGET_S:g}]")
        if request.HasField("queue_s") and not 0.0 <= request.queue_s <= MAX_BUDGET_S:
            raise InvalidRequest(f"queue_s must be in [0, {MAX_BUDGET_S:g}]")
        if len(request.request_id) > MAX_REQUEST_ID:
            raise InvalidRequest(f"request_id is longer than {MAX_REQUEST_ID} characters")
        return SubmitPooling(
            number=next(self._numbers),
            request_id=request.request_id,
            prompts=tuple(_token_ids(prompt.ids) for prompt in request.prompts),
            pooling=_pooling(request),
            budget_s=request.budget_s,
            queue_s=request.queue_s if request.HasField("queue_s") else math.inf,
            namespace=check_identity("namespace", request.namespace),
            engine_crashes=min(request.engine_crashes, MAX_ENGINE_CRASHES),
        )


def _pooling(request: pooling_pb2.PoolRequest) -> PoolingParams:
    if request.pool not in _POOLS:
        raise InvalidRequest(f"pool is {request.pool}, which is not a pooling mode")
    some = request.label_token_ids[: pooling.MAX_LABEL_TOKENS + 1]
    wanted = PoolingParams(PoolingMode(request.pool), tuple(some))
    pooling.check(wanted)
    return wanted


def _token_ids(ids: Sequence[int]) -> bytes:
    tokens = np.fromiter(ids, np.int64, len(ids))
    if len(tokens) and tokens.max() > MAX_TOKEN_ID:
        raise InvalidRequest(
            f"prompts has token id {tokens.max()}, expected at most {MAX_TOKEN_ID}"
        )
    return tokens.astype("<i4").tobytes()


def _finished(
    vector: NDArray[np.float32], num_tokens: int, request: pooling_pb2.PoolRequest
) -> NDArray[np.float32]:
    """Return the final vector: mean of the engine's sum, truncated and normalised, in float64.

    Raises:
        RequestFailed: the vector contains NaN or Inf.
        InvalidRequest: more dimensions are requested than the model has.
    """
    if request.dimensions > len(vector):
        raise InvalidRequest(f"dimensions is {request.dimensions}, the model has {len(vector)}")
    found = vector[: request.dimensions or None].astype(np.float64)
    if request.pool == pooling_pb2.POOL_MEAN:
        found /= num_tokens
    if not np.isfinite(found).all():
        raise RequestFailed("the model's hidden states contain NaN or Inf")
    if request.normalize:
        found /= max(float(np.linalg.norm(found)), 1e-12)
    return found.astype("<f4")


def program(config: PrefillConfig) -> RoleProgram:
    # With TLS, it calls only nodes that it can authenticate.
    calls = config.server.tls.cert is None or config.server.tls.mutual
    fetches = config.prefix_sharing.enabled and calls
    return RoleProgram("prefill", config, partial(_parts, calls=calls, fetches=fetches))


def _parts(frontend: NodeFrontend, *, calls: bool, fetches: bool) -> RoleServices:
    """Connect the services of a prefill node.

    Incoming calls: consumers that want KV, and routers that want vectors. Outgoing calls: nodes
    that consumers name because they have part of a prompt, and nodes from which this node copies
    weights.

    Args:
        calls: whether it may call other nodes.
        fetches: whether it fetches prefixes of prompts.
    """
    streams = PairStreams(frontend.transfer_socket, frontend.metrics)
    dialer = PairDialer(streams, frontend.metrics, frontend.make_channel)
    producers = NamedProducers(frontend.address, dialer.dial)
    pairs = PairService(
        streams,
        frontend.engine.check_ready,
        frontend.supervision.check_length,
        on_named=producers.name if fetches else lambda addresses: None,
        on_encoders=producers.name if calls else lambda addresses: None,
    )
    pooling = PoolingServicer(frontend.engine, frontend.supervision.check_length)

    def pair_with(address: str) -> None:
        if not calls:
            raise FailedPrecondition(
                "a prefill node with TLS needs mutual TLS to call other nodes: set --tls-ca"
            )
        producers.name([address])

    def drain() -> None:
        pairs.drain()
        pooling.drain()

    def resume() -> None:
        pairs.resume()
        pooling.resume()

    def end(error: ServingError) -> None:
        streams.close_all(error)
        pooling.end(error)

    return RoleServices(
        services=(pairs.register, pooling.register),
        background=(partial(streams.run, frontend.supervision.heartbeat), dialer.run),
        handoff=lambda handoff: spans.record_handoff(frontend.tracer, handoff),
        pooled=pooling.pooled,
        pair_with=pair_with,
        drain=drain,
        resume=resume,
        end=end,
    )
