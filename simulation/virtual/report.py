"""The figures of a run in virtual time."""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from simulation.cost import StepCost
from simulation.virtual.cluster import Response
from simulation.virtual.scenario import LatencyLimits

TTFT_BAND = 0.3


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in seconds, or None without values."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a run. All times are simulated.

    Attributes:
        band, ttft_band: expected relative errors of ITL and TTFT.
        seconds: from the first counted request to the last counted token.
        tpot: mean time between two tokens, for each response.
        right, wrong: number of complete responses that equal the oracle's, and of all others.
        errors: number of failed requests by error.
        tokens_per_s: output tokens of complete responses.
        goodput: complete requests/s within the scenario's limits. None: it has no limits.
        roles: roles at the end of the run, by node.
        utilization: share of the time in which a node's device computes, by node.
        hash: hash of the times and tokens of all responses.
        violations: sentences, one for each rule that the run broke.
    """

    simulated: bool = True
    band: float
    ttft_band: float
    requests: int
    right: int
    wrong: int
    errors: dict[str, int]
    seconds: float
    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    requests_per_s: float
    tokens_per_s: float
    goodput: float | None
    roles: dict[str, str]
    utilization: dict[str, float]
    hash: str
    violations: list[str]


def make_report(
    responses: Sequence[Response],
    begin: float,
    busy_s: Mapping[str, float],
    roles: Mapping[str, str],
    limits: LatencyLimits | None,
    cost: StepCost,
    wrong: Collection[str],
    violations: list[str],
) -> RunReport:
    """Return the report of a run.

    Args:
        begin: time.monotonic() from which figures count.
        busy_s: seconds of steps since then, by node.
        roles: roles at the end, by node.
        limits: None: the report has no goodput.
        wrong: names of responses with wrong tokens.
        violations: see RunReport.
    """
    complete = [each for each in responses if not each.error]
    right = sum(each.arrival.name not in wrong for each in complete)
    last = max((time for each in responses for time in each.times), default=begin)
    seconds = max(last - begin, 1e-9)
    return RunReport(
        band=cost.band,
        ttft_band=max(TTFT_BAND, cost.band),
        requests=len(responses),
        right=right,
        wrong=len(complete) - right,
        errors=dict(sorted(Counter(each.error for each in responses if each.error).items())),
        seconds=seconds,
        ttft=_percentiles(each.times[0] - each.sent_at for each in complete),
        itl=_percentiles(b - a for each in complete for a, b in pairwise(each.times)),
        tpot=_percentiles(_tpot(each.times) for each in complete if len(each.times) > 1),
        requests_per_s=len(complete) / seconds,
        tokens_per_s=sum(len(each.times) for each in complete) / seconds,
        goodput=_num_within(complete, limits) / seconds if limits is not None else None,
        roles=dict(roles),
        utilization={name: busy / seconds for name, busy in busy_s.items()},
        hash=_hash(responses, begin),
        violations=violations,
    )


def _percentiles(values: Iterable[float]) -> Percentiles:
    """Return nearest-rank percentiles."""
    ordered = sorted(values)
    if not ordered:
        return Percentiles(None, None, None, None, None)
    p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
    return Percentiles(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def _num_within(complete: Sequence[Response], limits: LatencyLimits) -> int:
    return sum(
        each.times[0] - each.sent_at <= limits.ttft
        and (len(each.times) < 2 or _tpot(each.times) <= limits.tpot)
        for each in complete
    )


def _tpot(times: Sequence[float]) -> float:
    return (times[-1] - times[0]) / (len(times) - 1)


def _hash(responses: Sequence[Response], begin: float) -> str:
    digest = hashlib.sha256()
    for each in responses:
        times = [time - begin for time in (each.sent_at, *each.times)]
        digest.update(msgspec.json.encode((times, each.token_ids, each.error)))
    return digest.hexdigest()[:16]


def lines(report: RunReport) -> Iterable[str]:
    """Yield the lines of a report for a terminal."""
    band, ttft_band = f"{report.band:.0%}", f"{report.ttft_band:.0%}"
    complete = report.right + report.wrong
    yield "Simulated by a cost model in virtual time. Not measured."
    yield (
        f"requests     {report.requests}: {report.right} right, {report.wrong} wrong, "
        f"{report.requests - complete} failed{_errors(report)}"
    )
    yield f"TTFT         {_times(report.ttft)} (simulated, +-{ttft_band} without queues)"
    yield f"ITL          {_times(report.itl)} (simulated, +-{band})"
    yield f"TPOT         {_times(report.tpot)} (simulated, +-{band})"
    yield (
        f"throughput   {report.requests_per_s:.3g} requests/s, {report.tokens_per_s:.4g} output "
        f"tokens/s in {report.seconds:.1f} s (simulated, +-{band})"
    )
    if report.goodput is not None:
        yield f"goodput      {report.goodput:.3g} requests/s within the limits (simulated)"
    for name, share in report.utilization.items():
        yield f"utilization  {name} {share:.1%} (simulated, +-{band}){_role(report, name)}"
    yield f"hash         {report.hash}"
    for each in report.violations:
        yield f"violation    {each}"


def _role(report: RunReport, node: str) -> str:
    """Return the role of a node if it has changed, else ""."""
    role, kind = report.roles[node], node.partition("/")[0]
    return "" if role in (kind, {"colocated": "decode"}.get(kind)) else f", now {role}"


def _errors(report: RunReport) -> str:
    named = ", ".join(f"{count} {name}" for name, count in report.errors.items())
    return f" ({named})" if named else ""


def _times(values: Percentiles) -> str:
    found = msgspec.structs.asdict(values).items()
    return ", ".join(f"{name} {1e3 * value:.4g} ms" for name, value in found if value is not None)
