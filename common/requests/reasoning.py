"""Reasoning at the beginning of a response, before the visible text."""

from typing import Any

import msgspec

from protos import sampling_pb2 as pb


class ReasoningTokens(msgspec.Struct, frozen=True):
    """Tokens that delimit reasoning.

    Attributes:
        close: token that ends it.
        open: token that begins it, as the first one of the response. None: the prompt has begun it.
    """

    close: int
    open: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.close,) if self.open is None else (self.open, self.close)


def from_proto(proto: pb.Thought) -> ReasoningTokens:
    return ReasoningTokens(proto.close, proto.open if proto.HasField("open") else None)


def to_fields(thought: ReasoningTokens) -> dict[str, Any]:
    """Return the fields of the wire form."""
    return {"close": thought.close, "open": thought.open}
