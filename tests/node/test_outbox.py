"""Results of a step that are too large for one message."""

from array import array
from unittest.mock import Mock

import numpy as np

from common.process.ipc import encode_frame
from common.requests.logprobs import Logprobs
from node.control.outbox import MAX_LOGPROB_BYTES, TokenOutbox

STREAM = 7


def large(num_tokens: int) -> Logprobs:
    column = array("f", [-1.0] * num_tokens).tobytes()
    return Logprobs(column, 0, b"", b"", bytes(4096 * num_tokens))


def test_hidden_states_of_many_requests_are_sent_before_the_tokens_in_messages_of_bounded_size():
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
        told = [number for each in sent for number, _ in getattr(each, column)]
        assert told == list(range(12))
    assert {each.stream for each in sent} == {STREAM}
    outbox.flush()
    assert channel.post.call_count == len(sent)
