"""The specification of a request, which all processes share: wire form and validation.

The router creates it. A decode node sends it to the prefill node and, in a live migration, to the
next decode node. The engine's `Request` refers to it. A new field is declared here and in
`protos/request.proto`.

Quarantine: a request that makes a forward pass raise crashes its engine with all other requests
there, and it is unknown which one it was. So each of them carries a crash count, and runs alone at
its prefill node and at its decode node until it is past the position of the crash. Then it is not
the cause, and its count is cleared. A request that runs alone in an engine that crashes is the
cause.
"""

import math
from collections.abc import (
    Iterable,
    Sequence,
)
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import msgspec

from common.errors import InvalidRequest, check_at_most
from common.limits import (
    HIGHEST,
    LOWEST,
    MAX_EMBEDDING_BYTES,
    MAX_STREAM_INTERVAL,
    MAX_WEIGHT,
    MIN_WEIGHT,
)
from common.requests import images, sampling
from common.requests.images import FIRST_IMAGE_TOKEN, Image
from common.requests.namespace import (
    BYTES_PER_TOKEN,
    IDENTITY_BYTES,
    NO_ADAPTER,
    SHARED,
    AdapterId,
    Namespace,
    as_bytes,
    check_identity,
    part_of,
    within,
)
from common.requests.sampling import SamplingParams
from common.rpc.channels import check_address
from common.tracing.context import checked
from protos import prefixes_pb2
from protos import request_pb2 as pb

GIVEN_TOKEN = FIRST_IMAGE_TOKEN  # id of each token
NUMBER_BYTES = 4
LARGEST = 65504.0  # largest float16, in which a model may compute
NOT_ACCEPTED = (
    "input_embeddings: this server does not accept them. engine.input_embeddings.enabled of its "
    "nodes allows it"
)
_GIVEN = as_bytes([GIVEN_TOKEN])


class InputEmbeddings(msgspec.Struct, frozen=True):
    """The input embeddings of a prompt, which replace token ids as the input of the first layer.

    Each token of such a prompt has the same id, above all vocabularies. Its KV is cached in a
    namespace that depends on all embeddings. So code that compares prompts by namespace and tokens
    recognises equal embeddings and distinguishes all others.

    Attributes:
        values: little-endian float32 [num_tokens, hidden size].
        name: hash of the values.
    """

    values: bytes
    num_tokens: int
    name: bytes

    @classmethod
    def of(cls, values: bytes, num_tokens: int) -> Self:
        """Return the embeddings of `num_tokens` tokens. Raise InvalidRequest if the size does not
        match or is too large.
        """
        check_at_most("input_embeddings", len(values), "bytes", MAX_EMBEDDING_BYTES)
        if not num_tokens or not values or len(values) % (NUMBER_BYTES * num_tokens):
            raise InvalidRequest(
                f"input_embeddings: {len(values)} bytes are not float32 [{num_tokens}, hidden size]"
            )
        return cls(values, num_tokens, blake2b(values, digest_size=IDENTITY_BYTES).digest())


def _given_embeddings(values: bytes, prompt: bytes) -> InputEmbeddings | None:
    """Parse the embeddings of a prompt. Return None without any.

    Args:
        prompt: token ids of the prompt, in the form of `as_bytes`.
    Raises:
        InvalidRequest: the embeddings do not fit the prompt.
    """
    if not values:
        return None
    given = InputEmbeddings.of(values, len(prompt) // BYTES_PER_TOKEN)
    if prompt != _GIVEN * (len(prompt) // BYTES_PER_TOKEN):
        raise InvalidRequest("input_embeddings: cannot be combined with token ids")
    return given


# Counted from the tokens sent: the crashed pass was for the next token, or for the one after it if
# a step was launched ahead.
QUARANTINE_TOKENS = 4
MAX_ENGINE_CRASHES = 1  # a node rejects a request that has crashed more engines
CRASHED_TWICE = "this request has crashed two engines, the second one while running alone"
MAX_REQUEST_ID = 256  # characters
MAX_BUDGET_S = 7 * 24 * 3600.0


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request.

    Attributes:
        request_id: the router's id, for logs and Abort.
        token_ids: prompt, then generated tokens, as little-endian int32.
        namespace: namespace of the client's prefix cache.
        adapter: LoRA adapter. Its KV is separate from all other KV in `namespace`.
        routing_key: key of its session. 0: none.
        client: number of the client. 0: unknown. Clients take turns for KV pages.
        engine_crashes: number of engines that crashed while they had it.
        input_embeddings: inputs that replace the token ids of its prompt. None: it has ids.
        prediction: output that the client expects, as little-endian int32.
        stream_interval: tokens that the decode node sends at a time, after the first one.
        traceparent: parent of the receiver's spans. "": not traced.
    """

    token_ids: bytes
    sampling: SamplingParams
    request_id: str = ""
    num_generated: int = 0
    namespace: Namespace = SHARED
    adapter: AdapterId = NO_ADAPTER
    priority: int = 0
    routing_key: int = 0
    client: int = 0
    client_weight: float = 1.0
    engine_crashes: int = 0
    images: tuple[Image, ...] = ()
    input_embeddings: InputEmbeddings | None = None
    prediction: bytes = b""
    stream_interval: int = 1
    traceparent: str = ""

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and generated tokens."""
        return len(self.token_ids) // BYTES_PER_TOKEN

    @property
    def num_predicted(self) -> int:
        return len(self.prediction) // BYTES_PER_TOKEN

    @property
    def num_prompt(self) -> int:
        return self.num_tokens - self.num_generated

    @property
    def tokens(self) -> "memoryview[int]":
        """Return the ids of `token_ids`, without a copy."""
        return tokens_of(self.token_ids)

    @property
    def cache_namespace(self) -> Namespace:
        """Return the namespace of its KV, for any weights."""
        content = b"" if self.input_embeddings is None else self.input_embeddings.name
        namespace = within(self.namespace, self.adapter)
        return part_of(namespace, content, person=b"baton embeddings")

    def continued(self, token_ids: Sequence[int], engine_crashes: int) -> "RequestSpec":
        """Return the request continued after these tokens, with the same seed."""
        if not token_ids and not engine_crashes:
            return self
        params = self.sampling
        if token_ids:  # prompt log-probabilities were sent with the first token
            params = msgspec.structs.replace(params, prompt_logprobs=-1)
        return msgspec.structs.replace(
            self,
            sampling=params,
            token_ids=self.token_ids + as_bytes(token_ids),
            num_generated=self.num_generated + len(token_ids),
            engine_crashes=engine_crashes,
        )


class PredictionUsage(msgspec.Struct, frozen=True):
    """Counts of predicted tokens used as drafts: accepted into the response, or rejected."""

    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: "PredictionUsage") -> "PredictionUsage":
        return PredictionUsage(self.accepted + other.accepted, self.rejected + other.rejected)


NOT_PREDICTED = PredictionUsage()


class Remaining(NamedTuple):
    """Seconds left of a request's limits when the message was sent.

    Attributes:
        budget_s: seconds of the total budget.
        queue_s: seconds until the first forward pass of its prompt must start.
    """

    budget_s: float
    queue_s: float = math.inf


def tokens_of(token_ids: bytes) -> "memoryview[int]":
    """Return little-endian int32 as numbers. Baton runs on little-endian machines only."""
    return memoryview(token_ids).cast("i")


def from_proto(proto: pb.Request) -> RequestSpec:
    """Validate a request from another process. The engine checks the ids against its vocabulary.

    Raises:
        InvalidRequest: names the field.
    """
    _check_tokens("token_ids", proto.token_ids)
    num_tokens = len(proto.token_ids) // BYTES_PER_TOKEN
    if not num_tokens:
        raise InvalidRequest("token_ids is empty")
    if proto.num_generated >= num_tokens:
        raise InvalidRequest(
            f"num_generated is {proto.num_generated} of {num_tokens} token_ids: no prompt is left"
        )
    if len(proto.request_id) > MAX_REQUEST_ID:
        raise InvalidRequest(f"request_id is longer than {MAX_REQUEST_ID} characters")
    for field in ("max_tokens", "seed"):
        if not proto.sampling.HasField(field):
            raise InvalidRequest(f"sampling.{field} is not set; the router sets it")
    _check_priority(proto.priority)
    seen: tuple[Image, ...] = ()
    if proto.images:
        seen = images.from_proto(proto.images)
        images.check_images(seen, tokens_of(proto.token_ids))
    prompt = proto.token_ids[: (num_tokens - proto.num_generated) * BYTES_PER_TOKEN]
    _check_tokens("prediction", proto.prediction)
    check_stream_interval(proto.stream_interval)
    return RequestSpec(
        request_id=proto.request_id,
        token_ids=proto.token_ids,
        num_generated=proto.num_generated,
        sampling=sampling.from_proto(proto.sampling, max_tokens=0, seed=0),
        namespace=check_identity("namespace", proto.namespace),
        adapter=check_identity("adapter", proto.adapter),
        priority=proto.priority,
        routing_key=proto.routing_key,
        client=proto.client,
        client_weight=_weight(proto.client_weight or 1.0),
        engine_crashes=min(proto.engine_crashes, MAX_ENGINE_CRASHES),
        images=seen,
        input_embeddings=_given_embeddings(proto.input_embeddings, prompt),
        prediction=proto.prediction,
        stream_interval=proto.stream_interval or 1,
        traceparent=checked(proto.traceparent),
    )


def to_fields(spec: RequestSpec) -> dict[str, Any]:
    """Return the fields of the wire form, for a larger message. A message would be copied."""
    return {
        **msgspec.structs.asdict(spec),
        "sampling": sampling.to_fields(spec.sampling),
        "images": images.to_proto(spec.images) if spec.images else (),
        "input_embeddings": spec.input_embeddings and spec.input_embeddings.values,
    }


def remaining_from_proto(proto: pb.Remaining) -> Remaining:
    """Parse the limits.

    Raises InvalidRequest unless the budget is positive and both are in range.
    """
    if not 0.0 < proto.budget_s <= MAX_BUDGET_S:  # also rejects NaN
        raise InvalidRequest(f"budget_s must be in (0, {MAX_BUDGET_S:g}], got {proto.budget_s}")
    if not proto.HasField("queue_s"):
        return Remaining(proto.budget_s)
    if not 0.0 <= proto.queue_s <= MAX_BUDGET_S:
        raise InvalidRequest(f"queue_s must be in [0, {MAX_BUDGET_S:g}], got {proto.queue_s}")
    return Remaining(proto.budget_s, proto.queue_s)


def remaining_to_fields(remaining: Remaining) -> dict[str, float | None]:
    queue_s = remaining.queue_s
    return {
        "budget_s": remaining.budget_s,
        "queue_s": queue_s if queue_s < math.inf else None,
    }


def _weight(weight: float) -> float:
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:  # also rejects NaN
        limits = f"[{MIN_WEIGHT}, {MAX_WEIGHT}]"
        raise InvalidRequest(f"client_weight must be in {limits}, got {weight:g}")
    return weight


def _check_tokens(field: str, token_ids: bytes) -> None:
    if len(token_ids) % BYTES_PER_TOKEN:
        raise InvalidRequest(f"{field} has {len(token_ids)} bytes, which is not a multiple of 4")


def check_stream_interval(interval: int) -> None:
    """Raise InvalidRequest if the interval is out of range. 0: not set."""
    if not 0 <= interval <= MAX_STREAM_INTERVAL:
        raise InvalidRequest(
            f"stream_interval must be in [1, {MAX_STREAM_INTERVAL}], got {interval}"
        )


def _check_priority(priority: int) -> None:
    if not LOWEST <= priority <= HIGHEST:
        raise InvalidRequest(f"priority must be in [{LOWEST}, {HIGHEST}], got {priority}")


MAX_HINTS = 4  # hints per request


class PrefixHint(msgspec.Struct, frozen=True):
    """A node's address, and how many tokens of the prompt's beginning it has cached.

    It may be wrong. The receiver tries to fetch the prefix there, and recomputes it if it is
    missing.
    """

    address: str
    num_tokens: int


def hints_from_proto(entries: Sequence[prefixes_pb2.PrefixAt]) -> tuple[PrefixHint, ...]:
    """Parse hints. Raises InvalidRequest if there are too many, or an address is invalid."""
    if len(entries) > MAX_HINTS:
        raise InvalidRequest(f"prefix_at has {len(entries)} entries, {MAX_HINTS} are allowed")
    return tuple(PrefixHint(check_address(each.address), each.tokens) for each in entries)


def hints_to_proto(hints: Iterable[PrefixHint]) -> list[prefixes_pb2.PrefixAt]:
    return [prefixes_pb2.PrefixAt(address=each.address, tokens=each.num_tokens) for each in hints]
