"""Choice of the model backend (native blocks, or the class in transformers), and the fingerprint.

Two nodes compare the fingerprints of their models before one uses the KV of the other.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from common.config import ModelBackend, SpeculativeConfig
from common.errors import ConfigError
from engine.models.checkpoint import Checkpoint, StoredTensor
from engine.models.families import FAMILIES
from engine.models.fields import Fields
from engine.models.model import Model
from engine.models.native import NativeCheckpoint
from engine.models.spec import LoadTarget, ModelSpec
from engine.ranks.expert_placement import LayerSlots

NO_DRAFTS = SpeculativeConfig()


class LoadableModel(Protocol):
    """A checkpoint that can be served, before it is loaded.

    Attributes:
        backend: the backend, as paired nodes compare it.
        computed: description of the backend, with the reason for its choice.
        drafter: the drafter with layers of its own, as paired nodes compare it.
    """

    @property
    def backend(self) -> str: ...

    @property
    def computed(self) -> str: ...

    @property
    def drafter(self) -> str: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def refilled_whole(self) -> bool:
        """Return whether `refill` needs memory for all weights twice. False: only one part at a
        time is in memory twice."""
        ...

    def stored(self) -> Iterable[str]:
        """Return the names of the model's stored tensors.

        Raises:
            ConfigError: there is no checkpoint, or it does not belong to this model.
        """
        ...

    def weight_bytes(self, target: LoadTarget) -> int:
        """Return the bytes that `load` allocates. Does not use the group of the share.

        Raises:
            ConfigError: see `stored`. Or the requested quantisation is not supported here, or the
                ranks cannot split the model.
        """
        ...

    def load(self, target: LoadTarget) -> Model:
        """Load a rank's part of the model. Raise ConfigError as `weight_bytes` does."""
        ...

    def refill(self, model: Model) -> None:
        """Replace the weights of a loaded model, whose checkpoint has the same configuration. No
        forward may run meanwhile.

        Raises:
            ConfigError: see `load`. Nothing has changed.
            EngineFault: the weights differ in more than values. Some are already replaced.
        """
        ...

    def move_experts(self, model: Model, moves: Mapping[str, LayerSlots]) -> None:
        """Read the experts of other slots into a model that has these weights, see ExpertPlacement.
        No forward may run meanwhile.

        Args:
            moves: the new slots of all ranks, by layer.
        Raises:
            ConfigError: the model has no slots, or a file is damaged.
        """
        ...

    def drain(self, model: Model) -> None:
        """Return the host memory of the model's weights to the operating system, until `refill`."""
        ...

    def tensors(self, model: Model) -> Iterable[Tensor]:
        """Return all tensors of the model that `refill` fills. Some may occur twice."""
        ...

    def config_hash(self) -> str:
        """Return a hash of all parts of the configuration that affect the computation, and
        therefore KV."""
        ...


def open_checkpoint(
    directory: Path,
    backend: ModelBackend = "auto",
    speculation: SpeculativeConfig = NO_DRAFTS,
) -> LoadableModel:
    """Read a checkpoint's configuration, and the configuration of the drafter if it has layers.

    Raises:
        ConfigError: the configuration is invalid, or the model is not supported.
    """
    kind = Fields.of(directory / "config.json").text("model_type")
    if backend == "native" or (backend == "auto" and kind in FAMILIES):
        return NativeCheckpoint(directory, speculation)
    if speculation.has_layers:
        raise ConfigError(
            f"engine.speculative.method: {speculation.method} needs a native implementation, "
            f"and {kind} runs on the Transformers library"
        )
    # Imported here, because transformers takes a second to import and native models do not need it.
    from engine.models.transformers_backend import TransformersCheckpoint

    because = (
        "as requested" if backend == "transformers" else f"{kind} has no native implementation"
    )
    return TransformersCheckpoint(directory, because)


def constants(loadable: LoadableModel) -> dict[str, str]:
    """Return the fields of a model's fingerprint that do not change with the weights. They are
    independent of the location.

    These are `architecture`, `model_backend`, `config` (sha256 of all numbers that the forward
    uses), and `drafter` (the draft layer, which also has KV).
    """
    return {
        "architecture": loadable.spec.architecture,
        "model_backend": loadable.backend,
        "config": loadable.config_hash(),
        "drafter": loadable.drafter,
    }


def stored_of(loadable: LoadableModel, directory: Path) -> dict[str, StoredTensor]:
    """Return the stored tensors of the model by name. Raise ConfigError if some are missing."""
    tensors = Checkpoint(directory).tensors
    return {name: tensors[name] for name in sorted(loadable.stored())}


def tokenizer_hash(directory: Path) -> str:
    """Return the sha256 of tokenizer.json, as the router computes it, or "" without such a file."""
    path = directory / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
