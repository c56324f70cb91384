"""GET /metrics: of this process where it is the whole router, else of all of them as one.

The process that keeps the others makes one of what they count (api/program/whole_metrics.py);
who is asked here asks that one.
"""

from collections.abc import Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder

from api.dialect.problems import Refusal
from api.http.answers import whole
from api.http.request import Request
from router.workers.asking import Siblings
from router.workers.telling import Tell

PATH = "/metrics"  # also as processes ask each other


def telling(registry: CollectorRegistry) -> Mapping[str, Tell]:
    """What other processes may ask: the text format."""

    async def tell(_: Mapping[str, str]) -> bytes:
        return generate_latest(registry)

    return {PATH: tell}


class MetricsEndpoint:
    """A handler of HTTP requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, request: Request) -> web.Response:
        encode, kind = choose_encoder(request.header("accept"))
        return whole(200, encode(self._registry), kind)


class WholeMetricsEndpoint:
    """The same, of a router with several processes."""

    def __init__(self, keeper: Siblings) -> None:
        self._keeper = keeper

    async def __call__(self, request: Request) -> web.Response:
        accept = request.header("accept")
        told = await self._keeper.ask(PATH, accept=accept)
        if told.num_silent:
            sentence = "the process that gathers this router's metrics did not answer in time"
            return Refusal(503, sentence).response()
        (body,) = told.bodies.values()
        return whole(200, body, choose_encoder(accept)[1])
