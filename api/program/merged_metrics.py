"""Aggregation of the metrics of several processes into those of one program.

Counters and histograms are summed. Counts of a silent or ended process stay in the sum. Each gauge
declares its aggregation, and gauges of silent processes are unknown.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from common.metrics.declared import MetricDeclaration, Together

_START = "process_start_time_seconds"  # distinguishes a process from its predecessor

Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a sample
_TOGETHER: Mapping[Together, Callable[[Iterable[float]], float]] = {
    "sum": sum,
    "most": max,
    "least": min,
}


@dataclass(frozen=True, slots=True)
class _Told:
    """Metrics of one process at one time."""

    started: float
    series: Mapping[Series, float]


@dataclass(slots=True)
class _Place:
    """Metrics of the successive processes with one number."""

    last: _Told | None = None
    answered: bool = False
    ended: dict[Series, float] = field(default_factory=dict)  # sums of those before the last


class MergedMetrics:
    """Metrics of all processes. For one thread."""

    def __init__(self, declared: Iterable[MetricDeclaration]) -> None:
        self._declared = tuple(declared)
        self._places: dict[int, _Place] = {}

    def take(self, texts: Mapping[int, str]) -> None:
        """Record the metrics of each process, in the text format. Missing processes are silent."""
        for place in self._places.values():
            place.answered = False
        for number, text in texts.items():
            place = self._places.setdefault(number, _Place())
            told = _read(text)
            if place.last is not None and place.last.started != told.started:
                for series, value in place.last.series.items():
                    place.ended[series] = place.ended.get(series, 0.0) + value
            place.last, place.answered = told, True

    def families(self) -> Iterator[Metric]:
        for declared in self._declared:
            metric = Metric(declared.name, declared.help, declared.kind)
            grows = declared.kind != "gauge"
            values = self._growing(declared) if grows else self._gauges(declared)
            metric.samples = [Sample(name, dict(labels), v) for (name, labels), v in values.items()]
            yield metric

    def _growing(self, declared: MetricDeclaration) -> Mapping[Series, float]:
        """Return sums.

        A series that only ended processes have is dropped, such as that of a deleted key.
        """
        sums: dict[Series, float] = {}
        for place in self._places.values():
            for series, value in _of(declared, place.last):
                sums[series] = sums.get(series, 0.0) + value
        for place in self._places.values():
            for series, value in place.ended.items():
                if series in sums:
                    sums[series] += value
        return sums

    def _gauges(self, declared: MetricDeclaration) -> Mapping[Series, float]:
        values: dict[Series, list[float]] = {}
        for place in self._places.values():
            if place.answered:
                for series, value in _of(declared, place.last):
                    values.setdefault(series, []).append(value)
        together = _TOGETHER[declared.together]
        return {series: together(each) for series, each in values.items()}


def _of(declared: MetricDeclaration, told: _Told | None) -> Iterator[tuple[Series, float]]:
    names = declared.sample_names
    if told is not None:
        yield from ((series, value) for series, value in told.series.items() if series[0] in names)


def _read(text: str) -> _Told:
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    series = {(one.name, tuple(one.labels.items())): one.value for one in samples}
    return _Told(series.get((_START, ()), 0.0), series)
