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
from router.admission import Admission
from router.chat_template import ChatTemplate
from router.cluster import Cluster
from router.decode_client import DecodeClient
from router.generation import Generator
from router.model_files import ModelFiles
from router.policy import RoundRobin
from router.service import RouterService
from router.survey import Survey
from router.tokenizer import RouterTokenizer
from router.validation import Limits, Prompts

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0  # for the ends of calls to reach their clients


@dataclass(frozen=True, slots=True)
class Running:
    """A router that serves."""

    port: int
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
        service = _make_service(config, model, tokenizer, cluster, survey, admission, counts)

        server = rpc.make_server()
        names = rpc.add_service(server, router_pb2_grpc.add_RouterServicer_to_server, service)
        health = rpc.add_health_and_reflection(server, names)
        port = rpc.bind(server, config.front.host, config.front.port)
        resources.enter_context(
            metrics.served(counts.registry, config.front.host, config.front.metrics_port)
        )
        await health.tell(False)
        await server.start()
        log.info("listening %s", kv(address=f"{config.front.host}:{port}", model=model.name))
        async with asyncio.TaskGroup() as tasks:
            nodes = tasks.create_task(cluster.run())
            readiness = tasks.create_task(_tell_readiness(cluster, changed, health))
            try:
                yield Running(port, health, admission, cluster, nodes, readiness)
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


def _make_service(
    config: RouterConfig,
    model: ModelFiles,
    tokenizer: RouterTokenizer,
    cluster: Cluster,
    survey: Survey,
    admission: Admission,
    counts: RouterMetrics,
) -> RouterService:
    """The parts that know text."""
    template = (
        ChatTemplate(model.chat_template, model.special_tokens) if model.chat_template else None
    )
    prompts = Prompts(tokenizer, template)
    limits = Limits(model.context_length, model.vocabulary_size)
    generator = Generator(
        tokenizer, prompts, limits, cluster, admission, counts, budget_s=config.budget_s
    )
    return RouterService(generator, survey, tokenizer, prompts, limits, model)


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
