"""Other weights for the model that is served, of the same shape: looked through beside the engine
while that goes on, then put in the place of the present ones while it is at rest. Then it can do
without any, too.

All on a thread of its own, so the loop turns on. Weights are named by their content.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError

from common.config import EngineConfig
from common.engine.models import Model, Servable, open_checkpoint
from common.engine.models.below import below
from common.engine.models.checkpoint import content
from common.engine.models.fingerprint import stored_of
from common.engine.sizing import free_bytes
from common.errors import ConfigError, EngineFault, InvalidRequest, Overloaded, WrongState
from common.requests.weights import WeightsId

_UNREADABLE = (
    *(ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    SafetensorError,
)
_FLAG = "engine.weights_directory"
# Numbers that are no tensors of the model: what was made of them is not made anew.
_FIXED = (".k_scale", ".v_scale")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where weights are read."""

    directory: Path
    servable: Servable


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
        self._source = _Source(directory, served)  # of those that are computed with
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
        directory = below(self._root, path, "model_path", _FLAG)
        return self._begin(lambda: self._look_through(directory))

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

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        self._under_way = True
        future = self._worker.submit(work)

        def done(_: Future[T]) -> None:
            self._under_way = False
            self.tell()

        future.add_done_callback(done)
        return future

    def _look_through(self, directory: Path) -> WeightsId:
        root, here = self._root, self._served
        try:
            if not here.changeable:
                raise InvalidRequest(
                    "model_path: a model that is shown images takes no other weights"
                )
            there = open_checkpoint(directory, self._config.model_backend, self._config.speculation)
            if (there.backend, there.config_hash()) != (here.backend, here.config_hash()):
                raise InvalidRequest("model_path: its configuration is that of another model")
            self._check_room(there)
            stored = stored_of(there, directory)
            if fixed := [name for name in stored if name.endswith(_FIXED)]:
                raise InvalidRequest(f"model_path: {fixed[0]} cannot be changed in a running node")
            weights = content(stored)
        except ConfigError as error:
            raise InvalidRequest(f"model_path: {str(error).replace(f'{root}/', '')}") from None
        except _UNREADABLE as error:  # whatever is wrong with a file, the engine goes on
            kind = type(error).__name__
            raise InvalidRequest(f"model_path: what is there cannot be read ({kind})") from error
        self._prepared = weights, _Source(directory, there)
        return weights

    def _check_room(self, there: Servable) -> None:
        """Raises InvalidRequest where they do not fit beside the present ones, and have to."""
        if not there.refilled_whole:
            return
        device, config = self._model.device, self._config
        wanted = there.weight_bytes(device, self._model.dtype, config.quantize)
        left = free_bytes(device, config.cache.memory_fraction)
        if wanted > left:
            raise InvalidRequest(
                f"model_path: {wanted / 2**30:.2f} GiB are wanted beside the present weights, "
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
            raise WrongState(f"its weights are incomplete now: {error}") from error
        self.id, self.whole, self._source = weights, True, source

    def _give_back(self) -> None:
        self.whole = False
        self._served.drain(self._model)

    def _bring_back(self) -> None:
        source = self._source
        try:
            if content(stored_of(source.servable, source.directory)) != self.id:
                raise WrongState("weights: other ones are now where they were read")
        except (ConfigError, *_UNREADABLE) as error:
            raise WrongState(f"weights: they cannot be read again: {error}") from error
        self._put(self.id, source)
