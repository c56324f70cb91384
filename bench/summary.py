"""Summary of a run's outcomes for a report, and its latency objectives (--goodput).

Times are in seconds. DEFINITIONS defines each figure, and every report prints it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.errors import InvalidInput
from bench.statistics import distribution, nearest_rank
from bench.traffic.load import LoadRun, RequestOutcome

_VALUES: Mapping[str, Callable[[RequestOutcome], float]] = {
    "ttft": lambda outcome: outcome.ttft or 0.0,
    "itl": lambda outcome: nearest_rank(outcome.gaps, 0.99),
    "tpot": lambda outcome: outcome.per_token or 0.0,
    "e2e": lambda outcome: outcome.e2e,
}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Latency limits in seconds.

    ttft, tpot and e2e are single numbers of a request. itl is the 99th percentile of the request's
    own gaps between chunks, or the longest gap if there are fewer than 100.
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


LATE_S, LATE_SHARE = 0.01, 0.02
BUSY_SHARE = 0.8  # share of a core above which the client is likely the bottleneck
LAG_S = 0.02  # p99 delay of the client's own timers above which its timestamps are late

DEFINITIONS = {
    "due": "The scheduled time of a request: by the arrival process in an open loop, when a caller "
    "is free in a closed loop. All latencies count from here, so a client that sends late cannot "
    "flatter the server.",
    "TTFT": "From due to the first event of the stream that stands for a token.",
    "ITL": "Gap between two events of one stream, as its reader sees it. An event may have several "
    "tokens (tokens per chunk).",
    "TPOT": "Time from the first to the last event of one response, divided by the tokens after "
    "the first event, by the server's usage. Without usage an event counts as one token.",
    "E2E": "From due to the end of the response.",
    "late": "Requests sent more than 10 ms after their due time.",
    "tokens/s": "Tokens of completed requests (in: prompt tokens, cached ones too), divided by the "
    "time from the start of the run to the end of the last response.",
    "goodput": "Completed requests a second that met every objective. The share is of all "
    "requests, failed ones too.",
    "percentiles": "Linear between ranks, over everything in one run. n is the count. A p99 of "
    "fewer than 100 values is little more than the largest.",
}


def summary(run: LoadRun, objectives: Objectives) -> dict[str, Any]:
    """Return all figures of one run, without the individual outcomes."""
    wall_s = max(run.wall_s, 1e-9)
    outcomes = run.outcomes
    completed = [outcome for outcome in outcomes if not outcome.error]
    chunks = sum(len(outcome.chunks) for outcome in completed)
    tokens = sum(outcome.output_tokens for outcome in completed)
    return {
        "requests": len(outcomes),
        "completed": len(completed),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "cancelled": run.begun - len(outcomes),
        "complete": run.ended is not None,
        "wall_s": round(run.wall_s, 3),
        "requests_per_s": round(len(completed) / wall_s, 3),
        "input_tokens_per_s": round(sum(o.prompt_tokens for o in completed) / wall_s, 1),
        "output_tokens_per_s": round(tokens / wall_s, 1),
        "prompt_tokens": distribution(float(o.prompt_tokens) for o in completed),
        "cached_tokens": sum(outcome.cached_tokens for outcome in completed),
        "output_tokens": distribution(float(o.output_tokens) for o in completed),
        "tokens_per_chunk": round(tokens / chunks, 2) if chunks else None,
        "usage_reported": all(outcome.usage_reported for outcome in completed),
        **latencies(completed),
        "late": sum(outcome.late > LATE_S for outcome in outcomes),
        "lateness": distribution(outcome.late for outcome in outcomes),
        "goodput": goodput(outcomes, objectives, wall_s),
        "client_cpu": round(run.client_cpu, 3),
        "client_lag": run.client_lag,
    }


def latencies(completed: Sequence[RequestOutcome]) -> dict[str, Any]:
    return {
        "ttft": distribution(o.ttft for o in completed if o.ttft is not None),
        "itl": distribution(gap for outcome in completed for gap in outcome.gaps),
        "tpot": distribution(o.per_token for o in completed if o.per_token is not None),
        "e2e": distribution(outcome.e2e for outcome in completed),
    }


def goodput(
    outcomes: Sequence[RequestOutcome], objectives: Objectives, wall_s: float
) -> dict[str, Any] | None:
    if not objectives.limits:
        return None
    good = sum(objectives.met(outcome) for outcome in outcomes)
    return {
        "objectives": dict(objectives.limits),
        "requests_per_s": round(good / wall_s, 3),
        "share": round(good / len(outcomes), 4) if outcomes else None,
    }


def gaps_during(
    readers: Sequence[RequestOutcome], prefills: Sequence[RequestOutcome]
) -> list[float]:
    """Return the gaps of `readers` that overlap a prefill.

    A prefill lasts from the sending of one of `prefills` to its first token, as the client sees it.
    """
    starts: list[float] = []  # ascending intervals that do not overlap
    ends: list[float] = []
    for start, end in sorted(
        (one.sent, one.chunks[0] if one.chunks else one.ended) for one in prefills
    ):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    found = []
    for reader in readers:
        for before, after in pairwise(reader.chunks):
            index = bisect_left(starts, after) - 1  # last interval that begins before the gap ends
            if index >= 0 and ends[index] > before:
                found.append(after - before)
    return found


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A reason not to trust a run's numbers."""

    kind: str
    weight: float  # the worst warning of a kind has the highest weight
    text: str


def warnings(name: str, run: LoadRun, stats: dict[str, Any]) -> list[RunWarning]:
    found = []

    def warn(kind: str, weight: float, text: str) -> None:
        found.append(RunWarning(kind, weight, f"{name}: {text}"))

    lag = run.client_lag.get("p99") or 0.0
    if run.client_cpu > BUSY_SHARE:
        used = f"the client used {run.client_cpu:.0%} of a core"
        warn("client", run.client_cpu, f"{used}: the client may be the limit, not the server")
    elif lag > LAG_S:
        used = f"though the client used only {run.client_cpu:.0%} of a core"
        too_long = "this machine is short of cores, and every latency is that much too long"
        warn("lag", lag, f"timers came {lag * 1e3:.0f} ms late (p99) {used}: {too_long}")
    if stats["errors"]:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in stats["errors"].items())
        detail = next((o.detail for o in run.outcomes if o.error), "")
        text = f"{kinds} of {stats['requests']} requests. First message: {detail}"
        warn("errors", sum(stats["errors"].values()), text)
    if stats["late"] > LATE_SHARE * stats["requests"]:
        most = stats["lateness"]["max"]
        late = f"{stats['late']} of {stats['requests']} requests were sent late"
        warn("late", most, f"{late}, by at most {most:.2f} s, which their latency includes")
    if stats["completed"] and not stats["usage_reported"]:
        warn("usage", 0.0, "the server reports no usage. Each event counts as one token")
    return found
