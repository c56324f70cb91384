"""Messages between rank 0 of a node and its followers, except steps.

A job is work other than steps. All followers do it.

Each message is one packet of a socket pair that rank 0 has created. No other process has an end of
it.
"""

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Literal, TypeAlias

import msgspec

MAX_PACKET_BYTES = 128 << 10  # below the kernel's limit for a packet
MOST_PAGES = 4096  # pages per CopyPages or EraseSlots
_ITEM_BYTES = {"int32": 4, "int64": 8, "float32": 4}


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Load a part of the model. The packet has the memories of this rank's collectives, see
    `open_groups`, and the pidfds of all other ranks, by rank. With several hosts it has no
    descriptors.

    Attributes:
        config: EngineConfig as JSON. `collectives` is not auto.
        store: directory for the rendezvous of gloo and NCCL. With several hosts, HOST:PORT.
        log_level, log_format: settings of rank 0's log.
    """

    rank: int
    config: bytes
    store: str
    log_level: str
    log_format: Literal["text", "json"]


class MeasureRank(msgspec.Struct, frozen=True, tag=True):
    """Measure the GPU memory that steps need in addition to weights and pages. All ranks do this at
    the same time, because it contains collectives.

    Attributes:
        free_bytes: memory for steps that every rank has. It determines the sizes of steps.
    """

    free_bytes: int


class StartSteps(msgspec.Struct, frozen=True, tag=True):
    """Allocate pages, then run steps. The packet has the memory of the blocks of steps.

    Attributes:
        num_tokens: tokens of the largest forward.
        block_bytes: see StepRing.
    """

    num_pages: int
    num_host_pages: int
    num_slots: int
    max_pages: int
    max_drafts: int
    num_tokens: int
    block_bytes: int


class StepHeader(msgspec.Struct, frozen=True, array_like=True, tag="Launch"):
    """The first fields of a Launch, for processes that forward steps without decoding them.

    Attributes:
        tensors: dtype, shape and offset in the block, per tensor, by part of the step.
    """

    tensors: tuple[
        tuple[tuple[Literal["int32", "int64", "float32"], tuple[int, ...], int], ...], ...
    ]

    @property
    def block_bytes(self) -> int:
        """Return the number of bytes of the block that tensors use."""
        tensors = chain.from_iterable(self.tensors)
        ends = (start + _ITEM_BYTES[dtype] * prod(shape) for dtype, shape, start in tensors)
        return max(ends, default=0)


class SampleStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Sample the newest step now, without waiting for the next one. For the first of two pipeline
    stages."""


class CaptureGraph(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Capture the CUDA graph of steps of one shape. Sent between steps, because it contains
    collectives.

    Attributes:
        shape: see GraphShape.
    """

    shape: tuple[int, int, bool, bool]


class ReadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read this rank's part of an adapter. The result is its id.

    Attributes:
        reading: number of this reading, for DropAdapter.
        path: path of the adapter's directory, as in AdapterDirectory.read.
    """

    reading: int
    path: str


class DropAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drop one reading of an adapter. Does nothing if the reading failed."""

    reading: int


class CopyPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Copy device[i] -> host[i], or the other way round, when all steps sent before are finished.

    Attributes:
        device_pages, host_pages: int32, at most MOST_PAGES.
    """

    to_host: bool
    device_pages: bytes
    host_pages: bytes


class RefillWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Replace the weights by those of a directory of the same model. No step is sent meanwhile.

    Attributes:
        weights: WeightsId of the directory. Other hosts compare it with their files.
    """

    directory: str
    weights: bytes


class DrainWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the memory of the weights to the operating system, until RefillWeights."""


class MoveExperts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read other experts from the files of the current weights. No step is sent meanwhile.

    Attributes:
        layers: new slots of all ranks (int16) by layer, see ExpertPlacement.
    """

    layers: dict[str, bytes]


class ReleasePools(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the memory of all pages to the operating system. No page has a holder."""


class RestorePools(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Allocate the memory of all pages again."""


class ReplaceHostPages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Use this number of host pages from now on. No step and no copy is in flight."""

    num_pages: int


class OpenPageFiles(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Open this rank's page files.

    Attributes:
        directory: directory of rank 0, which has locked it.
        version: version of whole pages, see version_of.
        num_bytes: size of the files.
    """

    directory: str
    version: bytes
    num_bytes: int


_Record: TypeAlias = tuple[bytes, int, int, int, int, int]  # see PageRecord


class WriteSlots(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write host pages into slots. The result has one byte per page: 0, or the number of its
    error."""

    writes: Sequence[tuple[int, int, _Record]]  # see SlotWrite


class ReadSlots(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read slots into host pages, if the slots have records with these identities. The result is as
    for WriteSlots."""

    reads: Sequence[tuple[int, int]]  # see SlotRead
    identities: Sequence[int]


class EraseSlots(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Mark slots (at most MOST_PAGES) as empty, after all earlier writes."""

    slots: Sequence[int]


class ClearSlots(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Mark all slots as empty, after all earlier writes."""


class TransferJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Do a part of hand-offs, as described by `body`. The engine does not decode it.

    Attributes:
        steps: number of steps that must be finished before.
    """

    steps: int
    body: bytes


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Send a RankReport at once."""


class EndRanks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Graceful shutdown. The last message. If rank 0 fails, its socket is closed without it."""


class RankStarted(msgspec.Struct, frozen=True, tag=True):
    """The rank opens its collectives next. Sent only with several hosts. The first ranks wait for
    it before they open theirs."""


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """The rank's part of the model is in memory.

    Attributes:
        free_bytes: memory left for steps and pages.
        pid: process id of the rank, on its host.
        fingerprint: fingerprint of the model files of this host. Set only by the first rank of each
            host other than rank 0's, otherwise empty.
    """

    free_bytes: int
    pid: int
    fingerprint: dict[str, str]


class RankMeasured(msgspec.Struct, frozen=True, tag=True):
    """The reply to MeasureRank.

    Attributes:
        free_bytes: memory left for pages.
    """

    free_bytes: int


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """The rank is ready for steps."""


class JobDone(msgspec.Struct, frozen=True, tag=True):
    """The end of a job.

    Attributes:
        error: "": the job succeeded.
    """

    number: int
    error: str = ""
    result: bytes = b""


class RankReport(msgspec.Struct, frozen=True, tag=True):
    """The reply to a Ping.

    Attributes:
        steps: number of steps that the rank has finished.
        memory_bytes: resident memory of its process.
    """

    steps: int
    memory_bytes: int


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a rank that fails.

    Attributes:
        config: whether it is a configuration error, which the user can correct.
    """

    error: str
    config: bool


ToFollower: TypeAlias = StartRank | MeasureRank | StartSteps
FileJob: TypeAlias = OpenPageFiles | WriteSlots | ReadSlots | EraseSlots | ClearSlots
Job: TypeAlias = (
    ReadAdapter
    | DropAdapter
    | CopyPages
    | RefillWeights
    | DrainWeights
    | MoveExperts
    | ReleasePools
    | RestorePools
    | ReplaceHostPages
    | FileJob
    | TransferJob
)


class RankJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A job of all followers. Each one replies with a JobDone of this number."""

    number: int
    job: Job


FromFollower: TypeAlias = (
    RankStarted | RankLoaded | RankMeasured | RankReady | JobDone | RankReport | RankFailed
)
