"""Random messages of every service between processes: each is accepted, or rejected with a
sentence.

Numbers are extremes of the types in which their consumers store them: int32, uint32, int64, NaN,
infinity.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import TransferConfig
from common.errors import ServingError
from common.page_tables import PageTables
from common.process.ipc import encode_frame
from common.request import Remaining, RequestSpec
from common.requests.namespace import as_bytes
from common.requests.sampling import SamplingParams
from common.tracing.context import UNTRACED
from decode_node import servicer
from engine.batch.request import Request
from engine.batch.table import SlotTable
from kvtransfer.frontend_messages import PairMessage
from kvtransfer.messages import HandoffId, Live, OpenHandoff, Prompt
from kvtransfer.pairing import PairHello, compare
from kvtransfer.pairs import codec
from kvtransfer.ports import GrantCommand, OpenCommand
from kvtransfer.protocol.attempt import ProducerPages
from kvtransfer.protocol.consumer import ConsumerEnd
from kvtransfer.protocol.producer import ProducerEnd
from node.messages import SubmitRequest
from protos import decode_pb2, kvtransfer_pb2
from tests.support.specs import make_spec

PAGE_SIZE = 16
PEER = 7
ID = HandoffId(PEER, 1, 1)
SAMPLING = SamplingParams(max_tokens=4, seed=1)

_UNSIGNED = st.sampled_from((0, 1, 2, 7, 16, 32, 2**31 - 1, 2**31, 2**32 - 1))
_UNSIGNED_64 = st.one_of(_UNSIGNED, st.sampled_from((2**63 - 1, 2**63, 2**64 - 1)))
_SIGNED = st.sampled_from((0, 1, -1, 7, 2**31 - 1, -(2**31)))
_REAL = st.sampled_from((0.0, 0.5, 1.0, -1.0, 1e30, float("nan"), float("inf"), 1e-40, 60.0))
_KINDS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: _UNSIGNED,
    FieldDescriptor.TYPE_UINT64: _UNSIGNED_64,
    FieldDescriptor.TYPE_FIXED64: _UNSIGNED_64,
    FieldDescriptor.TYPE_INT32: _SIGNED,
    FieldDescriptor.TYPE_SINT32: _SIGNED,
    FieldDescriptor.TYPE_ENUM: _SIGNED,
    FieldDescriptor.TYPE_FLOAT: _REAL,
    FieldDescriptor.TYPE_DOUBLE: _REAL,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.sampled_from(("", "x", "h:1", "ä" * 300, "\0", "tcp")),
    FieldDescriptor.TYPE_BYTES: st.sampled_from((b"", b"\xff", b"x" * 70_000)),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Message], usual: dict[str, Any] | None = None) -> Any:
    """Args:
    usual: values by path, such as "open.id", that most messages have, because there are more
        checks after the first one.
    """
    message = kind()
    _fill(draw, message, usual or {}, "")
    return message


def _fill(draw: st.DrawFn, message: Message, usual: dict[str, Any], path: str) -> None:
    kinds = message.DESCRIPTOR.oneofs_by_name.get("message")
    kind = draw(st.sampled_from(list(kinds.fields))) if kinds is not None else None
    for field in message.DESCRIPTOR.fields:
        if kinds is not None and field.containing_oneof is kinds and field is not kind:
            continue
        name = f"{path}.{field.name}" if path else field.name
        if name in usual and draw(_MOSTLY):
            value = usual[name]
            if isinstance(value, Message):
                getattr(message, field.name).CopyFrom(value)
            elif field.is_repeated:
                getattr(message, field.name).extend(value)
            else:
                setattr(message, field.name, value)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            named = field.message_type.fields_by_name["key"].type == field.TYPE_STRING
            getattr(message, field.name).update(draw(_MAPS if named else _BIASES))
        elif field is not kind and not draw(_MOSTLY if field.message_type else st.booleans()):
            continue
        elif field.message_type is not None:
            parts = getattr(message, field.name)
            if field.is_repeated:
                for _ in range(draw(st.integers(0, 2))):
                    _fill(draw, parts.add(), usual, name)
            else:
                parts.SetInParent()
                _fill(draw, parts, usual, name)
        elif field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(_KINDS[field.type], max_size=4)))
        else:
            setattr(message, field.name, draw(_KINDS[field.type]))


_MOSTLY = st.sampled_from((True,) * 31 + (False,))
_MAPS = st.dictionaries(st.sampled_from(("dtype", "x")), st.sampled_from(("", "y")), max_size=2)
_BIASES = st.dictionaries(
    st.integers(0, 2**32 - 1), st.floats(width=32) | st.floats(-100, 100, width=32), max_size=2
)
_ID = kvtransfer_pb2.HandoffId(instance=PEER, request=1, attempt=1)
_BUDGET = {"remaining.budget_s": 60.0}
_REQUEST = {"num_generated": 0, "token_ids": as_bytes([1, 2, 3]), "traceparent": ""}
_SAMPLED = {"max_tokens": 4, "seed": 2**64 - 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
_REST = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
_REQUEST |= {f"sampling.{k}": v for k, v in {**_SAMPLED, **_REST, "stop": ["x"]}.items()}
SUBMIT = {**_BUDGET, **{f"request.{name}": value for name, value in _REQUEST.items()}}
SUBMIT |= {"prefill_addresses": ["h:1"]}
OPEN = {f"open.{name}": value for name, value in _BUDGET.items()}
OPEN |= {f"open.prompt.request.{name}": value for name, value in _REQUEST.items()}
KINDS = ("open", "grant", "done", "cancel", "admitted", "ready", "released", "failed")
IDS = {f"{kind}.id": _ID for kind in KINDS}
READY = {"ready.start": 0, "ready.end": 16, "ready.pages": [3], "ready.last": False}

STREAM = SimpleNamespace(number=1, own_address="", known=lambda hints: hints)
many = settings(max_examples=300)


def acquire(spec: RequestSpec) -> None:
    """Store it in the engine's table, which raises OverflowError for a value that does not fit."""
    table = SlotTable(1, 64, PAGE_SIZE)
    request = Request.of(spec, key=1, origin=(1, 2**64 - 1), deadline=1.0, arrived=0.0)
    assert table.acquire(request, (1,)) == 0


@many
@given(messages(decode_pb2.Submit, SUBMIT))
def test_a_submit_is_rejected_or_fits_into_a_frame_and_the_table(submit: decode_pb2.Submit) -> None:
    """Seen failing without the check of stop_token_ids: OverflowError in SlotTable."""
    try:
        record: SubmitRequest = servicer._parsed(STREAM, submit, UNTRACED)
    except ServingError:
        return
    encode_frame(record)
    acquire(record.spec)


@many
@given(st.lists(messages(kvtransfer_pb2.FromConsumer, {**OPEN, **IDS}), max_size=6))
def test_a_consumers_message_is_rejected_or_accepted_by_a_producer(
    said: "list[kvtransfer_pb2.FromConsumer]",
) -> None:
    end = ProducerEnd(TransferConfig(), PageTables(PAGE_SIZE))
    end.stream_up(1, PEER, 0.0)
    for message in said:
        try:
            record = codec.parse(message)
            if isinstance(record, PairHello):
                compare(PairHello(1, 1, {"dtype": "y"}, (), record.regions, "here"), record)
                continue
        except ServingError:
            continue
        encode_frame(PairMessage(1, record))
        if isinstance(record, OpenHandoff) and isinstance(record.source, Prompt | Live):
            acquire(record.source.spec)
        end.received(1, record, 0.0)
        end.tick(0.0)


@many
@given(st.lists(messages(kvtransfer_pb2.FromProducer, {**READY, **IDS}), max_size=6))
def test_a_producers_message_is_rejected_or_accepted_by_a_consumer(
    said: "list[kvtransfer_pb2.FromProducer]",
) -> None:
    end = ConsumerEnd(TransferConfig(), PageTables(PAGE_SIZE))
    end.stream_up(1, PEER, "h:1", ProducerPages(2**31, 0, True, 1), 0.0)
    end.link_up(1, "tcp", 1.0)
    end.command(OpenCommand(ID, PEER, b"", Remaining(60.0), Prompt(make_spec(range(20)))), 0.0)
    end.command(GrantCommand(ID, 0, np.arange(2, dtype=np.int32)), 0.0)
    for message in said:
        try:
            record = codec.parse(message)
        except ServingError:
            continue
        if isinstance(record, PairHello):
            continue
        encode_frame(PairMessage(1, record))
        end.received(1, record, 0.0)
        end.tick(0.0)
