"""Statistics for reports: percentiles, and ratios over repeats with confidence intervals."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Student's t at 97.5 %, by degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
_T_MANY = 2.145  # upper bound for 14 and more degrees of freedom
_RESAMPLES = 2000


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile: at least `share` of the values are not above it.

    0 if there are no values.
    """
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def distribution(values: Iterable[float]) -> dict[str, Any]:
    """Return count, mean, p50, p90, p99 (linear between ranks) and max. None without values."""
    data = np.fromiter(values, float)
    if not len(data):
        return {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    p50, p90, p99 = np.percentile(data, (50, 90, 99)).tolist()
    return {
        "n": len(data),
        "mean": _rounded(data.mean()),
        "p50": _rounded(p50),
        "p90": _rounded(p90),
        "p99": _rounded(p99),
        "max": _rounded(data.max()),
    }


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of two systems: geometric mean over paired repeats.

    `low` and `high` are its 95 % confidence interval (Student's t on logarithms).
    """

    mean: float
    low: float | None  # None: a single repeat has no interval
    high: float | None
    repeats: int

    @property
    def verdict(self) -> str:
        """Return the verdict on a ratio of times: "lower", "higher", or "undecided"."""
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return "undecided"
        return "lower" if self.high < 1 else "higher"

    def record(self) -> dict[str, Any]:
        return {
            "mean": _rounded(self.mean),
            "low": None if self.low is None else _rounded(self.low),
            "high": None if self.high is None else _rounded(self.high),
            "repeats": self.repeats,
        }


def ratio(pairs: Sequence[tuple[float | None, float | None]]) -> Ratio | None:
    """Return the ratio over paired repeats.

    Args:
        pairs: (value, reference value) of each repeat. Pairs with a missing value or a zero are
            left out.

    Returns:
        None if no pair is left.
    """
    logs = np.array([math.log(a / b) for a, b in pairs if a and b])
    if not len(logs):
        return None
    mean = float(logs.mean())
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None, 1)
    degrees = len(logs) - 1
    t = _T[degrees - 1] if degrees <= len(_T) else _T_MANY
    half = t * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


@dataclass(frozen=True, slots=True)
class Crossing:
    """The x from which a curve of ratios stays below 1."""

    at: float | None  # None: never within the range
    below: float | None  # largest x before it that is not below 1, if any
    first: float | None  # smallest x from which all are below 1

    @property
    def everywhere(self) -> bool:
        return self.first is not None and self.below is None


def crossing(xs: Sequence[float], logs: Sequence[float]) -> Crossing:
    """Find the x from which ratios stay below 1.

    Args:
        xs: ascending, above 0.
        logs: logarithm of the ratio at each x.

    Returns:
        A Crossing whose `at` is linear in log x between the two neighbours, or the first x itself.
    """
    index = len(xs)
    while index and logs[index - 1] < 0:
        index -= 1
    if index == len(xs):
        return Crossing(None, xs[-1] if xs else None, None)
    if index == 0:
        return Crossing(xs[0], None, xs[0])
    a, b = logs[index - 1], logs[index]
    left, right = math.log(xs[index - 1]), math.log(xs[index])
    at = math.exp(left + (right - left) * a / (a - b))
    return Crossing(at, xs[index - 1], xs[index])


@dataclass(frozen=True, slots=True)
class Confidence:
    """Bootstrap confidence of a crossing: repeats are drawn again, with replacement."""

    same: float  # share of draws with the same two neighbours, or also without a crossing
    never: float  # share of draws without a crossing
    low: float | None  # 5 % and 95 % quantiles of the crossings
    high: float | None


def confidence(xs: Sequence[float], logs: np.ndarray, seed: int = 0) -> Confidence | None:
    """Bootstrap the crossing.

    Args:
        logs: logarithms of the ratio, [repeats, len(xs)].

    Returns:
        None for fewer than three repeats, because draws from two hardly differ.
    """
    repeats = len(logs)
    if repeats < 3:
        return None
    expected = crossing(xs, logs.mean(axis=0).tolist())
    rng = np.random.default_rng(seed)
    drawn = [
        crossing(xs, logs[rng.integers(repeats, size=repeats)].mean(axis=0).tolist())
        for _ in range(_RESAMPLES)
    ]
    places = [one.at for one in drawn if one.at is not None]
    low, high = np.percentile(places, (5, 95)).tolist() if places else (None, None)
    return Confidence(
        same=sum(one.first == expected.first for one in drawn) / _RESAMPLES,
        never=1 - len(places) / _RESAMPLES,
        low=low,
        high=high,
    )


def _rounded(value: float) -> float:
    return round(float(value), 6)
