"""A consumer without an engine, to measure hand-offs.

It receives hand-offs from a running prefill node with the product's transfer thread, links and pair
stream, and records the time of each event. Without an engine thread, decode steps do not affect the
times. It reads every page of a prompt and then discards it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.config import EngineConfig, TransferConfig
from common.copy_map import ONE_RANK
from common.process.ipc import FrameSocket, socket_pair
from common.request import Remaining, RequestSpec
from common.requests.sampling import SamplingParams
from engine.build import Engine, build
from kvtransfer import data_paths
from kvtransfer.backends.base import PagePool
from kvtransfer.frontend_messages import PairInput
from kvtransfer.messages import HandoffAdmitted, HandoffId, Prompt
from kvtransfer.pairing import PairHello
from kvtransfer.pairs.dialer import PairDialer
from kvtransfer.pairs.streams import PairStreams
from kvtransfer.ports import (
    CompletedEvent,
    FirstTokenEvent,
    GrantCommand,
    Ints,
    NodeEvent,
    OpenCommand,
    ProducerRate,
    ProducerUp,
    ReadsEndedEvent,
)
from kvtransfer.protocol.progress import EventOutlet
from kvtransfer.transfer.consumer import ReadMetrics
from kvtransfer.transfer.device_page_bytes import page_bytes_of
from kvtransfer.transfer.paths import ComparedBytes, TransferPaths
from kvtransfer.transfer.rank_paths import RankLinks, RankOffers
from kvtransfer.transfer.sides import TransferSides, both_sides
from kvtransfer.transfer.thread import TransferThread
from node.metrics import NodeMetrics

INSTANCE = 77
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Watched:
    """The times of one hand-off in seconds.

    exposed: from the first token until the producer has confirmed that every page has landed,
    including the round trip of Done and Released.
    """

    first_token: float  # from Admitted
    exposed: float
    token: int


class Watcher:
    """A consumer of one prefill node, made by `watching`. For one event loop."""

    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        events: "asyncio.Queue[tuple[float, NodeEvent]]",
        producer: ProducerUp,
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._events = events
        self.producer = producer
        self.page_bytes = engine.pool.page_bytes
        self._handoffs = 0

    async def take(self, token_ids: Ints) -> Watched:
        """Let the producer prefill a prompt, and read all of it.

        Raises SystemExit if the hand-off fails.
        """
        self._handoffs += 1
        id = HandoffId(INSTANCE, self._handoffs, 1)
        sampling = SamplingParams(max_tokens=2, seed=1, temperature=0.0, ignore_eos=True)
        num_pages = -(-len(token_ids) // self._engine.shape.layout.page_size)
        first = num_pages * self._handoffs % (self._engine.pages.num_pages - num_pages)
        pages = np.arange(first, first + num_pages, dtype=np.int32)
        spec = RequestSpec(token_ids=token_ids.tobytes(), sampling=sampling)
        weights, budget = self._engine.weights.id, Remaining(WAIT_S)
        self._transfer.post(OpenCommand(id, self.producer.instance, weights, budget, Prompt(spec)))
        self._transfer.post(GrantCommand(id, 0, pages))
        at: dict[type, float] = {}
        token = -1
        while CompletedEvent not in at:
            when, event = await asyncio.wait_for(self._events.get(), WAIT_S)
            at[type(event)] = when
            match event:
                case FirstTokenEvent():
                    token = event.output.token
                case HandoffAdmitted() | CompletedEvent() | ProducerRate():
                    pass
                case ReadsEndedEvent():
                    pass  # it belongs to the previous hand-off
                case _:
                    raise SystemExit(f"the hand-off was not to end like this: {event}")
        first_at = at[FirstTokenEvent]
        return Watched(first_at - at[HandoffAdmitted], at[CompletedEvent] - first_at, token)


@contextlib.asynccontextmanager
async def watching(
    address: str, engine_config: EngineConfig, transfer_config: TransferConfig
) -> AsyncIterator[Watcher]:
    """Pair with the prefill node at `address`.

    The engine configuration must be the node's own, because model, pages and dtype are compared.
    """
    engine = build(engine_config)
    engine.pool.tensor.zero_()  # causes the page faults before the measurement
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[tuple[float, NodeEvent]] = asyncio.Queue()
    front_socket, thread_socket = socket_pair()
    frames: FrameSocket[PairInput] = FrameSocket(thread_socket, PairInput)

    def note() -> None:  # on the transfer thread, right after it has sent an event
        now = time.perf_counter()
        for event in transfer.take():
            loop.call_soon_threadsafe(events.put_nowait, (now, event))

    transfer = TransferThread(
        frames,
        _sides(engine, transfer_config),
        engine_late_s=lambda: 0.0,
        wake_engine=note,
    )
    metrics = NodeMetrics("decode")
    streams = PairStreams(front_socket, metrics)
    dialer = PairDialer(streams, metrics)
    dialer.dial(frozenset({address}))
    transfer.start()
    tasks = [asyncio.create_task(streams.run()), asyncio.create_task(dialer.run())]
    try:
        _, event = await asyncio.wait_for(events.get(), WAIT_S)
        if not isinstance(event, ProducerUp):
            raise SystemExit(f"the prefill node does not pair: {event}")
        yield Watcher(engine, transfer, events, event)
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(transfer.stop, WAIT_S)


def _sides(
    engine: Engine, config: TransferConfig
) -> Callable[[EventOutlet, Callable[[], None]], TransferSides]:
    pool, shape = engine.pool, engine.shape
    kv = PagePool(pool.base_address, pool.page_bytes, pool.num_pages, str(shape.device))
    tables = shape.layout.tables
    fingerprint, regions = engine.fingerprint, (kv.region,)
    hello = PairHello.of(INSTANCE, "bench", fingerprint, regions, tables.state_pages)
    backends = data_paths.backends(config, tls=False)
    pages_by_rank = shape.whole.pages_by_rank
    paths = TransferPaths(
        RankLinks(0, ONE_RANK, kv, backends, config, pages_by_rank),
        RankOffers(0, dict),
        tuple(backends),
        ComparedBytes(ONE_RANK, pages_by_rank),
    )
    contents = partial(page_bytes_of, kv)
    return both_sides(
        config, tables, hello, contents, paths, ReadMetrics(), max_unconsumed_tokens=0
    )
