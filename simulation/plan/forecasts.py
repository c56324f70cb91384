"""Closed forms: the latency of a layout at a given request rate.

Prefill nodes are one queue with several servers. The number of running requests on a decode node
follows from its rate and its step time (Little's law) and varies like a Poisson variable. The first
token comes from the prefill node, so the hand-off delays only the second one. Each step time is
computed once per node size.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import msgspec

from simulation.cost import StepCost, StepShape
from simulation.plan.traffic import PERCENTILE, Forecast, Traffic

CHUNK = 8192  # default chunk of prefill nodes, in tokens
MAX_BATCH_TOKENS = 16384  # default limit of prompt tokens in one step
MAX_ROWS = 1024


class NodeSteps:
    """Step times of one kind of node for the lengths of a load.

    Attributes:
        prompts: seconds of each request's prompt on an idle prefill node.
        kv_rows: number of running requests that fit the KV pool.
        max_batch: prompts that share a step on a prefill node.
        batch_s: seconds of a step, by number of mean prompts.
    """

    def __init__(self, cost: StepCost, traffic: Traffic) -> None:
        self.cost = cost
        self._context = round(traffic.context)
        self._input = max(1, round(traffic.input))
        self.kv_rows = cost.kv_capacity_tokens / traffic.context
        self.prompts = [self._prompt_s(each.input) for each in traffic.requests]
        self.max_batch = max(1, MAX_BATCH_TOKENS // self._input)
        self.batch_s = cache(self._batch_s)
        self._decode_at, self._mixed_at = cache(self._decode_s), cache(self._mixed_s)

    def batch_between(self, prompts: float) -> float:
        """Return `batch_s` for a mean number of prompts, interpolated."""
        return _between(self.batch_s, prompts)

    def decode_s(self, rows: float) -> float:
        """Return the seconds of a step of `rows` decode rows, interpolated."""
        return _between(self._decode_at, rows)

    def mixed_s(self, chunk: int, rows: float) -> float:
        """Return the seconds of a step with a chunk of prompts and `rows` decode rows."""
        return _between(lambda number: self._mixed_at(chunk, number), rows)

    def _decode_s(self, rows: int) -> float:
        rows = max(1, rows)
        return self.cost.step_s(StepShape((1,) * rows, (self._context,) * rows))

    def _mixed_s(self, chunk: int, rows: int) -> float:
        """Return the seconds of a mixed step.

        The chunk is the middle one of a long prompt, or consists of several short prompts.
        """
        length = self._input
        if length >= chunk:
            chunks: Sequence[int] = (chunk,)
            contexts: Sequence[int] = ((length + chunk) // 2,)
        else:
            whole, rest = divmod(chunk, length)
            chunks = contexts = (length,) * whole + ((rest,) if rest else ())
        return self.cost.step_s(
            StepShape((1,) * rows + tuple(chunks), (self._context,) * rows + tuple(contexts))
        )

    def _prompt_s(self, length: int) -> float:
        ends = [*range(CHUNK, length, CHUNK), length]
        starts = [0, *ends[:-1]]
        return sum(
            self.cost.step_s(StepShape((end - start,), (end,)))
            for start, end in zip(starts, ends, strict=True)
        )

    def _batch_s(self, prompts: int) -> float:
        if prompts == 1:
            return self._prompt_s(self._input)
        return self.cost.step_s(StepShape((self._input,) * prompts, (self._input,) * prompts))


def _between(at: Callable[[int], float], place: float) -> float:
    below = math.floor(place)
    share = place - below
    return at(below) if share == 0 else (1 - share) * at(below) + share * at(below + 1)


_BISECTIONS = 24  # precision: 1e-7 of the range


class Waiting(msgspec.Struct, frozen=True):
    """A waiting time: zero, or else exponentially distributed.

    Attributes:
        probability: probability that a request waits.
        mean: mean seconds of the requests that wait.
    """

    probability: float
    mean: float

    def share_within(self, limit: float) -> float:
        """Return the share of requests that wait at most `limit` seconds."""
        if limit < 0:
            return 0.0
        return 1.0 if self.mean <= 0 else 1 - self.probability * math.exp(-limit / self.mean)


def waiting(servers: int, rate: float, service: float, variation: float) -> Waiting:
    """Return the wait in a queue with several servers (M/G/k by Allen and Cunneen).

    Args:
        rate: requests/s at all servers together, less than servers / service.
        service: mean service time in seconds.
        variation: squared coefficient of variation of the service time.
    """
    offered = rate * service
    blocked = 1.0  # Erlang's formula B, by its recursion over servers
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    busy = offered / servers
    probability = blocked / (1 - busy * (1 - blocked))
    return Waiting(probability, (1 + variation) / 2 * service / (servers * (1 - busy)))


def variation(values: Sequence[float]) -> float:
    """Return the squared coefficient of variation."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def percentile(share: float, wait: Waiting, services: Sequence[float]) -> float:
    """Return the time within which `share` of the requests have waited and been served."""

    def lacks(limit: float) -> bool:
        within = sum(wait.share_within(limit - service) for service in services)
        return within < share * len(services)

    longest = max(services)
    while lacks(longest):
        longest *= 2
    return highest(lacks, 0.0, longest)


def highest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the highest value up to which a condition holds, or `low` if it never does."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


_NORMAL = 1.28  # standard deviations between the mean and the 90th percentile
# Standard deviations of a Poisson variable, averaged over the time of a request.
_AVERAGED = 0.86
_RESERVE = 2.0  # standard deviations of running requests for which there is room
_INFINITE = math.inf


def disaggregated(
    traffic: Traffic, prefill: NodeSteps, decode: NodeSteps, nodes: tuple[int, int], path: str
) -> Forecast:
    """Return the latency with prefill nodes and decode nodes.

    Args:
        nodes: numbers of prefill nodes and of decode nodes.
        path: data path of hand-offs, see PATHS.
    """
    kv_bytes = round(traffic.input) * prefill.cost.kv_bytes_per_token
    link_busy = traffic.rate / min(nodes) * prefill.cost.transfer_s(kv_bytes, path)
    if link_busy >= 1:
        return Forecast(_INFINITE, _INFINITE, "link", link_busy=link_busy)
    ttft, busy = _prefill(traffic, prefill, nodes[0])
    if busy >= 1:
        return Forecast(_INFINITE, _INFINITE, "prefill time", prefill_busy=busy)
    rows = _rows(traffic, decode, nodes[1])
    if exhausted := _exhausted(rows, decode):
        return Forecast(ttft, _INFINITE, exhausted, rows, busy)
    last = min(kv_bytes, CHUNK * prefill.cost.kv_bytes_per_token)  # the others are hidden
    hand_off = prefill.cost.transfer_s(last, path) / (1 - link_busy) / traffic.output
    tpot = decode.decode_s(_high(rows)) + hand_off
    return Forecast(ttft, tpot, "", rows, busy, rows / decode.kv_rows, link_busy)


def _prefill(traffic: Traffic, steps: NodeSteps, nodes: int) -> tuple[float, float]:
    """Return the 90th percentile of TTFT, and the busy share of the nodes.

    Waiting prompts share a step: the more wait, the less time each takes.
    """
    spread = variation(steps.prompts)
    mean = sum(steps.prompts) / len(steps.prompts)
    alone = steps.batch_s(1)

    def shared(batch: float) -> float:
        """Return the mean seconds per prompt in a step with `batch` prompts."""
        return mean * steps.batch_between(batch) / batch / alone

    def wait(batch: float) -> Waiting | None:
        service = shared(batch)
        if traffic.rate * service >= nodes:
            return None
        return waiting(nodes, traffic.rate, service, spread)

    def larger(batch: float) -> bool:
        found = wait(batch)
        if found is None:
            return True
        return 1 + traffic.rate / nodes * found.probability * found.mean > batch

    batch = highest(larger, 1.0, float(steps.max_batch))
    found = wait(batch)
    if found is None:
        return _INFINITE, traffic.rate * shared(batch) / nodes
    factor = steps.batch_between(batch) / alone
    services = [factor * service for service in steps.prompts]
    return percentile(PERCENTILE, found, services), traffic.rate * shared(batch) / nodes


def _rows(traffic: Traffic, steps: NodeSteps, nodes: int) -> float:
    """Return the mean number of running requests of a decode node. MAX_ROWS: it is overloaded."""
    rate = traffic.rate / nodes

    def too_few(rows: float) -> bool:
        return rows < rate * traffic.output * steps.decode_s(rows)

    return float(MAX_ROWS) if too_few(MAX_ROWS) else highest(too_few, 0.0, MAX_ROWS)


def most_rows(rows: float) -> float:
    """Return the running requests for which a node needs slots and pages, by their mean."""
    return rows + _RESERVE * math.sqrt(rows)


def _exhausted(rows: float, steps: NodeSteps) -> str:
    if most_rows(rows) > steps.kv_rows:
        return "KV memory"
    return "decode time" if rows >= MAX_ROWS else ""


def _high(rows: float) -> float:
    """Return the 90th percentile of running requests, averaged over a request's time."""
    return rows + _NORMAL * _AVERAGED * math.sqrt(rows)


def colocated(traffic: Traffic, steps: NodeSteps, nodes: int, chunk: int) -> Forecast:
    """Return the latency with colocated nodes: prompt chunks beside decode rows."""
    rate, chunks = traffic.rate / nodes, traffic.input / chunk  # chunks per request

    def delay(rows: float) -> float:
        """Return the seconds by which a prompt delays each running request."""
        return chunks * (steps.mixed_s(chunk, rows) - steps.decode_s(rows))

    def too_few(rows: float) -> bool:
        return rows < rate * (traffic.output * steps.decode_s(rows) + rows * delay(rows))

    rows = float(MAX_ROWS) if too_few(MAX_ROWS) else highest(too_few, 0.0, MAX_ROWS)
    step, mixed = steps.decode_s(rows), steps.mixed_s(chunk, rows)
    busy = rate * chunks * mixed
    if busy >= 1:
        return Forecast(_INFINITE, _INFINITE, "prefill time", rows, busy)
    if exhausted := _exhausted(rows, steps):
        return Forecast(_INFINITE, _INFINITE, exhausted, rows, busy)
    services = [
        max(each.input / chunk * mixed, step) + step / 2  # plus half of the step in progress
        for each in traffic.requests
    ]
    inputs = variation([each.input for each in traffic.requests])
    wait = waiting(nodes, traffic.rate, chunks * mixed, inputs)
    prompts = rate * traffic.output * step / (1 - rate * delay(rows))  # prompts during a request
    many = prompts + _NORMAL * math.sqrt(prompts * (1 + inputs))
    high = _high(rows)
    tpot = steps.decode_s(high) + many * delay(high) / traffic.output
    tpot = min(tpot, steps.mixed_s(chunk, high))
    ttft = percentile(PERCENTILE, wait, services)
    return Forecast(ttft, tpot, "", rows, busy, rows / steps.kv_rows)
