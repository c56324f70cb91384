"""Figures of tools/bench/cpu: one value per round, with median, worst value and goal."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import getitem
from statistics import median
from typing import Any, Literal

from tools.bench.cpu.floor import Floor

Better = Literal["low", "high"]


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    values: Sequence[float]  # one per round. Empty: not measured
    better: Better
    goal: float | None = None  # None: a figure for comparison only
    note: str = ""

    @property
    def middle(self) -> float:
        return median(self.values)

    @property
    def worst(self) -> float:
        return max(self.values) if self.better == "low" else min(self.values)

    @property
    def reached(self) -> bool | None:
        """Return whether the median reaches the goal, or None without a goal or values."""
        if self.goal is None or not self.values:
            return None
        return self.middle <= self.goal if self.better == "low" else self.middle >= self.goal

    def record(self) -> dict[str, Any]:
        return asdict(self) | {
            "median": round(self.middle, 4) if self.values else None,
            "worst": round(self.worst, 4) if self.values else None,
            "values": [round(value, 4) for value in self.values],
            "reached": self.reached,
        }


@dataclass(slots=True)
class RoundTable:
    """Measurements in rounds: a row for each system, load and round."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def of(self, system: str, load: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if (row["system"], row["load"]) == (system, load)]

    def values(self, system: str, load: str, *keys: str) -> list[float]:
        """Return one number per round, by its path in the row. Empty without rows."""
        found: list[Any] = [reduce(getitem, keys, row) for row in self.of(system, load)]
        return [float(value) for value in found]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one part of the benchmark."""

    table: RoundTable = field(default_factory=RoundTable)
    floors: list[Floor] = field(default_factory=list)  # measured before each round
    left_out: dict[str, str] = field(default_factory=dict)  # reasons by system

    @property
    def floor(self) -> Floor:
        """Return the best floor of all rounds: the machine's limit without other load."""
        return Floor(
            max(floor.read_bytes_per_s for floor in self.floors),
            max(floor.product_flops_per_s for floor in self.floors),
        )

    def figure(
        self,
        what: str,
        values: Sequence[float],
        better: Better,
        goal: float | None = None,
        *,
        of: Sequence[str] = (),
    ) -> Figure:
        """Return a figure of this part.

        Args:
            of: systems that the values belong to. Systems that were left out are noted.
        """
        reasons = [f"{name}: {self.left_out[name]}" for name in of if name in self.left_out]
        return Figure(what, values, better, goal, "; ".join(reasons))


def ratios(values: Sequence[float], against: Sequence[float]) -> list[float]:
    """Return the ratios by round. Empty if either was not measured."""
    if not values or not against:
        return []
    return [a / b for a, b in zip(values, against, strict=True)]


def best(of: Sequence[Sequence[float]], better: Better) -> list[float]:
    """Return the best of several systems in each round. Systems without values do not count."""
    choose = min if better == "low" else max
    return [choose(values) for values in zip(*filter(None, of), strict=True)]


def growth(
    times: Sequence[float], before: Sequence[float], read: float, read_before: float
) -> list[float]:
    """Return the growth of a step's time relative to the growth of its bytes. 1: proportional."""
    return [grown / (read / read_before) for grown in ratios(times, before)]


def agreement(table: RoundTable, load: str, system: str, other: str) -> float:
    """Return the share of responses whose tokens all equal another system's."""
    mine, theirs = ([row["token_ids"] for row in table.of(name, load)] for name in (system, other))
    pairs = [pair for round in zip(mine, theirs, strict=True) for pair in zip(*round, strict=True)]
    return float(sum(a == b for a, b in pairs)) / len(pairs)


def spreads(table: RoundTable) -> list[dict[str, Any]]:
    """Return a row for each system: medians, and in brackets the range over the rounds."""
    rows = []
    for load, system in dict.fromkeys((row["load"], row["system"]) for row in table.rows):
        threads = {row.get("threads", "its own") for row in table.of(system, load)}
        row = {"load": load, "system": system, "threads": " or ".join(map(str, sorted(threads)))}
        for keys in (("tokens_per_s",), ("ttft_ms", "p50"), ("itl_ms", "p50")):
            row[" ".join(keys)] = _spread(table.values(system, load, *keys))
        rows.append(row)
    return rows


def _spread(values: Sequence[float]) -> str:
    low, middle, high = (f"{value:.3g}" for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"
