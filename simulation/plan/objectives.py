"""Limits of latency, and the predicted latency that is compared with them."""

import msgspec

PERCENTILE = 0.9  # of the requests that must be within each limit


class Objectives(msgspec.Struct, frozen=True):
    """Limits in seconds for 90 % of the requests."""

    ttft: float
    tpot: float


class Forecast(msgspec.Struct, frozen=True):
    """The predicted latency of a layout at one rate, in seconds.

    Attributes:
        ttft: 90th percentile. Infinite if a queue grows without end.
        tpot: 90th percentile.
        exhausted: the resource that the load needs more of than there is. "": none.
        rows: mean running requests of a node that decodes.
        prefill_busy: share of time that prefill takes.
        kv_used: share of the KV pool of a node that decodes.
        link_busy: share of the busiest port that hand-offs take.
    """

    ttft: float
    tpot: float
    exhausted: str = ""
    rows: float = 0.0
    prefill_busy: float = 0.0
    kv_used: float = 0.0
    link_busy: float = 0.0

    def bottleneck(self, objectives: Objectives) -> str:
        """Return the first resource that keeps the layout from its objectives. "": none."""
        if self.exhausted:
            return self.exhausted
        if self.tpot > objectives.tpot:
            return "TPOT"
        return "TTFT" if self.ttft > objectives.ttft else ""
