"""Measure what several ranks of a node cost, as ratios to one rank.

    python -m tools.bench.ranks [--parts steps launch memory start ready groups] [--rounds 3]
        [--small]

steps: decode steps of a model of 449 million random weights in float32.
launch: microseconds of rank 0's engine thread in which it sends a step of 256 rows with 64 pages
    each to 1, 3 and 7 followers. Followers are sockets that a thread reads.
memory: bytes of weights of each rank, and by how much they exceed 1/tp of those of one rank.
start: seconds from the start of a node of a tiny model until it is ready.
ready: microseconds from the time at which rank 0 publishes the pages of a hand-off until it may
    announce them, because all other ranks have replied. With one rank there is nothing to wait for.
groups: tokens per second of two nodes that share the experts of a tiny model, and of two nodes
    that each have all of them, as threads of one process. Then the same with one of the nodes idle.

Compared variants run in turns, several times. A figure is the minimum of all runs, because other
work only makes them longer.
"""

import argparse
import contextlib
import itertools
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from bench.steps import SchedulingRole
from common.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    TransferConfig,
)
from common.requests.sampling import SamplingParams
from engine.batch.batch import ScheduleBatch
from engine.batch.forward import HostBatch
from engine.batch.request import Request
from engine.build import build
from engine.loop.loop import EventLoop
from engine.models import open_checkpoint
from engine.models.spec import LoadTarget
from engine.ranks.messages import MAX_PACKET_BYTES
from engine.ranks.share import Share
from engine.runner.launch_message import block_bytes, encode
from engine.runner.step import Step
from engine.scheduler.results import StepOutcome
from kvtransfer.rank_messages import OfferPaths, PublishPages, StartTransfer
from kvtransfer.rank_messages import encode as encode_message
from tests.support.engine.group_nodes import GroupNode, running
from tests.support.models.checkpoints import make_checkpoint
from tests.support.specs import make_request
from tools.bench.support import record
from tools.bench.support.models import QWEN3_450M, QWEN3_SMALL, kept

Rows: TypeAlias = list[dict[str, Any]]
PROMPT_TOKENS = 64
_READY_S = 60.0
_GROUP_ROWS = 8
# Experts with enough work to be worth sharing.
_MOE: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_hidden_layers": 4,
}
# Numbers of ranks, and threads of each rank.
KINDS = {"1 rank, 1 thread": (1, 1), "1 rank, 2 threads": (1, 2), "2 ranks": (2, 1)}


class _Decoding(SchedulingRole):
    """Records when steps end."""

    def __init__(self, model: Path, ranks: int, threads: int, max_rows: int) -> None:
        config = _config(model, ranks, threads, max_rows)
        self.engine = build(config, "node.follower")
        super().__init__(self.engine.scheduler(config, lambda request, holding: None))
        self._loop = EventLoop(self, self.engine.runner)
        self._ends: list[float] = []
        self._added = 0

    def finished(self, batch: ScheduleBatch, outcome: StepOutcome) -> None:
        self._ends.append(time.perf_counter())

    def idle(self) -> None:
        pass

    def shortest_step_s(self, rows: int, steps: int) -> float:
        """Return the shortest time between the ends of two decode steps."""
        self.run(rows, steps)
        decodes = self._ends[-(steps - 5) :]
        return min(later - earlier for earlier, later in itertools.pairwise(decodes))

    def run(self, rows: int, steps: int) -> None:
        """Run `rows` requests to their end."""
        for request in _requests(rows, steps, self._added):
            self.scheduler.add(request)
        self._added += rows
        self._ends.clear()
        in_flight = None
        while self.scheduler.has_work or in_flight is not None:
            in_flight = self._loop.step(in_flight)


def _config(model: Path, ranks: int, threads: int, max_rows: int) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        threads=threads,
        parallel=ParallelConfig(tp=ranks),
        cache=CacheConfig(num_pages=32 * max_rows, swap_pages=0),
        scheduler=SchedulerConfig(max_running_requests=max_rows),
    )


def _requests(rows: int, steps: int, added: int) -> list[Request]:
    """Return requests with keys after those of earlier requests."""
    made = []
    for number in range(added + 1, added + rows + 1):
        tokens = [1 + (number * 31 + place) % 200 for place in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True, seed=number)
        made.append(make_request(tokens, key=number, sampling=sampling))
    return made


def steps(options: argparse.Namespace) -> Rows:
    model, best = _model(options), _Best()
    for _ in range(options.rounds):
        for kind, (ranks, threads) in KINDS.items():
            decoding = _Decoding(model, ranks, threads, max(options.rows))
            for rows in options.rows:
                best.note((kind, rows), decoding.shortest_step_s(rows, options.steps))
            decoding.engine.close()
    return [
        {
            "rows": rows,
            "kind": kind,
            "step_ms": best[kind, rows] * 1e3,
            "to_one": best[kind, rows] / best["1 rank, 1 thread", rows],
            "to_two": best[kind, rows] / best["1 rank, 2 threads", rows],
        }
        for rows in options.rows
        for kind in KINDS
    ]


def launch(options: argparse.Namespace) -> Rows:
    step = _wide_step()
    block, encoder = np.empty(block_bytes(step), np.uint8), msgspec.msgpack.Encoder()
    found = []
    for count in (1, 3, 7):
        with _followers(count) as sockets:

            def send(sockets: Sequence[socket.socket] = sockets) -> None:
                header = encoder.encode(encode(step, block))
                for each in sockets:
                    each.send(header, socket.MSG_DONTWAIT)

            spent = [_cpu_s(send) for _ in range(options.rounds * 500)]
        found.append({"followers": count, **_us(spent)})
    return found


def _us(seconds: Sequence[float]) -> dict[str, float]:
    return {"us": min(seconds) * 1e6, "p50": float(np.median(seconds)) * 1e6}


def memory(options: argparse.Namespace) -> Rows:
    loadable = open_checkpoint(_model(options))

    def num_bytes(share: Share) -> int:
        return loadable.weight_bytes(LoadTarget(torch.device("cpu"), torch.float32, share=share))

    whole = num_bytes(Share())
    return [
        {"rank": f"{rank} of {size}", "mib": own / (1 << 20), "over": own * size / whole - 1}
        for size in (2, 4)
        for rank in range(size)
        for own in [num_bytes(Share(rank, size))]
    ]


def start(options: argparse.Namespace) -> Rows:
    model, best = kept(options.models, "qwen3-small", torch.float32, QWEN3_SMALL), _Best()
    for _, ranks in itertools.product(range(options.rounds), (1, 2, 4)):
        best.note(ranks, _ready_s(model, ranks))
    return [{"ranks": n, "s": seconds, "to_one": seconds / best[1]} for n, seconds in best.items()]


def ready(options: argparse.Namespace) -> Rows:
    """Measure real follower processes, with the pages of 512 tokens."""
    model = kept(options.models, "qwen3-small", torch.float32, QWEN3_SMALL)
    pages, found = np.arange(32, dtype=np.int32).tobytes(), []
    for tp in (2, 4):
        engine = _Decoding(model, tp, 1, 2).engine
        transfer = TransferConfig(backend="tcp").model_dump_json().encode()
        for message in (StartTransfer(transfer, False, 1), OfferPaths(1)):
            engine.ask_followers(encode_message(message)).result(_READY_S)
        publish = encode_message(PublishPages(1, pages))
        spent = []
        for _ in range(options.rounds * 300):
            begun = time.perf_counter()
            engine.ask_followers(publish).result(_READY_S)
            spent.append(time.perf_counter() - begun)
        engine.close()
        found.append({"ranks": tp, **_us(spent)})
    return found


def groups(options: argparse.Namespace) -> Rows:
    """Compare groups of two nodes with two separate nodes on the same cores."""
    best = _Best()
    with tempfile.TemporaryDirectory() as root:
        model = make_checkpoint(Path(root) / "model", "qwen3_moe", **_MOE)
        for number, busy in itertools.product(range(options.rounds), (2, 1)):
            alone = [_Decoding(model, 1, 1, _GROUP_ROWS) for _ in range(busy)]
            works = [partial(each.run, _GROUP_ROWS, options.steps) for each in alone]
            best.note(("alone", busy), _elapsed_s(works))
            for each in alone:
                each.engine.close()
            directory = Path(root) / f"group-{number}-{busy}"
            best.note(("group", busy), _group_s(model, directory, busy, options.steps))
    return [
        {
            "kind": kind,
            "busy": busy,
            "rate": busy * _GROUP_ROWS * options.steps / seconds,
            "of_alone": best["alone", busy] / seconds,
        }
        for (kind, busy), seconds in best.items()
    ]


class _Best(dict[Any, float]):
    """The least of the noted values of each key."""

    def note(self, key: object, value: float) -> None:
        self[key] = min(value, self.get(key, value))


def _group_s(model: Path, directory: Path, busy: int, steps: int) -> float:
    """Return the seconds in which the first `busy` of two nodes complete their requests."""
    with running(2, directory, lambda: _config(model, 1, 1, _GROUP_ROWS)) as nodes:

        def answer(node: GroupNode) -> None:
            node.submit(*_requests(_GROUP_ROWS, steps, 0))
            node.wait()

        return _elapsed_s([partial(answer, node) for node in nodes[:busy]])


def _elapsed_s(works: Sequence[Callable[[], None]]) -> float:
    """Return the seconds until all are done, running at the same time."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(works)) as threads:
        for each in [threads.submit(work) for work in works]:
            each.result()
    return time.perf_counter() - begun


PARTS = {each.__name__: each for each in (steps, launch, memory, start, ready, groups)}


def _model(options: argparse.Namespace) -> Path:
    name, sizes = ("qwen3-small", QWEN3_SMALL) if options.small else ("qwen3-450m", QWEN3_450M)
    return kept(options.models, name, torch.float32, sizes)


def _ready_s(model: Path, ranks: int) -> float:
    """Return the seconds from the start of a node's process until it is ready."""
    flags = ["--mode=colocated", "--engine.device=cpu", "--engine.threads=1"]
    flags += [f"--engine.model={model}", f"--engine.parallel.tp={ranks}", "--server.port=0"]
    command = [sys.executable, "-m", "decode_node", *flags, "--engine.cache.num-pages=64"]
    begun = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as node:
        assert node.stderr is not None
        ready = any(": ready " in line for line in node.stderr)
        spent = time.perf_counter() - begun
        node.terminate()
    if not ready:
        raise RuntimeError(f"a node with {ranks} ranks does not get ready")
    return spent


def _wide_step(rows: int = 256, pages: int = 64) -> Step:
    """Return a decode step with this number of rows, and pages in each."""
    wide, long = np.arange(rows, dtype=np.int32), np.arange(rows)
    none, page_ids = np.empty((rows, 0), np.int32), np.arange(rows * pages, dtype=np.int32)
    batch = HostBatch(
        locations=(long,),
        page_starts=(wide * pages,),
        token_ids=wide,
        positions=wide,
        lengths=wide,
        query_starts=np.arange(rows + 1, dtype=np.int32),
        sampled=long,
        state_reads=none,
        state_writes=none,
        state_marks=wide,
        state_kept=none,
        page_ids=page_ids,
        slots=long,
        num_decodes=rows,
        seen=(),
        extends=(),
    )
    return Step(batch)


@contextlib.contextmanager
def _followers(count: int) -> Iterator[Sequence[socket.socket]]:
    """Yield a socket for each follower, whose packets a thread receives."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]

    def receive(theirs: socket.socket) -> None:
        while theirs.recv(MAX_PACKET_BYTES):
            pass

    threads = [threading.Thread(target=receive, args=(theirs,)) for _, theirs in pairs]
    for thread in threads:
        thread.start()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for ours, _ in pairs:
            ours.close()
        for thread, (_, theirs) in zip(threads, pairs, strict=True):
            thread.join()
            theirs.close()


def _cpu_s(call: Callable[[], None]) -> float:
    """Return the CPU seconds of this thread in a call, after giving other threads a turn."""
    begun = time.thread_time()
    call()
    spent = time.thread_time() - begun
    time.sleep(0)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["steps"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each engine (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a model of 3.5 MB, to try the bench")
    parser.add_argument("--models", type=Path, default=Path("build/bench-models"))
    options = parser.parse_args()
    for part in options.parts:
        rows = PARTS[part](options)
        record.show(rows)
        config = {"part": part, "small": options.small, "rounds": options.rounds}
        record.emit("ranks", config, rows)


if __name__ == "__main__":
    main()
