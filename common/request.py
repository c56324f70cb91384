"""The specification of a request: its only record, its wire form and its validation.

All processes share this record. The router creates it. A decode node sends it to the prefill node
and to the next decode node. The engine's `Request` refers to it. A new field is declared here and
in `protos/request.proto`.

Quarantine: one request that makes a forward pass raise crashes its engine, together with all its
other requests, and it is unknown which request it was. So each of them carries a crash count. It is
computed alone, at its prefill node and at its decode node, until it is past the position of the
crash. Then it is not the cause, and its count is cleared. A request that is alone in an engine that
crashes is the cause.
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

# Input embeddings: a prompt as inputs of the first layer, without token ids.
#
# Each token of such a prompt has the same id, above all vocabularies. Its KV is cached in a
# namespace of its own, which depends on all embeddings. Code that compares prompts by namespace and
# tokens therefore recognises equal embeddings, and never takes other ones for them.
GIVEN_TOKEN = FIRST_IMAGE_TOKEN  # the id of each token
NUMBER_BYTES = 4
LARGEST = 65504.0  # of float16, in which a model may compute
NOT_ACCEPTED = (
    "input_embeddings: this server does not accept them. engine.input_embeddings.enabled of its "
    "nodes allows it"
)
_GIVEN = as_bytes([GIVEN_TOKEN])


class InputEmbeddings(msgspec.Struct, frozen=True):
    """The embeddings of a prompt.

    Attributes:
        values: little-endian float32 [num_tokens, hidden size].
        num_tokens: of the prompt.
        name: hash of the values.
    """

    values: bytes
    num_tokens: int
    name: bytes

    @classmethod
    def of(cls, values: bytes, num_tokens: int) -> Self:
        """Return the embeddings of so many tokens. Raise InvalidRequest if they have no such shape,
        or too many bytes."""
        check_at_most("input_embeddings", len(values), "bytes", MAX_EMBEDDING_BYTES)
        if not num_tokens or not values or len(values) % (NUMBER_BYTES * num_tokens):
            raise InvalidRequest(
                f"input_embeddings: {len(values)} bytes are not float32 [{num_tokens}, hidden size]"
            )
        return cls(values, num_tokens, blake2b(values, digest_size=IDENTITY_BYTES).digest())


def _given_embeddings(values: bytes, prompt: bytes) -> InputEmbeddings | None:
    """Parse the embeddings of a prompt. Return None without any.

    Args:
        prompt: its ids, in the form of `as_bytes`.
    Raises:
        InvalidRequest: they do not fit the prompt.
    """
    if not values:
        return None
    given = InputEmbeddings.of(values, len(prompt) // BYTES_PER_TOKEN)
    if prompt != _GIVEN * (len(prompt) // BYTES_PER_TOKEN):
        raise InvalidRequest("input_embeddings: cannot be combined with token ids")
    return given


# Counted from the tokens sent: the crashed pass was for the next one, or for the one after if a
# step was launched ahead.
QUARANTINE_TOKENS = 4
MAX_ENGINE_CRASHES = 1  # crashes with which a node still accepts a request
CRASHED_TWICE = "this request has crashed two engines, the second one while running alone"
MAX_REQUEST_ID = 256  # characters
MAX_BUDGET_S = 7 * 24 * 3600.0


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request.

    Attributes:
        request_id: of the router, for logs and Abort.
        token_ids: little-endian int32: the prompt, then generated tokens.
        num_generated: how many of token_ids are generated tokens.
        namespace: of the client's prefix cache.
        adapter: LoRA adapter. Its KV is separate from all other KV in `namespace`.
        routing_key: of its session. 0: none.
        client: number of the client. 0: not known. Clients take turns for KV pages.
        client_weight: relative share of the client.
        engine_crashes: engines that crashed while they had it.
        images: of its prompt.
        input_embeddings: of its prompt, whose ids say nothing then. None: it has ids.
        prediction: little-endian int32: output that the client expects.
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
        """Return the number of tokens of `prediction`."""
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
        """Return the request continued after these tokens.

        Its seed draws the next tokens as before.
        """
        if not token_ids and not engine_crashes:
            return self
        params = self.sampling
        if token_ids:  # log-probabilities of the prompt were sent with the first of them
            params = msgspec.structs.replace(params, prompt_logprobs=-1)
        return msgspec.structs.replace(
            self,
            sampling=params,
            token_ids=self.token_ids + as_bytes(token_ids),
            num_generated=self.num_generated + len(token_ids),
            engine_crashes=engine_crashes,
        )


class PredictionUsage(msgspec.Struct, frozen=True):
    """Predicted tokens used as drafts: in the response (accepted), or wrong (rejected)."""

    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: "PredictionUsage") -> "PredictionUsage":
        return PredictionUsage(self.accepted + other.accepted, self.rejected + other.rejected)


NOT_PREDICTED = PredictionUsage()


class Remaining(NamedTuple):
    """Seconds left of a request's limits when the message was sent.

    Attributes:
        budget_s: of its total budget.
        queue_s: longest wait for the first forward pass of its prompt.
    """

    budget_s: float
    queue_s: float = math.inf


def tokens_of(token_ids: bytes) -> "memoryview[int]":
    """Return little-endian int32 as numbers, on the little-endian machines that Baton runs on."""
    return memoryview(token_ids).cast("i")


def from_proto(proto: pb.Request) -> RequestSpec:
    """Validate a request of another process. The engine checks the ids against its vocabulary.

    Raises:
        InvalidRequest: with the field's name.
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
    """Return the fields of the wire form, for use in a larger message.

    Protobuf would copy a message.
    """
    return {
        **msgspec.structs.asdict(spec),
        "sampling": sampling.to_fields(spec.sampling),
        "images": images.to_proto(spec.images) if spec.images else (),
        "input_embeddings": spec.input_embeddings and spec.input_embeddings.values,
    }


def to_proto(spec: RequestSpec) -> pb.Request:
    """Return the wire form. `from_proto` gives the same record back."""
    return pb.Request(**to_fields(spec))


def remaining_from_proto(proto: pb.Remaining) -> Remaining:
    """Return the limits.

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
    """Return the fields of the wire form."""
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
    """Raise InvalidRequest if the priority is out of range."""
    if not LOWEST <= priority <= HIGHEST:
        raise InvalidRequest(f"priority must be in [{LOWEST}, {HIGHEST}], got {priority}")


MAX_HINTS = 4  # per request


class PrefixHint(msgspec.Struct, frozen=True):
    """A node by its address, and how many prompt tokens it holds, from the first one on.

    It may be wrong. The receiver requests the prefix there and recomputes it if it is missing.
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
