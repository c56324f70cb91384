"""Metrics of all processes of a router as one, gathered by the parent process.

They are served on the parent's metrics port, and to each worker process for the shared HTTP port.
"""

import asyncio
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from api.admin.metrics_endpoint import PATH
from api.program.merged_metrics import MergedMetrics
from common.metrics.program import MetricFamilies
from router.metrics import DECLARED, PROCESSES
from router.workers.asking import LONGEST_S, SiblingProcesses, Tell

_KEEPER = -1  # the parent's number among the sources


class MetricsAggregator:
    """Merged metrics. For one event loop. `registry` may be used on any thread but the loop's."""

    def __init__(self, routers: SiblingProcesses) -> None:
        """
        Args:
            routers: client of the worker processes.
        """
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
    def tells(self) -> Mapping[str, Tell]:
        """Return the handler for requests of worker processes."""

        async def tell(query: Mapping[str, str]) -> bytes:
            families = await self._families()
            registry = CollectorRegistry()
            registry.register(MetricFamilies(lambda: families))
            encode, _ = choose_encoder(query["accept"])
            return encode(registry)

        return {PATH: tell}

    async def _families(self) -> list[Metric]:
        """Return the merged metrics. Concurrent callers share one query."""
        if self._gathering is None or self._gathering.done():
            self._gathering = asyncio.create_task(self._gather())
        return await asyncio.shield(self._gathering)

    async def _gather(self) -> list[Metric]:
        told = await self._routers.ask(PATH)
        self._num_silent = told.num_silent
        texts = {number: body.decode() for number, body in told.bodies.items()}
        self._several.take({**texts, _KEEPER: generate_latest(self._own).decode()})
        return list(self._several.families())
