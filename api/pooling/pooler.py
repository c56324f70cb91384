"""One request for embeddings or scores, from its arrival to its end, for every client protocol.

Prefill nodes compute them without decode nodes.
"""

import time
from collections.abc import Sequence
from functools import partial

from api.auth.client import Client
from api.generation import DeadlineScope, RequestLimiter, TimeBudget
from api.requests import validation
from api.requests.generate_params import (
    MAX_TOKENS,
    PoolingCaller,
    PoolingRequest,
    PoolingResult,
    all_of,
    check_vocabulary,
)
from api.requests.served_model import ServedModel
from api.requests.validation import decide_namespace
from common.errors import EngineDied, InvalidRequest, NodeUnavailable, Overloaded
from common.requests import pooling
from common.requests.namespace import Namespace
from protos import pooling_pb2
from router.cluster.pooling_nodes import PoolingNodes
from router.policy.load import PlacementKey, RequestDue
from router.record import RequestRecords

# Limits of one call to a node. Prompts of one request may be computed on several nodes.
MAX_CALL_PROMPTS = 32
MAX_CALL_TOKENS = 1 << 14
_MAX_TRIES = 3  # nodes that are tried for one call


class Pooler:
    """Runs pooling requests on prefill nodes. For one event loop."""

    def __init__(
        self,
        model: ServedModel,
        nodes: PoolingNodes,
        admission: RequestLimiter,
        records: RequestRecords,
        budget: TimeBudget,
    ) -> None:
        self._model = model
        self._nodes = nodes
        self._admission = admission
        self._records = records
        self._budget = budget

    async def pool(self, request: PoolingRequest, caller: PoolingCaller) -> PoolingResult:
        """Return a vector for every prompt, in order.

        Cancelling this call cancels the request on its nodes.

        Args:
            caller: its client is authenticated, and the client's limits are not checked yet.

        Raises:
            ServingError: the request failed, possibly for one prompt only.
        """
        client, request_id = caller.client, caller.request_id
        label = caller.label[: validation.MAX_LABEL_CHARACTERS]
        with self._records.begin(request_id, label, client.name, caller.traceparent) as record:
            validation.check_label(caller.label)
            budget_s = validation.budget_s(caller.timeout_s, self._budget.total_s)
            with DeadlineScope(budget_s) as deadline:
                async with self._admission.admitted(client):
                    due = RequestDue(
                        time.monotonic() + budget_s * self._budget.queue_share, deadline
                    )
                    prompts = await self._prompts(request, client)
                    num_tokens = sum(map(len, prompts))
                    client.usage.prompts(num_tokens)
                    record.timeline.tokenized = time.monotonic()
                    record.place(num_tokens)
                    namespace = decide_namespace(caller.cache_salt, client.namespaces_of)
                    pooled = await self._pooled(request, request_id, prompts, due, namespace)
                    record.finish("pooled", pooled.cached_tokens)
                    return pooled

    async def _prompts(self, request: PoolingRequest, client: Client) -> list[Sequence[int]]:
        """Return the token ids of the prompts. Raises as PromptEncoder does."""
        pooling.check(request.pooling)
        check_vocabulary(request.pooling.tokens, self._model.limits, "label_token_ids")
        found: list[Sequence[int]] = []
        left = MAX_TOKENS
        for prompt in request.prompts:
            token_ids = await self._model.prompts.checked(prompt, client)
            left -= len(token_ids)
            if left < 0:
                raise InvalidRequest(f"input: more than {MAX_TOKENS} tokens in one request")
            found.append(token_ids)
        return found

    async def _pooled(
        self,
        request: PoolingRequest,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        due: RequestDue,
        namespace: Namespace,
    ) -> PoolingResult:
        base = pooling_pb2.PoolRequest(
            request_id=request_id,
            pool=pooling_pb2.Pool.Name(request.pooling.pool),
            label_token_ids=request.pooling.tokens,
            dimensions=request.dimensions,
            normalize=request.normalize,
            namespace=namespace,
        )
        calls = [partial(self._call, base, some, namespace, due) for some in _calls(prompts)]
        answers = await all_of(calls)
        return PoolingResult(
            vectors=[vector for answer in answers for vector in answer.vectors],
            num_tokens=[len(prompt) for prompt in prompts],
            cached_tokens=sum(answer.cached_tokens for answer in answers),
        )

    async def _call(
        self,
        base: pooling_pb2.PoolRequest,
        prompts: Sequence[Sequence[int]],
        namespace: bytes,
        due: RequestDue,
    ) -> pooling_pb2.PoolResponse:
        """Call one node. If it is unavailable or overloaded, try others."""
        request = pooling_pb2.PoolRequest()
        request.CopyFrom(base)
        for token_ids in prompts:
            request.prompts.add(ids=token_ids)
        key = PlacementKey([token for prompt in prompts for token in prompt], "", namespace)
        tried: list[str] = []
        while True:
            chosen = self._nodes.choose(key, due, tried)
            tried.append(chosen.node.address)
            now = time.monotonic()
            request.budget_s = max(due.deadline - now, 1e-3)
            request.queue_s = min(max(due.start_by - now, 0.0), request.budget_s)
            try:
                with chosen.charge:
                    return await chosen.node.pool(request, request.budget_s)
            except (NodeUnavailable, Overloaded, EngineDied) as error:
                request.engine_crashes += isinstance(error, EngineDied)
                if len(tried) >= _MAX_TRIES or not self._nodes.others(tried):
                    raise


def _calls(prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Split prompts into calls, in order, each with as many prompts as the limits allow."""
    calls: list[list[Sequence[int]]] = []
    num_tokens = 0
    for prompt in prompts:
        num_tokens += len(prompt)
        if not calls or len(calls[-1]) >= MAX_CALL_PROMPTS or num_tokens > MAX_CALL_TOKENS:
            calls.append([])
            num_tokens = len(prompt)
        calls[-1].append(prompt)
    return calls
