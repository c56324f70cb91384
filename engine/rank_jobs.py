"""Work of all ranks other than steps: copies of pages, adapters, new weights, release of memory.

Rank 0 does its part, sends a job to the followers, and continues when all are done.
"""

import contextlib
import itertools
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from common.config import EngineConfig
from common.errors import ConfigError, EngineFault, InvalidRequest, ServingError
from common.process.resources import resident_bytes
from common.requests.namespace import AdapterId, WeightsId
from engine.adapters.library import AdapterSource
from engine.adapters.stored import LoraAdapter
from engine.batch.batch import PageCopies
from engine.kv_cache.kv import HostPool, KVPool
from engine.memory_release import PageMemory, memory_of
from engine.models import content, open_checkpoint, stored_of
from engine.rank_files import RankFiles, when_all
from engine.ranks import Share
from engine.ranks.expert_placement import LayerSlots
from engine.ranks.job_queue import JobFailed
from engine.ranks.messages import (
    MAX_PACKET_BYTES,
    MOST_PAGES,
    CopyPages,
    DrainWeights,
    DropAdapter,
    FileJob,
    Job,
    JobDone,
    MoveExperts,
    RankReport,
    ReadAdapter,
    RefillWeights,
    ReleasePools,
    RestorePools,
    TransferJob,
)
from engine.ranks.processes import Followers
from engine.runner.copier import Copier, PageCopier
from engine.runner.forwards import Forwards
from engine.runner.gpu import use_gpu
from engine.runner.ranked import SentSteps
from engine.runner.stream import StreamEvent
from engine.update import WeightsInMemory, WeightSource

_READ_S = 600.0  # seconds for an adapter on a slow disk
_MEMORY_S = 60.0  # seconds until all ranks have released or allocated their pages
_MOST_MOVED_BYTES = MAX_PACKET_BYTES // 2  # the slots in one MoveExperts

_encoder = msgspec.msgpack.Encoder()


class AdaptersOfRanks:
    """An AdapterSource that makes every rank read its part.

    Args:
        own: source of rank 0's part.
    """

    def __init__(self, own: AdapterSource, followers: Followers) -> None:
        self._own = own
        self._followers = followers
        self._readings = itertools.count()

    def read(self, path: str) -> LoraAdapter:
        adapter, reading = self._own.read(path), next(self._readings)
        # Steps name an adapter by its id, so followers keep it as long as rank 0 does.
        weakref.finalize(adapter, self._drop, reading).atexit = False
        asked = self._followers.ask(ReadAdapter(reading, path))
        try:
            ids = asked.result(_READ_S)
        except JobFailed as error:
            raise InvalidRequest(str(error)) from error
        except TimeoutError as error:
            late = f"lora_path: a rank has not read it within {_READ_S:.0f} s"
            raise InvalidRequest(late) from error
        if any(each != adapter.id for each in ids):
            raise InvalidRequest("lora_path: the files changed while they were read")
        return adapter

    def _drop(self, reading: int) -> None:
        with contextlib.suppress(EngineFault):  # the followers may have ended
            self._followers.ask(DropAdapter(reading))


class CopierOfRanks:
    """A Copier of the pages of all ranks.

    Args:
        own: copier of rank 0's pages. Owned by this object.
    """

    def __init__(self, own: Copier, followers: Followers) -> None:
        self.notify: Callable[[], None] = lambda: None
        self._own = own
        self._followers = followers

    def save(self, copies: PageCopies) -> Future[None]:
        return self._joined(self._own.save(copies), copies, to_host=True)

    def load(self, copies: PageCopies) -> Future[None]:
        return self._joined(self._own.load(copies), copies, to_host=False)

    def close(self) -> None:
        self._own.close()

    def _joined(self, own: Future[None], copies: PageCopies, *, to_host: bool) -> Future[None]:
        def asked(start: int) -> "Future[Sequence[bytes]]":
            some = slice(start, start + MOST_PAGES)
            pages = [
                each[some].astype(np.int32).tobytes()
                for each in (copies.device_pages, copies.host_pages)
            ]
            return self._followers.ask(CopyPages(to_host, *pages))

        starts = range(0, len(copies.device_pages), MOST_PAGES)
        whole = when_all("a copy of pages", [own, *map(asked, starts)], lambda: None)
        whole.add_done_callback(lambda _: self.notify())
        return whole


class WeightsOfRanks:
    """The weights of the followers, see OtherRanks."""

    def __init__(self, followers: Followers) -> None:
        self.on_other_hosts = followers.parallel.hosts > 1
        self._followers = followers

    def refill(self, directory: Path, weights: WeightsId) -> "Future[Any]":
        return self._followers.ask(RefillWeights(str(directory), weights))

    def drain(self) -> "Future[Any]":
        return self._followers.ask(DrainWeights())

    def move_experts(self, moves: Mapping[str, LayerSlots]) -> Sequence["Future[Any]"]:
        packed = {layer: np.array(slots, np.int16).tobytes() for layer, slots in moves.items()}
        return [self._followers.ask(MoveExperts(dict(some))) for some in _in_packets(packed)]


def _in_packets(layers: Mapping[str, bytes]) -> Iterator[Sequence[tuple[str, bytes]]]:
    """Divide layers so that each part fits in a packet."""
    some: list[tuple[str, bytes]] = []
    for each in layers.items():
        if some and sum(len(slots) for _, slots in (*some, each)) > _MOST_MOVED_BYTES:
            yield some
            some = []
        some.append(each)
    yield some


class MemoryOfRanks:
    """A PageMemory of all ranks.

    Args:
        own: memory of rank 0's pages.
    """

    def __init__(self, own: PageMemory, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    def release(self) -> None:
        asked = self._followers.ask(ReleasePools())
        self._own.release()
        asked.result(_MEMORY_S)

    def restore(self) -> None:
        self._own.restore()
        self._followers.ask(RestorePools()).result(_MEMORY_S)


@dataclass(slots=True, eq=False)
class RankWeights:
    """The weights of a follower.

    Attributes:
        compares: whether the files must be compared with rank 0's, because they are on another
            host.
    """

    config: EngineConfig
    memory: WeightsInMemory
    source: WeightSource
    compares: bool

    def refill(self, directory: Path, weights: WeightsId) -> None:
        config = self.config
        there = open_checkpoint(directory, config.model_backend, config.speculative)
        if self.compares and content(stored_of(there, directory)) != weights:
            host = socket.gethostname()
            raise ConfigError(f"{directory} on {host} has other weights than on the first host")
        source = WeightSource.of(directory, there)
        self.memory.refill(there)
        self.source = source

    def move_experts(self, moves: Mapping[str, LayerSlots]) -> None:
        """Read the experts of other slots, by layer."""
        if self.compares and not self.source.is_unchanged:
            raise ConfigError(
                f"{self.source.directory}: the files have changed since they were read"
            )
        self.memory.move_experts(self.source.loadable, moves)


class JobReply(Protocol):
    """Reports the end of a job. Any thread, once."""

    def __call__(self, result: bytes = b"", error: str = "") -> None: ...


class TransferTaker(Protocol):
    """A follower's part of hand-offs."""

    def take(self, body: bytes, steps: StreamEvent | None, reply: JobReply) -> None:
        """Begin a TransferJob, without waiting."""
        ...

    def close(self) -> None:
        """Start to close. Does not wait."""
        ...


class FollowerJobs:
    """The jobs of a follower. Copies, hand-offs and all other jobs have one thread each, which
    works in order.

    Args:
        steps: the socket to rank 0.
        pool, host_pool: this rank's pages.
        adapters: source of this rank's parts.
    """

    def __init__(
        self,
        share: Share,
        steps: socket.socket,
        pool: KVPool,
        host_pool: HostPool,
        adapters: AdapterSource,
        weights: RankWeights,
        transfer: TransferTaker,
    ) -> None:
        self._share = share
        self._steps = steps
        self._pool = pool
        self._host_pool = host_pool
        self._copier: Copier = PageCopier(pool, host_pool)
        self._files = RankFiles(share, host_pool.tensor)
        self._source = adapters
        self._weights = weights
        self._transfer = transfer
        device = pool.tensor.device
        use = partial(use_gpu, device) if device.type == "cuda" else None
        self._copying = ThreadPoolExecutor(1, "copy-pages", use)
        self._working = ThreadPoolExecutor(1, "jobs", use)
        self._readings: dict[int, LoraAdapter] = {}
        self._adapters: dict[AdapterId, list[LoraAdapter]] = {}  # one entry per reading

    def adapter(self, identity: AdapterId) -> LoraAdapter:
        return self._adapters[identity][0]

    def with_host_pages(self, number: int, num_pages: int, forwards: Forwards) -> Forwards:
        self._copier.close()
        layout, device = self._pool.layout, self._pool.tensor.device
        self._host_pool = HostPool(layout, num_pages, device)
        self._copier = PageCopier(self._pool, self._host_pool)
        self._reply(number)
        return forwards.with_same_graphs(self._host_pool)

    def report(self, steps: SentSteps) -> None:
        self._steps.send(_encoder.encode(RankReport(steps.num_done, resident_bytes())))

    def take(self, number: int, job: Job, steps: SentSteps) -> None:
        reply = partial(self._reply, number)
        match job:
            case TransferJob(steps=before, body=body):
                self._transfer.take(body, steps.after(before), reply)
            case CopyPages():
                newest = steps.newest
                self._copying.submit(self._do, reply, lambda: self._copy(job, newest))
            case _ if isinstance(job, FileJob):
                self._working.submit(self._do, reply, lambda: self._files.take(job, reply))
            case _:
                self._working.submit(self._do, reply, lambda: self._done(job))

    def _done(self, job: Job) -> bytes:
        match job:
            case ReadAdapter(reading=reading, path=path):
                return self._read(reading, path)
            case DropAdapter(reading=reading):
                self._drop(reading)
            case RefillWeights(directory=directory, weights=weights):
                self._weights.refill(Path(directory), weights)
            case DrainWeights():
                self._weights.memory.release()
            case MoveExperts(layers=layers):
                self._weights.move_experts({name: self._slots(raw) for name, raw in layers.items()})
            case ReleasePools():
                memory_of(self._pool, self._host_pool).release()
            case RestorePools():
                memory_of(self._pool, self._host_pool).restore()
        return b""

    def _slots(self, packed: bytes) -> LayerSlots:
        by_rank = np.frombuffer(packed, np.int16).reshape(self._share.size, -1)
        return tuple(tuple(experts) for experts in by_rank.tolist())

    def _do(self, reply: JobReply, work: Callable[[], bytes | None]) -> None:
        """Do a job, and reply with its result. None: the job replies itself."""
        try:
            if (result := work()) is not None:
                reply(result)
        except Exception as error:  # noqa: BLE001  every end of a job is a reply
            reply(error=_message(error))

    def _reply(self, number: int, result: bytes = b"", error: str = "") -> None:
        self._steps.send(_encoder.encode(JobDone(number, error, result)))

    def _copy(self, job: CopyPages, running: StreamEvent | None) -> bytes:
        if running is not None:
            running.wait()
        device, host = (
            np.frombuffer(each, np.int32) for each in (job.device_pages, job.host_pages)
        )
        copy = self._copier.save if job.to_host else self._copier.load
        copy(PageCopies(device, host)).result()
        return b""

    def _read(self, reading: int, path: str) -> bytes:
        adapter = self._source.read(path)
        self._readings[reading] = adapter
        self._adapters.setdefault(adapter.id, []).append(adapter)
        return adapter.id

    def _drop(self, reading: int) -> None:
        adapter = self._readings.pop(reading, None)
        if adapter is None:
            return  # the adapter could not be read
        others = self._adapters[adapter.id]
        others.remove(adapter)
        if not others:
            del self._adapters[adapter.id]


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"
