"""GET /metrics, for this process if it is the whole router, else merged over all processes.

The parent process merges the counts of the worker processes (api/program/whole_metrics.py). A
worker that gets this request asks the parent.
"""

from collections.abc import Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder

from api.dialect.problems import ApiError
from api.http.answers import whole
from api.http.request import HttpRequest
from router.workers.asking import SiblingProcesses, Tell

PATH = "/metrics"  # also the path between worker processes


def telling(registry: CollectorRegistry) -> Mapping[str, Tell]:
    """Return the handler for queries of other worker processes: metrics in the text format."""

    async def tell(_: Mapping[str, str]) -> bytes:
        return generate_latest(registry)

    return {PATH: tell}


class MetricsEndpoint:
    """HTTP handler for the metrics of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, request: HttpRequest) -> web.Response:
        encode, kind = choose_encoder(request.header("accept"))
        return whole(200, encode(self._registry), kind)


class MergedMetricsEndpoint:
    """HTTP handler for the metrics of a router with several processes."""

    def __init__(self, keeper: SiblingProcesses) -> None:
        self._keeper = keeper

    async def __call__(self, request: HttpRequest) -> web.Response:
        accept = request.header("accept")
        told = await self._keeper.ask(PATH, accept=accept)
        if told.num_silent:
            sentence = "the process that gathers this router's metrics did not answer in time"
            return ApiError(503, sentence).response()
        (body,) = told.bodies.values()
        return whole(200, body, choose_encoder(accept)[1])
