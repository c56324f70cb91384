"""Metrics of all worker processes merged into one exposition, by the parent process.

They are served on the parent's metrics port, and to each worker process for the shared HTTP port.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Sample

from api.admin.router_state import METRICS_PATH
from common.metrics.declared import MetricDeclaration, Together
from common.metrics.program import MetricFamilies
from router.metrics import DECLARED, PROCESSES
from router.workers import LONGEST_S, OtherProcesses, ProcessHandler

_START = "process_start_time_seconds"  # distinguishes a process from its replacement

Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels of a sample
_TOGETHER: Mapping[Together, Callable[[Iterable[float]], float]] = {
    "sum": sum,
    "most": max,
    "least": min,
}


@dataclass(frozen=True, slots=True)
class _ProcessMetrics:
    """Metrics of one process at one time."""

    started: float
    series: Mapping[Series, float]


@dataclass(slots=True)
class _Place:
    """Metrics of one worker process and the processes that it replaces."""

    last: _ProcessMetrics | None = None
    answered: bool = False
    ended: dict[Series, float] = field(default_factory=dict)  # sums of ended processes


class MergedMetrics:
    """Merges the metrics of all worker processes. For one thread."""

    def __init__(self, declared: Iterable[MetricDeclaration]) -> None:
        self._declared = tuple(declared)
        self._places: dict[int, _Place] = {}

    def take(self, texts: Mapping[int, str]) -> None:
        """Record the metrics of each process, as text. Missing processes did not respond."""
        for place in self._places.values():
            place.answered = False
        for number, text in texts.items():
            place = self._places.setdefault(number, _Place())
            metrics = _read(text)
            if place.last is not None and place.last.started != metrics.started:
                for series, value in place.last.series.items():
                    place.ended[series] = place.ended.get(series, 0.0) + value
            place.last, place.answered = metrics, True

    def families(self) -> Iterator[Metric]:
        for declared in self._declared:
            metric = Metric(declared.name, declared.help, declared.kind)
            grows = declared.kind != "gauge"
            values = self._growing(declared) if grows else self._gauges(declared)
            metric.samples = [Sample(name, dict(labels), v) for (name, labels), v in values.items()]
            yield metric

    def _growing(self, declared: MetricDeclaration) -> Mapping[Series, float]:
        """Return the sums of a counter or histogram.

        Series that only ended processes have are dropped, such as those of a deleted key.
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


def _of(
    declared: MetricDeclaration, metrics: _ProcessMetrics | None
) -> Iterator[tuple[Series, float]]:
    names = declared.sample_names
    if metrics is not None:
        yield from (
            (series, value) for series, value in metrics.series.items() if series[0] in names
        )


def _read(text: str) -> _ProcessMetrics:
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    series = {(one.name, tuple(one.labels.items())): one.value for one in samples}
    return _ProcessMetrics(series.get((_START, ()), 0.0), series)


_KEEPER = -1  # the parent's number among the sources


class MetricsAggregator:
    """Queries worker processes and serves their merged metrics. For one event loop.

    `registry` may be used on any thread but the loop's.
    """

    def __init__(self, routers: OtherProcesses) -> None:
        self._routers = routers
        self._several = MergedMetrics(DECLARED)
        self._num_silent = 0
        self._own = CollectorRegistry()
        ProcessCollector(registry=self._own)
        self._own.register(
            MetricFamilies(lambda: [PROCESSES.family({("silent",): self._num_silent})])
        )
        self._gathering: asyncio.Task[list[Metric]] | None = None
        loop = asyncio.get_running_loop()

        def families() -> Iterable[Metric]:
            gathering = asyncio.run_coroutine_threadsafe(self._families(), loop)
            return gathering.result(2 * LONGEST_S)

        self.registry = CollectorRegistry()
        self.registry.register(MetricFamilies(families))

    @property
    def handlers(self) -> Mapping[str, ProcessHandler]:
        """Return the handler for requests from worker processes."""

        async def handle(query: Mapping[str, str]) -> bytes:
            families = await self._families()
            registry = CollectorRegistry()
            registry.register(MetricFamilies(lambda: families))
            encode, _ = choose_encoder(query["accept"])
            return encode(registry)

        return {METRICS_PATH: handle}

    async def _families(self) -> list[Metric]:
        """Return the merged metrics. Concurrent callers share one query."""
        if self._gathering is None or self._gathering.done():
            self._gathering = asyncio.create_task(self._gather())
        return await asyncio.shield(self._gathering)

    async def _gather(self) -> list[Metric]:
        replies = await self._routers.ask(METRICS_PATH)
        self._num_silent = replies.num_silent
        texts = {number: body.decode() for number, body in replies.bodies.items()}
        self._several.take({**texts, _KEEPER: generate_latest(self._own).decode()})
        return list(self._several.families())
