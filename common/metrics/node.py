"""What a node counts. Its front counts streams; all else is the engine's, which reports it twice a
second, and is told at the scrape as it was reported: nothing is counted twice.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from prometheus_client.core import Metric

from common import bounds
from common.distribution import Counted
from common.memory_tags import MEMORY_TAGS
from common.metrics.declared import Declared, Values
from common.metrics.program import INFO, PROCESS, registry_of
from common.metrics.trust import TRUST, TrustMetrics
from common.node.messages import Moving
from common.pause_mode import PAUSE_MODES
from common.priority import CLASSES
from common.queueing.drain import Backlog

Role = Literal["prefill", "decode"]
Refusal = Literal["invalid", "draining", "overloaded", "late", "dropped", "deadline"]
StreamKind = Literal["router", "pair"]
Pairing = Literal["up", "refused", "failed"]

STATES = ("starting", "ready", "paused", "unhealthy", "draining")
QUEUES = (
    *("waiting", "chunked", "on_device", "retracted"),
    "guided",  # whose guide is being compiled
    "bringing",  # whose prefix is copied back from a tier below
    "fetching",  # whose prefix is read from another node
    "adapter",  # whose adapter has no slot
    "paused",  # of a decode node alone: to be placed once its pause is over
    *("bootstrap", "inflight", "pooled"),  # of a prefill node alone
    *("unpaired", "prealloc", "transfer", "leaving"),  # of a decode node alone
)
HOLDERS = ("free", "request", "step", "read", "publication", "copy", "cache")
MODES = ("extend", "decode", "mixed", "verify")
PATHS = ("nvlink", "cuda_ipc", "rdma", "cma", "tcp")

# Of the front ------------------------------------------------------------------------------------

REJECTED = Declared(
    "baton_node_rejected",
    "counter",
    "Requests, or hand-offs, that this node would not take, or not go on with; late: its queue is "
    "longer than they may wait, dropped: they have waited so long and nothing was computed, "
    "adapter: their adapter is not loaded, paused: the node is, weights: it has others than who "
    "asks.",
    {
        "reason": (
            *("invalid", "draining", "overloaded", "late", "dropped", "deadline"),
            *("adapter", "paused", "weights"),
        )
    },
)
STREAMS = Declared("baton_streams", "gauge", "Open streams.", {"kind": ("router", "pair")})
STREAM_ENDS = Declared(
    "baton_stream_ends", "counter", "Streams that are over.", {"kind": ("router", "pair")}
)
CUT_OFF = Declared(
    "baton_streams_cut_off", "counter", "Streams ended because the other side did not read."
)
PAIRINGS = Declared(
    "baton_pairings",
    "counter",
    "Attempts to pair with a node to read from, by how they ended.",
    {"outcome": ("up", "refused", "failed")},
)
STATE = Declared("baton_node_state", "gauge", "1 for the state of the node.", {"state": STATES})
SILENCE = Declared(
    "baton_engine_silence_seconds",
    "gauge",
    "Seconds since the engine made progress, beyond what its step under way may take.",
)

# Of the engine -----------------------------------------------------------------------------------

PAGES = Declared(
    "baton_kv_pages",
    "gauge",
    "KV pages by holder, which together are the pool; one with several holders counts for the "
    "first of request, step, read, publication, copy (to a tier below, or from there), cache.",
    {"holder": HOLDERS},
)
HOST_PAGES = Declared("baton_host_kv_pages", "gauge", "Host pages that retracted requests fill.")
QUEUE = Declared(
    "baton_queue_requests",
    "gauge",
    "Requests in each queue of the engine; on_device: in the chunk or the running batch.",
    {"queue": QUEUES},
    sparse=True,
)
WAITING = Declared(
    "baton_queued_requests",
    "gauge",
    "Requests that wait to be computed here, and on a decode node for pages, by priority: below 0, "
    "0, above.",
    {"priority": CLASSES},
)
QUEUED = Declared(
    "baton_queued_seconds",
    "gauge",
    "Until what waits now is through, as far as is known: prompts to be computed here, and on a "
    "decode node requests for pages.",
    {"queue": ("prompts", "pages")},
    sparse=True,
)
TOKEN_SECONDS = Declared(
    "baton_prompt_token_seconds",
    "gauge",
    "That a prompt token has taken here lately, cached or not, while prompts waited; 0: not known.",
)
STEP_SECONDS = Declared(
    "baton_step_seconds",
    "histogram",
    "A step's time on the device: end of the step before, or launch, -> its result is here.",
    {"mode": MODES},
    bounds.STEP_S,
)
BATCH_REQUESTS = Declared(
    "baton_batch_requests",
    "histogram",
    "Requests in a step.",
    {"mode": MODES},
    bounds.BATCH_REQUESTS,
)
BATCH_TOKENS = Declared(
    "baton_batch_tokens",
    "histogram",
    "Tokens computed in a step that has prompts, or drafts.",
    {"mode": ("extend", "mixed", "verify")},
    bounds.BATCH_TOKENS,
)
WAITED = Declared(
    "baton_engine_waited_seconds",
    "counter",
    "Time that the engine thread waited: for the device, or idle for work.",
    {"on": ("device", "work")},
)
THREAD_CPU = Declared(
    "baton_engine_thread_cpu_seconds",
    "counter",
    "CPU time of the engine thread: scheduling, launching, finishing.",
)
ENGINE_CPU = Declared(
    "baton_engine_cpu_seconds", "counter", "CPU time of the engine process, all threads."
)
SELF_CHECKS = Declared(
    "baton_self_checks",
    "counter",
    "Times that an idle engine found every page and slot accounted for; else it ends.",
)
PROMPT_TOKENS = Declared(
    "baton_prompt_tokens", "counter", "Prompt tokens of requests admitted to be prefilled here."
)
CACHED_TOKENS = Declared(
    "baton_cached_tokens", "counter", "Of these, those whose KV the prefix cache had."
)
SAMPLED_TOKENS = Declared("baton_sampled_tokens", "counter", "Tokens sampled on this node.")
FINISHED = Declared("baton_finished_requests", "counter", "Requests that have left the scheduler.")
DEADLINES = Declared(
    "baton_deadlines", "counter", "Requests whose total budget was spent in the scheduler."
)
RETRACTIONS = Declared(
    "baton_retractions", "counter", "Requests taken off the device for want of pages."
)
RECOMPUTED = Declared(
    "baton_recomputed", "counter", "Retracted requests whose KV had to be computed anew."
)
PREEMPTED = Declared(
    "baton_preempted",
    "counter",
    "Requests taken off the device for one that is more urgent, by their own priority.",
    {"priority": CLASSES},
)
PAUSES = Declared(
    "baton_pauses",
    "counter",
    "Times that generation was paused by an operator, by what was to become of requests.",
    {"mode": PAUSE_MODES},
)
WEIGHT_UPDATES = Declared(
    "baton_weight_updates", "counter", "Times that other weights were put in place."
)
WEIGHT_BYTES = Declared(
    "baton_weight_bytes",
    "counter",
    "Bytes of weights that this node has read from others, and that others have read here.",
    {"copy": ("read", "lent")},
)
WEIGHT_READS = Declared(
    "baton_weight_reads",
    "counter",
    "Times that this node was to take another one's weights; held: all of them came, and are what "
    "was wanted.",
    {"outcome": ("held", "lost")},
)
WEIGHT_READ_SECONDS = Declared(
    "baton_weight_read_seconds",
    "counter",
    "What that has taken in sum, with comparing them but without putting them in place.",
)
MEMORY_AWAY = Declared(
    "baton_memory_away",
    "gauge",
    "1 for each part of the node's memory that is given back to the system, as an operator had it.",
    {"part": MEMORY_TAGS},
)
DRAFT_TOKENS = Declared(
    "baton_draft_tokens",
    "counter",
    "Tokens that were guessed and computed with the newest one; accepted: they were right, and one "
    "step less each.",
    {"outcome": ("accepted", "rejected")},
)
PREDICTION_TOKENS = Declared(
    "baton_prediction_tokens",
    "counter",
    "Of these, those of texts that clients had expected of their answers.",
    {"outcome": ("accepted", "rejected")},
)
VERIFIED_TOKENS = Declared(
    "baton_verified_tokens",
    "histogram",
    "Tokens that a step gave a request of which some were guessed: those that were right, and one.",
    {},
    bounds.RUN_TOKENS,
)
POOLED = Declared(
    "baton_pooled_prompts", "counter", "Prompts that were computed for their vectors or scores."
)
ADAPTERS = Declared("baton_adapters", "gauge", "LoRA adapters in host memory.")
ADAPTER_BYTES = Declared("baton_adapter_bytes", "gauge", "Host memory that they take.")
ADAPTER_SLOTS = Declared(
    "baton_adapter_slots_used", "gauge", "Slots of the device whose adapter requests have."
)
ADAPTER_FILLS = Declared("baton_adapter_fills", "counter", "Adapters copied into a slot.")
KERNELS_COMPILED = Declared(
    "baton_kernels_compiled", "counter", "Total kernels that were compiled while serving."
)
KERNEL_COMPILE_SECONDS = Declared(
    "baton_kernel_compile_seconds", "counter", "Time that compiling kernels took while serving."
)
ADAPTERS_EVICTED = Declared(
    "baton_adapters_evicted", "counter", "Adapters that went from host memory to make room."
)
IMAGES = Declared(
    "baton_images",
    "counter",
    "Images that a chunk of a prompt had tokens of. Encoded: then; kept: their embeddings were "
    "still there.",
    {"embeddings": ("encoded", "kept")},
)
IMAGE_SECONDS = Declared(
    "baton_image_encoding_seconds",
    "counter",
    "Time that forwards took longer for encoding images; on a GPU, until that was launched.",
)
IMAGE_BYTES = Declared("baton_image_bytes", "gauge", "Embeddings of images that are kept.")
HANDOFFS = Declared(
    "baton_handoffs",
    "counter",
    "Hand-offs by how they ended; held: the reader has everything. "
    "Lost: on prefill nodes those of cancelled requests, and of answers of one token, too. "
    "Failed: given up by the owner itself; each of those is lost as well.",
    {"outcome": ("held", "lost", "failed")},
)

# Of a decode node's engine -----------------------------------------------------------------------

OPENED = Declared("baton_handoffs_opened", "counter", "Attempts at hand-offs.")
RETRIES = Declared(
    "baton_handoff_retries", "counter", "Of these, those after a lost one of the same request."
)
HANDOFF_SECONDS = Declared(
    "baton_handoff_seconds",
    "histogram",
    "Hand-off opened -> its pages are here and confirmed, the prefill included.",
    bounds=bounds.HANDOFF_S,
)
HANDOFF_TOKENS = Declared(
    "baton_handoff_prompt_tokens",
    "counter",
    "Tokens of hand-offs held, by where their KV was: in this node's cache, in the prefill "
    "node's, or nowhere yet.",
    {"source": ("own_cache", "owner_cache", "computed")},
)
PAGES_READ = Declared("baton_kv_pages_read", "counter", "Pages of hand-offs held that were read.")
LOCAL_PREFILLS = Declared(
    "baton_local_prefills",
    "counter",
    "Prompts that this decode node prefills itself: it is colocated; they are short; no "
    "candidate is paired; all attempts are lost.",
    {"reason": ("colocated", "short", "no_owner", "exhausted")},
)
CANARIES = Declared(
    "baton_canaries",
    "counter",
    "Nodes whose KV was tried when they were paired; wrong: answers were others than with this "
    "node's own, and it is not used. Unknown: it could not be told, or not yet; the node is used, "
    "unless it was wrong before.",
    {"outcome": ("right", "wrong", "unknown")},
)
READ_BYTES = Declared(
    "baton_handoff_read_bytes", "counter", "Bytes read from other nodes.", {"path": PATHS}
)
READ_DESCRIPTORS = Declared(
    "baton_handoff_read_descriptors",
    "counter",
    "Transfer descriptors of these reads: one a page.",
    {"path": PATHS},
)
READ_SECONDS = Declared(
    "baton_handoff_read_seconds",
    "histogram",
    "Time of one read, of the pages of one chunk.",
    {"path": PATHS},
    bounds.READ_S,
)
READS_REFUSED = Declared(
    "baton_handoff_reads_refused",
    "counter",
    "Reads that the owner refused: it does not publish these pages.",
    {"path": PATHS},
)
PAGES_COMPARED = Declared(
    "baton_handoff_pages_compared",
    "counter",
    "Pages read whose checksum was compared with their owner's; wrong: it differed.",
    {"outcome": ("right", "wrong")},
)
READS_IN_FLIGHT = Declared(
    "baton_handoff_reads_in_flight", "gauge", "Reads given to links and not over."
)
# By path and not by peer: addresses are no closed set. Describe tells each link.
LINKS = Declared(
    "baton_links", "gauge", "Usable links to nodes that this one reads from.", {"path": PATHS}
)
SLOWEST = Declared(
    "baton_slowest_link_bytes_per_second",
    "gauge",
    "Speed of the slowest link of each path, as proved at pairing and measured since.",
    {"path": PATHS},
    sparse=True,
)
LINK_CHANGES = Declared(
    "baton_link_changes",
    "counter",
    "Prefill nodes that became usable for this node, and that ceased to be.",
    {"change": ("up", "down")},
)

MOVES = Declared(
    "baton_node_moves",
    "counter",
    "Requests that another decode node was to go on with while they ran; away: it does, refused: "
    "they go on here. here: those that came.",
    {"outcome": ("away", "refused", "here")},
)

PROMPT_TOKEN_WAYS = Declared(
    "baton_prompt_token_ways",
    "counter",
    "Tokens of prompts that were this node's to compute, by where their KV came from; fetched: "
    "read from another node's cache.",
    {"way": ("own", "fetched", "computed")},
)
FETCHES = Declared(
    "baton_prefix_fetches",
    "counter",
    "Prefixes of prompts that another node was said to have; held: read. Lost: refused, or late. "
    "Not tried: dearer than to compute it, no pages for it, no such node is paired.",
    {"outcome": ("held", "lost", "dearer", "no_room", "unpaired")},
)
LOANS = Declared(
    "baton_prefix_loans",
    "counter",
    "Prefixes that other nodes wanted to read here; held: they have. Refused: there was no more of "
    "it, or too much was lent.",
    {"outcome": ("held", "lost", "refused")},
)
FORGOTTEN = Declared(
    "baton_forgotten_prefixes",
    "counter",
    "Prefixes whose KV made logits that are no numbers, and that the caches have forgotten; own: "
    "in a request of this node. Asked: in one of a node that had read them here. Unheeded: the "
    "same, asked too often, and not forgotten.",
    {"cause": ("own", "asked", "unheeded")},
)

_TIERS = {"tier": ("host", "file")}
TIER_PAGES = Declared(
    "baton_tier_pages", "gauge", "Pages that are kept in a tier below the prefix cache.", _TIERS
)
TIER_TOKENS = Declared(
    "baton_tier_tokens",
    "counter",
    "Tokens of prompts that were not computed, nor read from another node, because a tier below "
    "the prefix cache had their KV; file: it alone had.",
    _TIERS,
)
TIER_BYTES = Declared(
    "baton_tier_bytes",
    "counter",
    "Bytes saved to host memory below the prefix cache, and brought back from there; written to "
    "files below that, and read back.",
    {"copy": ("saved", "brought", "written", "read")},
)
TIER_EVICTED = Declared(
    "baton_tier_evicted",
    "counter",
    "Pages of tokens that went from a tier to make room.",
    _TIERS,
)
TIER_FAULTS = Declared(
    "baton_tier_faults",
    "counter",
    "Pages that could not be written to a file, for want of room or otherwise, or not be read; "
    "damaged: what was read was not what had been written. They are computed anew.",
    {"fault": ("full", "write", "read", "damaged")},
)

BOTH = (
    *(REJECTED, STREAMS, STREAM_ENDS, CUT_OFF, STATE, SILENCE, PAGES, HOST_PAGES, QUEUE),
    *(WAITING, QUEUED, TOKEN_SECONDS),
    *(STEP_SECONDS, BATCH_REQUESTS, BATCH_TOKENS, WAITED, THREAD_CPU, ENGINE_CPU),
    *(SELF_CHECKS, PROMPT_TOKENS, CACHED_TOKENS, SAMPLED_TOKENS, FINISHED, DEADLINES),
    *(RETRACTIONS, RECOMPUTED, PREEMPTED, PAUSES, MEMORY_AWAY, HANDOFFS),
    *(WEIGHT_UPDATES, WEIGHT_BYTES, WEIGHT_READS, WEIGHT_READ_SECONDS),
    *(PROMPT_TOKEN_WAYS, FETCHES, LOANS, FORGOTTEN, PAIRINGS),
    *(READ_BYTES, READ_DESCRIPTORS, READ_SECONDS, READS_REFUSED, READS_IN_FLIGHT),
    *(PAGES_COMPARED, LINKS, SLOWEST),
    *(IMAGES, IMAGE_SECONDS, IMAGE_BYTES),
    *(ADAPTERS, ADAPTER_BYTES, ADAPTER_SLOTS, ADAPTER_FILLS, ADAPTERS_EVICTED),
    *(KERNELS_COMPILED, KERNEL_COMPILE_SECONDS),
    *(TIER_PAGES, TIER_TOKENS, TIER_BYTES, TIER_EVICTED, TIER_FAULTS),
)
DECODE = (
    *(OPENED, RETRIES, HANDOFF_SECONDS, HANDOFF_TOKENS, PAGES_READ, LOCAL_PREFILLS, CANARIES),
    *(LINK_CHANGES, MOVES, DRAFT_TOKENS, PREDICTION_TOKENS, VERIFIED_TOKENS),
)
PREFILL = (POOLED,)
DECLARED: Mapping[Role, tuple[Declared, ...]] = {
    "prefill": (*BOTH, *PREFILL, *TRUST, INFO, *PROCESS),
    "decode": (*BOTH, *DECODE, *TRUST, INFO, *PROCESS),
}

# What an engine counts, under its own names; some with a label's value behind a slash.
_TOTALS = {
    "refused": REJECTED,
    "draft_tokens": DRAFT_TOKENS,
    "prediction_tokens": PREDICTION_TOKENS,
    "prompt_tokens": PROMPT_TOKENS,
    "cached_tokens": CACHED_TOKENS,
    "generated_tokens": SAMPLED_TOKENS,
    "finished": FINISHED,
    "deadlines": DEADLINES,
    "retractions": RETRACTIONS,
    "recomputed": RECOMPUTED,
    "preempted": PREEMPTED,
    "pauses": PAUSES,
    "weight_updates": WEIGHT_UPDATES,
    "weight_bytes": WEIGHT_BYTES,
    "weight_reads": WEIGHT_READS,
    "weight_read_seconds": WEIGHT_READ_SECONDS,
    "handoffs_opened": OPENED,
    "handoff_retries": RETRIES,
    "handoff_tokens": HANDOFF_TOKENS,
    "pages_read": PAGES_READ,
    "local_prefills": LOCAL_PREFILLS,
    "canaries": CANARIES,
    "moves": MOVES,
    "prompt_token_ways": PROMPT_TOKEN_WAYS,
    "prefix_fetches": FETCHES,
    "prefix_loans": LOANS,
    "forgotten_prefixes": FORGOTTEN,
    "read_bytes": READ_BYTES,
    "read_descriptors": READ_DESCRIPTORS,
    "reads_refused": READS_REFUSED,
    "pages_compared": PAGES_COMPARED,
    "link_changes": LINK_CHANGES,
    "waited": WAITED,
    "thread_cpu": THREAD_CPU,
    "process_cpu": ENGINE_CPU,
    "self_checks": SELF_CHECKS,
    "pooled_prompts": POOLED,
    "adapter_fills": ADAPTER_FILLS,
    "adapters_evicted": ADAPTERS_EVICTED,
    "kernels_compiled": KERNELS_COMPILED,
    "kernel_compile_seconds": KERNEL_COMPILE_SECONDS,
    "images": IMAGES,
    "image_seconds": IMAGE_SECONDS,
    "tier_tokens": TIER_TOKENS,
    "tier_bytes": TIER_BYTES,
    "tier_evicted": TIER_EVICTED,
    "tier_faults": TIER_FAULTS,
}
_GAUGES = {
    "host_pages": HOST_PAGES,
    "reads_in_flight": READS_IN_FLIGHT,
    "adapters": ADAPTERS,
    "adapter_bytes": ADAPTER_BYTES,
    "adapter_slots": ADAPTER_SLOTS,
    "image_bytes": IMAGE_BYTES,
    "tier_pages": TIER_PAGES,
}
_DISTRIBUTIONS = {
    "step_seconds": STEP_SECONDS,
    "batch_requests": BATCH_REQUESTS,
    "batch_tokens": BATCH_TOKENS,
    "handoff_seconds": HANDOFF_SECONDS,
    "verified_tokens": VERIFIED_TOKENS,
    "read_seconds": READ_SECONDS,
}
_HANDOFFS = "handoffs_"  # of any other such counter the rest of the name is the outcome


class NodeMetrics:
    """Metrics of a node, told by its front. Written by its event loop, told on the thread that
    scrapes."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.trust = TrustMetrics()
        self._streams = STREAMS.numbers()
        self._stream_ends = STREAM_ENDS.numbers()
        self._pairings = PAIRINGS.numbers()
        self._cut_off = CUT_OFF.numbers()
        self._refused = REJECTED.numbers()
        self._liveness: Callable[[], tuple[str, float]] = lambda: ("starting", 0.0)
        self._moving = Moving(steps=0, gauges={}, state="ready", links=())
        self.registry = registry_of(lambda: self._role, self._families)

    def begin(self, role: Role) -> None:
        """What the engine counts begins anew."""
        self._role = role
        self._moving = Moving(steps=0, gauges={}, state="ready", links=())

    def liveness_from(self, liveness: Callable[[], tuple[str, float]]) -> None:
        """Names whoever knows the node's state and the seconds of its engine's silence. Called on
        the thread that scrapes."""
        self._liveness = liveness

    def engine_moved(self, moving: Moving) -> None:
        """Takes the engine's latest report."""
        self._moving = moving

    def refused(self, reason: Refusal) -> None:
        """A submission that the engine has not seen."""
        self._refused[reason,] += 1

    def stream_opened(self, kind: StreamKind) -> None:
        self._streams[kind,] += 1

    def stream_closed(self, kind: StreamKind) -> None:
        self._streams[kind,] -= 1
        self._stream_ends[kind,] += 1

    def pairing(self, outcome: Pairing) -> None:
        self._pairings[outcome,] += 1

    def cut_off(self) -> None:
        self._cut_off[()] += 1

    def _families(self) -> Iterable[Metric]:
        series = _reported(self._moving)
        state, silent_s = self._liveness()
        series[STATE.name], series[SILENCE.name] = {(state,): 1.0}, {(): silent_s}
        series[STREAMS.name], series[STREAM_ENDS.name] = {**self._streams}, {**self._stream_ends}
        series[PAIRINGS.name], series[CUT_OFF.name] = {**self._pairings}, {**self._cut_off}
        rejected = series.setdefault(REJECTED.name, {})
        for values, number in self._refused.items():
            by_engine = rejected.get(values, 0.0)
            assert not isinstance(by_engine, Counted)
            rejected[values] = by_engine + number
        for declared in (*BOTH, *(DECODE if self._role == "decode" else PREFILL)):
            yield declared.family(series.get(declared.name, {}))
        yield from self.trust.families()


def _reported(moving: Moving) -> dict[str, dict[Values, float | Counted]]:
    """What an engine's report says, by the name of the metric."""
    series: dict[str, dict[Values, float | Counted]] = {}
    for name, value in moving.gauges.items():
        declared, values = _place(name)
        if declared is not None:
            series.setdefault(declared.name, {})[values] = value
    for name, counted in moving.distributions.items():
        key, _, label = name.partition("/")
        series.setdefault(_DISTRIBUTIONS[key].name, {})[_values(label)] = counted
    series[LINKS.name], series[SLOWEST.name] = _links(moving)
    series[QUEUED.name] = {(queue,): told.queued_s for queue, told in moving.backlogs.items()}
    series[TOKEN_SECONDS.name] = {(): moving.backlogs.get("prompts", Backlog()).unit_s}
    return series


def _place(name: str) -> tuple[Declared | None, Values]:
    """Which series a value of a report is; None for what is told otherwise."""
    gauge, _, label = name.partition("/")
    if gauge in _GAUGES:
        return _GAUGES[gauge], _values(label)
    kind, _, rest = name.partition("_")
    if kind == "pages":
        return PAGES, (rest,)
    if kind == "queue":
        return QUEUE, (rest,)
    if kind == "away":
        return MEMORY_AWAY, (rest,)
    if kind == "waiting":
        return WAITING, (rest,)
    key, _, label = rest.partition("/")
    if key in _TOTALS:
        declared = _TOTALS[key]
        # A total of what is also counted by label.
        return (None, ()) if declared.labels and not label else (declared, _values(label))
    if key.startswith(_HANDOFFS):
        return HANDOFFS, (key.removeprefix(_HANDOFFS),)
    return None, ()


def _values(label: str) -> Values:
    return (label,) if label else ()


def _links(
    moving: Moving,
) -> tuple[dict[Values, float | Counted], dict[Values, float | Counted]]:
    """Number and slowest speed, by path."""
    speeds: dict[str, list[float]] = {}
    for _, path, gib_per_s in moving.links:
        speeds.setdefault(path, []).append(gib_per_s * 2**30)
    return (
        {(path,): float(len(of_path)) for path, of_path in speeds.items()},
        {(path,): min(of_path) for path, of_path in speeds.items()},
    )
