"""Weight version: a 16-byte hash of the weights of a node.

It is the same for weights loaded at the start and later. KV made with other weights is useless. So
nodes pair only with nodes of the same version, and prefix caches are separated by it. A request for
KV names the version of the sender, and a node with another version refuses it.
"""

from typing import TypeAlias

from common.errors import InvalidRequest
from common.requests.namespace import Namespace, part_of

WEIGHTS_BYTES = 16
WeightsId: TypeAlias = bytes
UNNAMED: WeightsId = b""  # not reported or not known


def check_weights(weights: bytes) -> WeightsId:
    """Return the version. Raises InvalidRequest if its length is wrong."""
    if len(weights) not in (0, WEIGHTS_BYTES):
        raise InvalidRequest(f"weights has {len(weights)} bytes; it has {WEIGHTS_BYTES}, or none")
    return weights


def made_with(namespace: Namespace, weights: WeightsId) -> Namespace:
    """Return the namespace for KV made with these weights."""
    return part_of(namespace, weights, person=b"baton weights KV")
