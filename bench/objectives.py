"""Latency objectives (SLO) that a request must meet to count as good: --goodput
ttft=0.5,itl=0.05."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.errors import InvalidInput
from bench.statistics import nearest_rank
from bench.traffic.outcome import RequestOutcome

KINDS = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in seconds.

    ttft, tpot and e2e are one number of a request. itl is the 99th percentile of the request's own
    gaps between chunks. With fewer than 100 gaps it is the longest.
    """

    limits: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Objectives":
        """Parse METRIC=SECONDS pairs. Raises InvalidInput."""
        try:
            pairs = [part.split("=") for part in text.split(",")]
            limits = {name.strip(): float(value) for name, value in pairs}
        except ValueError:
            limits = {}
        if not limits or not limits.keys() <= set(KINDS) or not all(v > 0 for v in limits.values()):
            raise InvalidInput(
                f"--goodput {text!r}: wants limits in seconds of {', '.join(KINDS)}, "
                "as ttft=0.5,itl=0.05"
            )
        return cls(limits)

    def met(self, outcome: RequestOutcome) -> bool:
        if outcome.error:
            return False
        return all(self._value(kind, outcome) <= limit for kind, limit in self.limits.items())

    def _value(self, kind: str, outcome: RequestOutcome) -> float:
        match kind:
            case "ttft":
                return outcome.ttft or 0.0
            case "itl":
                return nearest_rank(outcome.gaps, 0.99)
            case "tpot":
                return outcome.per_token or 0.0
            case _:
                return outcome.e2e
