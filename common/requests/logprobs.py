"""Log-probabilities of consecutive tokens, in the form that nodes send to the router.

Hidden states of the model's last layer and routed experts are sent with them if a client requests
them.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import ProtocolViolation
from common.requests.sampling import MAX_LOGPROBS
from protos import sampling_pb2 as pb


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities in columns of float32 or uint32, in native byte order."""

    logprob: bytes  # [n]
    num_top: int  # most likely tokens per position, in descending order
    top_token: bytes  # [n, num_top]
    top_logprob: bytes  # [n, num_top]
    hidden_states: bytes = b""  # [n, hidden size], state that predicted each token, or nothing
    # int16 [n, layers, experts per token], for the token before each, or nothing.
    routed_experts: bytes = b""

    def __len__(self) -> int:
        return len(self.logprob) // 4

    def first(self, num_tokens: int) -> "Logprobs":
        return self._part(0, num_tokens)

    def tokens(self) -> list["TokenLogprobs"]:
        k = self.num_top
        logprobs, top = array("f", self.logprob), array("f", self.top_logprob).tolist()
        top_tokens = array("I", self.top_token).tolist()
        states, experts = self.hidden_states, self.routed_experts
        return [
            TokenLogprobs(
                logprob,
                top_tokens[n * k : (n + 1) * k],
                top[n * k : (n + 1) * k],
                _rows(states, len(self), n, n + 1),
                _rows(experts, len(self), n, n + 1),
            )
            for n, logprob in enumerate(logprobs)
        ]

    @property
    def num_bytes(self) -> int:
        columns = self.logprob, self.top_token, self.top_logprob
        return sum(map(len, (*columns, self.hidden_states, self.routed_experts)))

    def _part(self, start: int, end: int) -> "Logprobs":
        width = 4 * self.num_top
        return Logprobs(
            self.logprob[4 * start : 4 * end],
            self.num_top,
            self.top_token[start * width : end * width],
            self.top_logprob[start * width : end * width],
            _rows(self.hidden_states, len(self), start, end),
            _rows(self.routed_experts, len(self), start, end),
        )


class TokenLogprobs(msgspec.Struct, frozen=True):
    logprob: float
    top_tokens: Sequence[int]
    top_logprobs: Sequence[float]
    hidden_state: bytes = b""  # float32 [hidden size], if requested
    experts: bytes = b""  # int16 [layers, experts per token], if requested


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """Join consecutive parts of one request."""
    return Logprobs(
        b"".join(part.logprob for part in parts),
        parts[0].num_top,
        b"".join(part.top_token for part in parts),
        b"".join(part.top_logprob for part in parts),
        b"".join(part.hidden_states for part in parts),
        b"".join(part.routed_experts for part in parts),
    )


def split(logprobs: Logprobs) -> list[Logprobs]:
    """Return one record per token."""
    return [logprobs._part(n, n + 1) for n in range(len(logprobs))]


def to_fields(logprobs: Logprobs) -> dict[str, Any]:
    """Return the fields of the wire form, for use in a larger message."""
    return {
        "logprob": array("f", logprobs.logprob),
        "num_top": logprobs.num_top,
        "top_token": array("I", logprobs.top_token),
        "top_logprob": array("f", logprobs.top_logprob),
        "hidden_states": logprobs.hidden_states,
        "routed_experts": logprobs.routed_experts,
    }


def from_proto(proto: pb.Logprobs) -> Logprobs:
    """Parse log-probabilities. Raises ProtocolViolation if column lengths differ."""
    num_top = proto.num_top
    num_values = len(proto.logprob) * num_top
    lengths = {len(proto.top_token), len(proto.top_logprob), num_values}
    if num_top > MAX_LOGPROBS or len(lengths) != 1:
        raise ProtocolViolation("log-probabilities in columns of wrong lengths")
    num_tokens = len(proto.logprob)
    sizes = {"hidden states": (proto.hidden_states, 4), "experts": (proto.routed_experts, 2)}
    for name, (column, number_bytes) in sizes.items():
        # Without tokens, the columns must be empty.
        if len(column) % (number_bytes * num_tokens or math.inf):
            raise ProtocolViolation(f"{len(column)} bytes of {name} for {num_tokens} tokens")
    return Logprobs(
        array("f", proto.logprob).tobytes(),
        num_top,
        array("I", proto.top_token).tobytes(),
        array("f", proto.top_logprob).tobytes(),
        proto.hidden_states,
        proto.routed_experts,
    )


def _rows(column: bytes, num_rows: int, start: int, end: int) -> bytes:
    size = len(column) // max(num_rows, 1)
    return column[start * size : end * size]
