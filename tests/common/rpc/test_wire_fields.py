"""Messages with too many fields are detected before they are parsed."""

import pytest

from common.rpc.services import FieldCounter
from protos.decode_pb2 import Submit, ToNode
from protos.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds
from protos.sampling_pb2 import Sampling

ALLOWED = 100


def exceeded(data: bytes, allowed: int = ALLOWED) -> bool:
    return FieldCounter(GenerateRequest.DESCRIPTOR, allowed).exceeded(data)


def of_messages(num: int) -> bytes:
    """Return messages with 1 + 3 * num fields."""
    turns = [ChatMessage(role="user", content="x" * 200) for _ in range(num)]
    return GenerateRequest(messages=ChatMessages(messages=turns)).SerializeToString()


def test_fields_of_nested_messages_count():
    assert not exceeded(of_messages(33))  # 100 fields
    assert exceeded(of_messages(34))


@pytest.mark.parametrize(
    "request_, num_fields",
    [
        (GenerateRequest(text="x" * 10_000), 1),
        (GenerateRequest(token_ids=TokenIds(ids=range(10_000))), 2),
        (GenerateRequest(text="x" * 300, timeout_s=1.0, sampling=Sampling(top_p=0.5, seed=9)), 5),
    ],
    ids=["text", "packed", "fixed"],
)
def test_a_long_field_is_one_field(request_, num_fields):
    data = request_.SerializeToString()
    assert not exceeded(data, num_fields)
    assert exceeded(data, num_fields - 1)


@pytest.mark.parametrize(
    "field",
    [b"\x2a\x00", b"\x1a\x00", b"\x12\x00", b"\x78\x01", b"\x7a\x00", b"\x7b\x7c", b"\x40\x01"],
    ids=["sampling", "messages", "text", "number", "bytes", "group", "unpacked"],
)
def test_merged_replaced_and_unknown_fields_count_too(field):
    assert exceeded(field * 200)


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 1000, b"\x12\xff" + b"\xff" * 1000, b"\x78" + b"\xff" * 1000, b"\x12" + b"\x80" * 9],
    ids=["tag", "length", "value", "end"],
)
def test_an_invalid_message_is_left_to_the_parser(data):
    assert not exceeded(data, 2)


def test_every_submit_of_a_routers_message_counts():
    data = ToNode(submits=[Submit(number=i + 1) for i in range(200)]).SerializeToString()
    assert FieldCounter(ToNode.DESCRIPTOR, 399).exceeded(data)
    assert not FieldCounter(ToNode.DESCRIPTOR, 400).exceeded(data)
