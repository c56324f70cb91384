"""What an answer may begin with: thought, which ends before anything is said."""

from typing import Any

import msgspec

from protos import sampling_pb2 as pb


class Thought(msgspec.Struct, frozen=True):
    """
    open: the token that begins it, as the first one of the answer; None: the prompt has begun it.
    close: the token that ends it.
    """

    close: int
    open: int | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.close,) if self.open is None else (self.open, self.close)


def from_proto(proto: pb.Thought) -> Thought:
    return Thought(proto.close, proto.open if proto.HasField("open") else None)


def to_fields(thought: Thought) -> dict[str, Any]:
    """The fields of the wire form."""
    return {"close": thought.close, "open": thought.open}
