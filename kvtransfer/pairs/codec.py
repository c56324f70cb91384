"""Conversion between records of a pair stream and protobuf. Used by the dialer and the service.

All input from a peer is validated here, before other code sees it: sizes, ranges, and missing
fields. Whether a token range or an id is valid depends on the hand-off, and is checked by the state
machines.
"""

import math
import operator
from typing import Any, TypeAlias

from msgspec.structs import asdict

from common import request
from common.errors import InvalidRequest, ProtocolViolation, ServingError
from common.limits import MAX_IMAGES, MAX_PIXEL_BYTES, MAX_RANKS
from common.request import MAX_BUDGET_S, hints_from_proto, hints_to_proto
from common.requests import images
from common.requests.logprobs import from_proto, to_fields
from common.requests.namespace import BYTES_PER_TOKEN, check_identity
from common.requests.sampling import MAX_TOKEN_ID
from common.requests.timeline import PrefillTimes
from common.rpc import check_address
from common.rpc.streams import said
from kvtransfer.backends.base import PoolRegion
from kvtransfer.messages import (
    AnyMessage,
    CancelHandoff,
    Embeddings,
    GrantHandoff,
    HandoffAdmitted,
    HandoffFailed,
    HandoffId,
    Heartbeat,
    InvalidatePrefix,
    Live,
    OpenHandoff,
    PagesReady,
    PagesReleased,
    Prefix,
    Prompt,
    ReadsDone,
    SampledOutput,
    Source,
    Weights,
)
from kvtransfer.pairing import DataPath, PairHello
from protos import kvtransfer_pb2 as pb

MAX_TOKENS = 1 << 20
MAX_PAGES = 1 << 20  # of one PagesReady
MAX_PATHS = 8  # of one rank
MAX_FIELDS = 64  # of a fingerprint
MAX_DESCRIPTION_BYTES = 64 << 10
MAX_TEXT = 4096  # characters of a reason, an address, a fingerprint's value

Proto: TypeAlias = pb.FromConsumer | pb.FromProducer


def parse(message: Proto) -> PairHello | AnyMessage:
    """Convert a message to its record. Raises ProtocolViolation if it is invalid."""
    kind = message.WhichOneof("message")
    if kind is None:
        raise ProtocolViolation("a message without content")
    body = getattr(message, kind)
    match body:
        case pb.Hello():
            return _hello(body)
        case pb.Open():
            return _open(body)
        case pb.Grant():
            if not 0.0 <= body.gib_per_s < math.inf:
                raise ProtocolViolation(f"a link of {body.gib_per_s} GiB/s")
            return GrantHandoff(id_of(body), body.prefix_tokens, body.room_tokens, body.gib_per_s)
        case pb.Done():
            return ReadsDone(id_of(body))
        case pb.Cancel():
            return CancelHandoff(id_of(body), _text("reason", body.reason))
        case pb.Forget():
            return _forget(body)
        case pb.Admitted():
            return HandoffAdmitted(id_of(body), body.compute_tokens, body.queued_tokens)
        case pb.Ready():
            return _ready(body)
        case pb.Released():
            return PagesReleased(id_of(body), body.held)
        case pb.Failed():
            _seconds("retry_after_s", body.retry_after_s)
            reason = _text("reason", body.reason)
            return HandoffFailed(id_of(body), reason, body.retryable, body.retry_after_s)
        case pb.Heartbeat():
            return Heartbeat(body.sequence, body.open_handoffs, body.connecting)
    raise ProtocolViolation(f"an unknown message {kind}")


def to_proto(record: PairHello | AnyMessage, *, as_consumer: bool) -> Proto:
    """Convert a record to the message to send.

    Args:
        as_consumer: whether this node is the consumer of the stream.
    """
    wrap = pb.FromConsumer if as_consumer else pb.FromProducer
    match record:
        case PairHello():
            return wrap(hello=_hello_proto(record))
        case OpenHandoff():
            return pb.FromConsumer(open=_open_proto(record))
        case GrantHandoff():
            return pb.FromConsumer(grant=pb.Grant(**_fields(record)))
        case ReadsDone():
            return pb.FromConsumer(done=pb.Done(**_fields(record)))
        case CancelHandoff(reason=reason):
            return pb.FromConsumer(
                cancel=pb.Cancel(**_fields(record) | {"reason": reason[:MAX_TEXT]})
            )
        case InvalidatePrefix():
            return pb.FromConsumer(forget=pb.Forget(**_fields(record)))
        case HandoffAdmitted():
            return pb.FromProducer(admitted=pb.Admitted(**_fields(record)))
        case PagesReady():
            return pb.FromProducer(ready=_ready_proto(record))
        case PagesReleased():
            return pb.FromProducer(released=pb.Released(**_fields(record)))
        case HandoffFailed(reason=reason, retry_after_s=retry_after_s):
            limited = {
                "reason": reason[:MAX_TEXT],
                "retry_after_s": min(retry_after_s, MAX_BUDGET_S),
            }
            return pb.FromProducer(failed=pb.Failed(**_fields(record) | limited))
        case Heartbeat():
            return wrap(heartbeat=pb.Heartbeat(**_fields(record)))


def _fields(record: AnyMessage) -> dict[str, Any]:
    """Return the fields of a record whose message has fields with the same names."""
    fields = asdict(record)
    if "id" in fields:
        fields["id"] = _id_proto(fields["id"])
    return fields


def last_words(error: ServingError) -> pb.FromProducer:
    """Return the producer's final message on a stream. It belongs to no hand-off."""
    return pb.FromProducer(last_words=said(error))


def id_of(
    body: pb.Open
    | pb.Grant
    | pb.Done
    | pb.Cancel
    | pb.Admitted
    | pb.Ready
    | pb.Released
    | pb.Failed,
) -> HandoffId:
    """Return the hand-off id. Raises ProtocolViolation if it is invalid."""
    id = body.id
    if not id.attempt:
        raise ProtocolViolation("a hand-off id without its attempt")
    return HandoffId(id.instance, id.request, id.attempt)


def _id_proto(id: HandoffId) -> pb.HandoffId:
    return pb.HandoffId(instance=id.instance, request=id.request, attempt=id.attempt)


def _hello(body: pb.Hello) -> PairHello:
    if not body.regions:
        raise ProtocolViolation("a Hello without a region")
    _at_most("regions", len(body.regions), MAX_RANKS)
    _at_most("paths", len(body.paths), MAX_PATHS * len(body.regions))
    _at_most("fingerprint", len(body.fingerprint), MAX_FIELDS)
    for path in body.paths:
        _at_most("bytes of a path's description", len(path.description), MAX_DESCRIPTION_BYTES)
    return PairHello(
        instance=body.instance_id,
        protocol_version=body.protocol_version,
        fingerprint={
            _text("fingerprint", field): _text("fingerprint", value)
            for field, value in body.fingerprint.items()
        },
        paths=tuple(
            DataPath(_text("backend", path.backend), path.description, path.rank)
            for path in body.paths
        ),
        regions=tuple(
            PoolRegion(region.base, region.page_bytes, region.num_pages) for region in body.regions
        ),
        address=_text("address", body.address),
        tp=body.tp,
        pp=body.pp,
        state_pages=body.state_pages,
    )


def _hello_proto(record: PairHello) -> pb.Hello:
    return pb.Hello(
        instance_id=record.instance,
        protocol_version=record.protocol_version,
        fingerprint=record.fingerprint,
        paths=[pb.DataPath(**asdict(path)) for path in record.paths],
        regions=[pb.Region(**asdict(region)) for region in record.regions],
        address=record.address,
        tp=record.tp,
        pp=record.pp,
        state_pages=record.state_pages,
    )


def num_tokens_of(body: pb.Open) -> int:
    """Return the number of tokens in an Open, without parsing them."""
    match getattr(body, body.WhichOneof("source") or "", None):
        case pb.Prompt(request=named) | pb.Live(request=named):
            return (len(named.token_ids) + len(named.prediction)) // BYTES_PER_TOKEN
        case pb.Prefix(token_ids=token_ids):
            return len(token_ids) // BYTES_PER_TOKEN
    return 0


def _open(body: pb.Open) -> OpenHandoff:
    try:
        return OpenHandoff(
            id_of(body),
            check_identity("weights", body.weight_version),
            request.remaining_from_proto(body.remaining),
            _source(body),
        )
    except InvalidRequest as error:
        raise ProtocolViolation(str(error)) from error


def _source(body: pb.Open) -> Source:
    match getattr(body, body.WhichOneof("source") or "", None):
        case pb.Prompt() as prompt:
            _check_tokens(prompt.request.token_ids)
            spec = request.from_proto(prompt.request)
            _at_most("encode_addresses", len(prompt.encode_addresses), MAX_IMAGES)
            encoders = tuple(map(check_address, prompt.encode_addresses))
            return Prompt(spec, hints_from_proto(prompt.prefix_hints), encoders)
        case pb.Live() as live:
            _check_tokens(live.request.token_ids)
            return Live(request.from_proto(live.request), live.ticket)
        case pb.Prefix() as prefix:
            _check_tokens(prefix.token_ids)
            namespace = check_identity("namespace", prefix.namespace)
            return Prefix(prefix.token_ids, namespace, prefix.ticket)
        case pb.Weights() as weights:
            _check_pieces(weights)
            return Weights(weights.first_piece, weights.num_pieces, weights.piece_bytes)
        case pb.Embeddings() as embeddings:
            _check_pieces(embeddings)
            _at_most("bytes of pixels", len(embeddings.image.pixels), MAX_PIXEL_BYTES)
            [image] = images.from_proto([embeddings.image])
            return Embeddings(image, embeddings.num_pieces, embeddings.piece_bytes)
    raise ProtocolViolation("an Open of an unknown source")


def _check_pieces(body: pb.Weights | pb.Embeddings) -> None:
    _at_most("pieces", body.num_pieces, MAX_TOKENS)
    if not (body.num_pieces and body.piece_bytes):
        raise ProtocolViolation("an Open without pieces")


def _open_proto(record: OpenHandoff) -> pb.Open:
    return pb.Open(
        id=_id_proto(record.id),
        weight_version=record.weights,
        remaining=request.remaining_to_fields(record.remaining),
        **_source_fields(record.source),
    )


def _source_fields(source: Source) -> dict[str, Any]:
    match source:
        case Prompt(spec, hints, encoders):
            fields = {"request": request.to_fields(spec), "encode_addresses": encoders}
            return {"prompt": fields | {"prefix_hints": hints_to_proto(hints)}}
        case Live(spec, ticket):
            return {"live": {"request": request.to_fields(spec), "ticket": ticket}}
        case Prefix():
            return {"prefix": asdict(source)}
        case Weights():
            return {"weights": asdict(source)}
        case Embeddings(image):
            [encoded] = images.to_proto([image])
            return {"embeddings": asdict(source) | {"image": encoded}}


def _forget(body: pb.Forget) -> InvalidatePrefix:
    _check_tokens(body.token_ids)
    try:
        namespace = check_identity("namespace", body.namespace)
    except InvalidRequest as error:
        raise ProtocolViolation(str(error)) from error
    return InvalidatePrefix(body.token_ids, namespace)


def _check_tokens(token_ids: bytes) -> None:
    num_tokens, rest = divmod(len(token_ids), BYTES_PER_TOKEN)
    _at_most("token_ids", num_tokens, MAX_TOKENS)
    if not num_tokens or rest:
        raise ProtocolViolation(f"{len(token_ids)} bytes of token_ids")


def _ready(body: pb.Ready) -> PagesReady:
    _at_most("pages", len(body.pages), MAX_PAGES)
    if body.end < body.start:
        raise ProtocolViolation(f"a range [{body.start}, {body.end})")
    return PagesReady(
        id_of(body),
        body.start,
        body.end,
        tuple(body.pages),
        body.last,
        _output(body),
        _sums(body),
    )


def _output(body: pb.Ready) -> SampledOutput | None:
    if not body.HasField("first_token"):
        if body.token_ids:
            raise ProtocolViolation("tokens of a running request without its newest token")
        return None
    if not body.last:
        raise ProtocolViolation("the first token comes with the last Ready, and only there")
    _at_most("token_ids", len(body.token_ids), MAX_TOKENS)
    if max((*body.token_ids, body.first_token)) > MAX_TOKEN_ID:
        raise ProtocolViolation(f"a token id above {MAX_TOKEN_ID}")
    return SampledOutput(
        body.first_token,
        tuple(body.token_ids),
        _times(body.times) if body.HasField("times") else None,
        from_proto(body.logprobs) if body.HasField("logprobs") else None,
        from_proto(body.prompt_logprobs) if body.HasField("prompt_logprobs") else None,
    )


def _sums(body: pb.Ready) -> tuple[tuple[int, int], ...]:
    places = list(body.checked)
    in_order = all(map(operator.lt, places, places[1:]))
    if len(body.sums) != len(places) or not in_order or max(places, default=-1) >= len(body.pages):
        raise ProtocolViolation("checksums of pages that are not in this Ready")
    return tuple(zip(places, body.sums, strict=True))


def _times(body: pb.PrefillTimes) -> PrefillTimes:
    seconds = (body.bootstrap_s, body.waiting_s, body.prefill_s)
    for each in seconds:
        _seconds("times", each)
    return PrefillTimes(*seconds, body.chunks)


def _times_proto(record: PrefillTimes) -> pb.PrefillTimes:
    return pb.PrefillTimes(
        bootstrap_s=record.bootstrap_s,
        waiting_s=record.waiting_s,
        prefill_s=record.prefill_s,
        chunks=record.num_chunks,
    )


def _ready_proto(record: PagesReady) -> pb.Ready:
    return pb.Ready(
        id=_id_proto(record.id),
        start=record.start,
        end=record.end,
        pages=record.pages,
        last=record.last,
        checked=[place for place, _ in record.sums],
        sums=[checksum for _, checksum in record.sums],
        **({} if record.output is None else _output_fields(record.output)),
    )


def _output_fields(output: SampledOutput) -> dict[str, Any]:
    prompt = output.prompt_logprobs
    return {
        "first_token": output.token,
        "token_ids": output.token_ids,
        "times": _times_proto(output.times) if output.times else None,
        "logprobs": None if output.logprobs is None else to_fields(output.logprobs),
        "prompt_logprobs": None if prompt is None else to_fields(prompt),
    }


def _seconds(field: str, value: float) -> None:
    if not 0.0 <= value <= MAX_BUDGET_S:  # also false for NaN
        raise ProtocolViolation(f"{field} of {value} s")


def _text(field: str, value: str) -> str:
    _at_most(f"characters of {field}", len(value), MAX_TEXT)
    return value


def _at_most(what: str, number: int, limit: int) -> None:
    if number > limit:
        raise ProtocolViolation(f"{number} {what}, {limit} allowed")
