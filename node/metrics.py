"""The metrics of a node.

The server process counts its streams. The engine reports everything else twice a second, and a
scrape returns the latest report, so that nothing is counted twice.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, get_args

from prometheus_client.core import Metric

from common import distribution
from common.distribution import HistogramCounts
from common.limits import MAX_RANKS
from common.metrics.declared import (
    MetricDeclaration,
    MetricValues,
    Values,
    counter,
    gauge,
    histogram,
)
from common.metrics.program import INFO, PROCESS, TRUST, TrustMetrics, registry_of
from common.pausing import MEMORY_TAGS, PAUSE_MODES
from common.queueing import CLASSES, QueueBacklog
from node.messages import EngineStats

Role = Literal["prefill", "decode", "encode"]
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
    *("embeddings", "bootstrap", "inflight", "pooled"),  # prefill nodes only
    *("unpaired", "prealloc", "transfer", "migrating"),  # decode nodes only
)
HOLDERS = ("free", "request", "step", "read", "publication", "copy", "cache")
MODES = ("extend", "decode", "mixed", "verify", "split")
PATHS = ("nvlink", "cuda_ipc", "rdma", "cma", "tcp")

TIERS = ("host", "file")
RANKS = tuple(map(str, range(MAX_RANKS)))

# Counted by the server process.
REJECTED = counter(
    "baton_node_requests_rejected",
    "Total requests or hand-offs that this node rejected or stopped. Late: the queue is longer "
    "than their wait limit. Dropped: that limit expired before any computation. Adapter: their "
    "adapter is not loaded. Paused: the node is paused. Weights: the consumer has another "
    "weight version.",
    reason=(*get_args(Refusal), "adapter", "paused", "weights"),
)
STREAMS = gauge("baton_streams", "Current open streams.", kind=get_args(StreamKind))
STREAM_ENDS = counter("baton_streams_closed", "Total closed streams.", kind=get_args(StreamKind))
CUT_OFF = counter(
    "baton_slow_peer_disconnects", "Total streams closed because the peer did not read."
)
PAIRINGS = counter(
    "baton_pairings",
    "Total attempts to pair with a node to read from, by result.",
    outcome=get_args(Pairing),
)
STATE = gauge("baton_node_state", "1 for the current state of the node, else 0.", state=STATES)
SILENCE = gauge(
    "baton_engine_heartbeat_age_seconds",
    "Seconds without progress of the engine, beyond what its running step may take.",
)
SERVER = (STREAMS, STREAM_ENDS, CUT_OFF, PAIRINGS, STATE, SILENCE)

# Reported by the engine, under these names (`_reported`). The value of a label follows after a
# slash, or after the underscore at the end of a name.
ENGINE: Mapping[str, MetricDeclaration] = {
    "total_refused": REJECTED,
    "pages_": gauge(
        "baton_kv_pages",
        "Current KV pages by holder. They add up to the pool. A page with several holders counts "
        "for the first of request, step, read, publication, copy (to or from an offload tier) and "
        "cache.",
        holder=HOLDERS,
    ),
    "request_pages": gauge(
        "baton_request_pages",
        "Current pages of requests with a slot, by the data in them. Full: keys and values, or "
        "latents, of all tokens. Window: those of the last tokens. State: the state of linear "
        "attention. Kinds that the model lacks are absent. A shared page counts for each of its "
        "requests.",
        kind=("full", "window", "state"),
        sparse=True,
    ),
    "simulated": gauge(
        "baton_simulated",
        "1 if the device of this node is simulated: its times are modelled, not measured.",
        sparse=True,
    ),
    "simulation_lag": gauge(
        "baton_simulation_lag_seconds",
        "Longest delay of a simulated step since the last report, because this host is busy.",
        sparse=True,
    ),
    "swap_pages": gauge("baton_swap_pages", "Current host pages used by retracted requests."),
    "queue_": gauge(
        "baton_queue_requests",
        "Current requests in each queue of the engine. The queue on_device has those in the "
        "current chunk or the running batch.",
        queue=QUEUES,
        sparse=True,
    ),
    "queued": gauge(
        "baton_queue_wait_estimate_seconds",
        "Estimated seconds until the waiting requests are served: prompts to be computed here, and "
        "requests for pages on a decode node.",
        queue=("prompts", "pages"),
        sparse=True,
    ),
    "token_seconds": gauge(
        "baton_prefill_seconds_per_token",
        "Recent time of a prompt token in seconds, cached or not, while prompts waited. "
        "0: unknown.",
    ),
    "waiting_": gauge(
        "baton_node_waiting_requests",
        "Current requests that wait for computation on this node, or for pages on a decode node, "
        "by priority: below 0, 0, above 0.",
        priority=CLASSES,
    ),
    "step_seconds": histogram(
        "baton_step_seconds",
        "Time of a step on the device in seconds, from the end of the previous step, or its "
        "launch, to its result. In mode split, a step is a group of layers of a prompt.",
        distribution.STEP_S,
        mode=MODES,
    ),
    "batch_requests": histogram(
        "baton_batch_requests", "Requests in a step.", distribution.BATCH_REQUESTS, mode=MODES
    ),
    "batch_tokens": histogram(
        "baton_batch_tokens",
        "Tokens computed in a step with prompts or drafts.",
        distribution.BATCH_TOKENS,
        mode=("extend", "mixed", "verify", "split"),
    ),
    "total_waited": counter(
        "baton_engine_wait_seconds",
        "Total time in seconds that the engine thread waited for the device, for work, or for the "
        "other nodes of its group to begin a step.",
        on=("device", "work", "group"),
    ),
    "total_idle_batches": counter(
        "baton_idle_batches",
        "Total steps of a node in a data-parallel group in which it computed only for other nodes.",
    ),
    "total_delayed_prefills": counter(
        "baton_delayed_prefills",
        "Total steps in which prompts waited for those of other nodes of the group.",
    ),
    "total_step_gap_seconds": counter(
        "baton_step_gap_seconds",
        "Total time in seconds before launches in which no other step was launched: from the end "
        "of the last step, or of a sleep of the engine thread, to the end of the launch. The "
        "device had nothing to do although a step could be launched.",
    ),
    "total_thread_cpu": counter(
        "baton_engine_thread_cpu_seconds",
        "Total CPU time of the engine thread in seconds: scheduling, launching, finishing.",
    ),
    "total_process_cpu": counter(
        "baton_engine_cpu_seconds",
        "Total CPU time of all threads of the engine process in seconds.",
    ),
    "total_self_checks": counter(
        "baton_leak_checks",
        "Total leak checks of an idle engine that found every page and slot accounted for. A "
        "failed check ends the engine.",
    ),
    "total_prompt_tokens": counter(
        "baton_prompt_tokens", "Total prompt tokens of requests admitted for prefill here."
    ),
    "total_cached_tokens": counter(
        "baton_cached_tokens",
        "Total tokens of baton_prompt_tokens_total whose KV was in the prefix cache.",
    ),
    "total_generated_tokens": counter("baton_sampled_tokens", "Total tokens sampled on this node."),
    "total_finished": counter(
        "baton_finished_requests", "Total requests that have left the scheduler."
    ),
    "total_deadlines": counter(
        "baton_deadline_exceeded", "Total requests whose budget expired in the scheduler."
    ),
    "total_retractions": counter(
        "baton_retractions", "Total requests retracted from the device for lack of pages."
    ),
    "total_recomputed": counter(
        "baton_retraction_recomputes", "Total retracted requests whose KV was recomputed."
    ),
    "total_preempted": counter(
        "baton_preemptions",
        "Total requests preempted by a more urgent one, by their own priority.",
        priority=CLASSES,
    ),
    "total_pauses": counter(
        "baton_pauses", "Total pauses of generation by an operator, by mode.", mode=PAUSE_MODES
    ),
    "away_": gauge(
        "baton_memory_released",
        "1 for each part of the node's memory that an operator has released to the system, else 0.",
        part=MEMORY_TAGS,
    ),
    "total_handoffs_": counter(
        "baton_handoffs",
        "Total hand-offs by result. Completed: the consumer has all pages. Failed: on prefill "
        "nodes this includes cancelled requests and responses of one token. Aborted: ended by the "
        "producer, and also counted as failed.",
        outcome=("completed", "failed", "aborted"),
    ),
    "total_weight_updates": counter("baton_weight_updates", "Total updates of the weights."),
    "total_weight_bytes": counter(
        "baton_weight_bytes",
        "Total bytes of weights that this node read from others (read) or provided to others "
        "(lent).",
        copy=("read", "lent"),
    ),
    "total_weight_reads": counter(
        "baton_weight_reads",
        "Total attempts to read the weights of another node. Completed: all arrived and their "
        "checksums matched.",
        outcome=("completed", "failed"),
    ),
    "total_weight_read_seconds": counter(
        "baton_weight_read_seconds",
        "Total time of these reads in seconds, including verification, without the update itself.",
    ),
    "total_prompt_token_ways": counter(
        "baton_prompt_tokens_by_source",
        "Total prompt tokens that this node had to provide, by the source of their KV. Fetched: "
        "read from another node's cache.",
        source=("own", "fetched", "computed"),
    ),
    "total_prefix_fetches": counter(
        "baton_prefix_fetches",
        "Total prefixes that another node was expected to have. Failed: rejected or too late. Not "
        "tried: too_expensive (more than computing), no_capacity (no free pages) and unpaired (no "
        "such node was paired).",
        outcome=("completed", "failed", "too_expensive", "no_capacity", "unpaired"),
    ),
    "total_prefix_loans": counter(
        "baton_prefix_exports",
        "Total prefixes that other nodes requested from this node. Refused: the prefix was "
        "evicted, or too much was being exported.",
        outcome=("completed", "failed", "refused"),
    ),
    "total_forgotten_prefixes": counter(
        "baton_prefix_invalidations",
        "Total prefixes whose KV gave NaN or Inf logits. Own: invalidated after a request of this "
        "node. Asked: invalidated for a node that had read them here. Limited: not invalidated, "
        "because requests exceeded the rate limit.",
        cause=("own", "asked", "limited"),
    ),
    "total_read_bytes": counter(
        "baton_handoff_read_bytes", "Total bytes read from other nodes.", path=PATHS
    ),
    "total_read_descriptors": counter(
        "baton_handoff_read_descriptors",
        "Total transfer descriptors of these reads, one for each page or part of a page.",
        path=PATHS,
    ),
    "read_seconds": histogram(
        "baton_handoff_read_seconds",
        "Time of one read in seconds. A read has the pages of one chunk.",
        distribution.READ_S,
        path=PATHS,
    ),
    "total_reads_refused": counter(
        "baton_handoff_reads_refused",
        "Total reads that the producer rejected because it does not publish these pages.",
        path=PATHS,
    ),
    "reads_in_flight": gauge(
        "baton_handoff_reads_in_flight", "Current reads submitted to links and not finished."
    ),
    "total_pages_compared": counter(
        "baton_handoff_checksums",
        "Total pages read whose checksum was compared with the producer's. Failed: they differed.",
        outcome=("passed", "failed"),
    ),
    "total_images": counter(
        "baton_images",
        "Total images with tokens in a chunk of a prompt. Encoded: the image was encoded for it. "
        "Kept: its embeddings were still cached.",
        embeddings=("encoded", "kept"),
    ),
    "total_image_seconds": counter(
        "baton_image_encoding_seconds",
        "Total time of the image encoder's calls in seconds.",
    ),
    "total_image_batches": counter(
        "baton_image_batches", "Total calls of the image encoder beside the steps of the engine."
    ),
    "images_waiting": gauge("baton_images_waiting", "Current images waiting to be encoded."),
    "image_bytes": gauge("baton_image_bytes", "Current size of cached image embeddings in bytes."),
    "adapters": gauge("baton_adapters", "Current LoRA adapters in host memory."),
    "adapter_bytes": gauge("baton_adapter_bytes", "Current host memory of LoRA adapters in bytes."),
    "adapter_slots": gauge(
        "baton_adapter_slots_used", "Current device slots whose adapter is used by requests."
    ),
    "total_adapter_fills": counter(
        "baton_adapter_loads", "Total copies of an adapter into a slot."
    ),
    "total_adapters_evicted": counter(
        "baton_adapters_evicted", "Total adapters evicted from host memory."
    ),
    "rank_memory": gauge(
        "baton_rank_memory_bytes",
        "Current resident memory of each rank in bytes. Only of nodes with several ranks.",
        rank=RANKS,
        sparse=True,
    ),
    "rank_behind": gauge(
        "baton_rank_steps_behind",
        "Steps that rank 0 had begun and this rank had not finished, when the rank last reported. "
        "Only of nodes with several ranks.",
        rank=RANKS,
        sparse=True,
    ),
    "rank_link_rate": gauge(
        "baton_rank_link_min_bytes_per_second",
        "Rate of each rank's slowest part of a link, as measured at pairing. Only of links to or "
        "from nodes with several ranks.",
        rank=RANKS,
        sparse=True,
    ),
    "expert_imbalance": gauge(
        "baton_expert_load_imbalance",
        "Tokens of the rank whose experts got the most, divided by the mean of the ranks, over the "
        "last period of engine.parallel.rebalance_steps. 1: equal. 0: experts are not moved.",
    ),
    "total_expert_moves": counter(
        "baton_expert_moves", "Total slots of ranks that got another expert."
    ),
    "total_expert_move_seconds": counter(
        "baton_expert_move_seconds",
        "Total time in which no step was computed because experts were moved, in seconds.",
    ),
    "total_kernels_compiled": counter(
        "baton_kernels_compiled", "Total kernels that were compiled while serving."
    ),
    "total_kernel_compile_seconds": counter(
        "baton_kernel_compile_seconds", "Total time for these compilations in seconds."
    ),
    "tier_pages": gauge("baton_offload_pages", "Current pages in an offload tier.", tier=TIERS),
    "total_tier_tokens": counter(
        "baton_offload_tokens",
        "Total prompt tokens that an offload tier saved from being computed or read from another "
        "node. File: no other tier had them.",
        tier=TIERS,
    ),
    "total_tier_bytes": counter(
        "baton_offload_bytes",
        "Total bytes saved to host memory and brought back from it, or written to files and read "
        "back.",
        copy=("saved", "brought", "written", "read"),
    ),
    "total_tier_evicted": counter(
        "baton_offload_evicted", "Total pages of tokens evicted from an offload tier.", tier=TIERS
    ),
    "total_tier_faults": counter(
        "baton_offload_errors",
        "Total pages that could not be written to a file (full, write) or read back. Damaged: the "
        "content differs from what was written. They are recomputed.",
        fault=("full", "write", "read", "damaged"),
    ),
    # By path, not by peer: the set of addresses is unbounded. Describe lists each link.
    "links": gauge(
        "baton_links", "Current usable links to nodes that this node reads from.", path=PATHS
    ),
    "link_rate": gauge(
        "baton_link_min_bytes_per_second",
        "Rate of the slowest link of each path, as measured at pairing and since.",
        path=PATHS,
        sparse=True,
    ),
}
DECODE_ENGINE: Mapping[str, MetricDeclaration] = {
    "total_handoffs_opened": counter("baton_handoffs_opened", "Total attempts at hand-offs."),
    "total_handoff_retries": counter(
        "baton_handoff_retries", "Total hand-off attempts after a failed one of the same request."
    ),
    "handoff_seconds": histogram(
        "baton_handoff_seconds",
        "Time of a hand-off in seconds, from its opening until its pages are here and confirmed, "
        "including the prefill.",
        distribution.HANDOFF_S,
    ),
    "total_handoff_tokens": counter(
        "baton_handoff_prompt_tokens",
        "Total tokens of completed hand-offs by the source of their KV: this node's cache, the "
        "prefill node's cache, or computed.",
        source=("local_cache", "producer_cache", "computed"),
    ),
    "total_pages_read": counter("baton_kv_pages_read", "Total pages read by completed hand-offs."),
    "total_local_prefills": counter(
        "baton_local_prefills",
        "Total prompts that this decode node prefilled itself. Colocated: by configuration. Short: "
        "below the configured length. Reason no_prefill_node: no candidate is paired. Exhausted: "
        "all attempts failed.",
        reason=("colocated", "short", "no_prefill_node", "exhausted"),
    ),
    "total_canaries": counter(
        "baton_canary_checks",
        "Total canary checks of nodes at pairing. Failed: responses differ from this node's own, "
        "and the node is not used. Unknown: no result yet. The node is used, unless its last "
        "canary failed.",
        outcome=("passed", "failed", "unknown"),
    ),
    "total_link_changes": counter(
        "baton_link_changes",
        "Total prefill nodes that became usable for this node (up), or unusable (down).",
        change=("up", "down"),
    ),
    "total_moves": counter(
        "baton_node_migrations",
        "Total live migrations of running requests. Away: completed, to another node. Refused: "
        "failed, and the request stays. Here: arrived on this node.",
        outcome=("away", "refused", "here"),
    ),
    "total_draft_tokens": counter(
        "baton_spec_draft_tokens",
        "Total draft tokens computed with the newest token. Accepted: correct, and each saved one "
        "step.",
        outcome=("accepted", "rejected"),
    ),
    "total_prediction_tokens": counter(
        "baton_prediction_tokens",
        "Total draft tokens from predictions that clients sent.",
        outcome=("accepted", "rejected"),
    ),
    "verified_tokens": histogram(
        "baton_spec_accepted_length",
        "Tokens that a step with drafts yields for a request: the accepted drafts and one more.",
        distribution.RUN_TOKENS,
    ),
}
PREFILL_ENGINE: Mapping[str, MetricDeclaration] = {
    "total_pooled_prompts": counter(
        "baton_pooling_prompts", "Total prompts computed for embeddings or scores."
    ),
    "total_tokens_ahead": counter(
        "baton_prefill_ahead_tokens",
        "Total prompt tokens computed while their decode node had no pages for them.",
    ),
    "total_embedding_reads": counter(
        "baton_embedding_reads",
        "Total images whose embeddings this node wanted to read from an encode node. All except "
        "completed ones are encoded here. Failed: refused, or the node was lost. Unpaired: it was "
        "not paired. No_capacity: no free pages.",
        outcome=("completed", "failed", "late", "unpaired", "no_capacity"),
    ),
}
_IMAGES = ("total_images", "total_image_seconds", "total_image_batches", "images_waiting")
ENCODE_ENGINE: Mapping[str, MetricDeclaration] = {
    **{
        name: ENGINE[name]
        for name in (*_IMAGES, "image_bytes", "pages_", "total_thread_cpu", "total_process_cpu")
    },
    "total_embedding_exports": counter(
        "baton_embedding_exports",
        "Total images that prefill nodes wanted to be encoded here. Failed: the prefill node no "
        "longer wanted it, or was lost. Refused: the queue was full, or encoding failed.",
        outcome=("completed", "failed", "refused"),
    ),
}
BOTH = (*SERVER, *ENGINE.values())
DECODE = (*DECODE_ENGINE.values(),)
PREFILL = (*PREFILL_ENGINE.values(),)
ENCODE = tuple(each for each in ENCODE_ENGINE.values() if each not in BOTH)
# The engine's metrics by role.
OF_ROLE: Mapping[Role, Mapping[str, MetricDeclaration]] = {
    "prefill": {**ENGINE, **PREFILL_ENGINE},
    "decode": {**ENGINE, **DECODE_ENGINE},
    "encode": ENCODE_ENGINE,
}
_ALL = {name: each for own in OF_ROLE.values() for name, each in own.items()}
DECLARED: Mapping[Role, tuple[MetricDeclaration, ...]] = {
    role: (*SERVER, *own.values(), *TRUST, INFO, *PROCESS) for role, own in OF_ROLE.items()
}


class NodeMetrics:
    """The metrics of a node. The frontend's event loop writes them, and a scraping thread reads."""

    def __init__(self, role: Role) -> None:
        self.trust = TrustMetrics()
        values = self._values = MetricValues()
        self._streams = values.numbers(STREAMS)
        self._stream_ends = values.numbers(STREAM_ENDS)
        self._pairings = values.numbers(PAIRINGS)
        self._cut_off = values.numbers(CUT_OFF)
        self._refused = REJECTED.numbers()
        self._liveness: Callable[[], tuple[str, float]] = lambda: ("starting", 0.0)
        self.begin(role)
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
        state, silent_s = self._liveness()
        yield STATE.family({(state,): 1.0})
        yield SILENCE.family({(): silent_s})
        yield from self._values.families()
        series: dict[str, dict[Values, float | HistogramCounts]] = {}
        for name, value in _reported(self._moving, self._refused):
            declared, values = _place(name)
            if declared is not None:
                series.setdefault(declared.name, {})[values] = value
        for declared in OF_ROLE[self._role].values():
            yield declared.family(series.get(declared.name, {}))
        yield from self.trust.families()


def _reported(
    moving: EngineStats, refused: Mapping[Values, float]
) -> Iterator[tuple[str, float | HistogramCounts]]:
    """Yield the values of an engine's report by name.

    Args:
        moving: the report.
        refused: rejections that the server process counted, to be added to the engine's.
    """
    yield from moving.gauges.items()
    yield from moving.distributions.items()
    for (reason,), number in refused.items():
        name = f"total_refused/{reason}"
        yield name, moving.gauges.get(name, 0.0) + number
    yield "token_seconds", moving.backlogs.get("prompts", QueueBacklog()).unit_s
    for queue, backlog in moving.backlogs.items():
        yield f"queued/{queue}", backlog.queued_s
    rates: dict[str, list[float]] = {}
    by_rank: dict[int, list[float]] = {}
    for _, path, gib_per_s, members in moving.links:
        rates.setdefault(path, []).append(gib_per_s * 2**30)
        for member in members:
            by_rank.setdefault(member.rank, []).append(member.gib_per_s * 2**30)
    for path, of_path in rates.items():
        yield f"links/{path}", float(len(of_path))
        yield f"link_rate/{path}", min(of_path)
    for rank, of_rank in by_rank.items():
        yield f"rank_link_rate/{rank}", min(of_rank)


def _place(name: str) -> tuple[MetricDeclaration | None, Values]:
    """Return the series of a reported value, or None if it is exported elsewhere."""
    key, _, label = name.partition("/")
    if key in _ALL:
        declared = _ALL[key]
        if declared.labels and not label:
            return None, ()  # the total of a counter that is also reported by label
        return declared, (label,) if label else ()
    for key, declared in _ALL.items():
        if key.endswith("_") and name.startswith(key):
            return declared, (name.removeprefix(key),)
    return None, ()
