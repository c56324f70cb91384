"""Closed forms: the latency of a layout at a rate of requests.

Prefill nodes are one queue with several servers. The running requests of a node that decodes follow
from its rate and its step time (Little's law), and their number varies like a Poisson variable. The
first token comes from the prefill node, so that the hand-off delays only the second one.
"""

import math

from simulation.plan.objectives import PERCENTILE, Forecast
from simulation.plan.queues import Waiting, highest, percentile, variation, waiting
from simulation.plan.steps import CHUNK, MAX_ROWS, NodeSteps
from simulation.plan.traffic import Traffic

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
        path: of hand-offs, see PATHS.
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

    Prompts that wait share a step. The more wait, the less time each takes.
    """
    spread = variation(steps.prompts)
    mean = sum(steps.prompts) / len(steps.prompts)
    alone = steps.batch_s(1)

    def shared(batch: float) -> float:
        """Return the mean seconds of a prompt in a step with `batch` prompts."""
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
    """Return the mean running requests of a decode node. MAX_ROWS: it cannot keep up."""
    rate = traffic.rate / nodes

    def too_few(rows: float) -> bool:
        return rows < rate * traffic.output * steps.decode_s(rows)

    return float(MAX_ROWS) if too_few(MAX_ROWS) else highest(too_few, 0.0, MAX_ROWS)


def most_rows(rows: float) -> float:
    """Return the running requests for which a node has slots and pages, by their mean."""
    return rows + _RESERVE * math.sqrt(rows)


def _exhausted(rows: float, steps: NodeSteps) -> str:
    if most_rows(rows) > steps.kv_rows:
        return "KV memory"
    return "decode time" if rows >= MAX_ROWS else ""


def _high(rows: float) -> float:
    """Return the 90th percentile of the running requests, averaged over a request's time."""
    return rows + _NORMAL * _AVERAGED * math.sqrt(rows)


def colocated(traffic: Traffic, steps: NodeSteps, nodes: int, chunk: int) -> Forecast:
    """Return the latency with nodes that compute chunks of prompts beside their decode rows."""
    rate, chunks = traffic.rate / nodes, traffic.input / chunk  # chunks of a request

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
        max(each.input / chunk * mixed, step) + step / 2  # half of the step under way
        for each in traffic.requests
    ]
    inputs = variation([each.input for each in traffic.requests])
    wait = waiting(nodes, traffic.rate, chunks * mixed, inputs)
    prompts = rate * traffic.output * step / (1 - rate * delay(rows))  # during a request
    many = prompts + _NORMAL * math.sqrt(prompts * (1 + inputs))
    high = _high(rows)
    tpot = steps.decode_s(high) + many * delay(high) / traffic.output
    tpot = min(tpot, steps.mixed_s(chunk, high))
    ttft = percentile(PERCENTILE, wait, services)
    return Forecast(ttft, tpot, "", rows, busy, rows / steps.kv_rows)
