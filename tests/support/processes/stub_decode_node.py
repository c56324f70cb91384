"""Stub nodes: real gRPC servers of `DecodeNode` and `Node` whose responses a test decides.

    python -m tests.support.processes.stub_decode_node --port 50200 --tokens 64 --step-s 0.02

runs a stub that responds on its own, with one token per live request and step, to measure a router.
"""

import argparse
import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import grpc.aio
import uvloop

from common import limits, rpc
from common.errors import EngineDied, FailedPrecondition, RequestFailed
from common.request import tokens_of
from common.rpc.streams import said
from protos import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc, router_pb2, sampling_pb2

T = TypeVar("T")


def links_to(peers: Sequence[str]) -> list[router_pb2.LinkState]:
    """Return the links in the Status of a node that has paired with these peers."""
    return [router_pb2.LinkState(peer=peer, path="tcp", gib_per_s=2.5) for peer in peers]


_WAIT_S = 60.0
_BEAT_S = 0.2
_instance_ids = itertools.count(1)


class Submission:
    """A Submit for tests: its own fields, and those of its request."""

    def __init__(self, proto: decode_pb2.Submit) -> None:
        self.proto = proto
        self.token_ids = [*tokens_of(proto.request.token_ids)]
        self.prediction = [*tokens_of(proto.request.prediction)]

    def __getattr__(self, name: str) -> Any:
        parts = (self.proto, self.proto.request, self.proto.remaining)
        return getattr(next(part for part in parts if hasattr(part, name)), name)

    def HasField(self, name: str) -> bool:
        parts = (self.proto, self.proto.request, self.proto.remaining)
        return next(part for part in parts if hasattr(part, name)).HasField(name)


class StubNode(node_pb2_grpc.NodeServicer):
    """The `Node` service of a node of either role. A stub prefill node has nothing else.

    Use as a context manager. `address` is valid inside.
    """

    def __init__(self, role: str = "prefill", *, tokenizer_hash: str = "", port: int = 0) -> None:
        self.description = node_pb2.DescribeResponse(
            role=role,
            instance_id=next(_instance_ids),
            pids=[11, 12],
            state="ready",
            tokenizer_hash=tokenizer_hash,
            pages={"free": 7, "cache": 1},
            links=[router_pb2.LinkState(peer="127.0.0.1:1", path="tcp", gib_per_s=2.5)],
            ranks=[router_pb2.RankState(rank=rank, pid=12 + rank) for rank in range(2)],
        )
        self.answering = asyncio.Event()  # while cleared, Describe does not respond
        self.answering.set()
        self.num_asked = 0  # number of Describe calls
        self.num_described = 0
        self.watchers: list[asyncio.Queue[node_pb2.CacheEvents | None]] = []
        self.adapters: dict[str, bytes] = {}  # by name
        self.refuses_adapters = ""  # reason to reject adapters, or ""
        self.calls_adapters: dict[str, bytes] = {}  # adapter id by path. Else the hash of the path
        self.paused = ""  # mode in which it is paused, or ""
        self.refuses_pauses = ""  # reason to reject pauses and cache flushes, or ""
        self.away: set[str] = set()  # released parts of its memory
        self.profiled: int | None = None  # number of profiled steps. None: never profiled
        self.prepared = self.weights = b""
        self.lender = ""  # node from which it has read these weights
        self.in_mode = ""  # mode in which it was paused during the weight update
        self.refuses_weights = self.loses_weights = ""  # reason to reject or to lose weights, or ""
        self.unpairs = False  # end its pairs on a weight update
        self.calls_weights = b""  # weight version to report, whatever the path
        self.address = ""
        self._port = port
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = rpc.make_server()
        self._add_services(self._server)
        self._port = rpc.bind(self._server, "127.0.0.1", self._port)
        self.address = f"127.0.0.1:{self._port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """End every call and stream immediately, and stop listening."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def Describe(self, request, context):
        self.num_asked += 1
        await self.answering.wait()
        self.num_described += 1
        return self.description

    async def WatchCache(self, request: node_pb2.WatchCacheRequest, context: Any) -> None:
        news: asyncio.Queue[node_pb2.CacheEvents | None] = asyncio.Queue()
        self.watchers.append(news)
        try:
            while (events := await news.get()) is not None:
                await context.write(events)
        finally:
            self.watchers.remove(news)

    async def LoadAdapter(self, request, context):
        if self.refuses_adapters:
            raise FailedPrecondition(self.refuses_adapters)
        fresh = request.name not in self.adapters
        content = hashlib.blake2b(request.path.encode(), digest_size=16).digest()
        self.adapters[request.name] = self.calls_adapters.get(request.path, content)
        self.adapters_changed()
        return router_pb2.LoadAdapterResponse(id=self.adapters[request.name], fresh=fresh)

    async def UnloadAdapter(self, request, context):
        known = self.adapters.pop(request.name, None) is not None
        self.adapters_changed()
        return router_pb2.UnloadAdapterResponse(known=known)

    async def Pause(self, request, context):
        if self.refuses_pauses:
            raise FailedPrecondition(self.refuses_pauses)
        fresh, self.paused = not self.paused, request.mode
        return router_pb2.PauseResponse(fresh=fresh, aborted=3)

    async def Continue(self, request, context):
        was_paused, self.paused = bool(self.paused), ""
        return router_pb2.ContinueResponse(was_paused=was_paused)

    async def PrepareWeights(self, request, context):
        if self.refuses_weights:
            raise FailedPrecondition(self.refuses_weights)
        self.prepared = (
            self.calls_weights or hashlib.blake2b(request.path.encode(), digest_size=16).digest()
        )
        return node_pb2.PrepareWeightsResponse(id=self.prepared)

    async def PutWeights(self, request, context):
        if self.loses_weights or not self.paused or request.id != self.prepared:
            raise FailedPrecondition(
                self.loses_weights or "it is not paused, or they are not prepared"
            )
        self.weights, self.in_mode = request.id, self.paused
        if self.unpairs:
            del self.description.links[:]
        return node_pb2.PutWeightsResponse()

    async def TakeWeights(self, request, context):
        if request.id != self.weights:
            if self.loses_weights or not self.paused:
                raise FailedPrecondition(self.loses_weights or "it is not paused")
            self.weights, self.in_mode, self.lender = request.id, self.paused, request.address
        return node_pb2.TakeWeightsResponse()

    async def ReleaseMemory(self, request, context):
        if self.refuses_pauses:
            raise FailedPrecondition(self.refuses_pauses)
        self.away |= set(request.tags)
        return router_pb2.ReleaseMemoryResponse()

    async def ResumeMemory(self, request, context):
        self.away -= set(request.tags)
        return router_pb2.ResumeMemoryResponse()

    async def StartProfile(self, request, context):
        self.profiled = request.num_steps
        return node_pb2.ProfileResponse(path=f"/traces/{self.description.role}")

    async def StopProfile(self, request, context):
        if self.profiled is None:
            raise FailedPrecondition("no profile is running")
        return node_pb2.ProfileResponse(path=f"/traces/{self.description.role}")

    async def FlushCache(self, request, context):
        if self.refuses_pauses:
            raise FailedPrecondition(self.refuses_pauses)
        return router_pb2.FlushCacheResponse(pages_freed=2)

    def adapters_changed(self) -> None:
        """Ignore the change: a prefill node's adapters are not announced."""

    def send_cache_events(self, **fields: Any) -> None:
        """Send CacheEvents with these fields to every watcher. Without fields, end their calls."""
        for news in self.watchers:
            news.put_nowait(node_pb2.CacheEvents(**fields) if fields else None)

    def _add_services(self, server: grpc.aio.Server) -> None:
        rpc.add_service(server, node_pb2_grpc.add_NodeServicer_to_server, self)


class StubDecodeNode(StubNode, decode_pb2_grpc.DecodeNodeServicer):
    """A decode node that records received messages, in order, and sends what a test requests."""

    def __init__(
        self,
        *,
        paired: Sequence[str] = (),
        serves_alone: bool = True,
        tokenizer_hash: str = "",
        port: int = 0,
        on_submit: Callable[[Submission], None] = lambda submit: None,
    ) -> None:
        super().__init__("decode", tokenizer_hash=tokenizer_hash, port=port)
        self.status = decode_pb2.Status(state="ready", serves_alone=serves_alone)
        self.status.links.extend(links_to(paired))
        self.version = limits.VERSION
        self.moves = True  # its engine sends heartbeats
        self.late_s = 0.0  # lateness in its heartbeats
        self.received: list[decode_pb2.ToNode] = []
        self.streams: list[asyncio.Queue[decode_pb2.FromNode | None]] = []
        # Received messages one by one: a Submit, or the number of a cancelled request.
        self._arrivals: asyncio.Queue[Submission | int] = asyncio.Queue()
        self._on_submit = on_submit

    async def Serve(self, messages: AsyncIterator[decode_pb2.ToNode], context: Any) -> None:
        outgoing: asyncio.Queue[decode_pb2.FromNode | None] = asyncio.Queue()
        self.streams.append(outgoing)
        greeting = decode_pb2.FromNode(status=self.status, protocol_version=self.version)
        outgoing.put_nowait(greeting)
        receiving = asyncio.create_task(self._receive(messages))
        beating = asyncio.create_task(self._heartbeat(outgoing))
        try:
            while (message := await outgoing.get()) is not None:
                await context.write(message)
            died = EngineDied("the node has ended: the engine has failed")
            await context.write(decode_pb2.FromNode(last_words=said(died)))
            # The status that grpcio reports if the router is writing at this moment.
            raise RequestFailed("Internal error from Core")
        finally:
            self.streams.remove(outgoing)
            beating.cancel()
            receiving.cancel()

    async def submitted(self) -> Submission:
        """Return the next Submit. Earlier messages of other kinds are skipped."""
        return await self._next(Submission)

    async def cancelled(self) -> int:
        """Return the number of the next request that the router cancels."""
        return await self._next(int)

    def say(
        self,
        tokens: Mapping[int, Sequence[int]] | None = None,
        *,
        ended: Mapping[int, Any] | None = None,
        error: str = "",
        error_code: int = 0,
        retry_after_s: float = 0.0,
        cached_tokens: int | None = None,
        logprobs: Mapping[int, Sequence[float]] | None = None,
        predicted: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Send one Step on every open stream.

        Args:
            tokens: new tokens by request.
            ended: finish reasons by request. The next three arguments apply to each ended request.
            cached_tokens: reported for all requests. None: no report.
            logprobs: log-probabilities of the new tokens, by request.
            predicted: accepted and rejected predicted tokens, by request.
        """
        ends = ended or {}
        begun = sorted({*(tokens or ()), *ends}) if cached_tokens is not None else []
        pairs = [(number, token) for number, many in (tokens or {}).items() for token in many]
        self.send(
            decode_pb2.FromNode(
                step=decode_pb2.Step(
                    request=[number for number, _ in pairs],
                    token=[token for _, token in pairs],
                    ended=list(ends),
                    reason=list(ends.values()),
                    begun=begun,
                    cached_tokens=[cached_tokens or 0] * len(begun),
                    error=[error] * len(ends),
                    error_code=[error_code] * len(ends),
                    retry_after_s=[retry_after_s] * len(ends),
                    logprobs=[
                        decode_pb2.RowLogprobs(
                            request=number, logprobs=sampling_pb2.Logprobs(logprob=of_token)
                        )
                        for number, of_token in (logprobs or {}).items()
                    ],
                    predicted=list(predicted or {}),
                    accepted=[accepted for accepted, _ in (predicted or {}).values()],
                    rejected=[rejected for _, rejected in (predicted or {}).values()],
                )
            )
        )

    def finish(
        self,
        number: int,
        tokens: Sequence[int] = (),
        reason: Any = decode_pb2.FINISH_REASON_STOP,
        **more: Any,
    ) -> None:
        """Send one Step with a request's last tokens and its end. `more`: arguments of `say`."""
        self.say({number: tokens}, ended={number: reason}, **more)

    async def complete(
        self, tokens: Sequence[int] = (), reason: Any = decode_pb2.FINISH_REASON_STOP, **more: Any
    ) -> Submission:
        """Finish the next request with these tokens."""
        submit = await self.submitted()
        self.finish(submit.number, tokens, reason, **more)
        return submit

    def change_status(self, **fields: Any) -> None:
        """Send routers a Status with these fields changed."""
        changed = decode_pb2.Status(**fields)
        for name in fields:
            self.status.ClearField(name)
        self.status.MergeFrom(changed)
        self.send(decode_pb2.FromNode(status=self.status))

    def adapters_changed(self) -> None:
        adapters = [decode_pb2.Adapter(name=name, id=each) for name, each in self.adapters.items()]
        self.change_status(adapters=adapters)

    def lose_engine(self) -> None:
        """End every stream like a frontend whose engine has crashed. Later streams work again."""
        for stream in self.streams:
            stream.put_nowait(None)

    def try_alone(self, request: int | None) -> None:
        """Report that a request runs alone from now on. None: a request of another router."""
        trial = decode_pb2.Quarantine(under_way=True, request=request)
        self.send(decode_pb2.FromNode(quarantine=trial))

    def send(self, message: decode_pb2.FromNode) -> None:
        for stream in self.streams:
            stream.put_nowait(message)

    def _add_services(self, server: grpc.aio.Server) -> None:
        super()._add_services(server)
        rpc.add_service(server, decode_pb2_grpc.add_DecodeNodeServicer_to_server, self)

    async def _heartbeat(self, outgoing: asyncio.Queue[decode_pb2.FromNode]) -> None:
        while True:
            if self.moves:
                beat = decode_pb2.EngineHeartbeat(late_s=self.late_s)
                outgoing.put_nowait(decode_pb2.FromNode(engine_heartbeat=beat))
            await asyncio.sleep(_BEAT_S)

    async def _receive(self, messages: AsyncIterator[decode_pb2.ToNode]) -> None:
        async for message in messages:
            self.received.append(message)
            submissions = [Submission(submit) for submit in message.submits]
            for arrival in (*submissions, *message.cancels):
                self._arrivals.put_nowait(arrival)
            for submission in submissions:
                self._on_submit(submission)

    async def _next(self, kind: type[T]) -> T:
        async with asyncio.timeout(_WAIT_S):
            while True:
                arrival = await self._arrivals.get()
                if isinstance(arrival, kind):
                    return arrival


class Metronome:
    """A stub that responds on its own: every `step_s`, one Step with one token per live request.

    Args:
        num_tokens: length of every response.
    """

    def __init__(self, token: int, num_tokens: int, step_s: float, *, port: int = 0) -> None:
        self.node = StubDecodeNode(port=port, on_submit=self._begin)
        self._token = token
        self._num_tokens = num_tokens
        self._step_s = step_s
        self._left: dict[int, int] = {}

    async def run(self) -> None:
        """Run until cancelled. Cancels are ignored, which the router must tolerate."""
        loop = asyncio.get_running_loop()
        next_step_at = loop.time()
        while True:
            next_step_at = max(next_step_at + self._step_s, loop.time())
            await asyncio.sleep(next_step_at - loop.time())
            if self._left:
                self._step()

    def _begin(self, submit: Submission) -> None:
        length = min(self._num_tokens, submit.sampling.max_tokens)
        self._left[submit.number] = length - submit.num_generated

    def _step(self) -> None:
        self.node.say(
            dict.fromkeys(self._left, (self._token,)),
            ended={
                number: decode_pb2.FINISH_REASON_LENGTH
                for number, left in self._left.items()
                if left == 1
            },
        )
        self._left = {number: left - 1 for number, left in self._left.items() if left > 1}


async def _main(arguments: argparse.Namespace) -> None:
    metronome = Metronome(arguments.token, arguments.tokens, arguments.step_s, port=arguments.port)
    async with metronome.node as node:
        print(node.address, flush=True)
        await metronome.run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", type=int, default=42)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.02)
    uvloop.run(_main(parser.parse_args()))
