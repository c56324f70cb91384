"""The metrics of a node.

The server process counts its own streams. The engine reports everything else twice a second, and a
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
from kvtransfer.ports import LINK_PATHS
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
    "paused",  # decode nodes only: placed after the pause
    *("embeddings", "bootstrap", "inflight", "pooled"),  # prefill nodes only
    *("unpaired", "prealloc", "transfer", "migrating"),  # decode nodes only
)
HOLDERS = ("free", "request", "step", "read", "publication", "copy", "cache")
MODES = ("extend", "decode", "mixed", "verify", "split")

TIERS = ("host", "file")
RANKS = tuple(map(str, range(MAX_RANKS)))

# Counted by the server process.
REJECTED = counter(
    "baton_node_requests_rejected",
    "Total requests or hand-offs that this node rejected or stopped. invalid: a value was "
    "wrong. draining: the node is draining. overloaded: a queue is full. late: they could "
    "not start within their wait limit. dropped: their wait limit expired before any "
    "computation. deadline: their total time expired. adapter: their LoRA adapter is not "
    "loaded. paused: the node is paused. weights: the other node has another weight version.",
    reason=(*get_args(Refusal), "adapter", "paused", "weights"),
)
STREAMS = gauge(
    "baton_streams",
    "Current open gRPC streams. router: to a router. pair: to a node with which this node "
    "exchanges KV.",
    kind=get_args(StreamKind),
)
STREAM_ENDS = counter(
    "baton_streams_closed",
    "Total closed gRPC streams. router: to a router. pair: to a node with which this node "
    "exchanges KV.",
    kind=get_args(StreamKind),
)
CUT_OFF = counter(
    "baton_slow_peer_disconnects",
    "Total streams that this node closed because the other side did not read.",
)
PAIRINGS = counter(
    "baton_pairings",
    "Total attempts of this node to pair, that is, to connect to a node whose KV it reads. "
    "up: succeeded. refused: the configurations are incompatible. failed: any other reason, "
    "tried again.",
    outcome=get_args(Pairing),
)
STATE = gauge("baton_node_state", "1 for the current state of the node, else 0.", state=STATES)
SILENCE = gauge(
    "baton_engine_heartbeat_age_seconds",
    "Seconds for which the engine has made no progress, minus the time that its current step may "
    "take.",
)
SERVER = (STREAMS, STREAM_ENDS, CUT_OFF, PAIRINGS, STATE, SILENCE)

# Reported by the engine under these names (`_reported`). The value of a label follows a slash, or
# the underscore at the end of a name.
ENGINE: Mapping[str, MetricDeclaration] = {
    "total_refused": REJECTED,
    "pages_": gauge(
        "baton_kv_pages",
        "Current KV pages by holder. The values add up to the pool. A page with several holders "
        "counts once, for its first holder in this order. request: a request. step: a running "
        "forward pass. read: a read that writes it. publication: another node may read it. copy: "
        "a copy to or from an offload tier. cache: only the prefix cache. free: no holder.",
        holder=HOLDERS,
    ),
    "request_pages": gauge(
        "baton_request_pages",
        "Current pages of requests in the running batch, by content. Only the kinds that the "
        "model has. A shared page counts for each of its requests. full: keys and values, or "
        "latents, of all tokens. window: those of the last tokens, in layers with a sliding "
        "window. state: the state of recurrent layers.",
        kind=("full", "window", "state"),
        sparse=True,
    ),
    "simulated": gauge(
        "baton_simulated",
        "1 if the device of this node is simulated, so that its times are modelled and not "
        "measured.",
        sparse=True,
    ),
    "simulation_lag": gauge(
        "baton_simulation_lag_seconds",
        "Longest delay of a simulated step since the last report. It grows if this host is too "
        "busy for the simulation.",
        sparse=True,
    ),
    "swap_pages": gauge(
        "baton_swap_pages",
        "Current pages of host memory with the KV of retracted and preempted requests.",
    ),
    "queue_": gauge(
        "baton_queue_requests",
        "Current requests in each queue of the engine. The section Queues explains the values.",
        queue=QUEUES,
        sparse=True,
    ),
    "queued": gauge(
        "baton_queue_wait_estimate_seconds",
        "Estimated seconds until all waiting requests have been served. prompts: those with a "
        "prompt to be computed on this node. pages: those that wait for pages on a decode node.",
        queue=("prompts", "pages"),
        sparse=True,
    ),
    "token_seconds": gauge(
        "baton_prefill_seconds_per_token",
        "Recent seconds for each token of a prompt, cached or not, while prompts waited. 0 if "
        "unknown.",
    ),
    "waiting_": gauge(
        "baton_node_waiting_requests",
        "Current requests that wait for computation on this node, or for pages on a decode node, "
        "by priority. low: below 0. normal: 0. high: above 0.",
        priority=CLASSES,
    ),
    "step_seconds": histogram(
        "baton_step_seconds",
        "Seconds of a step on the device, by the kind of step. extend: prompts only. decode: one "
        "token for each running request. mixed: both. verify: decode with draft tokens. split: a "
        "group of layers of a prompt.",
        distribution.STEP_S,
        mode=MODES,
    ),
    "batch_requests": histogram(
        "baton_batch_requests",
        "Requests in a step, by the kinds of baton_step_seconds.",
        distribution.BATCH_REQUESTS,
        mode=MODES,
    ),
    "batch_tokens": histogram(
        "baton_batch_tokens",
        "Tokens that a step computes, for steps with prompts or draft tokens, by the kinds of "
        "baton_step_seconds.",
        distribution.BATCH_TOKENS,
        mode=("extend", "mixed", "verify", "split"),
    ),
    "total_waited": counter(
        "baton_engine_wait_seconds",
        "Total seconds for which the engine thread waited. device: for the device. work: for "
        "requests. group: for the other nodes of its data-parallel group to begin a step.",
        on=("device", "work", "group"),
    ),
    "total_idle_batches": counter(
        "baton_idle_batches",
        "Total steps in which a node of a data-parallel group had no requests and computed only "
        "its experts for the other nodes.",
    ),
    "total_delayed_prefills": counter(
        "baton_delayed_prefills",
        "Total steps in which prompts of a node of a data-parallel group waited, so that the "
        "nodes compute prompts in the same steps.",
    ),
    "total_step_gap_seconds": counter(
        "baton_step_gap_seconds",
        "Total seconds for which the device had nothing to do, although the engine could have "
        "launched a step. Time in which the engine had no work does not count.",
    ),
    "total_thread_cpu": counter(
        "baton_engine_thread_cpu_seconds",
        "Total CPU seconds of the engine thread, which schedules, launches and finishes steps.",
    ),
    "total_process_cpu": counter(
        "baton_engine_cpu_seconds",
        "Total CPU seconds of all threads of the engine process.",
    ),
    "total_self_checks": counter(
        "baton_leak_checks",
        "Total leak checks that an idle engine passed. If a page or slot is unaccounted for, the "
        "engine ends instead.",
    ),
    "total_prompt_tokens": counter(
        "baton_prompt_tokens",
        "Total prompt tokens, cached or not, of requests whose prompts this node began to compute.",
    ),
    "total_cached_tokens": counter(
        "baton_cached_tokens",
        "Total prompt tokens in baton_prompt_tokens_total whose KV was in the prefix cache.",
    ),
    "total_generated_tokens": counter("baton_sampled_tokens", "Total tokens sampled on this node."),
    "total_finished": counter(
        "baton_finished_requests", "Total requests that have ended on this node's engine."
    ),
    "total_deadlines": counter(
        "baton_deadline_exceeded", "Total requests whose total time expired on this node."
    ),
    "total_retractions": counter(
        "baton_retractions",
        "Total requests that were removed from the device for lack of pages. They continue later.",
    ),
    "total_recomputed": counter(
        "baton_retraction_recomputes",
        "Total retracted requests whose KV was recomputed, because host memory for it was full.",
    ),
    "total_preempted": counter(
        "baton_preemptions",
        "Total requests that were preempted by a request of higher priority, by their own "
        "priority. low: below 0. normal: 0. high: above 0.",
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
        "Total hand-offs (transfers of KV) to or from this node, by result. completed: all pages "
        "arrived and were confirmed. failed: all others. On prefill nodes these include cancelled "
        "requests, and responses of one token, which need no transfer. aborted: failed hand-offs "
        "that the prefill node ended, which also count as failed.",
        outcome=("completed", "failed", "aborted"),
    ),
    "total_weight_updates": counter(
        "baton_weight_updates", "Total updates of the weights at run time."
    ),
    "total_weight_bytes": counter(
        "baton_weight_bytes",
        "Total bytes of weights that were copied between nodes. read: from other nodes. sent: to "
        "other nodes.",
        copy=("read", "sent"),
    ),
    "total_weight_reads": counter(
        "baton_weight_reads",
        "Total attempts to read the weights of another node. completed: all arrived, and their "
        "checksums matched. failed: all others.",
        outcome=("completed", "failed"),
    ),
    "total_weight_read_seconds": counter(
        "baton_weight_read_seconds",
        "Total seconds of the reads in baton_weight_reads_total, including the checksums, "
        "without the update itself.",
    ),
    "total_prompt_token_ways": counter(
        "baton_prompt_tokens_by_source",
        "Total prompt tokens by the source of their KV. own: this node's prefix cache. fetched: "
        "the prefix cache of another node. computed: computed here.",
        source=("own", "fetched", "computed"),
    ),
    "total_prefix_fetches": counter(
        "baton_prefix_fetches",
        "Total prefixes that this node could have read from another node's cache, by result. "
        "completed: read. failed: refused or too late. too_expensive: not tried, because "
        "computing was faster. no_capacity: not tried, because no pages were free. unpaired: not "
        "tried, because the nodes are not connected.",
        outcome=("completed", "failed", "too_expensive", "no_capacity", "unpaired"),
    ),
    "total_prefix_loans": counter(
        "baton_prefix_exports",
        "Total prefixes that other nodes requested from this node's cache, by result. completed: "
        "read. failed: the transfer failed. refused: the prefix was evicted, or too many were "
        "being read.",
        outcome=("completed", "failed", "refused"),
    ),
    "total_forgotten_prefixes": counter(
        "baton_prefix_invalidations",
        "Total cached prefixes that were removed because their KV caused NaN or Inf in logits. "
        "own: in a request of this node. asked: in a request of another node, which had read the "
        "KV here. limited: not removed, because another node exceeded the rate limit.",
        cause=("own", "asked", "limited"),
    ),
    "total_read_bytes": counter(
        "baton_handoff_read_bytes",
        "Total bytes that this node read from other nodes.",
        path=LINK_PATHS,
    ),
    "total_read_descriptors": counter(
        "baton_handoff_read_descriptors",
        "Total transfer descriptors of the reads in baton_handoff_read_bytes_total. One "
        "descriptor is a page or a part of a page.",
        path=LINK_PATHS,
    ),
    "read_seconds": histogram(
        "baton_handoff_read_seconds",
        "Seconds of one read, which has the pages of one chunk.",
        distribution.READ_S,
        path=LINK_PATHS,
    ),
    "total_reads_refused": counter(
        "baton_handoff_reads_refused",
        "Total reads that the other node refused, because it had not published these pages to "
        "this node.",
        path=LINK_PATHS,
    ),
    "reads_in_flight": gauge(
        "baton_handoff_reads_in_flight", "Current reads that have started and not ended."
    ),
    "total_pages_compared": counter(
        "baton_handoff_checksums",
        "Total pages whose checksum was compared after reading. passed: equal. failed: the "
        "content differs from what the other node published.",
        outcome=("passed", "failed"),
    ),
    "total_images": counter(
        "baton_images",
        "Total images whose tokens were part of a computed chunk. encoded: the image was encoded "
        "for it. kept: its embeddings were still cached.",
        embeddings=("encoded", "kept"),
    ),
    "total_image_seconds": counter(
        "baton_image_encoding_seconds",
        "Total seconds of the image encoder's calls.",
    ),
    "total_image_batches": counter(
        "baton_image_batches",
        "Total calls of the image encoder that ran beside the steps of the engine.",
    ),
    "images_waiting": gauge("baton_images_waiting", "Current images waiting to be encoded."),
    "image_bytes": gauge("baton_image_bytes", "Current size of cached image embeddings in bytes."),
    "adapters": gauge("baton_adapters", "Current LoRA adapters in host memory."),
    "adapter_bytes": gauge("baton_adapter_bytes", "Current host memory of LoRA adapters in bytes."),
    "adapter_slots": gauge(
        "baton_adapter_slots_used",
        "Current slots of LoRA adapters on the device that requests use.",
    ),
    "total_adapter_fills": counter(
        "baton_adapter_loads",
        "Total copies of a LoRA adapter from host memory to a slot on the device.",
    ),
    "total_adapters_evicted": counter(
        "baton_adapters_evicted", "Total LoRA adapters evicted from host memory."
    ),
    "rank_memory": gauge(
        "baton_rank_memory_bytes",
        "Current resident memory of each rank in bytes. Only for nodes with several ranks.",
        rank=RANKS,
        sparse=True,
    ),
    "rank_behind": gauge(
        "baton_rank_steps_behind",
        "Steps that rank 0 had begun and this rank had not finished, at the last report of this "
        "rank. Only for nodes with several ranks.",
        rank=RANKS,
        sparse=True,
    ),
    "rank_link_rate": gauge(
        "baton_rank_link_min_bytes_per_second",
        "Rate of the slowest part of a link that this rank has, as measured at pairing. Only for "
        "links of nodes with several ranks.",
        rank=RANKS,
        sparse=True,
    ),
    "expert_imbalance": gauge(
        "baton_expert_load_imbalance",
        "Tokens of the busiest rank, divided by the mean of all ranks, over the last "
        "engine.parallel.rebalance_steps. 1 means equal load. 0 means that experts are not "
        "moved.",
    ),
    "total_expert_moves": counter(
        "baton_expert_moves", "Total changes of an expert in a slot of a rank."
    ),
    "total_expert_move_seconds": counter(
        "baton_expert_move_seconds",
        "Total seconds in which no step was computed because experts were moved.",
    ),
    "total_kernels_compiled": counter(
        "baton_kernels_compiled", "Total kernels that were compiled while the node was serving."
    ),
    "total_kernel_compile_seconds": counter(
        "baton_kernel_compile_seconds",
        "Total seconds in which kernels were compiled while the node was serving.",
    ),
    "tier_pages": gauge("baton_offload_pages", "Current pages in an offload tier.", tier=TIERS),
    "total_tier_tokens": counter(
        "baton_offload_tokens",
        "Total prompt tokens whose KV an offload tier had, so that they were not computed or "
        "read from another node. host: host memory. file: only a file.",
        tier=TIERS,
    ),
    "total_tier_bytes": counter(
        "baton_offload_bytes",
        "Total bytes copied to and from offload tiers. saved: to host memory. loaded: back from "
        "host memory. written: to files. read: back from files.",
        copy=("saved", "loaded", "written", "read"),
    ),
    "total_tier_evicted": counter(
        "baton_offload_evicted", "Total pages evicted from an offload tier.", tier=TIERS
    ),
    "total_tier_faults": counter(
        "baton_offload_errors",
        "Total pages that failed in the file tier. They are recomputed if needed. full: no space "
        "to write. write: another error when writing. read: an error when reading. damaged: the "
        "content differs from what was written.",
        fault=("full", "write", "read", "damaged"),
    ),
    # By path, not by peer, because the set of addresses is unbounded. Describe lists each link.
    "links": gauge(
        "baton_links",
        "Current usable connections over which this node reads KV from other nodes, by data path.",
        path=LINK_PATHS,
    ),
    "link_rate": gauge(
        "baton_link_min_bytes_per_second",
        "Rate of the slowest link of each data path, as measured at pairing and since.",
        path=LINK_PATHS,
        sparse=True,
    ),
}
DECODE_ENGINE: Mapping[str, MetricDeclaration] = {
    "total_handoffs_opened": counter(
        "baton_handoffs_opened",
        "Total attempts at a hand-off, that is, requests to a prefill node for the KV of a prompt.",
    ),
    "total_handoff_retries": counter(
        "baton_handoff_retries",
        "Total attempts at a hand-off after an earlier attempt for the same request failed.",
    ),
    "handoff_seconds": histogram(
        "baton_handoff_seconds",
        "Seconds from the start of a hand-off until all pages are here and confirmed. This "
        "includes the prefill.",
        distribution.HANDOFF_S,
    ),
    "total_handoff_tokens": counter(
        "baton_handoff_prompt_tokens",
        "Total prompt tokens of completed hand-offs by the source of their KV. local_cache: this "
        "node's prefix cache. producer_cache: the prefill node's prefix cache. computed: "
        "computed by the prefill node.",
        source=("local_cache", "producer_cache", "computed"),
    ),
    "total_pages_read": counter(
        "baton_kv_pages_read", "Total pages that were read by completed hand-offs."
    ),
    "total_local_prefills": counter(
        "baton_local_prefills",
        "Total prompts that this decode node computed itself. colocated: by its configuration. "
        "short: the prompt is below --local-prefill-max-tokens. no_prefill_node: no prefill node "
        "was connected. exhausted: all attempts at prefill nodes failed.",
        reason=("colocated", "short", "no_prefill_node", "exhausted"),
    ),
    "total_canaries": counter(
        "baton_canary_checks",
        "Total canaries, which compare tokens generated with a prefill node's KV and with this "
        "node's own. passed: equal. failed: different, so this node does not use that prefill "
        "node. unknown: no result yet. The prefill node is used, unless its last canary failed.",
        outcome=("passed", "failed", "unknown"),
    ),
    "total_link_changes": counter(
        "baton_link_changes",
        "Total changes of prefill nodes for this node. up: it became usable. down: it became "
        "unusable.",
        change=("up", "down"),
    ),
    "total_moves": counter(
        "baton_node_migrations",
        "Total live migrations of running requests. away: to another node. refused: failed, and "
        "the request stayed. here: from another node.",
        outcome=("away", "refused", "here"),
    ),
    "total_draft_tokens": counter(
        "baton_spec_draft_tokens",
        "Total draft tokens of speculative decoding. accepted: correct, so each saved one step. "
        "rejected: wrong.",
        outcome=("accepted", "rejected"),
    ),
    "total_prediction_tokens": counter(
        "baton_prediction_tokens",
        "Total draft tokens from predictions that clients sent. accepted: correct. rejected: "
        "wrong.",
        outcome=("accepted", "rejected"),
    ),
    "verified_tokens": histogram(
        "baton_spec_accepted_length",
        "Tokens that a step with draft tokens yields for a request: the accepted drafts and one "
        "more.",
        distribution.RUN_TOKENS,
    ),
}
PREFILL_ENGINE: Mapping[str, MetricDeclaration] = {
    "total_pooled_prompts": counter(
        "baton_pooling_prompts", "Total prompts computed for embeddings or scores."
    ),
    "total_tokens_ahead": counter(
        "baton_prefill_ahead_tokens",
        "Total prompt tokens that this node computed before the decode node had pages for them.",
    ),
    "total_embedding_reads": counter(
        "baton_embedding_reads",
        "Total images that this node wanted an encode node to encode. If that does not complete, "
        "this node encodes the image. completed: the embeddings were read. failed: refused, or the "
        "encode node was lost. late: it took too long. unpaired: the nodes are not connected. "
        "no_capacity: no pages were free.",
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
        "Total images that prefill nodes wanted this node to encode. completed: their embeddings "
        "were read. failed: the prefill node no longer wanted it, or was lost. refused: the "
        "queue was full, or encoding failed.",
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
    """The metrics of a node. The frontend's event loop writes, and a scraping thread reads them.

    Attributes:
        report: the engine's latest report.
        liveness: returns the node's state and the seconds since its engine's last progress.
    """

    def __init__(self, role: Role) -> None:
        self.trust = TrustMetrics()
        values = self._values = MetricValues()
        self._streams = values.numbers(STREAMS)
        self._stream_ends = values.numbers(STREAM_ENDS)
        self._pairings = values.numbers(PAIRINGS)
        self._cut_off = values.numbers(CUT_OFF)
        self._refused = REJECTED.numbers()
        self.liveness: Callable[[], tuple[str, float]] = lambda: ("starting", 0.0)
        self.begin(role)
        self.registry = registry_of(lambda: self._role, self._families)

    def begin(self, role: Role) -> None:
        """Reset the engine's report for a new role, whose engine counts from 0."""
        self._role = role
        self.report = EngineStats(steps=0, gauges={}, state="ready", links=())

    def refused(self, reason: Refusal) -> None:
        """Count a rejected request that the engine has not seen."""
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
        state, silent_s = self.liveness()
        yield STATE.family({(state,): 1.0})
        yield SILENCE.family({(): silent_s})
        yield from self._values.families()
        series: dict[str, dict[Values, float | HistogramCounts]] = {}
        for name, value in _reported(self.report, self._refused):
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
        refused: rejections by the server process, added to the engine's.
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
    for link in moving.links:
        rates.setdefault(link.path, []).append(link.gib_per_s * 2**30)
        for member in link.members:
            by_rank.setdefault(member.rank, []).append(member.gib_per_s * 2**30)
    for path, of_path in rates.items():
        yield f"links/{path}", float(len(of_path))
        yield f"link_rate/{path}", min(of_path)
    for rank, of_rank in by_rank.items():
        yield f"rank_link_rate/{rank}", min(of_rank)


def _place(name: str) -> tuple[MetricDeclaration | None, Values]:
    """Return the series of a reported value, or None if it is exported under another name."""
    key, _, label = name.partition("/")
    if key in _ALL:
        declared = _ALL[key]
        if declared.labels and not label:
            return None, ()  # a total that is also reported by label
        return declared, (label,) if label else ()
    for key, declared in _ALL.items():
        if key.endswith("_") and name.startswith(key):
            return declared, (name.removeprefix(key),)
    return None, ()
