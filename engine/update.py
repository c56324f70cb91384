"""Other weights for the model that is served, of the same shape: looked through beside the engine
while that goes on, or read from another node, then put in the place of the present ones while it is
at rest. Then it can do without any, too.

All on a thread of its own, so the loop turns on. Weights are named by their content.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError

from common.config import EngineConfig
from common.errors import ConfigError, EngineFault, InvalidRequest, Overloaded, WrongState
from common.requests.weights import WeightsId
from engine.models import Model, Servable, open_checkpoint
from engine.models.below import below
from engine.models.checkpoint import content
from engine.models.fingerprint import stored_of
from engine.models.one_file import OneFile, ReceivedFile
from engine.sizing import free_bytes

_UNREADABLE = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    SafetensorError,
)
_FLAG = "engine.weights_directory"
_NAMED = "model_path"  # as who asks for those of a directory calls it
_NOWHERE = (
    "weights: these came from another node, and since others were to come they are nowhere here to "
    "be read again"
)
# Numbers that are no tensors of the model: what was made of them is not made anew.
_FIXED = (".k_scale", ".v_scale")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where weights are read.

    received: from another node; they are here until they are closed.
    """

    directory: Path
    servable: Servable
    received: ReceivedFile | None = None

    def close(self) -> None:
        """Nothing is read any more."""
        if self.received is not None:
            self.received.close()


class WeightsUpdate:
    """Engine thread only.

    Attributes:
        id: of the weights that are computed with.
        whole: False: what is there is a part of some and a part of others, or nothing. Both are
            changed by the other thread, while the engine is at rest.
        tell: called by another thread when something is done.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        served: Servable,
        model: Model,
        weights: WeightsId,
    ) -> None:
        self._config = config
        self._served = served
        self._model = model
        root = config.weights_directory
        self._root = None if root is None else root.resolve()
        self._worker = ThreadPoolExecutor(1, "weights")
        self._under_way = False
        self._prepared: tuple[WeightsId, _Source] | None = None
        self._directory = directory
        # Of those that are computed with; None: nowhere any more.
        self._source: _Source | None = _Source(directory, served)
        self._lent: tuple[_Source, OneFile] | None = None  # of the thread that reads them
        self.id = weights
        self.whole = True
        self.tell: Callable[[], None] = lambda: None

    def prepare(self, path: str) -> Future[WeightsId]:
        """Looks them through, all bytes of them, and names them; `put` may follow. Fails with
        InvalidRequest: they are not there, or those of another model.

        Raises:
            InvalidRequest: the path leads elsewhere, or there is no directory of weights.
            Overloaded: others are under way.
        """
        if self._root is None:
            raise InvalidRequest(f"model_path: this node has no {_FLAG}")
        if self._under_way:
            raise Overloaded("other weights are under way already")
        directory = below(self._root, path, _NAMED, _FLAG)
        return self._begin(lambda: self._look_through(directory))

    def receive(self) -> ReceivedFile:
        """A place for those that are read from another node; `prepare_received` follows, or
        whoever has it closes it. Present ones that came so are not kept beside them.

        Raises:
            Overloaded: others are under way.
            WrongState: there is none.
        """
        if self._under_way:
            raise Overloaded("other weights are under way already")
        if self._source is not None and self._source.received is not None:
            self._forget_source()
        try:
            return ReceivedFile(self._directory)
        except OSError as error:
            raise WrongState(f"weights: there is no place for them here: {error}") from error

    def prepare_received(self, received: ReceivedFile, named: str) -> Future[WeightsId]:
        """As `prepare`, of what has been read; owned from now on.

        Args:
            named: who has lent them.
        Raises:
            Overloaded: others are under way, and it is closed.
        """
        if self._under_way:
            received.close()
            raise Overloaded("other weights are under way already")
        return self._begin(lambda: self._look_through_received(received, named))

    def lent(self) -> OneFile:
        """Those that are computed with, as another node reads them. On one thread, any; reads
        headers of files. Raises WrongState: they are not there to be read."""
        source = self._source
        if source is None or not self.whole:
            raise WrongState(_NOWHERE if self.whole else "weights: they are incomplete")
        if self._lent is not None and self._lent[0] is source:
            return self._lent[1]
        try:
            with source.received or nullcontext():
                stored = stored_of(source.servable, source.directory)
            file = OneFile(stored, source.received)
            self._lent = source, file
            return file
        except (ConfigError, *_UNREADABLE) as error:
            raise WrongState(f"weights: they cannot be read again: {error}") from error

    def put(self, weights: WeightsId) -> Future[None]:
        """Puts what was prepared last in place. Fails with WrongState: it could not be read any
        more; then `whole` says whether the present ones are all there still.

        Raises:
            WrongState: others were prepared last, or none.
            Overloaded: others are under way.
        """
        if self._under_way:
            raise Overloaded("other weights are under way already")
        prepared = self._prepared
        if prepared is None or prepared[0] != weights:
            raise WrongState("these weights were not prepared")
        return self._begin(lambda: self._put(*prepared))

    def check_drainable(self) -> None:
        """Raises WrongState where their memory cannot be given back."""
        if self._model.device.type != "cpu":
            raise WrongState("weights: they are in a device's memory, which is not given back")
        if self._source is None:
            raise WrongState(_NOWHERE)

    def give_back(self) -> Future[None]:
        """Gives their memory back to the system, until `bring_back`. After `check_drainable`.

        Raises:
            Overloaded: others are under way, or they are not whole.
        """
        if self._under_way or not self.whole:
            raise Overloaded("weights: others are under way")
        return self._begin(self._give_back)

    def bring_back(self) -> Future[None]:
        """Reads them again from where they were read. Fails with WrongState: others are there, or
        none.

        Raises:
            Overloaded: others are under way.
        """
        if self._under_way:
            raise Overloaded("weights: others are under way")
        return self._begin(self._bring_back)

    def close(self) -> None:
        """Nothing is begun any more."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        if not self._under_way:
            self._forget_prepared()
            self._forget_source()

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        self._under_way = True
        future = self._worker.submit(work)

        def done(_: Future[T]) -> None:
            self._under_way = False
            self.tell()

        future.add_done_callback(done)
        return future

    def _look_through(self, directory: Path) -> WeightsId:
        found, weights = self._named(directory, _NAMED, f"{self._root}/")
        self._prepare(weights, _Source(directory, found))
        return weights

    def _look_through_received(self, received: ReceivedFile, named: str) -> WeightsId:
        try:
            found, weights = self._named(received.directory, named, f"{received.directory}: ")
        except BaseException:
            received.close()
            raise
        self._prepare(weights, _Source(received.directory, found, received))
        return weights

    def _prepare(self, weights: WeightsId, source: _Source) -> None:
        self._forget_prepared()
        self._prepared = weights, source

    def _named(self, directory: Path, named: str, hidden: str) -> tuple[Servable, WeightsId]:
        """Looks all of them through.

        Args:
            hidden: what is nobody's business, in what is said of them.
        Raises:
            InvalidRequest: they cannot be put in the place of the present ones.
        """
        try:
            return self._fitting(directory)
        except (ConfigError, InvalidRequest) as error:
            raise InvalidRequest(f"{named}: {str(error).replace(hidden, '')}") from None
        except _UNREADABLE as error:  # whatever is wrong with a file, the engine goes on
            kind = type(error).__name__
            raise InvalidRequest(f"{named}: what is there cannot be read ({kind})") from error

    def _fitting(self, directory: Path) -> tuple[Servable, WeightsId]:
        here = self._served
        there = open_checkpoint(directory, self._config.model_backend, self._config.speculation)
        if (there.backend, there.config_hash()) != (here.backend, here.config_hash()):
            raise InvalidRequest("its configuration is that of another model")
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

    def _check_room(self, there: Servable) -> None:
        """Raises InvalidRequest where they do not fit beside the present ones, and have to."""
        if not there.refilled_whole:
            return
        device, config = self._model.device, self._config
        wanted = there.weight_bytes(device, self._model.dtype, config.quantize)
        left = free_bytes(device, config.cache.memory_fraction)
        if wanted > left:
            raise InvalidRequest(
                f"{wanted / 2**30:.2f} GiB are wanted beside the present weights, "
                f"{left / 2**30:.2f} GiB are left"
            )

    def _put(self, weights: WeightsId, source: _Source) -> None:
        if weights == self.id and self.whole:
            return
        self.whole = False
        try:
            source.servable.refill(self._model, self._config.quantize)
            if self._model.device.type == "cuda":
                torch.cuda.synchronize(self._model.device)
        except (ConfigError, EngineFault, *_UNREADABLE) as error:
            if source.received is not None and source is not self._source:
                self._forget_prepared()
            raise WrongState(f"its weights are incomplete now: {error}") from error
        if source is not self._source:
            self._forget_source()
            if source.received is not None:
                self._prepared = None  # another put would close what is lent
        self.id, self.whole, self._source = weights, True, source

    def _give_back(self) -> None:
        self.whole = False
        self._served.drain(self._model)

    def _bring_back(self) -> None:
        source = self._source
        if source is None:
            raise WrongState(_NOWHERE)
        try:
            if content(stored_of(source.servable, source.directory)) != self.id:
                raise WrongState("weights: other ones are now where they were read")
        except (ConfigError, *_UNREADABLE) as error:
            raise WrongState(f"weights: they cannot be read again: {error}") from error
        self._put(self.id, source)
