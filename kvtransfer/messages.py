"""The messages of one hand-off, as immutable records. `pairs/wire.py` maps them to protobuf.

Hello opens a stream and is compared in `pairing.py`; everything here follows it.
"""

import math
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import msgspec

from common.requests.adapter import NO_ADAPTER, AdapterId
from common.requests.images import Image
from common.requests.logprobs import Logprobs
from common.requests.namespace import SHARED, Namespace
from common.requests.prefix_at import PrefixAt
from common.requests.sampling import SamplingParams
from common.requests.timeline import PrefillTimes
from common.requests.weights import UNNAMED, WeightsId


class HandoffId(NamedTuple):
    """Names one attempt at one hand-off. Never derived from a router's or a client's id."""

    instance: int  # of the reader
    request: int  # the reader's own counter, new for every submission
    attempt: int  # from 1

    def __str__(self) -> str:
        return f"{self.instance:016x}-{self.request}-{self.attempt}"


class Kind(IntEnum):
    """What a hand-off is of. The numbers of kvtransfer.proto."""

    PROMPT = 0  # the owner computes it
    LIVE = 1  # a request that the owner runs, until it is released as held
    PREFIX = 2  # what the owner's cache has of it, which stays there too
    WEIGHTS = 3  # a part of those that the owner computes with: token_ids are numbers of pieces

    @property
    def samples(self) -> bool:
        """Whether a token comes with it."""
        return self in (Kind.PROMPT, Kind.LIVE)


class Message(msgspec.Struct, frozen=True, tag=True):
    """Any message of a pair stream after Hello."""


class Open(Message, frozen=True, tag=True):
    id: HandoffId
    token_ids: tuple[int, ...]
    num_generated: int
    sampling: SamplingParams
    budget_s: float
    request_id: str
    traceparent: str = ""  # what the owner's spans hang on
    namespace: Namespace = SHARED  # of the owner's prefix cache
    engine_deaths: int = 0  # see common/requests/trial.py
    queue_s: float = math.inf  # longest wait for the prompt's first forward
    kind: Kind = Kind.PROMPT
    # LIVE: of the running request; token_ids are all that is known of it but one. PREFIX: of a
    # running request, of which LIVE is to follow.
    ticket: int = 0
    priority: int = 0
    prefix_at: tuple[PrefixAt, ...] = ()  # PROMPT: where the owner may read what it lacks
    adapter: AdapterId = NO_ADAPTER  # that computes it, and that the namespace is within
    weights: WeightsId = UNNAMED  # likewise
    images: tuple[Image, ...] = ()  # PROMPT: of its prompt
    routing_key: int = 0


class Grant(Message, frozen=True, tag=True):
    id: HandoffId
    prefix_tokens: int
    room_tokens: int = 0  # LIVE: the reader has room for the KV of so many
    gib_per_s: float = 0.0  # LIVE: over its link, as that was proved; 0.0: not known


class Admitted(Message, frozen=True, tag=True):
    id: HandoffId
    compute_tokens: int
    queued_tokens: int


class Ready(Message, frozen=True, tag=True):
    """Token range [start, end) is in `pages` of the owner, final and readable: which ones, and in
    which order, `PageTables.spans` says."""

    id: HandoffId
    start: int
    end: int
    pages: tuple[int, ...]
    last: bool
    first_token: int | None  # set if and only if last, of a kind that samples
    times: PrefillTimes | None = None  # with last
    logprobs: Logprobs | None = None  # of the first token, where asked for
    prompt_logprobs: Logprobs | None = None  # with last: of the prompt's tokens but the first one
    sums: tuple[tuple[int, int], ...] = ()  # of some pages: place in `pages`, checksum; in order
    # LIVE: tokens from Open's end on that have KV; first_token is the newest, which has none, and
    # logprobs are of as many of the last tokens as these are.
    token_ids: tuple[int, ...] = ()


class Done(Message, frozen=True, tag=True):
    id: HandoffId


class Released(Message, frozen=True, tag=True):
    id: HandoffId
    held: bool


class Cancel(Message, frozen=True, tag=True):
    id: HandoffId
    reason: str


class Forget(Message, frozen=True, tag=True):
    """KV of these that the owner gave made logits that are no numbers: nobody is to find it there.
    Of no hand-off: what was given is off the books. Nothing is answered."""

    token_ids: tuple[int, ...]
    namespace: Namespace = SHARED


class Failed(Message, frozen=True, tag=True):
    id: HandoffId
    reason: str
    retryable: bool
    retry_after_s: float = 0.0  # above 0.0: the owner's queue is too long, and until when


class Beat(Message, frozen=True, tag=True):
    sequence: int
    open_handoffs: int
    connecting: bool = False  # from a reader whose link is not up: an owner over RDMA must poll


FromReader: TypeAlias = Open | Grant | Done | Cancel | Forget | Beat
FromOwner: TypeAlias = Admitted | Ready | Released | Failed | Beat
AnyMessage: TypeAlias = (
    Open | Grant | Admitted | Ready | Done | Released | Cancel | Forget | Failed | Beat
)
