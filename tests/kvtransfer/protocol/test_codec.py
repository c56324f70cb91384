"""Conversion of records to protobuf and back, and rejection of invalid messages."""

import math
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ProtocolViolation
from common.limits import HIGHEST, LOWEST, MAX_RANKS, MAX_STREAM_INTERVAL
from common.request import (
    GIVEN_TOKEN,
    MAX_BUDGET_S,
    MAX_ENGINE_CRASHES,
    MAX_HINTS,
    InputEmbeddings,
    PrefixHint,
    Remaining,
    RequestSpec,
)
from common.requests.images import Image
from common.requests.namespace import SHARED, as_bytes, namespace_of
from common.requests.sampling import SamplingParams
from common.requests.timeline import PrefillTimes
from common.tracing.context import SpanName
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
    Live,
    OpenHandoff,
    PagesReady,
    PagesReleased,
    Prefix,
    Prompt,
    ReadsDone,
    SampledOutput,
    Weights,
)
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.pairs import codec
from protos import kvtransfer_pb2 as pb
from tests.kvtransfer.pump import through_protobuf
from tests.support.specs import make_spec

ID = HandoffId(1, 2, 3)
SAMPLING = SamplingParams(max_tokens=4, seed=5)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i31 = st.integers(0, 2**31 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ids = st.builds(HandoffId, u64, u64, st.integers(1, 2**32 - 1))


def some(low: float, high: float) -> st.SearchStrategy[float]:
    """Return numbers with float32 precision, which one conversion does not change."""
    return st.floats(low, high, width=32, allow_nan=False)


samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31 - 1),
    seed=u64,
    temperature=some(0, 100),
    top_p=some(0.125, 1),
    top_k=st.one_of(st.just(-1), st.integers(1, 2**31 - 1)),
    min_p=some(0, 1),
    stop_token_ids=st.lists(i31, max_size=16).map(tuple),
    ignore_eos=st.booleans(),
    frequency_penalty=some(-2, 2),
    presence_penalty=some(-2, 2),
    repetition_penalty=some(0.125, 8),
    logit_bias=st.dictionaries(i31, some(-100, 100), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    allowed_token_ids=st.lists(i31, max_size=4).map(tuple),
    bad_word_ids=st.lists(st.lists(i31, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    logprobs=st.integers(-1, 20),
    prompt_logprobs=st.integers(-1, 20),
    prompt_logprobs_start=st.integers(0, 2**31 - 1),
    hidden_states=st.booleans(),
    routed_experts=st.booleans(),
)
beats = st.builds(Heartbeat, u64, u32, st.booleans())
hellos = st.builds(
    PairHello,
    u64,
    u32,
    st.dictionaries(text, text, max_size=5),
    st.lists(st.builds(DataPath, text, st.binary(max_size=40), u32), max_size=3).map(tuple),
    st.lists(st.builds(PoolRegion, u64, u64, u32), min_size=1, max_size=3).map(tuple),
    text,
    u32,
    u32,
    u32,
)


traceparents = st.just("") | st.builds(
    lambda *name: SpanName(*name).header,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
)
seconds = st.floats(0.0, MAX_BUDGET_S)
times = st.builds(PrefillTimes, seconds, seconds, seconds, u32)


hints = st.builds(PrefixHint, st.sampled_from(["127.0.0.1:1", "node:50100", "[::1]:2"]), u32)


images = st.builds(Image, st.just(0), u32, u32, st.binary(max_size=40), st.integers(1, 2**32 - 1))
namespaces = st.just(SHARED) | st.builds(namespace_of, text)
token_ids = st.lists(i31, min_size=1, max_size=30).map(as_bytes)


@st.composite
def specs(draw: st.DrawFn) -> RequestSpec:
    tokens = draw(token_ids)
    num_generated, embeddings = draw(st.integers(0, len(tokens) // 4 - 1)), None
    num_prompt = len(tokens) // 4 - num_generated
    if draw(st.booleans()):
        tokens = as_bytes([GIVEN_TOKEN] * num_prompt) + tokens[4 * num_prompt :]
        row = draw(st.binary(min_size=4, max_size=4))
        embeddings = InputEmbeddings.of(row * num_prompt, num_prompt)
    return RequestSpec(
        token_ids=tokens,
        num_generated=num_generated,
        input_embeddings=embeddings,
        sampling=draw(samplings),
        request_id=draw(text),
        traceparent=draw(traceparents),
        namespace=draw(namespaces),
        engine_crashes=draw(st.integers(0, MAX_ENGINE_CRASHES)),
        priority=draw(st.integers(LOWEST, HIGHEST)),
        routing_key=draw(u64),
        client=draw(u64),
        client_weight=draw(st.floats(0.1, 10.0)),
        prediction=draw(st.lists(i31, max_size=4).map(as_bytes)),
        stream_interval=draw(st.integers(1, MAX_STREAM_INTERVAL)),
    )


sources = st.one_of(
    st.builds(
        Prompt,
        specs(),
        st.lists(hints, max_size=MAX_HINTS).map(tuple),
        st.lists(st.sampled_from(["node:50400", "[::1]:2"]), max_size=3).map(tuple),
    ),
    st.builds(Live, specs(), u64),
    st.builds(Prefix, token_ids, namespaces, u64),
    st.builds(Weights, u32, st.integers(1, codec.MAX_TOKENS), st.integers(1, 2**64 - 1)),
    st.builds(Embeddings, images, st.integers(1, codec.MAX_TOKENS), st.integers(1, 2**64 - 1)),
)
budgets = st.builds(
    Remaining, st.floats(1e-3, MAX_BUDGET_S), st.floats(0.0, MAX_BUDGET_S) | st.just(math.inf)
)
opens = st.builds(
    OpenHandoff, ids, st.just(b"") | st.binary(min_size=16, max_size=16), budgets, sources
)


outputs = st.builds(SampledOutput, i31, st.lists(i31, max_size=5).map(tuple), st.none() | times)


@st.composite
def readies(draw: st.DrawFn) -> PagesReady:
    start = draw(i31)
    output = draw(st.none() | outputs)
    pages = tuple(draw(st.lists(u32, max_size=30)))
    end = draw(st.integers(start, 2**32 - 1))
    last = output is not None or draw(st.booleans())
    places = draw(st.sets(st.integers(0, len(pages) - 1))) if pages else ()
    sums = tuple((place, draw(st.integers(0, 2**64 - 1))) for place in sorted(places))
    return PagesReady(draw(ids), start, end, pages, last, output, sums)


from_consumer = st.one_of(
    opens,
    st.builds(GrantHandoff, ids, u32, u32),
    st.builds(ReadsDone, ids),
    st.builds(CancelHandoff, ids, text),
    beats,
)
from_producer = st.one_of(
    st.builds(HandoffAdmitted, ids, u32, u32),
    readies(),
    st.builds(PagesReleased, ids, st.booleans()),
    st.builds(HandoffFailed, ids, text, st.booleans(), seconds),
    beats,
)


# Seen failing without `queue_s` of Open in either direction, and without `engine_crashes`.
@settings(max_examples=150)
@given(from_consumer)
def test_messages_of_a_consumer_arrive_unchanged(message):
    assert through_protobuf(message, as_consumer=True) == message


# Seen failing without `retry_after_s` of Failed in either direction.
@settings(max_examples=150)
@given(from_producer)
def test_messages_of_a_producer_arrive_unchanged(message):
    assert through_protobuf(message, as_consumer=False) == message


@settings(max_examples=50)
@given(hellos, st.booleans())
def test_a_hello_arrives_unchanged(hello, as_consumer):
    assert through_protobuf(hello, as_consumer=as_consumer) == hello


def _changed(record: PairHello | AnyMessage, part: str, as_consumer: bool, **changes: Any) -> Any:
    """Return the message of a record, with changes of one of its parts."""
    message = codec.to_proto(record, as_consumer=as_consumer)
    body: Any = attrgetter(part)(message)
    for field, value in changes.items():
        body.ClearField(field)
        if isinstance(value, list | dict):
            getattr(body, field).MergeFrom(getattr(type(body)(**{field: value}), field))
        elif value is not None:
            setattr(body, field, value)
    return message


OPENING = OpenHandoff(ID, b"", Remaining(9.0), Prompt(make_spec([1, 2])))
READY = PagesReady(ID, 0, 4, (1,), True, SampledOutput(7))
HELLO = PairHello(1, 1, {"a": "b"}, (DataPath("tcp", b"x"),), (PoolRegion(0, 1, 1),), "here:1")
_open = partial(_changed, OPENING, "open.prompt.request", True)
_due = partial(_changed, OPENING, "open.remaining", True)
_grant = partial(_changed, GrantHandoff(ID, 0), "grant", True)
_ready = partial(_changed, READY, "ready", False)
_failed = partial(_changed, HandoffFailed(ID, "late", True), "failed", False)
_hello = partial(_changed, HELLO, "hello", True)


def _hinted(*addresses: str) -> Any:
    hints = [{"address": each} for each in addresses]
    return _changed(OPENING, "open.prompt", True, prefix_hints=hints)


def _pieces(number: int, piece_bytes: int = 1) -> Any:
    weights = {"num_pieces": number, "piece_bytes": piece_bytes}
    return _changed(OPENING, "open", True, weights=weights)


def test_an_invalid_trace_is_ignored_and_no_violation():
    for header in ("nonsense", "00-0-0-01", "x" * 5000):
        message = codec.parse(_open(traceparent=header))
        assert isinstance(message, OpenHandoff) and message.source == Prompt(make_spec([1, 2]))


@pytest.mark.parametrize(
    "checked, sums", [([0], []), ([], [7]), ([1], [7]), ([0, 0], [7, 7])], ids=str
)
def test_checksums_must_match_the_published_pages(checked, sums):
    with pytest.raises(ProtocolViolation, match="checksums"):
        codec.parse(_ready(checked=checked, sums=sums))


def test_times_before_the_last_range_are_ignored():
    message = _ready(last=False, first_token=None, times={"prefill_s": 1.0})
    record = codec.parse(message)
    assert isinstance(record, PagesReady) and record.output is None


@pytest.mark.parametrize(
    "message, complaint",
    [
        (_ready(times={"prefill_s": -1.0}), "times of"),
        (_ready(times={"waiting_s": float("nan")}), "times of"),
        (_ready(times={"bootstrap_s": float("inf")}), "times of"),
        (pb.FromConsumer(), "without content"),
        (pb.FromProducer(), "without content"),
        (pb.FromConsumer(grant=pb.Grant(prefix_tokens=1)), "attempt"),
        (_grant(gib_per_s=math.nan), "GiB/s"),
        (_grant(gib_per_s=math.inf), "GiB/s"),
        (_grant(gib_per_s=-1.0), "GiB/s"),
        (pb.FromConsumer(done=pb.Done(id=pb.HandoffId(instance=1, request=1))), "attempt"),
        (pb.FromConsumer(cancel=pb.Cancel(id=_open().open.id, reason="x" * 5000)), "reason"),
        (_open(token_ids=b""), "0 bytes of token_ids"),
        (pb.FromConsumer(forget=pb.Forget()), "0 bytes of token_ids"),
        (pb.FromConsumer(forget=pb.Forget(token_ids=b"12345")), "5 bytes of token_ids"),
        (pb.FromConsumer(forget=pb.Forget(token_ids=b"1234", namespace=bytes(15))), "namespace"),
        (_open(token_ids=bytes(4 * codec.MAX_TOKENS + 4)), "token_ids"),
        (_open(token_ids=b"12345"), "5 bytes of token_ids"),
        (_open(prediction=b"12345"), "prediction has 5 bytes"),
        (_open(stream_interval=1025), "stream_interval must be in"),
        (_hinted("here"), "host:port"),
        (_hinted(*["h:1"] * 5), "4 are allowed"),
        (_open(num_generated=2), "generated"),
        (_due(budget_s=math.nan), "budget"),
        (_due(budget_s=math.inf), "budget"),
        (_due(budget_s=0.0), "budget"),
        (_due(budget_s=-1.0), "budget"),
        (_due(queue_s=math.nan), "queue_s"),
        (_due(queue_s=-1.0), "queue_s"),
        (_failed(retry_after_s=math.inf), "retry_after_s"),
        (_failed(retry_after_s=-1.0), "retry_after_s"),
        (_open(request_id="x" * 5000), "request_id"),
        (_open(namespace=bytes(15)), "namespace has 15 bytes, expected 16 or 0"),
        (_open(namespace=bytes(1 << 20)), "namespace"),
        (_open(sampling=None), "max_tokens"),
        (
            pb.FromConsumer(open=pb.Open(id=_open().open.id, remaining={"budget_s": 1})),
            "unknown source",
        ),
        (_pieces(0), "without pieces"),
        (_pieces(1, piece_bytes=0), "without pieces"),
        (_pieces(codec.MAX_TOKENS + 1), "pieces"),
        (_open(priority=101), "priority"),
        (_open(priority=-101), "priority"),
        (_ready(last=False), "first token"),
        (_ready(first_token=None, token_ids=[7]), "newest token"),
        (_ready(first_token=2**31), "token id"),
        (_ready(token_ids=[2**31]), "token id"),
        (_ready(start=5), "range"),
        (_ready(pages=[1] * (codec.MAX_PAGES + 1)), "pages"),
        (_hello(regions=[]), "region"),
        (_hello(regions=[pb.Region()] * (MAX_RANKS + 1)), "regions"),
        (_hello(paths=[pb.DataPath()] * 9), "paths"),
        (_hello(paths=[pb.DataPath(description=bytes(1 << 17))]), "description"),
        (_hello(fingerprint={str(n): "" for n in range(65)}), "fingerprint"),
        (_hello(fingerprint={"a": "x" * 5000}), "fingerprint"),
        (_hello(address="x" * 5000), "address"),
    ],
)
def test_an_invalid_message_is_a_violation(message, complaint):
    with pytest.raises(ProtocolViolation, match=complaint):
        codec.parse(message)


@pytest.mark.parametrize("field, value", [("temperature", -1.0), ("top_p", 2.0), ("max_tokens", 0)])
def test_sampling_options_that_no_router_would_send_are_a_violation(field, value):
    message = _open()
    setattr(message.open.prompt.request.sampling, field, value)
    with pytest.raises(ProtocolViolation, match=field):
        codec.parse(message)


def test_a_long_reason_is_truncated_so_that_the_peer_accepts_it():
    failed = through_protobuf(HandoffFailed(ID, "x" * 10_000, True), as_consumer=False)
    assert isinstance(failed, HandoffFailed) and len(failed.reason) == codec.MAX_TEXT


@settings(max_examples=200)
@given(st.binary(max_size=200), st.sampled_from([pb.FromConsumer, pb.FromProducer]))
def test_any_bytes_are_a_record_or_a_violation(data, kind):
    try:
        message = kind.FromString(data)
    except DecodeError:
        return
    try:
        codec.parse(message)
    except ProtocolViolation:
        return
