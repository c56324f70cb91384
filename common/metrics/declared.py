"""What a metric is: its name, its meaning, and every value that its labels can have.

A program makes all series of a family at once. One that is 0 from the start can be compared with,
and a value that nobody declared is a KeyError in a test and not a new series in production.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from common.distribution import Counted, Distribution

Kind = Literal["counter", "gauge", "histogram"]
Values = tuple[str, ...]
# What a gauge of several processes of one program comes to.
Together = Literal["sum", "most", "least"]


@dataclass(frozen=True, slots=True)
class Declared:
    """
    Attributes:
        name: in base units, without the suffixes that Prometheus gives to samples.
        labels: by name, every value; the family's label sets are their product. One without values
            has those of a file that the user keeps, and belongs to a sparse family.
        bounds: of a histogram's buckets.
        sparse: a label set that there is nothing to say of is left out.
        together: what a gauge is of several processes that are one program.
    """

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, Values] = field(default_factory=dict)
    bounds: tuple[float, ...] = ()
    sparse: bool = False
    together: Together = "sum"

    @property
    def label_sets(self) -> list[Values]:
        return list(product(*self.labels.values()))

    @property
    def sample_names(self) -> frozenset[str]:
        """As expressions name them."""
        suffixes = {
            "counter": ("_total",),
            "gauge": ("",),
            "histogram": ("_bucket", "_count", "_sum"),
        }
        return frozenset(self.name + suffix for suffix in suffixes[self.kind])

    def numbers(self) -> dict[Values, float]:
        """Of a counter or gauge, by the values of all labels; to be told with `family`. For one
        thread that writes: a tenth of what a number of the library costs, which takes a lock."""
        return dict.fromkeys(self.label_sets, 0.0)

    def distributions(self) -> dict[Values, Distribution]:
        """As `numbers`, of a histogram."""
        return {values: Distribution(self.bounds) for values in self.label_sets}

    def family(self, series: Mapping[Values, float | Counted | Distribution]) -> Metric:
        """One scrape's family; label sets that are not in `series` are 0."""
        make: Mapping[Kind, Callable[..., Any]] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        family = make[self.kind](self.name, self.help, labels=tuple(self.labels))
        zero = Distribution(self.bounds).counted() if self.kind == "histogram" else 0.0
        known: Iterable[Values] = () if self.sparse else self.label_sets
        for values, value in {**dict.fromkeys(known, zero), **series}.items():
            if isinstance(value, Distribution):
                value = value.counted()
            if isinstance(value, Counted):
                family.add_metric(values, _buckets(value), value.total)
            else:
                family.add_metric(values, value)
        made: Metric = family
        return made


def _buckets(counted: Counted) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus has them."""
    bounds = [*map(floatToGoString, counted.bounds), "+Inf"]
    below, buckets = 0, []
    for bound, count in zip(bounds, counted.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return buckets
