"""The messages of a hand-off on a pair stream, as immutable records. `pairs/codec.py` converts them
to protobuf.

They follow Hello, which opens a stream and is defined in `pairing.py`.
"""

from typing import ClassVar, NamedTuple, TypeAlias

import msgspec

from common.request import PrefixHint, Remaining, RequestSpec
from common.requests.images import Image
from common.requests.logprobs import Logprobs
from common.requests.namespace import BYTES_PER_TOKEN, SHARED, Namespace, WeightsId
from common.requests.timeline import PrefillTimes


class HandoffId(NamedTuple):
    """The identity of one attempt at a hand-off. Never derived from an id of a router or client."""

    instance: int  # the consumer's instance id
    request: int  # the consumer's own counter, incremented for each submission
    attempt: int  # from 1

    def __str__(self) -> str:
        return f"{self.instance:016x}-{self.request}-{self.attempt}"


class HandoffSource(msgspec.Struct, frozen=True):
    """The content of a hand-off.

    Attributes:
        samples: whether a hand-off of this kind ends with a sampled token.
        in_pieces: whether pages carry pieces of data other than KV, one piece in each page.
    """

    samples: ClassVar[bool] = False
    in_pieces: ClassVar[bool] = False


class Prompt(HandoffSource, frozen=True, tag=True):
    """A request whose KV the producer computes.

    Attributes:
        prefix_hints: other nodes from which the producer may fetch a prefix that it lacks.
        encode_addresses: the encode node of each image. Empty: use no encode node.
    """

    spec: RequestSpec
    prefix_hints: tuple[PrefixHint, ...] = ()
    encode_addresses: tuple[str, ...] = ()

    samples: ClassVar[bool] = True

    @property
    def num_tokens(self) -> int:
        return self.spec.num_tokens


class Live(HandoffSource, frozen=True, tag=True):
    """A running request of the producer, for live migration. The producer runs it until the
    hand-off is completed.

    Attributes:
        spec: has all tokens that the consumer knows except the last one.
    """

    spec: RequestSpec
    ticket: int

    samples: ClassVar[bool] = True

    @property
    def num_tokens(self) -> int:
        return self.spec.num_tokens


class Prefix(HandoffSource, frozen=True, tag=True):
    """The cached part of a prefix. The producer copies it from its prefix cache and computes
    nothing.

    Attributes:
        token_ids: little-endian int32, whole pages.
        namespace: namespace in the producer's cache, including adapter and weight version.
        ticket: ticket of a running request that will follow as Live. 0: none.
    """

    token_ids: bytes
    namespace: Namespace = SHARED
    ticket: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // BYTES_PER_TOKEN


class Weights(HandoffSource, frozen=True, tag=True):
    """Consecutive pieces of the weights that the producer serves.

    Attributes:
        piece_bytes: size of each piece, except the last of the file. Fits into a page of rank 0 of
            both nodes.
    """

    first_piece: int
    num_pieces: int
    piece_bytes: int

    in_pieces: ClassVar[bool] = True

    @property
    def num_tokens(self) -> int:
        """Return the number of pieces. Each counts as one token and has its own page."""
        return self.num_pieces


class Embeddings(HandoffSource, frozen=True, tag=True):
    """The embeddings of an image, computed by an encode node and cut into pieces like Weights.

    Attributes:
        image: its position in a prompt is ignored.
    """

    image: Image
    num_pieces: int
    piece_bytes: int

    in_pieces: ClassVar[bool] = True

    @property
    def num_tokens(self) -> int:
        """Return the number of pieces."""
        return self.num_pieces


Source: TypeAlias = Prompt | Live | Prefix | Weights | Embeddings


class PairRecord(msgspec.Struct, frozen=True, tag=True):
    """Any message of a pair stream after Hello."""


class OpenHandoff(PairRecord, frozen=True, tag=True):
    """A consumer's request for `source`.

    Attributes:
        weights: weight version of the consumer. Absent for Prefix, whose namespace includes it.
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
    room_tokens: int = 0  # LIVE: tokens for whose KV the consumer has pages
    gib_per_s: float = 0.0  # LIVE: proved rate of the consumer's link; 0.0: unknown


class HandoffAdmitted(PairRecord, frozen=True, tag=True):
    """A producer's report that its scheduler has admitted the prompt.

    Attributes:
        compute_tokens: tokens of the prompt that are not cached.
        queued_tokens: tokens that the producer computes before those.
    """

    id: HandoffId
    compute_tokens: int
    queued_tokens: int


class SampledOutput(msgspec.Struct, frozen=True):
    """The output of a hand-off whose kind samples. It comes with the last range.

    Attributes:
        token: the first token. Of a running request, the newest one, which has no KV.
        token_ids: of a running request, the tokens with KV from the end of Open's tokens on.
        times: of a prompt, as its producer measured them.
        logprobs: of the last tokens, up to `token`, if requested.
        prompt_logprobs: of the prompt from the first requested token on.
    """

    token: int
    token_ids: tuple[int, ...] = ()
    times: PrefillTimes | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class PagesReady(PairRecord, frozen=True, tag=True):
    """A token range [start, end) whose KV in `pages` of the producer is final and readable.
    `PageTables.spans` defines the pages of a range and their order.
    """

    id: HandoffId
    start: int
    end: int
    pages: tuple[int, ...]
    last: bool
    output: SampledOutput | None  # set if and only if last, and the kind samples
    # (index in `pages`, checksum) of sampled pages, in order.
    sums: tuple[tuple[int, int], ...] = ()


class ReadsDone(PairRecord, frozen=True, tag=True):
    id: HandoffId


class PagesReleased(PairRecord, frozen=True, tag=True):
    id: HandoffId
    held: bool


class CancelHandoff(PairRecord, frozen=True, tag=True):
    """The cancellation of an attempt in any state. The consumer's engine gets no CompletedEvent or
    FailedEvent for it, and ReadsEndedEvent if the attempt was granted.
    """

    id: HandoffId
    reason: str


class InvalidatePrefix(PairRecord, frozen=True, tag=True):
    """A consumer's report that KV of these tokens, which it got from the producer, led to NaN or
    Inf logits. The producer must no longer serve that KV from its cache. The message belongs to no
    hand-off, because the hand-off is completed. It has no reply.
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
    retry_after_s: float = 0.0  # above 0.0: retry after this time, because the queue is too long


class Heartbeat(PairRecord, frozen=True, tag=True):
    sequence: int
    open_handoffs: int
    connecting: bool = False  # consumer's link is not up: a producer over RDMA must poll


FromConsumer: TypeAlias = (
    OpenHandoff | GrantHandoff | ReadsDone | CancelHandoff | InvalidatePrefix | Heartbeat
)
FromProducer: TypeAlias = HandoffAdmitted | PagesReady | PagesReleased | HandoffFailed | Heartbeat
AnyMessage: TypeAlias = FromConsumer | FromProducer
