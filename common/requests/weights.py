"""What names the weights that a node computes with: a hash of their content, 16 bytes, the same
whether it was started with them or got them later.

KV that was made with some weights is of no use to others. So nodes pair with those that have the
same, prefix caches part by them, a node is asked for KV by the weights of who asks, and refuses
where it has others.
"""

from typing import TypeAlias

from common.errors import InvalidRequest
from common.requests.namespace import Namespace, part_of

WEIGHTS_BYTES = 16
WeightsId: TypeAlias = bytes
UNNAMED: WeightsId = b""  # not told, or not known


def check_weights(weights: bytes) -> WeightsId:
    """Raises InvalidRequest for what names none."""
    if len(weights) not in (0, WEIGHTS_BYTES):
        raise InvalidRequest(f"weights has {len(weights)} bytes; it has {WEIGHTS_BYTES}, or none")
    return weights


def made_with(namespace: Namespace, weights: WeightsId) -> Namespace:
    """The part of a namespace in which KV is made with these."""
    return part_of(namespace, weights, person=b"baton weights KV")
