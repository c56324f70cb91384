"""Counters of hand-offs and local prefills of a decode node. Engine thread only."""

from collections.abc import Mapping

from grpc import StatusCode

from common import distribution
from common.distribution import HistogramCounts, LiveHistogram
from common.errors import AdapterNotLoaded, QueueFull, ServingError
from engine.batch.request import RequestEnd

_NAMES = (
    *("handoffs_opened", "handoffs_completed", "handoffs_failed", "handoff_retries", "pages_read"),
    *("handoff_tokens/local_cache", "handoff_tokens/producer_cache", "handoff_tokens/computed"),
    *("link_changes/up", "link_changes/down"),
    *("refused/invalid", "refused/draining", "refused/overloaded", "refused/deadline"),
    *("refused/late", "refused/dropped", "refused/adapter"),
    *("moves/away", "moves/refused", "moves/here"),
    *("canaries/passed", "canaries/failed", "canaries/unknown"),
)
_LOCAL = ("colocated", "short", "no_prefill_node", "exhausted")
_REFUSALS = {
    StatusCode.INVALID_ARGUMENT: "invalid",
    StatusCode.DEADLINE_EXCEEDED: "deadline",
    StatusCode.UNAVAILABLE: "draining",
}
_REASONS: Mapping[type[ServingError], str] = {QueueFull: "late", AdapterNotLoaded: "adapter"}


class DecodeCounters:
    """Counters, named as in Node.Describe.

    A name with a slash ends with a reason, source or change.
    """

    def __init__(self) -> None:
        self._totals = dict.fromkeys(_NAMES, 0)
        self._local = dict.fromkeys(_LOCAL, 0)
        self._seconds = LiveHistogram(distribution.HANDOFF_S)

    def link(self, *, up: bool) -> None:
        self._totals["link_changes/up" if up else "link_changes/down"] += 1

    def local_prefill(self, reason: str) -> None:
        """Count a local prefill, by one of the reasons in `_LOCAL`."""
        self._local[reason] += 1

    def opened(self, attempt: int) -> None:
        """Count an opened hand-off. Attempts are numbered from 1."""
        self._totals["handoffs_opened"] += 1
        self._totals["handoff_retries"] += attempt > 1

    def held(
        self, seconds: float, *, pages_read: int, tokens: int, own: int, owner_cached: int
    ) -> None:
        """Count a completed hand-off.

        Args:
            seconds: time since it was opened.
            pages_read: pages transferred.
            tokens: of the request.
            own: prefix tokens that this node had in its cache.
            owner_cached: prefix tokens that the producer had in its cache.
        """
        totals = self._totals
        totals["handoffs_completed"] += 1
        totals["pages_read"] += pages_read
        totals["handoff_tokens/local_cache"] += own
        totals["handoff_tokens/producer_cache"] += max(owner_cached - own, 0)
        totals["handoff_tokens/computed"] += tokens - max(own, owner_cached)
        self._seconds.add(seconds)

    def moved_away(self, *, held: bool) -> None:
        """Count an outgoing migration.

        `held`: it completed. Otherwise the request continues here.
        """
        self._totals["moves/away" if held else "moves/refused"] += 1

    def moved_here(self) -> None:
        """Count an incoming migration that completed."""
        self._totals["moves/here"] += 1

    def canary(self, verdict: str) -> None:
        """Count a verdict: "passed", "failed" or "unknown"."""
        self._totals[f"canaries/{verdict}"] += 1

    def lost(self) -> None:
        self._totals["handoffs_failed"] += 1

    def refused(self, error: ServingError) -> None:
        reason = _REASONS.get(type(error)) or _REFUSALS.get(error.status, "overloaded")
        self._totals[f"refused/{reason}"] += 1

    def dropped(self, finish: RequestEnd) -> None:
        """Count a request that was dropped from a queue.

        Other ends have no retry time and do not count.
        """
        self._totals["refused/dropped"] += bool(finish.retry_after_s)

    def totals(self) -> dict[str, int]:
        by_reason = {f"local_prefills/{reason}": count for reason, count in self._local.items()}
        return {**self._totals, "local_prefills": sum(self._local.values()), **by_reason}

    def distributions(self) -> Mapping[str, HistogramCounts]:
        return {"handoff_seconds": self._seconds.counted()}
