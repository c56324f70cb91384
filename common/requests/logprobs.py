"""Log-probabilities of consecutive tokens, in the form sent from node to router."""

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

    def __len__(self) -> int:
        return len(self.logprob) // 4

    def first(self, num_tokens: int) -> "Logprobs":
        """Return the first `num_tokens` tokens."""
        width = 4 * self.num_top
        return Logprobs(
            self.logprob[: 4 * num_tokens],
            self.num_top,
            self.top_token[: num_tokens * width],
            self.top_logprob[: num_tokens * width],
        )

    def tokens(self) -> list["TokenLogprobs"]:
        """Return one record per token."""
        k = self.num_top
        logprobs, top = array("f", self.logprob), array("f", self.top_logprob).tolist()
        top_tokens = array("I", self.top_token).tolist()
        return [
            TokenLogprobs(logprob, top_tokens[n * k : (n + 1) * k], top[n * k : (n + 1) * k])
            for n, logprob in enumerate(logprobs)
        ]


class TokenLogprobs(msgspec.Struct, frozen=True):
    logprob: float
    top_tokens: Sequence[int]
    top_logprobs: Sequence[float]


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """Join consecutive parts of one request."""
    return Logprobs(
        b"".join(part.logprob for part in parts),
        parts[0].num_top,
        b"".join(part.top_token for part in parts),
        b"".join(part.top_logprob for part in parts),
    )


def split(logprobs: Logprobs) -> list[Logprobs]:
    """Return one record per token."""
    width = 4 * logprobs.num_top
    return [
        Logprobs(
            logprobs.logprob[4 * n : 4 * n + 4],
            logprobs.num_top,
            logprobs.top_token[n * width : (n + 1) * width],
            logprobs.top_logprob[n * width : (n + 1) * width],
        )
        for n in range(len(logprobs))
    ]


def to_fields(logprobs: Logprobs | None) -> dict[str, Any] | None:
    """Return the fields of the wire form, for use in a larger message."""
    if logprobs is None:
        return None
    return {
        "logprob": array("f", logprobs.logprob),
        "num_top": logprobs.num_top,
        "top_token": array("I", logprobs.top_token),
        "top_logprob": array("f", logprobs.top_logprob),
    }


def from_proto(proto: pb.Logprobs) -> Logprobs:
    """Parse log-probabilities. Raises ProtocolViolation if column lengths differ."""
    num_top = proto.num_top
    num_values = len(proto.logprob) * num_top
    lengths = {len(proto.top_token), len(proto.top_logprob), num_values}
    if num_top > MAX_LOGPROBS or len(lengths) != 1:
        raise ProtocolViolation("log-probabilities in columns of wrong lengths")
    return Logprobs(
        array("f", proto.logprob).tobytes(),
        num_top,
        array("I", proto.top_token).tobytes(),
        array("f", proto.top_logprob).tobytes(),
    )
