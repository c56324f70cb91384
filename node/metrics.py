"""The metrics of a node.

The server process counts its streams. The engine reports everything else twice a second, and a
scrape returns the latest report, so that nothing is counted twice.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from prometheus_client.core import Metric

from common import distribution
from common.distribution import HistogramCounts
from common.limits import MAX_RANKS
from common.metrics.declared import MetricDeclaration, Values
from common.metrics.program import INFO, PROCESS, TRUST, TrustMetrics, registry_of
from common.pausing import MEMORY_TAGS, PAUSE_MODES
from common.priority import CLASSES
from common.queueing import QueueBacklog
from node.messages import EngineStats

Role = Literal["prefill", "decode"]
Refusal = Literal["invalid", "draining", "overloaded", "late", "dropped", "deadline"]
StreamKind = Literal["router", "pair"]
Pairing = Literal["up", "refused", "failed"]

STATES = ("starting", "ready", "paused", "unhealthy", "draining")
QUEUES = (
    *("waiting", "chunked", "on_device", "retracted"),
    "grammar",  # guided decoding: the grammar is being compiled
    "offload_load",  # the prefix is loaded from an offload tier
    "fetching",  # the prefix is read from another node
    "adapter",  # the adapter has no slot
    "paused",  # decode nodes only: placed when the pause ends
    *("bootstrap", "inflight", "pooled"),  # prefill nodes only
    *("unpaired", "prealloc", "transfer", "migrating"),  # decode nodes only
)
HOLDERS = ("free", "request", "step", "read", "publication", "copy", "cache")
MODES = ("extend", "decode", "mixed", "verify")
PATHS = ("nvlink", "cuda_ipc", "rdma", "cma", "tcp")

# Of the server process --------------------------------------------------------------------------

REJECTED = MetricDeclaration(
    "baton_node_requests_rejected",
    "counter",
    "Total requests or hand-offs that this node rejected or stopped. Late: the queue is longer "
    "than their wait limit. Dropped: that limit expired before any computation. Adapter: their "
    "adapter is not loaded. Paused: the node is paused. Weights: the consumer has another "
    "weight version.",
    {
        "reason": (
            *("invalid", "draining", "overloaded", "late", "dropped", "deadline"),
            *("adapter", "paused", "weights"),
        )
    },
)
STREAMS = MetricDeclaration(
    "baton_streams", "gauge", "Current open streams.", {"kind": ("router", "pair")}
)
STREAM_ENDS = MetricDeclaration(
    "baton_streams_closed", "counter", "Total closed streams.", {"kind": ("router", "pair")}
)
CUT_OFF = MetricDeclaration(
    "baton_slow_peer_disconnects", "counter", "Total streams closed because the peer did not read."
)
PAIRINGS = MetricDeclaration(
    "baton_pairings",
    "counter",
    "Total attempts to pair with a node to read from, by result.",
    {"outcome": ("up", "refused", "failed")},
)
STATE = MetricDeclaration(
    "baton_node_state", "gauge", "1 for the current state of the node, else 0.", {"state": STATES}
)
SILENCE = MetricDeclaration(
    "baton_engine_heartbeat_age_seconds",
    "gauge",
    "Seconds without progress of the engine, beyond what its running step may take.",
)

# Of the engine -----------------------------------------------------------------------------------

PAGES = MetricDeclaration(
    "baton_kv_pages",
    "gauge",
    "Current KV pages by holder. They add up to the pool. A page with several holders counts "
    "for the first of request, step, read, publication, copy (to or from an offload tier) and "
    "cache.",
    {"holder": HOLDERS},
)
HOST_PAGES = MetricDeclaration(
    "baton_swap_pages", "gauge", "Current host pages used by retracted requests."
)
QUEUE = MetricDeclaration(
    "baton_queue_requests",
    "gauge",
    "Current requests in each queue of the engine. The queue on_device has those in the current "
    "chunk or the running batch.",
    {"queue": QUEUES},
    sparse=True,
)
WAITING = MetricDeclaration(
    "baton_node_waiting_requests",
    "gauge",
    "Current requests that wait for computation on this node, or for pages on a decode node, by "
    "priority: below 0, 0, above 0.",
    {"priority": CLASSES},
)
QUEUED = MetricDeclaration(
    "baton_queue_wait_estimate_seconds",
    "gauge",
    "Estimated seconds until the waiting requests are served: prompts to be computed here, and "
    "requests for pages on a decode node.",
    {"queue": ("prompts", "pages")},
    sparse=True,
)
TOKEN_SECONDS = MetricDeclaration(
    "baton_prefill_seconds_per_token",
    "gauge",
    "Recent time of a prompt token in seconds, cached or not, while prompts waited. 0: unknown.",
)
STEP_SECONDS = MetricDeclaration(
    "baton_step_seconds",
    "histogram",
    "Time of a step on the device in seconds, from the end of the previous step, or its launch, "
    "to its result.",
    {"mode": MODES},
    distribution.STEP_S,
)
BATCH_REQUESTS = MetricDeclaration(
    "baton_batch_requests",
    "histogram",
    "Requests in a step.",
    {"mode": MODES},
    distribution.BATCH_REQUESTS,
)
BATCH_TOKENS = MetricDeclaration(
    "baton_batch_tokens",
    "histogram",
    "Tokens computed in a step with prompts or drafts.",
    {"mode": ("extend", "mixed", "verify")},
    distribution.BATCH_TOKENS,
)
WAITED = MetricDeclaration(
    "baton_engine_wait_seconds",
    "counter",
    "Total time in seconds that the engine thread waited for the device, or for work.",
    {"on": ("device", "work")},
)
THREAD_CPU = MetricDeclaration(
    "baton_engine_thread_cpu_seconds",
    "counter",
    "Total CPU time of the engine thread in seconds: scheduling, launching, finishing.",
)
ENGINE_CPU = MetricDeclaration(
    "baton_engine_cpu_seconds",
    "counter",
    "Total CPU time of all threads of the engine process in seconds.",
)
SELF_CHECKS = MetricDeclaration(
    "baton_leak_checks",
    "counter",
    "Total leak checks of an idle engine that found every page and slot accounted for. A failed "
    "check ends the engine.",
)
PROMPT_TOKENS = MetricDeclaration(
    "baton_prompt_tokens", "counter", "Total prompt tokens of requests admitted for prefill here."
)
CACHED_TOKENS = MetricDeclaration(
    "baton_cached_tokens",
    "counter",
    "Total tokens of baton_prompt_tokens_total whose KV was in the prefix cache.",
)
SAMPLED_TOKENS = MetricDeclaration(
    "baton_sampled_tokens", "counter", "Total tokens sampled on this node."
)
FINISHED = MetricDeclaration(
    "baton_finished_requests", "counter", "Total requests that have left the scheduler."
)
DEADLINES = MetricDeclaration(
    "baton_deadline_exceeded", "counter", "Total requests whose budget expired in the scheduler."
)
RETRACTIONS = MetricDeclaration(
    "baton_retractions", "counter", "Total requests retracted from the device for lack of pages."
)
RECOMPUTED = MetricDeclaration(
    "baton_retraction_recomputes", "counter", "Total retracted requests whose KV was recomputed."
)
PREEMPTED = MetricDeclaration(
    "baton_preemptions",
    "counter",
    "Total requests preempted by a more urgent one, by their own priority.",
    {"priority": CLASSES},
)
PAUSES = MetricDeclaration(
    "baton_pauses",
    "counter",
    "Total pauses of generation by an operator, by mode.",
    {"mode": PAUSE_MODES},
)
WEIGHT_UPDATES = MetricDeclaration(
    "baton_weight_updates", "counter", "Total updates of the weights."
)
WEIGHT_BYTES = MetricDeclaration(
    "baton_weight_bytes",
    "counter",
    "Total bytes of weights that this node read from others (read) or provided to others (lent).",
    {"copy": ("read", "lent")},
)
WEIGHT_READS = MetricDeclaration(
    "baton_weight_reads",
    "counter",
    "Total attempts to read the weights of another node. Completed: all arrived and their "
    "checksums matched.",
    {"outcome": ("completed", "failed")},
)
WEIGHT_READ_SECONDS = MetricDeclaration(
    "baton_weight_read_seconds",
    "counter",
    "Total time of these reads in seconds, including verification, without the update itself.",
)
MEMORY_AWAY = MetricDeclaration(
    "baton_memory_released",
    "gauge",
    "1 for each part of the node's memory that an operator has released to the system, else 0.",
    {"part": MEMORY_TAGS},
)
DRAFT_TOKENS = MetricDeclaration(
    "baton_spec_draft_tokens",
    "counter",
    "Total draft tokens computed with the newest token. Accepted: correct, and each saved one "
    "step.",
    {"outcome": ("accepted", "rejected")},
)
PREDICTION_TOKENS = MetricDeclaration(
    "baton_prediction_tokens",
    "counter",
    "Total draft tokens from predictions that clients sent.",
    {"outcome": ("accepted", "rejected")},
)
VERIFIED_TOKENS = MetricDeclaration(
    "baton_spec_accepted_length",
    "histogram",
    "Tokens that a step with drafts yields for a request: the accepted drafts and one more.",
    {},
    distribution.RUN_TOKENS,
)
POOLED = MetricDeclaration(
    "baton_pooling_prompts", "counter", "Total prompts computed for embeddings or scores."
)
ADAPTERS = MetricDeclaration("baton_adapters", "gauge", "Current LoRA adapters in host memory.")
ADAPTER_BYTES = MetricDeclaration(
    "baton_adapter_bytes", "gauge", "Current host memory of LoRA adapters in bytes."
)
ADAPTER_SLOTS = MetricDeclaration(
    "baton_adapter_slots_used", "gauge", "Current device slots whose adapter is used by requests."
)
ADAPTER_FILLS = MetricDeclaration(
    "baton_adapter_loads", "counter", "Total copies of an adapter into a slot."
)
_RANKS = {"rank": tuple(map(str, range(MAX_RANKS)))}
RANK_MEMORY = MetricDeclaration(
    "baton_rank_memory_bytes",
    "gauge",
    "Current resident memory of each rank in bytes. Only of nodes with several ranks.",
    _RANKS,
    sparse=True,
)
RANK_BEHIND = MetricDeclaration(
    "baton_rank_steps_behind",
    "gauge",
    "Steps that rank 0 had begun and this rank had not finished, when the rank last reported. Only "
    "of nodes with several ranks.",
    _RANKS,
    sparse=True,
)
KERNELS_COMPILED = MetricDeclaration(
    "baton_kernels_compiled", "counter", "Total kernels that were compiled while serving."
)
KERNEL_COMPILE_SECONDS = MetricDeclaration(
    "baton_kernel_compile_seconds", "counter", "Total time for these compilations in seconds."
)
ADAPTERS_EVICTED = MetricDeclaration(
    "baton_adapters_evicted", "counter", "Total adapters evicted from host memory."
)
IMAGES = MetricDeclaration(
    "baton_images",
    "counter",
    "Total images with tokens in a chunk of a prompt. Encoded: the image was encoded for it. "
    "Kept: its embeddings were still cached.",
    {"embeddings": ("encoded", "kept")},
)
IMAGE_SECONDS = MetricDeclaration(
    "baton_image_encoding_seconds",
    "counter",
    "Total extra time of forward passes for encoding images in seconds. On a GPU, the time to "
    "launch that work.",
)
IMAGE_BYTES = MetricDeclaration(
    "baton_image_bytes", "gauge", "Current size of cached image embeddings in bytes."
)
HANDOFFS = MetricDeclaration(
    "baton_handoffs",
    "counter",
    "Total hand-offs by result. Completed: the consumer has all pages. Failed: on prefill nodes "
    "this includes cancelled requests and responses of one token. Aborted: ended by the producer, "
    "and also counted as failed.",
    {"outcome": ("completed", "failed", "aborted")},
)

# Of a decode node's engine -----------------------------------------------------------------------

OPENED = MetricDeclaration("baton_handoffs_opened", "counter", "Total attempts at hand-offs.")
RETRIES = MetricDeclaration(
    "baton_handoff_retries",
    "counter",
    "Total hand-off attempts after a failed one of the same request.",
)
HANDOFF_SECONDS = MetricDeclaration(
    "baton_handoff_seconds",
    "histogram",
    "Time of a hand-off in seconds, from its opening until its pages are here and confirmed, "
    "including the prefill.",
    bounds=distribution.HANDOFF_S,
)
HANDOFF_TOKENS = MetricDeclaration(
    "baton_handoff_prompt_tokens",
    "counter",
    "Total tokens of completed hand-offs by the source of their KV: this node's cache, the "
    "prefill node's cache, or computed.",
    {"source": ("local_cache", "producer_cache", "computed")},
)
PAGES_READ = MetricDeclaration(
    "baton_kv_pages_read", "counter", "Total pages read by completed hand-offs."
)
LOCAL_PREFILLS = MetricDeclaration(
    "baton_local_prefills",
    "counter",
    "Total prompts that this decode node prefilled itself. Colocated: by configuration. Short: "
    "below the configured length. Reason no_prefill_node: no candidate is paired. Exhausted: all "
    "attempts failed.",
    {"reason": ("colocated", "short", "no_prefill_node", "exhausted")},
)
CANARIES = MetricDeclaration(
    "baton_canary_checks",
    "counter",
    "Total canary checks of nodes at pairing. Failed: responses differ from this node's own, and "
    "the node is not used. Unknown: no result yet. The node is used, unless its last canary "
    "failed.",
    {"outcome": ("passed", "failed", "unknown")},
)
READ_BYTES = MetricDeclaration(
    "baton_handoff_read_bytes", "counter", "Total bytes read from other nodes.", {"path": PATHS}
)
READ_DESCRIPTORS = MetricDeclaration(
    "baton_handoff_read_descriptors",
    "counter",
    "Total transfer descriptors of these reads, one a page.",
    {"path": PATHS},
)
READ_SECONDS = MetricDeclaration(
    "baton_handoff_read_seconds",
    "histogram",
    "Time of one read in seconds. A read has the pages of one chunk.",
    {"path": PATHS},
    distribution.READ_S,
)
READS_REFUSED = MetricDeclaration(
    "baton_handoff_reads_refused",
    "counter",
    "Total reads that the producer rejected because it does not publish these pages.",
    {"path": PATHS},
)
PAGES_COMPARED = MetricDeclaration(
    "baton_handoff_checksums",
    "counter",
    "Total pages read whose checksum was compared with the producer's. Failed: they differed.",
    {"outcome": ("passed", "failed")},
)
READS_IN_FLIGHT = MetricDeclaration(
    "baton_handoff_reads_in_flight", "gauge", "Current reads submitted to links and not finished."
)
# By path, not by peer: the set of addresses is unbounded. Describe lists each link.
LINKS = MetricDeclaration(
    "baton_links",
    "gauge",
    "Current usable links to nodes that this node reads from.",
    {"path": PATHS},
)
SLOWEST = MetricDeclaration(
    "baton_link_min_bytes_per_second",
    "gauge",
    "Rate of the slowest link of each path, as measured at pairing and since.",
    {"path": PATHS},
    sparse=True,
)
LINK_CHANGES = MetricDeclaration(
    "baton_link_changes",
    "counter",
    "Total prefill nodes that became usable for this node (up), or unusable (down).",
    {"change": ("up", "down")},
)

MOVES = MetricDeclaration(
    "baton_node_migrations",
    "counter",
    "Total live migrations of running requests. Away: completed, to another node. Refused: "
    "failed, and the request stays. Here: arrived on this node.",
    {"outcome": ("away", "refused", "here")},
)

PROMPT_TOKEN_WAYS = MetricDeclaration(
    "baton_prompt_tokens_by_source",
    "counter",
    "Total prompt tokens that this node had to provide, by the source of their KV. Fetched: "
    "read from another node's cache.",
    {"source": ("own", "fetched", "computed")},
)
FETCHES = MetricDeclaration(
    "baton_prefix_fetches",
    "counter",
    "Total prefixes that another node was expected to have. Failed: rejected or too late. Not "
    "tried: too_expensive (more than computing), no_capacity (no free pages) and unpaired (no "
    "such node was paired).",
    {"outcome": ("completed", "failed", "too_expensive", "no_capacity", "unpaired")},
)
LOANS = MetricDeclaration(
    "baton_prefix_exports",
    "counter",
    "Total prefixes that other nodes requested from this node. Refused: the prefix was evicted, "
    "or too much was being exported.",
    {"outcome": ("completed", "failed", "refused")},
)
FORGOTTEN = MetricDeclaration(
    "baton_prefix_invalidations",
    "counter",
    "Total prefixes whose KV gave NaN or Inf logits. Own: invalidated after a request of this "
    "node. Asked: invalidated for a node that had read them here. Limited: not invalidated, "
    "because requests exceeded the rate limit.",
    {"cause": ("own", "asked", "limited")},
)

_TIERS = {"tier": ("host", "file")}
TIER_PAGES = MetricDeclaration(
    "baton_offload_pages", "gauge", "Current pages in an offload tier.", _TIERS
)
TIER_TOKENS = MetricDeclaration(
    "baton_offload_tokens",
    "counter",
    "Total prompt tokens that an offload tier saved from being computed or read from another "
    "node. File: no other tier had them.",
    _TIERS,
)
TIER_BYTES = MetricDeclaration(
    "baton_offload_bytes",
    "counter",
    "Total bytes saved to host memory and brought back from it, or written to files and read back.",
    {"copy": ("saved", "brought", "written", "read")},
)
TIER_EVICTED = MetricDeclaration(
    "baton_offload_evicted",
    "counter",
    "Total pages of tokens evicted from an offload tier.",
    _TIERS,
)
TIER_FAULTS = MetricDeclaration(
    "baton_offload_errors",
    "counter",
    "Total pages that could not be written to a file (full, write) or read back. Damaged: the "
    "content differs from what was written. They are recomputed.",
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
    *(KERNELS_COMPILED, KERNEL_COMPILE_SECONDS, RANK_MEMORY, RANK_BEHIND),
    *(TIER_PAGES, TIER_TOKENS, TIER_BYTES, TIER_EVICTED, TIER_FAULTS),
)
DECODE = (
    *(OPENED, RETRIES, HANDOFF_SECONDS, HANDOFF_TOKENS, PAGES_READ, LOCAL_PREFILLS, CANARIES),
    *(LINK_CHANGES, MOVES, DRAFT_TOKENS, PREDICTION_TOKENS, VERIFIED_TOKENS),
)
PREFILL = (POOLED,)
DECLARED: Mapping[Role, tuple[MetricDeclaration, ...]] = {
    "prefill": (*BOTH, *PREFILL, *TRUST, INFO, *PROCESS),
    "decode": (*BOTH, *DECODE, *TRUST, INFO, *PROCESS),
}

# The engine's counters by its own names, some with a label's value after a slash.
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
    "swap_pages": HOST_PAGES,
    "reads_in_flight": READS_IN_FLIGHT,
    "adapters": ADAPTERS,
    "adapter_bytes": ADAPTER_BYTES,
    "adapter_slots": ADAPTER_SLOTS,
    "image_bytes": IMAGE_BYTES,
    "tier_pages": TIER_PAGES,
    "rank_memory": RANK_MEMORY,
    "rank_behind": RANK_BEHIND,
}
_DISTRIBUTIONS = {
    "step_seconds": STEP_SECONDS,
    "batch_requests": BATCH_REQUESTS,
    "batch_tokens": BATCH_TOKENS,
    "handoff_seconds": HANDOFF_SECONDS,
    "verified_tokens": VERIFIED_TOKENS,
    "read_seconds": READ_SECONDS,
}
_HANDOFFS = "handoffs_"  # the rest of the name of any other such counter is the outcome


class NodeMetrics:
    """The metrics of a node. The front's event loop writes them, the scraping thread reads them."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.trust = TrustMetrics()
        self._streams = STREAMS.numbers()
        self._stream_ends = STREAM_ENDS.numbers()
        self._pairings = PAIRINGS.numbers()
        self._cut_off = CUT_OFF.numbers()
        self._refused = REJECTED.numbers()
        self._liveness: Callable[[], tuple[str, float]] = lambda: ("starting", 0.0)
        self._moving = EngineStats(steps=0, gauges={}, state="ready", links=())
        self.registry = registry_of(lambda: self._role, self._families)

    def begin(self, role: Role) -> None:
        """Reset the engine's report for a new role, whose engine counts from 0."""
        self._role = role
        self._moving = EngineStats(steps=0, gauges={}, state="ready", links=())

    def liveness_from(self, liveness: Callable[[], tuple[str, float]]) -> None:
        """Set the function that returns the node's state and the seconds of its engine's silence.
        Called on the scraping thread.
        """
        self._liveness = liveness

    def engine_moved(self, moving: EngineStats) -> None:
        """Record the engine's latest report."""
        self._moving = moving

    def refused(self, reason: Refusal) -> None:
        """Count a rejected submission that the engine has not seen."""
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
            assert not isinstance(by_engine, HistogramCounts)
            rejected[values] = by_engine + number
        for declared in (*BOTH, *(DECODE if self._role == "decode" else PREFILL)):
            yield declared.family(series.get(declared.name, {}))
        yield from self.trust.families()


def _reported(moving: EngineStats) -> dict[str, dict[Values, float | HistogramCounts]]:
    """Return the series of an engine's report, by the name of the metric."""
    series: dict[str, dict[Values, float | HistogramCounts]] = {}
    for name, value in moving.gauges.items():
        declared, values = _place(name)
        if declared is not None:
            series.setdefault(declared.name, {})[values] = value
    for name, counted in moving.distributions.items():
        key, _, label = name.partition("/")
        series.setdefault(_DISTRIBUTIONS[key].name, {})[_values(label)] = counted
    series[LINKS.name], series[SLOWEST.name] = _links(moving)
    series[QUEUED.name] = {(queue,): told.queued_s for queue, told in moving.backlogs.items()}
    series[TOKEN_SECONDS.name] = {(): moving.backlogs.get("prompts", QueueBacklog()).unit_s}
    return series


def _place(name: str) -> tuple[MetricDeclaration | None, Values]:
    """Return the series of a reported value, or None if it is exported elsewhere."""
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
        # The total of a counter that is also reported by label.
        return (None, ()) if declared.labels and not label else (declared, _values(label))
    if key.startswith(_HANDOFFS):
        return HANDOFFS, (key.removeprefix(_HANDOFFS),)
    return None, ()


def _values(label: str) -> Values:
    return (label,) if label else ()


def _links(
    moving: EngineStats,
) -> tuple[dict[Values, float | HistogramCounts], dict[Values, float | HistogramCounts]]:
    """Return the number of links and the slowest rate, by path."""
    speeds: dict[str, list[float]] = {}
    for _, path, gib_per_s in moving.links:
        speeds.setdefault(path, []).append(gib_per_s * 2**30)
    return (
        {(path,): float(len(of_path)) for path, of_path in speeds.items()},
        {(path,): min(of_path) for path, of_path in speeds.items()},
    )
