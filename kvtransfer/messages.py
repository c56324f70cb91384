"""The messages of one hand-off, as immutable records. `pairs/codec.py` maps them to protobuf.

Hello opens a stream and is compared in `pairing.py`; everything here follows it.
"""

from enum import Enum, auto
from typing import ClassVar, NamedTuple, TypeAlias

import msgspec

from common.request import Remaining, RequestSpec
from common.requests.logprobs import Logprobs
from common.requests.namespace import SHARED, Namespace
from common.requests.prefix_hash import BYTES_PER_TOKEN
from common.requests.prefix_hint import PrefixAt
from common.requests.timeline import PrefillTimes
from common.requests.weights import WeightsId


class HandoffId(NamedTuple):
    """Names one attempt at one hand-off. Never derived from a router's or a client's id."""

    instance: int  # of the reader
    request: int  # the reader's own counter, new for every submission
    attempt: int  # from 1

    def __str__(self) -> str:
        return f"{self.instance:016x}-{self.request}-{self.attempt}"


class Kind(Enum):
    """What a hand-off is of: see the sources of `Open`."""

    PROMPT = auto()
    LIVE = auto()
    PREFIX = auto()
    WEIGHTS = auto()

    @property
    def samples(self) -> bool:
        """Return whether a token comes with it."""
        return self in (Kind.PROMPT, Kind.LIVE)


class Prompt(msgspec.Struct, frozen=True, tag=True):
    """The owner computes the KV of a request's tokens.

    prefix_hints: other nodes from which the owner may read what it lacks.
    """

    spec: RequestSpec
    prefix_hints: tuple[PrefixAt, ...] = ()

    kind: ClassVar[Kind] = Kind.PROMPT

    @property
    def num_tokens(self) -> int:
        return self.spec.num_tokens


class Live(msgspec.Struct, frozen=True, tag=True):
    """A request that the owner runs, until it is released as held.

    spec: has all tokens that the reader knows but the last one.
    ticket: of the running request.
    """

    spec: RequestSpec
    ticket: int

    kind: ClassVar[Kind] = Kind.LIVE

    @property
    def num_tokens(self) -> int:
        return self.spec.num_tokens


class Prefix(msgspec.Struct, frozen=True, tag=True):
    """What the owner's cache has of some tokens, which stays there too.

    token_ids: little-endian int32, whole pages.
    namespace: of the owner's cache, with adapter and weights.
    ticket: of a running request that is to follow as Live; 0: none.
    """

    token_ids: bytes
    namespace: Namespace = SHARED
    ticket: int = 0

    kind: ClassVar[Kind] = Kind.PREFIX

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // BYTES_PER_TOKEN


class Weights(msgspec.Struct, frozen=True, tag=True):
    """Consecutive pieces of the weights that the owner computes with."""

    first_piece: int
    num_pieces: int

    kind: ClassVar[Kind] = Kind.WEIGHTS

    @property
    def num_tokens(self) -> int:
        """Return the number of pieces: each takes the place of a token, in a page of its own."""
        return self.num_pieces


Source: TypeAlias = Prompt | Live | Prefix | Weights


class Message(msgspec.Struct, frozen=True, tag=True):
    """Any message of a pair stream after Hello."""


class Open(Message, frozen=True, tag=True):
    """A reader asks for `source`.

    weights: that the reader computes with; unnamed with Prefix, whose namespace has them.
    """

    id: HandoffId
    weights: WeightsId
    remaining: Remaining
    source: Source

    @property
    def num_tokens(self) -> int:
        return self.source.num_tokens


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

    token_ids: bytes  # little-endian int32
    namespace: Namespace = SHARED

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // BYTES_PER_TOKEN


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
