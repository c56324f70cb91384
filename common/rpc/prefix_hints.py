"""Hints on who holds which prefix, on the wire."""

from collections.abc import Iterable, Sequence

from common.errors import InvalidRequest
from common.requests.prefix_hint import MAX_HINTS, PrefixAt
from common.rpc.addresses import check_address
from protos import prefixes_pb2


def from_proto(told: Sequence[prefixes_pb2.PrefixAt]) -> tuple[PrefixAt, ...]:
    """Raises InvalidRequest: they are too many, or one names no address."""
    if len(told) > MAX_HINTS:
        raise InvalidRequest(f"prefix_at has {len(told)} entries, {MAX_HINTS} are allowed")
    return tuple(PrefixAt(check_address(each.address), each.tokens) for each in told)


def to_proto(hints: Iterable[PrefixAt]) -> list[prefixes_pb2.PrefixAt]:
    return [prefixes_pb2.PrefixAt(address=each.address, tokens=each.num_tokens) for each in hints]
