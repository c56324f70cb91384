"""Search for the layouts with the highest request rate within the latency targets."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from simulation.cost import StepCost
from simulation.cost.kernels import TP_SIZES
from simulation.plan.forecasts import NodeSteps, colocated, disaggregated, highest, most_rows
from simulation.plan.layouts import Layout, layouts
from simulation.plan.traffic import Forecast, LatencyTargets, Traffic

MAX_GPUS = 512
_LEAST_RATE = 1e-6  # requests/s: a load without queues
_BEYOND = 1.02  # rate at which the bottleneck is determined, as a multiple of the capacity


class Hardware(msgspec.Struct, frozen=True):
    """The hardware of a plan.

    Attributes:
        gpu: kind of GPU, or a file of measured step times.
        path: data path of hand-offs between nodes.
    """

    gpus: int
    gpu: str
    model: str
    path: str


class Candidate(msgspec.Struct, frozen=True):
    """A layout with its predicted capacity.

    Attributes:
        capacity: highest rate within the targets, in requests/s. 0: none.
        bottleneck: resource or objective that limits the capacity.
        forecast: latency at the rate of the load.
        slots: running requests of a decode node at the capacity.
        tie: the lead of the best layout is within the error of the cost model.
    """

    layout: Layout
    capacity: float
    bottleneck: str
    forecast: Forecast
    slots: float
    tie: bool = False


class NodeEstimate(msgspec.Struct, frozen=True):
    """Figures of a node with `tp` GPUs.

    Attributes:
        prefill_s: seconds of a mean prompt on an idle node.
        hand_off_s: seconds to transfer its KV over an idle link.
    """

    tp: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    prefill_s: float
    hand_off_s: float


class Plan(msgspec.Struct, frozen=True):
    """All layouts, best first.

    Attributes:
        nodes: figures of nodes by number of GPUs.
        band: expected relative error of step times, TPOT and capacities.
    """

    candidates: tuple[Candidate, ...]
    nodes: tuple[NodeEstimate, ...]
    band: float

    @property
    def ttft_band(self) -> float:
        """Return the expected relative error of TTFT, which includes the error of the queues."""
        return 1.5 * self.band

    def best(self, *, disaggregated: bool) -> Candidate | None:
        """Return the best candidate of one kind, or None."""
        kind = [each for each in self.candidates if bool(each.layout.prefill) is disaggregated]
        return kind[0] if kind else None

    def leaders(self, top: int) -> list[Candidate]:
        """Return the best `top` candidates, always including the best one of each kind."""
        best = self.best(disaggregated=True), self.best(disaggregated=False)
        return [each for i, each in enumerate(self.candidates) if i < top or each in best]

    @property
    def verdict(self) -> str:
        """Return a sentence on whether disaggregation is better."""
        split, whole = self.best(disaggregated=True), self.best(disaggregated=False)
        if not self.candidates[0].capacity:
            return "No layout meets the objectives at any rate."
        if split is None or whole is None:
            return "There is only one kind of layout for these GPUs."
        name, better, other = "Disaggregated", split.capacity, whole.capacity
        if whole.capacity > split.capacity:
            name, better, other = "Colocated", whole.capacity, split.capacity
        if not other:
            return f"{name} nodes are better: only they meet the objectives."
        if better <= other * (1 + self.band):
            return (
                "Disaggregated and colocated nodes tie: their difference of "
                f"{better / other - 1:.0%} is within the band of {self.band:.0%}."
            )
        return f"{name} nodes are better: they serve {better / other - 1:.0%} more requests/s."


def make_plan(hardware: Hardware, traffic: Traffic, targets: LatencyTargets) -> Plan:
    """Return the predicted capacity of every layout, by closed forms.

    Raises:
        ValueError: the cost model does not support the GPU or the model, the model fits on no node,
            or a request is longer than the model's context.
    """
    steps = _node_sizes(hardware, traffic)
    found = [
        _candidate(layout, steps, traffic, targets, hardware.path)
        for layout in layouts(hardware.gpus, steps.keys())
    ]
    found.sort(key=lambda each: (-each.capacity, each.forecast.ttft))
    band = max(each.cost.band for each in steps.values())
    nodes = tuple(_figures(tp, each, traffic, hardware.path) for tp, each in steps.items())
    marks = ties([each.capacity for each in found], band)
    ranked = (
        msgspec.structs.replace(each, tie=tie) for each, tie in zip(found, marks, strict=True)
    )
    return Plan(tuple(ranked), nodes, band)


def _figures(tp: int, steps: NodeSteps, traffic: Traffic, path: str) -> NodeEstimate:
    cost = steps.cost
    kv_bytes = round(traffic.input * cost.kv_bytes_per_token)
    return NodeEstimate(
        tp=tp,
        weight_bytes=cost.weight_bytes,
        kv_bytes_per_token=cost.kv_bytes_per_token,
        kv_capacity_tokens=cost.kv_capacity_tokens,
        prefill_s=sum(steps.prompts) / len(steps.prompts),
        hand_off_s=cost.transfer_s(kv_bytes, path),
    )


def _node_sizes(hardware: Hardware, traffic: Traffic) -> Mapping[int, NodeSteps]:
    """Return the step times by number of GPUs of a node, for sizes on which the model can run."""
    if not 1 <= hardware.gpus <= MAX_GPUS:
        raise ValueError(f"{hardware.gpus} GPUs: expected 1 to {MAX_GPUS}")
    costs, reason = {}, ""
    for tp in (tp for tp in TP_SIZES if tp <= hardware.gpus):
        try:
            costs[tp] = StepCost.of(hardware.gpu, hardware.model, tp)
        except ValueError as error:
            reason = str(error)
    if not costs:
        raise ValueError(reason)
    if not all(each.kv.is_uniform for each in costs.values()):
        raise ValueError(
            f"model {hardware.model!r}: plans do not support layers with windows or states"
        )
    limit = next(iter(costs.values())).context_length
    if traffic.longest > limit:
        raise ValueError(f"a request of {traffic.longest} tokens exceeds the context of {limit}")
    return {tp: NodeSteps(cost, traffic) for tp, cost in costs.items()}


def _candidate(
    layout: Layout,
    steps: Mapping[int, NodeSteps],
    traffic: Traffic,
    targets: LatencyTargets,
    path: str,
) -> Candidate:
    decode, prefill = steps[layout.decode_tp], steps[layout.prefill_tp]

    def forecast(rate: float) -> Forecast:
        load = msgspec.structs.replace(traffic, rate=rate)
        if layout.chunk:
            return colocated(load, decode, layout.decode, layout.chunk)
        return disaggregated(load, prefill, decode, (layout.prefill, layout.decode), path)

    def bottleneck(rate: float) -> str:
        return forecast(rate).bottleneck(targets)

    capacity = 0.0
    if not bottleneck(_LEAST_RATE):
        limit = 1.0
        while not bottleneck(limit):
            limit *= 2
        capacity = highest(lambda rate: not bottleneck(rate), _LEAST_RATE, limit)
    limited_by = bottleneck(max(capacity * _BEYOND, _LEAST_RATE))
    slots = most_rows(forecast(capacity).rows)
    return Candidate(layout, capacity, limited_by, forecast(traffic.rate), slots)


def ties(capacities: Sequence[float | None], band: float) -> list[bool]:
    """Return which capacities, best first, tie with the best one: they are within the error band.

    All are False if the best one is alone, or is 0 or None.
    """
    least = (capacities[0] or math.inf) / (1 + band) if capacities else math.inf
    near = [(each or 0.0) >= least for each in capacities]
    return near if sum(near) > 1 else [False] * len(near)
