"""An engine without a model: it repeats the prompt, one token per request every 5 ms.

Communicates with its frontend like a real engine. `engine.model` selects its behaviour: echo |
bad-config (ends with ConfigError) | crash (raises on the first request) | hang (never ready) |
loading (does not read messages) | stuck-at-end (does not end when stopped) | stuck-after-crash
(reports its error, and does not end) | one-role (rejects role changes for lack of memory). Requests
that may not wait at all are rejected as if the queue were full. A model "ranks" has three ranks,
one of which has not reported.
"""

import logging
import time
from dataclasses import dataclass, field

import numpy as np

from common.config import DecodeConfig
from common.errors import ConfigError
from common.process.ipc import FrameSocket, PeerGone
from common.request import PredictionUsage
from engine.batch.holding import PageHolding
from engine.kv_cache.kv_events import CacheEvents
from engine.kv_cache.pages import PageAllocator, PageHolder
from engine.kv_cache.radix import PrefixCache
from kvtransfer.frontend_messages import EngineHeartbeat, PairInput
from kvtransfer.ports import LinkMember, ProducerUp
from node.control.engine_control import CacheReports
from node.engine_process import Begin, EngineChannel, EngineStart, run_engine
from node.messages import (
    AbortRequests,
    CancelSubmitted,
    DescribeNode,
    Drained,
    DrainNode,
    EngineReady,
    EngineStats,
    FlushCache,
    NodeCall,
    NodeCallResult,
    PrepareRole,
    QuarantineStarted,
    RequestEnded,
    ResumeNode,
    RouterStreamClosed,
    StartRole,
    StepTokens,
    SubmitRequest,
    WatchCache,
)

STEP_S = 0.005
PAGE_SIZE = 16
STOP, LENGTH, ABORT, ERROR = 1, 2, 3, 4


@dataclass
class Live:
    submit: SubmitRequest
    said: int = 0
    prompt: "np.ndarray" = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = np.frombuffer(self.submit.spec.token_ids, "<i4")


class StuckAtShutdown(logging.NullHandler):
    """Blocks a process after its last log line."""

    def close(self) -> None:
        time.sleep(600)


class EchoEngine:
    def __init__(self, channel: EngineChannel, pairs: FrameSocket[PairInput], model: str) -> None:
        self._channel = channel
        self._pairs = pairs
        self._model = model
        self._live: dict[tuple[int, int], Live] = {}
        self._draining = False
        self._drained = False
        self._steps = 0
        self._report_at = 0.0
        self._successor: StartRole | None = None
        self._pages = PageAllocator(64)
        self._cache = PrefixCache(PAGE_SIZE, self._pages)
        self._cache_reports = CacheReports(CacheEvents(self._cache), channel.post)

    def run(self) -> StartRole:
        """Serve one role. Returns when another role begins."""
        while self._successor is None:
            for message in self._channel.take():
                self._take(message)
            self._step()
            self._cache_reports.flush()
            self._report()
            if self._draining and not self._live and not self._drained:
                self._drained = True
                self._channel.post(Drained())
            self._channel.wait(STEP_S if self._live else 0.2)
        return self._successor

    def _take(self, message: object) -> None:
        match message:
            case SubmitRequest():
                if self._model == "stuck-after-crash":
                    logging.getLogger().addHandler(StuckAtShutdown())
                if "crash" in self._model:
                    raise RuntimeError("the stub was told to crash")
                if message.remaining.queue_s == 0.0:
                    late = RequestEnded(message.number, ERROR, "late", 8, retry_after_s=2.5)
                    return self._say(message.stream, ended=(late,))
                self._live[message.stream, message.number] = Live(message)
                if message.spec.engine_crashes:
                    self._channel.post(QuarantineStarted(message.stream, message.number))
                    self._channel.post(QuarantineStarted(0, 0))
                self._remember(message)
            case WatchCache():
                self._cache_reports.watch(message)
            case CancelSubmitted(stream=stream, request=request):
                if self._live.pop((stream, request), None):
                    self._say(stream, ended=(RequestEnded(request, ABORT),))
            case RouterStreamClosed(stream=stream):
                self._live = {key: live for key, live in self._live.items() if key[0] != stream}
            case NodeCall(number, DescribeNode()):
                queues = {"running": len(self._live)}
                described = {"queues": queues, "pages": {"free": 8}, "counters": {"steps": 7}}
                self._channel.post(NodeCallResult(number, description=described))
            case StartRole():
                self._successor = message
            case NodeCall(number, DrainNode() | ResumeNode() as command):
                self._draining, self._drained = isinstance(command, DrainNode), False
                self._channel.post(NodeCallResult(number))
            case NodeCall(number, PrepareRole()):
                no_room = "there is no room" if self._model == "one-role" else ""
                self._channel.post(NodeCallResult(number, error=no_room))
            case NodeCall(number, FlushCache()):
                busy = "1 request is running" if self._live else ""
                if not busy:
                    self._cache.flush()
                self._channel.post(NodeCallResult(number, error=busy, integer=5))
            case NodeCall(number, AbortRequests(name)):
                doomed = [
                    key for key, live in self._live.items() if live.submit.spec.request_id == name
                ]
                for stream, request in doomed:
                    del self._live[stream, request]
                    self._say(stream, ended=(RequestEnded(request, ABORT),))
                self._channel.post(NodeCallResult(number, integer=len(doomed)))

    def _remember(self, submit: SubmitRequest) -> None:
        """Insert the prompt into the cache as if it had been computed already."""
        tokens = np.frombuffer(submit.spec.token_ids, np.int32)
        pages = self._cache.allocate(len(tokens) // PAGE_SIZE, PageHolder.REQUEST)
        if pages is not None:
            self._cache.insert(tokens, PageHolding.of(pages), submit.spec.namespace)
            self._pages.drop(pages, PageHolder.REQUEST)

    def _step(self) -> None:
        self._steps += bool(self._live)
        for (stream, request), live in list(self._live.items()):
            token = int(live.prompt[live.said % len(live.prompt)])
            begun = ((request, 3),) if not live.said else ()
            live.said += 1
            over = live.said == live.submit.spec.sampling.max_tokens
            if over:
                del self._live[stream, request]
            ended = (RequestEnded(request, LENGTH),) if over else ()
            num_predicted = len(live.submit.spec.prediction) // 4
            predicted = ((request, PredictionUsage(num_predicted, 1)),) if num_predicted else ()
            self._say(stream, [request], [token], ended, begun, predicted)

    def _say(
        self,
        stream: int,
        requests: "list[int]" = [],  # noqa: B006
        tokens: "list[int]" = [],  # noqa: B006
        ended: tuple[RequestEnded, ...] = (),
        begun: tuple[tuple[int, int], ...] = (),
        predicted: tuple[tuple[int, PredictionUsage], ...] = (),
    ) -> None:
        columns = np.array(requests, "<u8").tobytes(), np.array(tokens, "<u4").tobytes()
        self._channel.post(StepTokens(stream, *columns, ended, begun, predicted=predicted))

    def _report(self) -> None:
        if time.monotonic() < self._report_at:
            return
        self._report_at = time.monotonic() + 0.2
        self._pairs.send(EngineHeartbeat(0.0))
        state = "draining" if self._draining else "ready"
        gauges = {
            "queue_on_device": float(len(self._live)),
            "swap_pages": 3.0,
            "pages_free": 8.0,
            "total_retractions": 2.0,
            "total_handoffs_opened": 5.0,
            "total_handoffs_completed": 4.0,
        }
        members: tuple[LinkMember, ...] = ()
        if self._model == "ranks":
            gauges |= {"rank_memory/0": 5.0, "rank_behind/0": 0.0}
            gauges |= {"rank_memory/1": 7.0, "rank_behind/1": 2.0}
            members = LinkMember(0, 0, "tcp", 2.0), LinkMember(1, 0, "cma", 1.5)
        links = (ProducerUp(1, "127.0.0.1:1", "tcp", 2.0, 64, members),)
        self._channel.post(EngineStats(self._steps, gauges, state, links, pages_free=5))


def body(begin: Begin, first: StartRole) -> None:
    start: EngineStart[DecodeConfig] = begin(first)
    model = start.config.engine.model
    if model == "bad-config":
        raise ConfigError("engine.model: no such checkpoint")
    if model == "loading":
        time.sleep(600)
    ready = EngineReady(
        "stub",
        {"model": "0"},
        "1",
        start.config.engine.context_length or 1 << 20,
        8,
        16,
        followers=(21, 22) if model == "ranks" else (),
        devices=("cuda:2", "cuda:3", "cuda:0") if model == "ranks" else ("cpu",),
    )
    try:
        while True:
            if model != "hang":
                start.channel.post(ready)
            pairs: FrameSocket[PairInput] = FrameSocket(start.transfer_socket, PairInput)
            successor = EchoEngine(start.channel, pairs, model).run()
            pairs.close()
            start = begin(successor)
    except PeerGone:
        if model == "stuck-at-end":
            time.sleep(600)
        raise


if __name__ == "__main__":
    run_engine(dict.fromkeys(("prefill", "decode"), DecodeConfig), body, "stub")
