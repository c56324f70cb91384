"""The messages of one hand-off, as immutable records. `pairs/codec.py` maps them to protobuf.

Hello opens a stream and is compared in `pairing.py`. All messages here follow it.
"""

from enum import Enum, auto
from typing import ClassVar, NamedTuple, TypeAlias

import msgspec

from common.request import PrefixHint, Remaining, RequestSpec
from common.requests.images import Image
from common.requests.logprobs import Logprobs
from common.requests.namespace import BYTES_PER_TOKEN, SHARED, Namespace, WeightsId
from common.requests.timeline import PrefillTimes


class HandoffId(NamedTuple):
    """The name of one attempt at one hand-off. Never derived from a router's or a client's id."""

    instance: int  # of the consumer
    request: int  # the consumer's own counter, incremented for every submission
    attempt: int  # from 1

    def __str__(self) -> str:
        return f"{self.instance:016x}-{self.request}-{self.attempt}"


class HandoffKind(Enum):
    """The content of a hand-off, one value for each source of `OpenHandoff`."""

    PROMPT = auto()
    LIVE = auto()
    PREFIX = auto()
    WEIGHTS = auto()
    EMBEDDINGS = auto()

    @property
    def samples(self) -> bool:
        """Return whether a hand-off of this kind ends with a sampled token."""
        return self in (HandoffKind.PROMPT, HandoffKind.LIVE)

    @property
    def in_pieces(self) -> bool:
        """Return whether pages have pieces of other data than KV, each in a page of its own."""
        return self in (HandoffKind.WEIGHTS, HandoffKind.EMBEDDINGS)


class Prompt(msgspec.Struct, frozen=True, tag=True):
    """A request whose KV the producer computes.

    prefix_hints: other nodes from which the producer may read the prefix that it lacks.
    encode_addresses: the encode node of each image. Empty: no encode node is used.
    """

    spec: RequestSpec
    prefix_hints: tuple[PrefixHint, ...] = ()
    encode_addresses: tuple[str, ...] = ()

    kind: ClassVar[HandoffKind] = HandoffKind.PROMPT

    @property
    def num_tokens(self) -> int:
        return self.spec.num_tokens


class Live(msgspec.Struct, frozen=True, tag=True):
    """A running request of the producer, until it is released as held.

    spec: has all tokens that the consumer knows but the last one.
    ticket: of the running request.
    """

    spec: RequestSpec
    ticket: int

    kind: ClassVar[HandoffKind] = HandoffKind.LIVE

    @property
    def num_tokens(self) -> int:
        return self.spec.num_tokens


class Prefix(msgspec.Struct, frozen=True, tag=True):
    """The part of some tokens' KV that is in the producer's cache. It stays there too.

    token_ids: little-endian int32, whole pages.
    namespace: of the producer's cache, with adapter and weights.
    ticket: of a running request that will follow as Live. 0: none.
    """

    token_ids: bytes
    namespace: Namespace = SHARED
    ticket: int = 0

    kind: ClassVar[HandoffKind] = HandoffKind.PREFIX

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // BYTES_PER_TOKEN


class Weights(msgspec.Struct, frozen=True, tag=True):
    """Consecutive pieces of the weights that the producer computes with.

    piece_bytes: of each piece except the file's last one. Rank 0 of both nodes has as large pages.
    """

    first_piece: int
    num_pieces: int
    piece_bytes: int

    kind: ClassVar[HandoffKind] = HandoffKind.WEIGHTS

    @property
    def num_tokens(self) -> int:
        """Return the number of pieces. Each piece replaces one token and has a page of its own."""
        return self.num_pieces


class Embeddings(msgspec.Struct, frozen=True, tag=True):
    """The embeddings of an image, which the producer encodes. They are cut into pieces, as weights
    are.

    image: its position in a prompt has no meaning.
    """

    image: Image
    num_pieces: int
    piece_bytes: int

    kind: ClassVar[HandoffKind] = HandoffKind.EMBEDDINGS

    @property
    def num_tokens(self) -> int:
        """Return the number of pieces, as Weights does."""
        return self.num_pieces


Source: TypeAlias = Prompt | Live | Prefix | Weights | Embeddings


class PairRecord(msgspec.Struct, frozen=True, tag=True):
    """Any message of a pair stream after Hello."""


class OpenHandoff(PairRecord, frozen=True, tag=True):
    """A consumer's request for `source`.

    weights: that the consumer computes with. Unnamed with Prefix, whose namespace includes them.
    """

    id: HandoffId
    weights: WeightsId
    remaining: Remaining
    source: Source

    @property
    def num_tokens(self) -> int:
        return self.source.num_tokens


class GrantHandoff(PairRecord, frozen=True, tag=True):
    id: HandoffId
    prefix_tokens: int
    room_tokens: int = 0  # LIVE: tokens for whose KV the consumer has capacity
    gib_per_s: float = 0.0  # LIVE: over its link, as it was proved; 0.0: unknown


class HandoffQueued(PairRecord, frozen=True, tag=True):
    id: HandoffId
    compute_tokens: int
    queued_tokens: int


class PagesReady(PairRecord, frozen=True, tag=True):
    """A token range [start, end) in `pages` of the producer, final and readable. `PageTables.spans`
    defines which pages, and their order.
    """

    id: HandoffId
    start: int
    end: int
    pages: tuple[int, ...]
    last: bool
    first_token: int | None  # set if and only if last, of a kind that samples
    times: PrefillTimes | None = None  # with last
    logprobs: Logprobs | None = None  # of the first token, if requested
    # With last: of the prompt's tokens except the first one.
    prompt_logprobs: Logprobs | None = None
    sums: tuple[tuple[int, int], ...] = ()  # of some pages: index in `pages`, checksum; in order
    # LIVE: tokens from Open's end on that have KV. first_token is the newest token, which has none.
    # logprobs are of the last len(token_ids) tokens, including first_token.
    token_ids: tuple[int, ...] = ()


class ReadsDone(PairRecord, frozen=True, tag=True):
    id: HandoffId


class PagesReleased(PairRecord, frozen=True, tag=True):
    id: HandoffId
    held: bool


class CancelHandoff(PairRecord, frozen=True, tag=True):
    id: HandoffId
    reason: str


class InvalidatePrefix(PairRecord, frozen=True, tag=True):
    """A consumer's report that KV of these tokens, which it got from the producer, led to NaN or
    Inf logits. The producer must not serve that KV from its cache any more. It belongs to no
    hand-off, since the hand-off is completed. There is no response.
    """

    token_ids: bytes  # little-endian int32
    namespace: Namespace = SHARED

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // BYTES_PER_TOKEN


class HandoffFailed(PairRecord, frozen=True, tag=True):
    id: HandoffId
    reason: str
    retryable: bool
    retry_after_s: float = 0.0  # above 0.0: the producer's queue is too long until then


class Heartbeat(PairRecord, frozen=True, tag=True):
    sequence: int
    open_handoffs: int
    connecting: bool = False  # from a consumer whose link is not up: a producer over RDMA must poll


FromConsumer: TypeAlias = (
    OpenHandoff | GrantHandoff | ReadsDone | CancelHandoff | InvalidatePrefix | Heartbeat
)
FromProducer: TypeAlias = HandoffQueued | PagesReady | PagesReleased | HandoffFailed | Heartbeat
AnyMessage: TypeAlias = (
    OpenHandoff
    | GrantHandoff
    | HandoffQueued
    | PagesReady
    | ReadsDone
    | PagesReleased
    | CancelHandoff
    | InvalidatePrefix
    | HandoffFailed
    | Heartbeat
)
