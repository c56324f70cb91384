"""Break-even analysis: the prompt length from which one system is better than another, and the
resulting advice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.metrics import Grid, Metric, shown
from bench.statistics import Confidence, Crossing, confidence, crossing

KNOB = "--local-prefill-max-tokens"


@dataclass(frozen=True, slots=True)
class BreakEvenResult:
    """The break-even point of two systems by one metric."""

    metric: Metric
    against: str
    lengths: Sequence[float]
    found: Crossing
    sure: Confidence | None

    def sentence(self) -> str:
        if not self.lengths:
            return "has not been measured"
        shortest, longest = self.lengths[0], self.lengths[-1]
        if self.found.at is None:
            said = f"never in the range of {shortest:g} to {longest:g} tokens"
        elif self.found.everywhere:
            said = f"from the shortest length measured, {shortest:g} tokens, on"
        else:
            said = (
                f"from about {shown(self.found.at)} tokens on (not yet at {self.found.below:g}, "
                f"from {self.found.first:g} on everywhere)"
            )
        if self.sure is None:
            return f"{said}; too few repeats to say with what confidence"
        said += f"; the same in {self.sure.same:.0%} of redrawn repeats"
        if self.found.at is not None and self.sure.low is not None and self.sure.high is not None:
            said += f", 90 % between {shown(self.sure.low)} and {shown(self.sure.high)} tokens"
        return said

    def record(self) -> dict[str, Any]:
        return {
            "by": self.metric.key,
            "against": self.against,
            "tokens": None if self.found.at is None else round(self.found.at),
            "not_yet_at": self.found.below,
            "everywhere_from": self.found.first,
            "same_share": self.sure and self.sure.same,
            "low": self.sure and self.sure.low,
            "high": self.sure and self.sure.high,
        }


def answer(
    grid: Grid, metric: Metric, lengths: Sequence[int], system: str, against: str
) -> BreakEvenResult:
    """Find the length from which `system` is better.

    Only lengths and repeats that both systems have count.
    """
    sign = 1.0 if metric.lower_is_better else -1.0
    logs: dict[float, dict[int, float]] = {}
    for length in lengths:
        ours = grid.spread(metric, system, length)
        pairs = ours.paired(grid.spread(metric, against, length))
        if pairs:
            logs[float(length)] = {r: sign * math.log(a / b) for r, (a, b) in pairs.items()}
    measured = sorted(logs)
    repeats = set.intersection(*(set(found) for found in logs.values())) if logs else set()
    table = np.array([[logs[length][r] for length in measured] for r in sorted(repeats)])
    if not len(table):
        return BreakEvenResult(metric, against, (), Crossing(None, None, None), None)
    place = crossing(measured, table.mean(axis=0).tolist())
    return BreakEvenResult(metric, against, measured, place, confidence(measured, table))


def advice(knob: BreakEvenResult) -> int | None:
    """Return the advised decode.local_prefill_max_tokens by one metric.

    It is the longest measured length at which remote prefill is not better yet. None: too little
    was measured.
    """
    if not knob.lengths:
        return None
    return int(knob.found.below or 0)


def advised(knobs: Sequence[BreakEvenResult]) -> str:
    """Return the advice by each metric, as a sentence."""
    said = []
    for knob in knobs:
        value = advice(knob)
        if value is None:
            continue
        text = f"{KNOB}={value}" if knob.found.at is not None else f"{KNOB} of at least {value}"
        said.append(f"{text} where {knob.metric.name} matters")
    return f"Advice for decode nodes: {'; '.join(said) or 'none, too little was measured'}."
