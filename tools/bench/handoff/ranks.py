"""Rates of page reads between nodes with several ranks, compared with nodes of one rank.

Every rank is a process. This process is rank 0 of all consumers. Each pair of nodes reads the same
pages of one model in turn, round after round. A ratio is the median over rounds of (time with one
rank on both sides / time of the pair). All ranks share this machine's cores.
"""

import itertools
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from common.config import TransferConfig
from common.copy_map import NodeShape
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedKV
from kvtransfer import data_paths
from kvtransfer.backends.base import PagePool
from kvtransfer.messages import HandoffId
from kvtransfer.pairing import DataPath, PairHello
from kvtransfer.ports import PagesToRead, TablePages
from kvtransfer.rank_messages import (
    OfferPaths,
    PublishPages,
    StartTransfer,
    TransferStarted,
    encode,
)
from kvtransfer.transfer.follower import FollowerTransfer
from kvtransfer.transfer.link import LinkEvent, LinkUp, PageLink, ReadEnded
from kvtransfer.transfer.node_paths import start_ranks
from kvtransfer.transfer.rank_paths import paths_of_rank
from tools.bench.support.record import ROOT

ONE = (1, 1)
PAIRS = (ONE, (1, 2), (2, 1), (2, 4), (4, 2))  # ranks of the producer, ranks of the consumer
COUNTS = (64, 256)
GOAL = 0.85
WAIT_S = 60.0

_CONSUMER = 1
_PACKET = 128 << 10


@dataclass(frozen=True, slots=True)
class Plan:
    backend: str
    rounds: int
    counts: tuple[int, ...] = COUNTS


def measure(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return one row per pair of nodes and number of pages, and the goal."""
    with ExitStack() as exits:
        producers = {
            tp: _Producer(tp, plan, exits)
            for tp in dict.fromkeys(producer for producer, _ in PAIRS)
        }
        consumers = {
            tp: _Consumer(tp, plan, exits)
            for tp in dict.fromkeys(consumer for _, consumer in PAIRS)
        }
        links = {
            pair: consumers[pair[1]].link(producers[pair[0]].hello(number), plan.backend)
            for number, pair in enumerate(PAIRS, start=_CONSUMER)
        }
        rows = [row for count in plan.counts for row in _rows(count, links, plan)]
        for link in links.values():
            link.close()
    worst = min(row["of_one_rank"] for row in rows)
    return rows, {"goal": GOAL, "worst_of_one_rank": worst, "met": worst >= GOAL}


def _rows(
    count: int, links: "dict[tuple[int, int], _TimedLink]", plan: Plan
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(count)
    seconds: dict[tuple[int, int], list[float]] = {pair: [] for pair in links}
    for number in range(plan.rounds + 1):
        ids = [rng.choice(max(plan.counts), count, replace=False).astype(np.int32) for _ in "ab"]
        for pair, link in links.items():
            taken = link.read(*ids)
            if number:  # the first one is the warm-up
                seconds[pair].append(taken)
    num_bytes = count * _layout().page_bytes
    return [
        {
            "ranks": f"{producer} -> {consumer}",
            "path": link.path,
            "pages": count,
            "gib_per_s": round(
                num_bytes / 2**30 / statistics.median(seconds[producer, consumer]), 3
            ),
            "of_one_rank": round(
                statistics.median(
                    one / own
                    for one, own in zip(seconds[ONE], seconds[producer, consumer], strict=True)
                ),
                3,
            ),
        }
        for (producer, consumer), link in links.items()
    ]


def _layout() -> KVLayout:
    """Return the layout of a model with 8 KV heads of 64 numbers in 16 layers."""
    return KVLayout.of([PagedKV(8, 64)] * 16, 16, torch.bfloat16)


def _part(rank: int, tp: int, num_pages: int) -> tuple[PagePool, NDArray[np.uint8]]:
    """Return the pages of one rank, and their memory."""
    page_bytes = _layout().pages_by_rank(NodeShape(tp))[rank].page_bytes
    memory = np.ones((num_pages, page_bytes), np.uint8)
    return PagePool(memory.ctypes.data, page_bytes, num_pages, "cpu"), memory


class _Ranks:
    """Ranks of one node from `first` on, each a process. Replies arrive on a thread per rank."""

    def __init__(self, first: int, tp: int, plan: Plan, exits: ExitStack) -> None:
        self._sockets: list[socket.socket] = []
        self._asked: dict[int, tuple[list[bytes], Future[Sequence[bytes]]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        for rank in range(first, tp):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            numbers = map(str, (theirs.fileno(), rank, tp, max(plan.counts)))
            process = subprocess.Popen(
                [sys.executable, "-m", "tools.bench.handoff.ranks", *numbers],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )
            theirs.close()
            exits.callback(process.wait, WAIT_S)
            exits.callback(ours.shutdown, socket.SHUT_RDWR)
            self._sockets.append(ours)
            threading.Thread(target=self._take, args=(ours,), daemon=True).start()

    def ask(
        self, body: bytes, on_done: Callable[[Future[Sequence[bytes]]], None] | None = None
    ) -> Future[Sequence[bytes]]:
        number, future = next(self._numbers), Future[Sequence[bytes]]()
        if on_done is not None:
            future.add_done_callback(on_done)
        self._asked[number] = [], future
        for each in self._sockets:
            each.send(msgspec.msgpack.encode((number, body)))
        return future

    def _take(self, replies: socket.socket) -> None:
        while packet := replies.recv(_PACKET):
            number, result, error = msgspec.msgpack.decode(packet)
            if error:
                print(error, file=sys.stderr)
            with self._lock:
                results, future = self._asked[number]
                results.append(result)
                complete = len(results) == len(self._sockets)
            if complete:
                future.set_result(results)


class _Producer:
    def __init__(self, tp: int, plan: Plan, exits: ExitStack) -> None:
        self._ranks = _Ranks(0, tp, plan, exits)
        self._plan = plan
        self._tp = tp
        start = StartTransfer(_config(plan).model_dump_json().encode(), False, 10 + tp)
        replies = self._ranks.ask(encode(start)).result(WAIT_S)
        started = [msgspec.msgpack.decode(each, type=TransferStarted) for each in replies]
        self._regions = [each.region for each in sorted(started, key=lambda each: each.rank)]

    def hello(self, consumer: int) -> PairHello:
        """Admit a consumer to all pages."""
        replies = self._ranks.ask(encode(OfferPaths(consumer))).result(WAIT_S)
        paths = [
            path
            for each in replies
            for path in msgspec.msgpack.decode(each, type=tuple[DataPath, ...])
        ]
        pages = np.arange(max(self._plan.counts), dtype=np.int32).tobytes()
        self._ranks.ask(encode(PublishPages(consumer, pages))).result(WAIT_S)
        hello = PairHello.of(10 + self._tp, "producer", {}, self._regions, 0)
        return msgspec.structs.replace(hello, paths=tuple(paths))


class _Consumer:
    def __init__(self, tp: int, plan: Plan, exits: ExitStack) -> None:
        config, followers = _config(plan), _Ranks(1, tp, plan, exits)
        pool, self._memory = _part(0, tp, max(plan.counts))
        backends = data_paths.backends(config, tls=False)
        beside = config, backends, _layout().pages_by_rank, 20 + tp
        self._paths = paths_of_rank(0, NodeShape(tp), pool, *beside)
        if tp > 1:
            ask = followers.ask
            self._paths, _ = start_ranks(self._paths, config, ask, tls=False, instance=20 + tp)

    def link(self, hello: PairHello, backend: str) -> "_TimedLink":
        self._paths.opener.check(hello)
        return _TimedLink(lambda notify: self._paths.opener.open(hello, backend, notify))


class _TimedLink:
    """A link whose reads are waited for."""

    def __init__(self, open_link: Callable[[Callable[[LinkEvent], None]], PageLink]) -> None:
        self.path = ""
        self._heard = threading.Event()
        self._error = ""
        self._link = open_link(self._take)
        self._wait()

    def read(self, source: NDArray[np.int32], destination: NDArray[np.int32]) -> float:
        """Return the seconds that a read takes."""
        self._heard.clear()
        started = time.perf_counter()
        spans = (TablePages(0, len(source)),)
        self._link.post(HandoffId(1, 1, 1), PagesToRead(source, destination, spans))
        self._wait()
        return time.perf_counter() - started

    def close(self) -> None:
        self._link.close("the measurement ends")
        self._link.join(WAIT_S)

    def _wait(self) -> None:
        if not self._heard.wait(WAIT_S) or self._error:
            raise SystemExit(f"a link failed: {self._error or 'no answer'}")

    def _take(self, event: LinkEvent) -> None:
        match event:
            case LinkUp(path=path):
                self.path = path
                self._heard.set()
            case ReadEnded(refused=refused):
                self._error = refused
                self._heard.set()


def _config(plan: Plan) -> TransferConfig:
    return TransferConfig(backend=plan.backend)


def _follow(descriptor: int, rank: int, tp: int, num_pages: int) -> None:
    """Run one rank until the other end of the socket is closed."""
    messages = socket.socket(fileno=descriptor)
    pool, memory = _part(rank, tp, num_pages)
    transfer = FollowerTransfer(rank, NodeShape(tp), pool, _layout().pages_by_rank)

    def answer(number: int) -> Callable[..., None]:
        def reply(result: bytes = b"", error: str = "") -> None:
            with suppress(OSError):
                messages.send(msgspec.msgpack.encode((number, result, error)))

        return reply

    while packet := messages.recv(_PACKET):
        number, body = msgspec.msgpack.decode(packet)
        transfer.take(body, None, answer(number))
    del memory


if __name__ == "__main__":
    _follow(*map(int, sys.argv[1:]))
