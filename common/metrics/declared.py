"""Declarations of metrics: name, help, and all values of their labels.

A process creates all series of a family when it starts, because rates need series that start at 0.
An undeclared label value is a KeyError in a test instead of a new series in production.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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

from common.distribution import HistogramCounts, LiveHistogram

Kind = Literal["counter", "gauge", "histogram"]
Values = tuple[str, ...]
# Aggregation of a gauge over the worker processes of a router.
Together = Literal["sum", "most", "least"]


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """The declaration of a metric.

    Attributes:
        name: in base units, without the suffixes that Prometheus adds to samples.
        labels: all values by label name. Series exist for their product. A label without values
            gets them from a user's file, and its family is sparse.
        bounds: upper bounds of a histogram's buckets.
        sparse: series without a value are left out.
        together: aggregation of a gauge over the worker processes of a router.
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
        """Names of the samples, as PromQL expressions use them."""
        suffixes = {
            "counter": ("_total",),
            "gauge": ("",),
            "histogram": ("_bucket", "_count", "_sum"),
        }
        return frozenset(self.name + suffix for suffix in suffixes[self.kind])

    def numbers(self) -> dict[Values, float]:
        """Return the values of a counter or gauge by label values, for use with `family`.

        For one writing thread: ten times cheaper than the library's values, which take a lock.
        """
        return dict.fromkeys(self.label_sets, 0.0)

    def distributions(self) -> dict[Values, LiveHistogram]:
        """Return the histograms by label values, for use with `family`."""
        return {values: LiveHistogram(self.bounds) for values in self.label_sets}

    def family(self, series: Mapping[Values, float | HistogramCounts | LiveHistogram]) -> Metric:
        """Return the family for one scrape. Series missing in `series` are 0."""
        make: Mapping[Kind, Callable[..., Any]] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        family = make[self.kind](self.name, self.help, labels=tuple(self.labels))
        zero = LiveHistogram(self.bounds).counted() if self.kind == "histogram" else 0.0
        known: Iterable[Values] = () if self.sparse else self.label_sets
        for values, value in {**dict.fromkeys(known, zero), **series}.items():
            if isinstance(value, LiveHistogram):
                value = value.counted()
            if isinstance(value, HistogramCounts):
                family.add_metric(values, _buckets(value), value.total)
            else:
                family.add_metric(values, value)
        made: Metric = family
        return made


def counter(name: str, help: str, *, sparse: bool = False, **labels: Values) -> MetricDeclaration:
    return MetricDeclaration(name, "counter", help, labels, sparse=sparse)


def gauge(
    name: str, help: str, *, sparse: bool = False, together: Together = "sum", **labels: Values
) -> MetricDeclaration:
    return MetricDeclaration(name, "gauge", help, labels, sparse=sparse, together=together)


def histogram(
    name: str, help: str, bounds: tuple[float, ...], **labels: Values
) -> MetricDeclaration:
    return MetricDeclaration(name, "histogram", help, labels, bounds)


class MetricValues:
    """Values of metrics for export at each scrape. Written by one thread."""

    def __init__(self) -> None:
        self._series: list[tuple[MetricDeclaration, Mapping[Values, float | LiveHistogram]]] = []

    def numbers(self, metric: MetricDeclaration) -> dict[Values, float]:
        numbers = metric.numbers()
        self._series.append((metric, numbers))
        return numbers

    def distributions(self, metric: MetricDeclaration) -> dict[Values, LiveHistogram]:
        distributions = metric.distributions()
        self._series.append((metric, distributions))
        return distributions

    def families(self) -> Iterator[Metric]:
        """Yield all families, on the scraping thread."""
        for metric, series in self._series:
            yield metric.family(series)


def _buckets(counted: HistogramCounts) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus expects them."""
    bounds = [*map(floatToGoString, counted.bounds), "+Inf"]
    below, buckets = 0, []
    for bound, count in zip(bounds, counted.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return buckets
