"""Joins the parts of a router, runs them, and ends them in the order that clients need."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio

from common import metrics, rpc
from common.config import RouterConfig
from common.logs import kv
from common.metrics import RouterMetrics
from protos import router_pb2_grpc
from router.admission import SHUTTING_DOWN, Admission
from router.chat_template import ChatTemplate
from router.cluster import NOT_READY, Cluster
from router.decode_client import DecodeClient
from router.generation import Generator
from router.http.server import HttpServer
from router.http.shared import Limits as HttpLimits
from router.http.shared import Shared
from router.model_files import ModelFiles
from router.openai import api, problems
from router.policy import RoundRobin
from router.service import RouterService
from router.survey import Survey
from router.tokenizer import RouterTokenizer
from router.validation import Limits, Prompts

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0  # for the ends of calls to reach their clients
# Of HTTP clients that wait between requests, and of probes; each live request has one more.
_SPARE_CONNECTIONS = 1024


@dataclass(frozen=True, slots=True)
class Running:
    """A router that serves."""

    port: int
    http_port: int
    http: HttpServer
    health: rpc.Health
    admission: Admission
    cluster: Cluster
    nodes: asyncio.Task[None]
    readiness: asyncio.Task[None]

    async def drain(self, longest_s: float, hurry: asyncio.Event) -> None:
        """Takes no new request and lets the live ones finish; those that have not after
        `longest_s`, or when `hurry` is set, end with UNAVAILABLE."""
        self.readiness.cancel()
        await self.health.tell(False)
        self.admission.close()
        self.http.drain()
        log.info("draining %s", kv(live=self.admission.num_live, longest_s=longest_s))
        await _first_of(self.admission.wait_until_none_live(), hurry.wait(), longest_s)
        self.nodes.cancel()  # the end of its node's stream is the end of a request
        await _first_of(self.admission.wait_until_none_live(), hurry.wait(), _LAST_WORDS_S)


@asynccontextmanager
async def running(config: RouterConfig, model: ModelFiles) -> AsyncIterator[Running]:
    """Serves while inside. It listens at once, and is healthy once a request could be placed.

    Raises:
        ConfigError: a port is taken, or the tokenizer or chat template cannot be used.
    """
    changed = asyncio.Event()  # something that readiness depends on
    tokenizer = RouterTokenizer(model.tokenizer_json)
    admission = Admission(config.max_requests)
    counts = RouterMetrics()
    async with AsyncExitStack() as resources:
        channels = {
            address: await resources.enter_async_context(rpc.make_channel(address))
            for address in (*config.prefill, *config.decode)
        }
        cluster, survey = _make_cluster(config, channels, tokenizer.hash, changed)
        prompts, limits = _make_prompts(model, tokenizer)
        generator = Generator(
            tokenizer, prompts, limits, cluster, admission, counts, budget_s=config.budget_s
        )
        service = RouterService(generator, survey, tokenizer, prompts, limits, model)

        server = rpc.make_server()
        names = rpc.add_service(server, router_pb2_grpc.add_RouterServicer_to_server, service)
        health = rpc.add_health_and_reflection(server, names)
        port = rpc.bind(server, config.front.host, config.front.port)
        resources.enter_context(
            metrics.served(counts.registry, config.front.host, config.front.metrics_port)
        )
        await health.tell(False)
        http = _make_http(config, model, generator, cluster, admission, counts)
        http_port = await http.start(config.front.host, config.http_port)
        resources.push_async_callback(http.stop, _LAST_WORDS_S)
        await server.start()
        host = config.front.host
        log.info(
            "listening %s",
            kv(address=f"{host}:{port}", http=f"{host}:{http_port}", model=model.name),
        )
        async with asyncio.TaskGroup() as tasks:
            nodes = tasks.create_task(cluster.run())
            readiness = tasks.create_task(_tell_readiness(cluster, changed, health))
            try:
                yield Running(port, http_port, http, health, admission, cluster, nodes, readiness)
            finally:
                readiness.cancel()
                nodes.cancel()
                await rpc.stop(server, _LAST_WORDS_S)


def _make_cluster(
    config: RouterConfig,
    channels: Mapping[str, grpc.aio.Channel],
    tokenizer_hash: str,
    changed: asyncio.Event,
) -> tuple[Cluster, Survey]:
    """The parts that know nodes; `changed` is set whenever one of them has moved."""
    roles = dict.fromkeys(config.prefill, "prefill") | dict.fromkeys(config.decode, "decode")
    survey = Survey(roles, channels, tokenizer_hash=tokenizer_hash, on_change=changed.set)

    def node_moved(address: str) -> None:
        if decode[address].status is None:
            survey.forget(address)
        survey.want()
        changed.set()

    decode = {
        address: DecodeClient(address, channels[address], peers=config.prefill, on_move=node_moved)
        for address in config.decode
    }
    return Cluster(decode, survey, RoundRobin(config.prefill, config.decode)), survey


def _make_prompts(model: ModelFiles, tokenizer: RouterTokenizer) -> tuple[Prompts, Limits]:
    """The parts that know text."""
    template = (
        ChatTemplate(model.chat_template, model.special_tokens) if model.chat_template else None
    )
    return Prompts(tokenizer, template), Limits(model.context_length, model.vocabulary_size)


def _make_http(
    config: RouterConfig,
    model: ModelFiles,
    generator: Generator,
    cluster: Cluster,
    admission: Admission,
    counts: RouterMetrics,
) -> HttpServer:
    def why_not_ready() -> str | None:
        if admission.closed:
            return SHUTTING_DOWN
        return None if cluster.ready else NOT_READY

    routes = api.routes(
        generator,
        counts,
        model_name=config.served_model_name or model.name,
        context_length=model.context_length,
        why_not_ready=why_not_ready,
    )
    limits = HttpLimits(max_connections=config.max_requests + _SPARE_CONNECTIONS)
    return HttpServer(Shared(limits, routes, problems.error_body, counts))


async def _tell_readiness(cluster: Cluster, changed: asyncio.Event, health: rpc.Health) -> None:
    while True:
        await changed.wait()
        changed.clear()
        await health.tell(cluster.ready)


async def _first_of(
    one: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object], longest_s: float
) -> None:
    waits = {asyncio.create_task(one), asyncio.create_task(other)}
    _, pending = await asyncio.wait(waits, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
