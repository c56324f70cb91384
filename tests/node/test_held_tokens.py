"""Tokens that a node sends in groups, and their messages."""

from array import array
from collections.abc import Mapping, Sequence
from unittest.mock import Mock

import numpy as np
import pytest

from common.process.ipc import encode_frame
from common.request import PredictionUsage
from common.requests.logprobs import Logprobs
from decode_node import held_tokens
from decode_node.active_requests import MAX_LOGPROB_BYTES, TokenOutbox
from decode_node.held_tokens import HeldTokens, TokenRows
from node.messages import RequestEnded, StepTokens

USED = PredictionUsage(1, 0)


def step(tokens: Mapping[int, Sequence[int]], ended: Sequence[int] = ()) -> StepTokens:
    pairs = [(number, token) for number, many in tokens.items() for token in many]
    return StepTokens(
        1,
        np.array([number for number, _ in pairs], "<u8").tobytes(),
        np.array([token for _, token in pairs], "<u4").tobytes(),
        tuple(RequestEnded(number, 2) for number in ended),
        predicted=tuple((number, USED) for number in tokens),
    )


def sent(rows: TokenRows) -> list[tuple[int, int]]:
    return list(zip(rows.requests, rows.tokens, strict=True))


def test_a_group_is_sent_as_a_whole_with_the_data_of_its_tokens():
    held = HeldTokens()
    held.begin(1, 3)
    assert sent(held.take(step({1: [10]}))) == [(1, 10)]
    assert not any(held.take(step({1: [11]})))
    rows = held.take(step({1: [12, 13, 14], 2: [20]}))
    assert sent(rows) == [(2, 20), (1, 11), (1, 12), (1, 13), (1, 14)]
    assert rows.predicted == [(2, USED), (1, USED), (1, USED)]
    assert not any(held.take(step({1: [15]})))
    # A router may reuse a number. That must not end the node.
    assert sent(held.take(step({}, ended=[1, 1]))) == [(1, 15)]
    assert not any(held.take_all())


def test_a_message_has_at_most_as_many_tokens_as_may_be_held(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(held_tokens, "MAX_HELD", 10)
    held = HeldTokens()
    for number in range(4):
        held.begin(number, 1000)
    held.take(step({number: [0] for number in range(4)}))
    sizes = [len(held.take(step({number: [0] for number in range(4)})).tokens) for _ in range(7)]
    assert sizes == [0, 0, 12, 0, 0, 12, 0]


STREAM = 7


def large(num_tokens: int) -> Logprobs:
    column = array("f", [-1.0] * num_tokens).tobytes()
    return Logprobs(column, 0, b"", b"", bytes(4096 * num_tokens))


def test_hidden_states_of_many_requests_are_sent_before_the_tokens_in_limited_messages():
    channel = Mock()
    outbox = TokenOutbox(channel)
    requests = np.arange(12, dtype=np.uint64)
    for request in range(12):
        outbox.prompt_logprobs((STREAM, request), large(256))  # 1 MiB
        outbox.logprobs((STREAM, request), large(512))
    outbox.tokens(np.full(12, STREAM, np.uint64), requests, np.zeros(12, np.int32))
    outbox.flush()
    sent = [call.args[0] for call in channel.post.call_args_list]
    assert all(len(encode_frame(each)) < MAX_LOGPROB_BYTES + 4096 for each in sent)
    *early, last = sent
    assert last.requests == requests.tobytes() and not any(each.requests for each in early)
    for column in ("prompt_logprobs", "logprobs"):
        reported = [number for each in sent for number, _ in getattr(each, column)]
        assert reported == list(range(12))
    assert {each.stream for each in sent} == {STREAM}
    outbox.flush()
    assert channel.post.call_count == len(sent)
