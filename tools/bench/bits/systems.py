"""Whole systems in which requests are compared with the same requests alone."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
from transformers import AutoModelForCausalLM

from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import LATENT_ARCHITECTURES, make_checkpoint
from tests.support.models.drafters import make_eagle, make_hybrid_mtp, make_mtp
from tests.support.processes.cluster import Cluster, Node, slowed
from tools.bench.bits.circumstances import Circumstances, ComparedKind
from tools.bench.bits.requests import ADAPTER, ComparedRequest, ComparedResponse, respond

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,  # in hybrid models the fourth layer has attention
}
_HEADS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_MTP_LAYERS = {
    "deepseek_v3": make_mtp,
    "qwen3_next": make_hybrid_mtp,
    "qwen3_5_text": make_hybrid_mtp,
}
_STEP_S = 0.004  # seconds added to each step, so that events occur within responses
_TOGETHER = 4  # compared requests of one round
_NEIGHBOURS = 3
_DISK_BYTES = 1 << 26
# Counters of nodes that show which events occurred, by name of the event.
_COUNTERS = {
    "retraction": "retractions",
    "recomputed retraction": "recomputed",
    "live migration": "moves/here",
    "hand-off": "handoffs_completed",
    "failed hand-off": "handoffs_failed",
    "local prefill": "local_prefills",
    "accepted draft": "draft_tokens/accepted",
    "rejected draft": "draft_tokens/rejected",
    "prefix of another node": "prefix_loans/completed",
}
EVENTS = (*_COUNTERS, "replay", "adapter", "kill decode", "kill prefill", "move", "switch")


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """A request in some circumstances, and the same request alone."""

    request: ComparedRequest
    around: Circumstances
    difference: str


@dataclass(slots=True)
class Tally:
    """The results so far.

    Attributes:
        events: number of each kind of event, according to nodes and responses.
    """

    pairs: list[ComparedPair] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)

    @property
    def differing(self) -> list[ComparedPair]:
        return [pair for pair in self.pairs if pair.difference]


class ComparedModel:
    """A model and its reference: a colocated node that gets one request at a time.

    Args:
        directory: directory for checkpoints and logs.
    """

    def __init__(self, directory: Path, kind: ComparedKind) -> None:
        self.kind = kind
        self._directory = directory
        sizes = {} if kind.family in LATENT_ARCHITECTURES else _HEADS
        self._model = make_checkpoint(directory / "model", kind.family, **_SIZES, **sizes)
        lora = self._make_adapter(directory / "adapters") if kind.native else ()
        self._adapters = ("", "", ADAPTER) if kind.native else ("",)
        self._eagle = directory / "eagle"
        if kind.family in _MTP_LAYERS:
            _MTP_LAYERS[kind.family](self._model)
        if kind.family == "llama":
            make_eagle(self._eagle, self._model)
        self._always = (
            f"--dtype={kind.dtype}",
            f"--engine.parallel.tp={kind.ranks}",
            *kind.flags,
            "--engine.batch-invariant",
            *lora,
        )
        self._number = 0
        self._known: dict[tuple[object, ...], ComparedResponse] = {}
        self._reference: Cluster
        self._alone = asyncio.Lock()

    def _make_adapter(self, directory: Path) -> tuple[str, ...]:
        """Write the adapter. Return the flags with which nodes load it."""
        make_adapter(directory / ADAPTER, AutoModelForCausalLM.from_pretrained(self._model))
        return f"--engine.lora.adapter-dir={directory}", f"--engine.lora.preload={ADAPTER}"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["ComparedModel"]:
        """Run the reference node while inside the context."""
        cold = ("--no-engine.cache.prefix-cache",)
        async with self._system(Circumstances(), 1, cold, slow=False) as self._reference:
            yield self

    async def compare(
        self, system: Circumstances, rounds: Sequence[Circumstances], draw: Random, tally: Tally
    ) -> None:
        """Run rounds of one system, each with several compared requests."""
        num_decode = 1 if not any(each.event != "none" for each in rounds) else 2
        async with self._system(system, num_decode) as cluster:
            for around in rounds:
                requests = [ComparedRequest.of(draw, self._adapters) for _ in range(_TOGETHER)]
                tally.pairs += await self._round(cluster, around, requests, draw, tally)
            await _count(cluster, tally)

    async def differs(self, pair: ComparedPair, around: Circumstances) -> bool:
        """Return whether a request's response also differs in these circumstances."""
        again = Tally()
        async with self._system(around, 2) as cluster:
            for number in range(2):
                requests = [pair.request] * _TOGETHER
                again.pairs += await self._round(cluster, around, requests, Random(number), again)
        return bool(again.differing)

    async def _round(
        self,
        cluster: Cluster,
        around: Circumstances,
        requests: Sequence[ComparedRequest],
        draw: Random,
        tally: Tally,
    ) -> list[ComparedPair]:
        if around.cache == "prefix":
            await asyncio.gather(*(respond(cluster, request.begun()) for request in requests))
        elif around.cache == "turn":
            before = await asyncio.gather(*(respond(cluster, request) for request in requests))
            requests = [
                request.next_turn(response.token_ids, draw)
                for request, response in zip(requests, before, strict=True)
            ]
        count = _NEIGHBOURS if around.load else 0
        neighbours = [ComparedRequest.of(draw, self._adapters) for _ in range(count)]
        reached, token = asyncio.Event(), draw.randrange(1, 24)
        loads = [asyncio.create_task(respond(cluster, each)) for each in neighbours]
        running = [
            asyncio.create_task(respond(cluster, request, _at(token, reached)))
            for request in requests
        ]
        happened = asyncio.create_task(_happen(cluster, around.event, reached, draw))
        responses = await asyncio.gather(*running, return_exceptions=True)
        reached.set()
        tally.events[await happened] += 1
        await asyncio.gather(*loads, return_exceptions=True)
        return [
            ComparedPair(request, around, await self._difference(request, around, response, tally))
            for request, response in zip(requests, responses, strict=True)
        ]

    async def _difference(
        self,
        request: ComparedRequest,
        around: Circumstances,
        response: ComparedResponse | BaseException,
        tally: Tally,
    ) -> str:
        if isinstance(response, BaseException):
            return f"it failed: {response}"
        if not response.invariant:
            return "it has no batch-invariant fingerprint"
        if request.adapter:
            tally.events["adapter"] += 1
        if response.cached_tokens:
            tally.events[f"cache hit, {around.cache}, tier {around.tier}"] += 1
        key = request.adapter, request.prompt, str(sorted(request.sampling.items(), key=str))
        async with self._alone:
            if key not in self._known:
                self._known[key] = await respond(self._reference, request)
        return response.difference(self._known[key])

    @asynccontextmanager
    async def _system(
        self,
        around: Circumstances,
        num_decode: int,
        more: Sequence[str] = (),
        *,
        slow: bool = True,
    ) -> AsyncIterator[Cluster]:
        self._number += 1
        logs = self._directory / f"system-{self._number}"
        colocated = around.topology == "colocated"
        files: Mapping[str, Sequence[str]] = {}
        if around.tier == "files":
            names = ["prefill-0", *(f"decode-{number}" for number in range(num_decode))]
            files = {name: tuple(_files(logs / name)) for name in names}
        async with Cluster(
            self._model,
            logs,
            path=around.path,
            num_prefill=0 if colocated else 1,
            num_decode=num_decode,
            node_flags=(*self._always, *around.flags(self._eagle), *more),
            decode_flags=tuple(around.decode_flags()),
            flags_of=files,
            router_flags=("--policy=random",),
            with_secret=False,
            environment=slowed(_STEP_S) if slow else None,
        ) as cluster:
            yield cluster


def _files(directory: Path) -> Iterator[str]:
    directory.mkdir(parents=True)
    yield f"--engine.offload.disk-dir={directory}"
    yield f"--engine.offload.disk-bytes={_DISK_BYTES}"


def _at(token: int, reached: asyncio.Event) -> Callable[[int], None]:
    """Return a callback that sets `reached` once a response has that many tokens."""

    def on_token(count: int) -> None:
        if count >= token:
            reached.set()

    return on_token


async def _happen(cluster: Cluster, event: str, reached: asyncio.Event, draw: Random) -> str:
    """Cause an event once a response has reached its token, and restore the system.

    Returns the event, or "none" if it did not occur.
    """
    if event != "kill prefill":  # that event is about prompts
        await reached.wait()
    match event:
        case "kill decode":
            await _kill(cluster, draw.choice(cluster.decode))
        case "kill prefill":
            await _kill(cluster, cluster.prefill[0])
        case "switch":
            await cluster.switch(node := cluster.decode[-1], "prefill")
            await cluster.switch(node, "decode")
        case "move":
            for source, target in (cluster.decode, cluster.decode[::-1]):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await cluster.migrate(source, target)
                    return event
            return "none"
    return event


async def _kill(cluster: Cluster, node: Node) -> None:
    await cluster.kill(node)
    await cluster.start_again(node)
    await cluster.until_whole()


async def _count(cluster: Cluster, tally: Tally) -> None:
    """Add the counters of the nodes and the router."""
    for node in cluster.live_nodes:
        counters = (await node.describe()).counters
        for event, counter in _COUNTERS.items():
            tally.events[event] += counters.get(counter, 0)
    tally.events["replay"] += int(await cluster.metric("baton_requests_replayed_total"))
