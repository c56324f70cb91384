"""Wire form of hints about cached prefixes."""

from collections.abc import Iterable, Sequence

from common.errors import InvalidRequest
from common.requests.prefix_hint import MAX_HINTS, PrefixHint
from common.rpc.addresses import check_address
from protos import prefixes_pb2


def from_proto(told: Sequence[prefixes_pb2.PrefixAt]) -> tuple[PrefixHint, ...]:
    """Parse hints. Raises InvalidRequest if there are too many, or an address is invalid."""
    if len(told) > MAX_HINTS:
        raise InvalidRequest(f"prefix_at has {len(told)} entries, {MAX_HINTS} are allowed")
    return tuple(PrefixHint(check_address(each.address), each.tokens) for each in told)


def to_proto(hints: Iterable[PrefixHint]) -> list[prefixes_pb2.PrefixAt]:
    return [prefixes_pb2.PrefixAt(address=each.address, tokens=each.num_tokens) for each in hints]
