"""Commands of operators and of the node process to the engine thread. See NodeCall."""

from typing import TypeAlias

import msgspec

from common.pausing import PauseMode
from common.requests.namespace import WeightsId


class DescribeNode(msgspec.Struct, frozen=True, tag=True):
    """Report pages, queues and counters."""


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """Reject new requests, and report when all others have ended."""


class ResumeNode(msgspec.Struct, frozen=True, tag=True):
    """Accept requests again after a drain."""


class PrepareRole(msgspec.Struct, frozen=True, tag=True):
    """Make the parts of another role."""

    role: str


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache."""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Abort the requests with this id."""

    request_id: str


class ExplainRequests(msgspec.Struct, frozen=True, tag=True):
    """Report the history of the requests with this id."""

    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    name: str


class PauseGeneration(msgspec.Struct, frozen=True, tag=True):
    mode: PauseMode


class ContinueGeneration(msgspec.Struct, frozen=True, tag=True):
    """End a pause."""


class PrepareWeights(msgspec.Struct, frozen=True, tag=True):
    """Check weights before an update."""

    path: str


class PutWeights(msgspec.Struct, frozen=True, tag=True):
    """Put prepared weights in place."""

    weights: WeightsId


class TakeWeights(msgspec.Struct, frozen=True, tag=True):
    """Take the weights of the node at this address."""

    weights: WeightsId
    address: str


class ReleaseMemory(msgspec.Struct, frozen=True, tag=True):
    tags: tuple[str, ...]


class ResumeMemory(msgspec.Struct, frozen=True, tag=True):
    tags: tuple[str, ...]


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    num_steps: int


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """Stop the profile and write it."""


Command: TypeAlias = (
    DescribeNode
    | DrainNode
    | ResumeNode
    | PrepareRole
    | FlushCache
    | AbortRequests
    | ExplainRequests
    | LoadAdapter
    | UnloadAdapter
    | PauseGeneration
    | ContinueGeneration
    | PrepareWeights
    | PutWeights
    | TakeWeights
    | ReleaseMemory
    | ResumeMemory
    | StartProfile
    | StopProfile
)
