"""The process of a follower, that is, of any rank except rank 0.

It has a part of the weights and pages, and no requests. `node.follower` is its entry point.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

import msgspec

from common import logs
from common.config import EngineConfig
from common.errors import ConfigError, RankLost
from common.logs import kv
from engine.adapters.adapters import adapter_directory
from engine.batch.graph_shapes import GraphShape
from engine.build import measured_room, pages_of
from engine.footprint import largest_forward
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.load import (
    fingerprint_of,
    keep_invariance,
    load_part,
    named_weights,
    open_model,
    usable_bytes,
)
from engine.models import Model
from engine.models.decoder import Decoder
from engine.rank_jobs import FollowerJobs, RankWeights, TransferTaker
from engine.ranks import Share
from engine.ranks.forking import forked
from engine.ranks.meeting import meeting_of
from engine.ranks.messages import (
    MAX_PACKET_BYTES,
    CaptureGraph,
    EndRanks,
    FromFollower,
    MeasureRank,
    Ping,
    RankFailed,
    RankJob,
    RankLoaded,
    RankMeasured,
    RankReady,
    RankStarted,
    ReplaceHostPages,
    SampleStep,
    StartRank,
    StartSteps,
    ToFollower,
)
from engine.ranks.rank_groups import RankGroups, open_groups
from engine.ranks.ring import StepRing
from engine.runner.forwards import Forwards, ForwardSizes
from engine.runner.graphs import CudaRecorder
from engine.runner.launch_message import Launch
from engine.runner.ranked import FollowedSteps
from engine.runner.stream import DeviceStream, StreamEvent, open_stream
from engine.sizing import resolve_shape, whole_layout
from engine.update import WeightsInMemory, WeightSource

_MAX_FILES = 130  # the pidfds of all other ranks, and two shared memories

# Arguments: the rank's share, its pages, and the layout of the whole model.
OpenTransfer: TypeAlias = Callable[[Share, KVPool, KVLayout], TransferTaker]

log = logging.getLogger(__name__)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFollower)
_step_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Launch | SampleStep | CaptureGraph | EndRanks | Ping | RankJob
)
_encoder = msgspec.msgpack.Encoder()


class FollowerStream:
    """A stream that reports failed steps, because no caller waits for most of its steps.

    Args:
        on_error: called on the stream's thread if a step fails.
    """

    def __init__(self, stream: DeviceStream, on_error: Callable[[Exception], None]) -> None:
        self._stream = stream
        self._on_error = on_error

    def submit(self, work: Callable[[], None]) -> StreamEvent:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                self._on_error(error)
                raise

        return self._stream.submit(guarded)

    def close(self) -> None:
        self._stream.close()


def serve(steps: socket.socket, open_transfer: OpenTransfer) -> None:
    """Load the model, then run steps until rank 0 closes its end."""
    message, files = _receive(steps)
    if not isinstance(message, StartRank):
        return
    logs.setup(f"rank {message.rank}", message.log_level, message.log_format)
    config = EngineConfig.model_validate_json(message.config)
    meeting = meeting_of(config.parallel, message.store)
    if config.parallel.hosts > 1:
        _send(steps, RankStarted())
    ranks = open_groups(config.parallel, message.rank, files, meeting)
    share = ranks.share
    opened = open_model(config, message.rank)
    leads_host = message.rank > 0 and config.parallel.place(message.rank) == 0
    weights_id = named_weights(opened) if leads_host else None
    model, bank, region = load_part(config, opened, share)
    fingerprint = {} if weights_id is None else fingerprint_of(config, opened, weights_id.result())
    _send(steps, RankLoaded(usable_bytes(model.device, config), os.getpid(), fingerprint))
    keep_invariance(config, model, share)
    message, files = _receive(steps)
    if isinstance(message, MeasureRank):
        shape = resolve_shape(
            config, model.spec, dtype=model.dtype, free=message.free_bytes, share=share
        )
        _record_experts(config, model, share, largest_forward(shape, config.scheduler.num_slots))
        _send(steps, RankMeasured(measured_room(config, model, bank, share, shape)))
        message, files = _receive(steps)
    if not isinstance(message, StartSteps):
        return
    _record_experts(config, model, share, message.num_tokens)
    pool, host_pool = pages_of(config, model, share, message.num_pages, message.num_host_pages)
    sizes = ForwardSizes(message.num_slots, message.max_pages, message.max_drafts)
    stream = FollowerStream(open_stream(model.device), partial(_fail_at, steps))
    # Rank 0 decides whether there are graphs, because another role may need them.
    has_graphs = model.device.type == "cuda" and share.stage is None
    recorder = CudaRecorder() if has_graphs else None
    forwards = Forwards(model, pool, host_pool, bank, stream, sizes, recorder)
    ring = StepRing(files[0], message.block_bytes)
    os.close(files[0])
    _send(steps, RankReady())
    adapters = adapter_directory(config.lora, model)
    source = WeightSource.of(opened.directory, opened.loadable)
    memory = WeightsInMemory(model, opened.loadable, region)
    weights = RankWeights(config, memory, source, leads_host)
    whole = whole_layout(config, model.spec, model.dtype, model.device)
    transfer = open_transfer(share, pool, whole)
    jobs = FollowerJobs(share, steps, pool, host_pool, adapters, weights, transfer)
    follow(steps, ring, forwards, ranks, jobs)
    transfer.close()


def follow(
    steps: socket.socket, ring: StepRing, forwards: Forwards, ranks: RankGroups, jobs: FollowerJobs
) -> None:
    """Run the steps and jobs of rank 0 until it ends.

    Never waits for a step, because rank 0 is at most a few steps ahead. Waits for the capture of a
    graph.

    Args:
        forwards: forwards over a stream that ends the process if a step fails.
    """
    followed = FollowedSteps(forwards, ranks, ring)
    while packet := steps.recv(MAX_PACKET_BYTES):
        match _step_decoder.decode(packet):
            case Launch() as launch:
                followed.run(launch, jobs.adapter)
            case SampleStep():
                followed.sample_now()
            case CaptureGraph(shape=shape):
                followed.forwards.capture(GraphShape(*shape), choice=False)
            case Ping():
                jobs.report(followed.sent)
            case RankJob(number=number, job=ReplaceHostPages(num_pages=num_pages)):
                followed.use(jobs.with_host_pages(number, num_pages, followed.forwards))
            case EndRanks():
                return
            case RankJob(number=number, job=job):
                jobs.take(number, job, followed.sent)


def _record_experts(config: EngineConfig, model: Model, share: Share, num_tokens: int) -> None:
    """Record the experts of this pipeline stage, if they are to be returned. Without stages, rank 0
    does."""
    if config.routed_experts.enabled and share.stage is not None:
        assert isinstance(model, Decoder)
        if model.routed is None:
            model.record_experts(num_tokens)


def main(descriptors: Sequence[int], open_transfer: OpenTransfer) -> NoReturn:
    """Serve until rank 0 ends, then end this process.

    Args:
        descriptors: descriptors of the sockets to rank 0. If there are several, a fork serves each.
        open_transfer: opens this rank's part of hand-offs.
    """
    # Only rank 0 decides when to end. Both signals may be sent to the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for each in descriptors:
        os.set_inheritable(each, False)
    descriptor = descriptors[0] if len(descriptors) == 1 else forked(descriptors)
    steps = socket.socket(fileno=descriptor)
    try:
        serve(steps, open_transfer)
    except (ConnectionResetError, BrokenPipeError):
        log.info("rank 0 ended before it read all replies")
    except ConfigError as error:
        log.error("the rank cannot start %s", kv(reason=error))
        _fail(steps, RankFailed(str(error), config=True), 2)
    except Exception as error:  # noqa: BLE001  the end of the process
        _fail_at(steps, error)
    _leave(0)


def _fail_at(steps: socket.socket, error: Exception) -> NoReturn:
    # A traceback of where another rank was lost does not help.
    log.error("the rank failed", exc_info=None if isinstance(error, RankLost) else error)
    _fail(steps, RankFailed(f"{type(error).__name__}: {error}"[:2000], config=False), 1)


def _fail(steps: socket.socket, last: RankFailed, exit_code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # rank 0 itself may have failed
        _send(steps, last)
    _leave(exit_code)


def _leave(exit_code: int) -> NoReturn:
    """End the process without waiting for its forward stream."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(exit_code)


def _receive(steps: socket.socket) -> tuple[ToFollower | None, Sequence[int]]:
    """Return a message and its descriptors. None: rank 0 has ended."""
    packet, files, _, _ = socket.recv_fds(steps, MAX_PACKET_BYTES, _MAX_FILES)
    for file in files:
        os.set_inheritable(file, False)
    return (_decoder.decode(packet) if packet else None), files


def _send(steps: socket.socket, message: FromFollower) -> None:
    steps.send(_encoder.encode(message))
