"""Messages between a node's server process and its engine thread: immutable, one record per kind.

The server process is stateless. It numbers the router streams with its own counter, so that the end
of one stream never affects requests of another.
"""

import math
from typing import TypeAlias

import msgspec

from common.distribution import HistogramCounts
from common.pausing import PauseMode
from common.queueing import QueueBacklog
from common.request import PredictionUsage, PrefixHint, Remaining, RequestSpec
from common.requests.logprobs import Logprobs
from common.requests.namespace import NO_ADAPTER, SHARED, UNNAMED, AdapterId, Namespace, WeightsId
from common.requests.pooling import PoolingParams
from common.requests.timeline import RequestTraces
from common.tracing.context import UNTRACED, TraceContext
from kvtransfer.ports import ProducerUp
from node.timings import ProducerTimings, RequestTimings


class DescribeNode(msgspec.Struct, frozen=True, tag=True):
    """Report pages, queues and counters."""


class DrainNode(msgspec.Struct, frozen=True, tag=True):
    """Reject new requests, and report when all others have ended."""


class ResumeNode(msgspec.Struct, frozen=True, tag=True):
    """Accept requests again after a drain."""


class PrepareRole(msgspec.Struct, frozen=True, tag=True):
    """Create the parts of another role."""

    role: str


class FlushCache(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache."""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
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
    """Copy the weights of the node at this address."""

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


class StartRole(msgspec.Struct, frozen=True, tag=True):
    """The beginning of a role. Sent first, and again for each later role. Later messages belong to
    that role, and the engine's messages do so from its next EngineReady on.
    """

    role: str  # "prefill" | "decode"
    config: str  # config record of the role as JSON
    instance: int  # random 64-bit number, new for each role
    address: str  # address of the frontend's gRPC server, for logs and peers


class MigrateFrom(msgspec.Struct, frozen=True):
    """The location of a request that is to migrate here."""

    address: str  # address of a decode node
    ticket: int  # ticket of its submission there


class Placement(msgspec.Struct, frozen=True):
    """The nodes on which a request may run, and the parts of its prefix that other nodes have.

    Attributes:
        prefill_addresses: candidates in order of preference.
        prefix_hints: other nodes known to have part of its prompt.
        ticket: identifies it for migration to another node. 0: it cannot migrate.
        move_from: the node that runs it now, if any.
        own_address: address of this node as the router knows it. "": unknown.
        encode_addresses: the encode node of each image. Empty: no encode node is used.
    """

    prefill_addresses: tuple[str, ...] = ()
    prefix_hints: tuple[PrefixHint, ...] = ()
    ticket: int = 0
    move_from: MigrateFrom | None = None
    own_address: str = ""
    encode_addresses: tuple[str, ...] = ()


class SubmitRequest(msgspec.Struct, frozen=True, tag=True):
    """A request of a router.

    Attributes:
        number: the router's number, on that stream.
        received: time.monotonic() at the frontend.
    """

    stream: int
    number: int
    spec: RequestSpec
    remaining: Remaining
    placement: Placement = Placement()
    received: float = 0.0
    trace: TraceContext = UNTRACED


class CancelSubmitted(msgspec.Struct, frozen=True, tag=True):
    stream: int
    request: int


class RouterStreamClosed(msgspec.Struct, frozen=True, tag=True):
    """The end of a router's stream, which cancels its requests."""

    stream: int


class NodeCall(msgspec.Struct, frozen=True, tag=True):
    """A call of the `Node` service. The response is one NodeCallResult with the same number."""

    number: int
    command: Command


class WatchCache(msgspec.Struct, frozen=True, tag=True):
    """A new or leaving watcher of the prefix cache. The frontend numbers watchers from 1 on."""

    watcher: int
    on: bool


class SubmitPooling(msgspec.Struct, frozen=True, tag=True):
    """A call for vectors of prompts. The response is one PoolingDone with the same number."""

    number: int  # the frontend's own
    request_id: str
    prompts: tuple[bytes, ...]  # little-endian int32
    pooling: PoolingParams
    budget_s: float
    queue_s: float = math.inf  # seconds that the first forward pass may be delayed
    namespace: Namespace = SHARED
    engine_crashes: int = 0  # see common/request.py


class CancelPooling(msgspec.Struct, frozen=True, tag=True):
    """The cancellation of a SubmitPooling, which gets no response."""

    number: int


FrontMessage: TypeAlias = (
    StartRole
    | SubmitRequest
    | CancelSubmitted
    | RouterStreamClosed
    | NodeCall
    | WatchCache
    | SubmitPooling
    | CancelPooling
)


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The first message of the engine in each role: the model is loaded, the pool is sized, and the
    role has begun. Shown by Describe, except for `weights`, which EngineStats has too.
    """

    model: str
    fingerprint: dict[str, str]
    tokenizer_hash: str
    context_length: int
    num_pages: int
    page_size: int  # tokens
    followers: tuple[int, ...] = ()  # pids of the ranks after rank 0 (the engine process)
    devices: tuple[str, ...] = ()  # by rank


class RequestEnded(msgspec.Struct, frozen=True):
    request: int
    reason: int  # FinishReason of decode.proto
    error: str = ""
    error_code: int = 0  # gRPC status code
    stamps: RequestTimings | None = None
    retry_after_s: float = 0.0  # above 0.0: retry after this time, because a queue was too long


class StepTokens(msgspec.Struct, frozen=True, tag=True):
    """The results of one step for one router stream."""

    stream: int
    requests: bytes  # little-endian uint64, one per new token
    tokens: bytes  # little-endian uint32, same length
    ended: tuple[RequestEnded, ...] = ()
    begun: tuple[tuple[int, int], ...] = ()  # (request, cached tokens), when its prefill begins
    # For all tokens of the requests that asked for them.
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    prompt_logprobs: tuple[tuple[int, Logprobs], ...] = ()  # before the request's first token
    predicted: tuple[tuple[int, PredictionUsage], ...] = ()  # for requests with a prediction

    def columns(self) -> tuple[list[int], list[int]]:
        """Return the requests and the tokens, one entry per new token."""
        requests = memoryview(self.requests).cast("Q").tolist()
        return requests, memoryview(self.tokens).cast("I").tolist()


class QuarantineStarted(msgspec.Struct, frozen=True, tag=True):
    """A quarantined request, which runs alone from now on. Stream 0: the quarantine has ended."""

    stream: int
    request: int


class HandoffSpan(msgspec.Struct, frozen=True, tag=True):
    """An ended hand-off of this producer. Sent only if it has a span here."""

    stamps: ProducerTimings


class PoolingDone(msgspec.Struct, frozen=True, tag=True):
    """The result of a SubmitPooling: vectors, or an error."""

    number: int
    vectors: tuple[bytes, ...] = ()  # float32 of each prompt; sums if a mean is requested
    cached_tokens: int = 0
    error: str = ""
    error_code: int = 0  # gRPC status code; 0: success
    retry_after_s: float = 0.0  # above 0.0: retry after this time, because a queue was too long


class NodeCallResult(msgspec.Struct, frozen=True, tag=True):
    number: int = 0  # number of its NodeCall
    error: str = ""  # such as FailedPrecondition. Empty: success
    integer: int = 0  # pages freed, requests aborted, adapters loaded or unloaded, pauses ended
    fresh: bool = True  # whether the state has changed
    path: str = ""  # path of a trace
    description: dict[str, dict[str, int]] | None = None  # "pages", "queues", "counters"
    flights: RequestTraces | None = None
    adapter: AdapterId = NO_ADAPTER  # the loaded adapter
    weights: WeightsId = UNNAMED  # weights that were checked, or are in use now


class EngineStats(msgspec.Struct, frozen=True, tag=True):
    """The engine's report, sent at least once a second while the loop turns, idle or not.

    Attributes:
        gauges: pages_HOLDER, queue_NAME and others, and total_NAME for counters. Here and in
            distributions, a name may end with /VALUE of a label.
    """

    steps: int
    gauges: dict[str, float]
    state: str  # "ready" | "paused" | "draining"
    links: tuple[ProducerUp, ...]  # of usable producers
    distributions: dict[str, HistogramCounts] = {}
    pages_free: int = 0  # including pages that only the prefix cache holds
    backlogs: dict[str, QueueBacklog] = {}  # "prompts", and on a decode node also "pages"
    adapters: dict[str, AdapterId] = {}  # adapters that requests may use, by name
    weights: WeightsId = UNNAMED  # current weight version


class CacheEventBatch(msgspec.Struct, frozen=True, tag=True):
    """A change of the prefix cache for these watchers. Empty: for all that have their snapshot.

    Pages are named by hashes (common/requests/namespace.py), uint64 in the machine's byte order.
    """

    watchers: tuple[int, ...]
    page_size: int  # tokens
    cleared: bool  # whether everything sent before is invalid
    stored: bytes
    removed: bytes


class KvEvents(msgspec.Struct, frozen=True, tag=True):
    """A batch of KV events as its subscribers get it (engine/kv_cache/kv_events.py)."""

    payload: bytes


class GroupDrains(msgspec.Struct, frozen=True, tag=True):
    """Another node of the group drains, so this node must drain too."""


class Drained(msgspec.Struct, frozen=True, tag=True):
    """All work has ended. The frontend may end the node."""


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """A fault of the engine, or a failed start. The process ends after it."""

    reason: str
    config: bool = False  # the user must fix it: exit code 2


EngineMessage: TypeAlias = (
    EngineReady
    | StepTokens
    | QuarantineStarted
    | HandoffSpan
    | PoolingDone
    | NodeCallResult
    | EngineStats
    | CacheEventBatch
    | KvEvents
    | GroupDrains
    | Drained
    | EngineFailed
)
