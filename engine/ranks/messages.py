"""Messages between rank 0 of a node and its followers, before steps are run.

Each is one packet of a socket pair that rank 0 has made. Nobody else has an end of it.
"""

from typing import Literal, TypeAlias

import msgspec

MAX_PACKET_BYTES = 128 << 10  # below the kernel's limit for a packet


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Load a part of the model. Comes with the memory of the collectives and the pidfds of all
    other ranks, by rank.

    Attributes:
        config: EngineConfig as JSON.
        store: path for the rendezvous of gloo.
        log_level, log_format: of rank 0's log.
    """

    rank: int
    size: int
    config: bytes
    store: str
    log_level: str
    log_format: Literal["text", "json"]


class StartSteps(msgspec.Struct, frozen=True, tag=True):
    """Allocate pages, then run steps. Comes with the memory of the blocks of steps.

    Attributes:
        block_bytes: see StepRing.
    """

    num_pages: int
    num_host_pages: int
    num_slots: int
    max_pages: int
    block_bytes: int


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """The part of the model is in memory."""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Steps may come."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a rank that ends.

    Attributes:
        config: the user can correct the error.
    """

    error: str
    config: bool


ToFollower: TypeAlias = StartRank | StartSteps
FromFollower: TypeAlias = RankLoaded | RankReady | RankFailed
