"""Latency objectives (SLO) that a request must meet: --goodput ttft=0.5,itl=0.05."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.errors import InvalidInput
from bench.statistics import nearest_rank
from bench.traffic.outcome import RequestOutcome

_VALUES: Mapping[str, Callable[[RequestOutcome], float]] = {
    "ttft": lambda outcome: outcome.ttft or 0.0,
    "itl": lambda outcome: nearest_rank(outcome.gaps, 0.99),
    "tpot": lambda outcome: outcome.per_token or 0.0,
    "e2e": lambda outcome: outcome.e2e,
}


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
        if not limits or not limits.keys() <= _VALUES.keys() or not min(limits.values()) > 0:
            raise InvalidInput(
                f"--goodput {text!r} is invalid: expected limits in seconds of "
                f"{', '.join(_VALUES)}, such as ttft=0.5,itl=0.05"
            )
        return cls(limits)

    def met(self, outcome: RequestOutcome) -> bool:
        if outcome.error:
            return False
        return all(_VALUES[kind](outcome) <= limit for kind, limit in self.limits.items())
