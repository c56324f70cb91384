"""The summary of a run's outcomes for a report.

Times are in seconds. DEFINITIONS names each figure once, and every report prints it.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.objectives import Objectives
from bench.statistics import distribution
from bench.traffic.load import LoadRun
from bench.traffic.outcome import RequestOutcome

LATE_S, LATE_SHARE = 0.01, 0.02
BUSY_SHARE = 0.8  # of a core: above it, the client is likely the bottleneck
LAG_S = 0.02  # p99 of the delay of the client's own timers: above it, its timestamps are late

DEFINITIONS = {
    "due": "When a request was to be sent. In an open loop the arrival process says it, in a "
    "closed loop it is when a caller was free. All latencies count from here, so that a client or "
    "a bound on requests in flight that sends late cannot flatter the server.",
    "TTFT": "From due to the first event of the stream that stands for a token.",
    "ITL": "Gap between two events of one stream, as its reader sees it. An event may hold several "
    "tokens (tokens per chunk says how many).",
    "TPOT": "Time from the first to the last event of one answer, divided by the tokens after the "
    "first event (by the server's usage); where the server does not tell what an event holds, the "
    "first is taken for one token.",
    "E2E": "From due to the end of the answer.",
    "late": "Requests sent more than 10 ms after they were due.",
    "tokens/s": "Tokens of answered requests (in: prompt tokens, cached ones too), divided by the "
    "time from the start of the run to the end of the last answer.",
    "goodput": "Answered requests that met every objective, per second of the same time; the share "
    "is of all requests, failed ones too.",
    "percentiles": "Linear between ranks, over everything in one run; n is the count. A p99 of "
    "fewer than 100 values is little more than the largest.",
}


def summary(run: LoadRun, objectives: Objectives) -> dict[str, Any]:
    """Return all figures of one run except its outcomes."""
    wall_s = max(run.wall_s, 1e-9)
    outcomes = run.outcomes
    answered = [outcome for outcome in outcomes if not outcome.error]
    chunks = sum(len(outcome.chunks) for outcome in answered)
    tokens = sum(outcome.output_tokens for outcome in answered)
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "given_up": run.begun - len(outcomes),
        "complete": run.ended is not None,
        "wall_s": round(run.wall_s, 3),
        "requests_per_s": round(len(answered) / wall_s, 3),
        "input_tokens_per_s": round(sum(o.prompt_tokens for o in answered) / wall_s, 1),
        "output_tokens_per_s": round(tokens / wall_s, 1),
        "prompt_tokens": distribution(float(o.prompt_tokens) for o in answered),
        "cached_tokens": sum(outcome.cached_tokens for outcome in answered),
        "output_tokens": distribution(float(o.output_tokens) for o in answered),
        "tokens_per_chunk": round(tokens / chunks, 2) if chunks else None,
        "usage_told": all(outcome.usage_told for outcome in answered),
        **latencies(answered),
        "late": sum(outcome.late > LATE_S for outcome in outcomes),
        "lateness": distribution(outcome.late for outcome in outcomes),
        "goodput": goodput(outcomes, objectives, wall_s),
        "client_cpu": round(run.client_cpu, 3),
        "client_lag": run.client_lag,
    }


def latencies(answered: Sequence[RequestOutcome]) -> dict[str, Any]:
    return {
        "ttft": distribution(o.ttft for o in answered if o.ttft is not None),
        "itl": distribution(gap for outcome in answered for gap in outcome.gaps),
        "tpot": distribution(o.per_token for o in answered if o.per_token is not None),
        "e2e": distribution(outcome.e2e for outcome in answered),
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

    A prefill lasts from the sending of one of `prefills` to its first token, as a client sees it.
    """
    starts: list[float] = []  # ascending spans that do not overlap
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
        for before, after in zip(reader.chunks, reader.chunks[1:], strict=False):
            index = bisect_left(starts, after) - 1  # the last span that begins before the gap ends
            if index >= 0 and ends[index] > before:
                found.append(after - before)
    return found


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A caveat about a run's numbers."""

    kind: str
    weight: float  # the worst warning of a kind has the highest weight
    text: str


def warnings(name: str, run: LoadRun, stats: dict[str, Any]) -> list[RunWarning]:
    """Return the caveats of a run.

    Args:
        name: name of the run.
    """
    said = []
    lag = run.client_lag.get("p99") or 0.0
    if run.client_cpu > BUSY_SHARE:
        text = f"the client used {run.client_cpu:.0%} of a core: these may be the client's numbers"
        said.append(RunWarning("client", run.client_cpu, f"{name}: {text}, not the server's"))
    elif lag > LAG_S:
        text = f"the client's timers came {lag * 1e3:.0f} ms late (p99) though it used only"
        why = "of a core: this machine is short of cores, and every latency is that much too long"
        said.append(RunWarning("lag", lag, f"{name}: {text} {run.client_cpu:.0%} {why}"))
    if stats["errors"]:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in stats["errors"].items())
        detail = next((o.detail for o in run.outcomes if o.error), "")
        text = f"{name}: {kinds} of {stats['requests']} requests; the first said: {detail}"
        said.append(RunWarning("errors", sum(stats["errors"].values()), text))
    if stats["late"] > LATE_SHARE * stats["requests"]:
        text = f"{name}: {stats['late']} of {stats['requests']} requests were sent late, by"
        most = stats["lateness"]["max"]
        said.append(RunWarning("late", most, f"{text} {most:.2f} s at most; their latency has it"))
    if stats["answered"] and not stats["usage_told"]:
        text = f"{name}: the server tells no usage; each event is taken for one token"
        said.append(RunWarning("usage", 0.0, text))
    return said
