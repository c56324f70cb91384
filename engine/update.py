"""Weight updates: other weights of the same shape replace the weights of the served model.

They are read from a directory while the engine serves, or received from another node, and applied
while the engine is paused. The memory of the weights can also be released then. A separate thread
does all work, so that the event loop continues. Weights are identified by their content.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from common.config import EngineConfig
from common.errors import ConfigError, EngineFault, FailedPrecondition, InvalidRequest, Overloaded
from common.requests.namespace import WeightsId
from engine.models import LoadableModel, Model, open_checkpoint
from engine.models.checkpoint import UNREADABLE, FileStamps, below, content, file_stamps, refusing
from engine.models.choice import stored_of
from engine.models.one_file import OneFile, ReceivedFile
from engine.ranks.expert_placement import LayerSlots
from engine.sizing import free_bytes
from kernels.cuda.driver import OutOfDeviceMemory
from kernels.cuda.virtual_memory import Region

_FLAG = "engine.weights_dir"
_NAMED = "model_path"  # the field with which clients name a directory of weights
_NOWHERE = (
    "weights: these came from another node and were replaced by newer ones, so they cannot be read "
    "again"
)
_RANKS_S = 3600.0  # seconds to wait for the other ranks, whose disks may be slow
# Numbers that are not tensors of the model. Values derived from them are not recomputed.
_FIXED = (".k_scale", ".v_scale")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeightSource:
    """The location from which weights are read.

    stamps: file stamps when this object was created.
    received: file of weights from another node. It exists until it is closed.
    """

    directory: Path
    loadable: LoadableModel
    stamps: FileStamps
    received: ReceivedFile | None = None

    @classmethod
    def of(
        cls, directory: Path, loadable: LoadableModel, received: ReceivedFile | None = None
    ) -> "WeightSource":
        return cls(directory, loadable, file_stamps(directory), received)

    @property
    def is_unchanged(self) -> bool:
        """Return whether size and time of the files have not changed since this object was
        created."""
        return file_stamps(self.directory) == self.stamps

    def close(self) -> None:
        """Release a received file. Nothing is read afterwards."""
        if self.received is not None:
            self.received.close()


@dataclass(frozen=True, slots=True, eq=False)
class WeightsInMemory:
    """The weights of one rank in memory. One thread at a time may change them, while no step is in
    flight.

    Attributes:
        served: the checkpoint with which the model was loaded.
        region: see LoadedModel.
    """

    model: Model
    served: LoadableModel
    region: Region | None = None

    def refill(self, loadable: LoadableModel) -> None:
        """Replace the weights by those of a checkpoint. Raise as LoadableModel.refill does."""
        self.map()
        loadable.refill(self.model)
        self._settle()

    def move_experts(self, loadable: LoadableModel, moves: Mapping[str, LayerSlots]) -> None:
        """Read the experts of other slots, by layer, from the current weights' checkpoint."""
        loadable.move_experts(self.model, moves)
        self._settle()

    def release(self) -> None:
        """Return the memory to the operating system, until `refill`."""
        self.served.drain(self.model)
        if self.region is not None:
            self.region.release()

    def map(self) -> None:
        """Allocate released memory again. Raise OutOfDeviceMemory if there is not enough."""
        if self.region is not None:
            self.region.map()

    def _settle(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


class OtherRanks(Protocol):
    """The weights of the other ranks. Calls run concurrently with this rank's part."""

    def refill(self, directory: Path, weights: WeightsId) -> Future[Any]:
        """Replace the weights by those of a directory.

        The future fails with EngineFault if a rank cannot.
        """
        ...

    def move_experts(self, moves: Mapping[str, LayerSlots]) -> Sequence[Future[Any]]:
        """Make the other ranks read the experts of other slots. The futures fail as in `refill`."""
        ...

    @property
    def on_other_hosts(self) -> bool: ...

    def drain(self) -> Future[Any]:
        """Return their memory to the operating system."""
        ...


class WeightUpdater:
    """The current weights and their updates. Engine thread only.

    Args:
        directory: directory of the current weights.
        others: None: this process has the whole model.
    Attributes:
        id: id of the weights in use.
        whole: False: the weights are a mix of two versions, or were released. Another thread
            changes `id` and `whole`, while the engine is paused.
        notify: called by another thread when an operation is done.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        weights: WeightsId,
        memory: WeightsInMemory,
        others: OtherRanks | None = None,
    ) -> None:
        self._config = config
        self._memory = memory
        self._others = others
        root = config.weights_dir
        self._root = None if root is None else root.resolve()
        self._worker = ThreadPoolExecutor(1, "weights")
        self._under_way = False
        self._prepared: tuple[WeightsId, WeightSource] | None = None
        self._directory = directory
        # Source of the current weights. None: not available any more.
        self._source: WeightSource | None = WeightSource.of(directory, memory.served)
        # Only for the thread that reads them.
        self._exported: tuple[WeightSource, OneFile] | None = None
        self.id = weights
        self.whole = True
        self.notify: Callable[[], None] = lambda: None

    def prepare(self, path: str) -> Future[WeightsId]:
        """Read and check all bytes of the weights at `path`, and return their id. `put` may follow.

        The future fails with InvalidRequest if they do not exist or belong to another model.

        Raises:
            InvalidRequest: the path is outside the directory of weights, or this node has none.
            Overloaded: another update is in progress.
        """
        if self._root is None:
            raise InvalidRequest(f"model_path: this node has no {_FLAG}")
        self._check_idle()
        directory = below(self._root, path, _NAMED, _FLAG)
        return self._begin(lambda: self._look_through(directory, _NAMED, f"{self._root}/"))

    def receive(self) -> ReceivedFile:
        """Create a file for weights that are read from another node. The caller passes it to
        `prepare_received`, or closes it.

        If the current weights were also received, their file is released.

        Raises:
            Overloaded: another update is in progress.
            FailedPrecondition: the file cannot be created, or other hosts could not read it.
        """
        if self._others is not None and self._others.on_other_hosts:
            raise FailedPrecondition(
                "weights: this node has ranks on other hosts, which read them from directories only"
            )
        self._check_idle()
        if self._source is not None and self._source.received is not None:
            self._forget_source()
        try:
            return ReceivedFile(self._directory)
        except OSError as error:
            raise FailedPrecondition(
                f"weights: there is not enough memory for them: {error}"
            ) from error

    def prepare_received(self, received: ReceivedFile, named: str) -> Future[WeightsId]:
        """Check received weights as `prepare` does. Takes ownership of `received`.

        Args:
            named: the node that exported them.
        Raises:
            Overloaded: another update is in progress. `received` is then closed.
        """
        try:
            self._check_idle()
        except Overloaded:
            received.close()
            raise
        hidden = f"{received.directory}: "
        return self._begin(lambda: self._look_through(received.directory, named, hidden, received))

    def exported(self) -> OneFile:
        """Return the current weights as one file, for another node. Reads the headers of files.

        May be called on any thread, but always on the same one. Raise FailedPrecondition if the
        weights cannot be read.
        """
        source = self._source
        if source is None or not self.whole:
            raise FailedPrecondition(_NOWHERE if self.whole else "weights: they are incomplete")
        if self._exported is not None and self._exported[0] is source:
            return self._exported[1]
        try:
            with source.received or nullcontext():
                stored = stored_of(source.loadable, source.directory)
            file = OneFile(stored, source.received)
            self._exported = source, file
            return file
        except (ConfigError, *UNREADABLE) as error:
            raise FailedPrecondition(f"weights: they cannot be read again: {error}") from error

    def put(self, weights: WeightsId) -> Future[None]:
        """Apply the weights that were prepared last.

        The future fails with FailedPrecondition if they can no longer be read. `whole` then states
        whether the current weights are still complete.

        Raises:
            FailedPrecondition: other weights were prepared last, or none.
            Overloaded: another update is in progress.
        """
        self._check_idle()
        prepared = self._prepared
        if prepared is None or prepared[0] != weights:
            raise FailedPrecondition("these weights were not prepared")
        return self._begin(lambda: self._put(*prepared))

    def check_drainable(self) -> None:
        """Raise FailedPrecondition if the memory of the weights cannot be released."""
        if self._memory.model.device.type != "cpu" and self._memory.region is None:
            raise FailedPrecondition(
                "weights: GPU memory is released only with --engine.memory-saver"
            )
        if self._source is None:
            raise FailedPrecondition(_NOWHERE)

    def release(self) -> Future[None]:
        """Release the memory of the weights to the operating system, until `restore`. Requires
        `check_drainable`.

        Raises:
            Overloaded: another update is in progress, or the weights are not whole.
        """
        self._check_idle()
        if not self.whole:
            raise Overloaded("weights: they are incomplete")
        return self._begin(self._release)

    def restore(self) -> Future[None]:
        """Read the weights again from their source. The future fails with FailedPrecondition if the
        source now has other weights, or none.

        Raises:
            Overloaded: another update is in progress.
        """
        self._check_idle()
        return self._begin(self._restore)

    def move_experts(self, moves: Mapping[str, LayerSlots]) -> Future[None] | None:
        """Make all ranks read the experts of other slots from the source of the current weights. No
        step may be in flight or begin until the future is done.

        Returns:
            None if the weights are being updated, are not whole, or cannot be read again. Nothing
                has changed then. The future fails if the experts are incomplete. Then the node must
                end.
        """
        source = self._source
        if self._under_way or not self.whole or source is None or not source.is_unchanged:
            return None
        return self._worker.submit(self._move_experts, source, moves)

    def close(self) -> None:
        """Start no further work, and close the sources."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        if not self._under_way:
            self._forget_prepared()
            self._forget_source()

    def _check_idle(self) -> None:
        if self._under_way:
            raise Overloaded("another weight update is already running")

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        self._under_way = True
        future = self._worker.submit(work)

        def done(_: Future[T]) -> None:
            self._under_way = False
            self.notify()

        future.add_done_callback(done)
        return future

    def _look_through(
        self, directory: Path, named: str, hidden: str, received: ReceivedFile | None = None
    ) -> WeightsId:
        """Check all weights of a directory. `put` may follow.

        Args:
            hidden: text to remove from error messages, such as the path of the directory.
            received: file that `directory` belongs to. It is closed if the weights are refused.
        Raises:
            InvalidRequest: they cannot replace the current weights.
        """
        with ExitStack() as refused:
            if received is not None:
                refused.callback(received.close)
            with refusing(named, hidden):
                found, weights = self._fitting(directory)
            self._forget_prepared()
            self._prepared = weights, WeightSource.of(directory, found, received)
            refused.pop_all()
        return weights

    def _fitting(self, directory: Path) -> tuple[LoadableModel, WeightsId]:
        here = self._memory.served
        there = open_checkpoint(directory, self._config.model_backend, self._config.speculative)
        if (there.backend, there.config_hash()) != (here.backend, here.config_hash()):
            raise InvalidRequest("its configuration belongs to another model")
        self._check_room(there)
        stored = stored_of(there, directory)
        if fixed := [name for name in stored if name.endswith(_FIXED)]:
            raise InvalidRequest(f"{fixed[0]} cannot be changed in a running node")
        return there, content(stored)

    def _forget_prepared(self) -> None:
        if self._prepared is not None:
            _, source = self._prepared
            self._prepared = None
            source.close()

    def _forget_source(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()

    def _check_room(self, there: LoadableModel) -> None:
        """Raise InvalidRequest if the new weights must be in memory beside the current ones, and
        there is not enough."""
        if not there.refilled_whole:
            return
        model = self._memory.model
        wanted = there.weight_bytes(model.target)
        left = free_bytes(model.device, self._config.cache.memory_fraction)
        if wanted > left:
            raise InvalidRequest(
                f"{wanted / 2**30:.2f} GiB are needed in addition to the present weights, "
                f"{left / 2**30:.2f} GiB are free"
            )

    def _put(self, weights: WeightsId, source: WeightSource) -> None:
        if weights == self.id and self.whole:
            return
        self.whole = False
        try:
            others = (
                None if self._others is None else self._others.refill(source.directory, weights)
            )
            self._memory.refill(source.loadable)
            if others is not None:
                others.result(_RANKS_S)
        except (ConfigError, EngineFault, *UNREADABLE) as error:
            if source.received is not None and source is not self._source:
                self._forget_prepared()
            raise FailedPrecondition(f"its weights are now incomplete: {error}") from error
        if source is not self._source:
            self._forget_source()
            if source.received is not None:
                self._prepared = None  # another put would close an exported file
        self.id, self.whole, self._source = weights, True, source

    def _move_experts(self, source: WeightSource, moves: Mapping[str, LayerSlots]) -> None:
        assert self._others is not None
        with source.received or nullcontext():
            others = self._others.move_experts(moves)
            self._memory.move_experts(source.loadable, moves)
            for each in others:
                each.result(_RANKS_S)

    def _release(self) -> None:
        self.whole = False
        others = None if self._others is None else self._others.drain()
        self._memory.release()
        if others is not None:
            others.result(_RANKS_S)

    def _restore(self) -> None:
        source = self._source
        if source is None:
            raise FailedPrecondition(_NOWHERE)
        try:
            if content(stored_of(source.loadable, source.directory)) != self.id:
                raise FailedPrecondition("weights: the files have changed since they were read")
        except (ConfigError, *UNREADABLE) as error:
            raise FailedPrecondition(f"weights: they cannot be read again: {error}") from error
        try:
            self._memory.map()
            self._put(self.id, source)
        except OutOfDeviceMemory as error:
            raise FailedPrecondition(f"weights: {error}") from error
        except FailedPrecondition:
            self._release()
            raise
