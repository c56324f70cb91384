"""Which way a checkpoint is computed: by our own blocks, or by transformers' class for it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common.config import ModelBackend, Quantize, SpeculationConfig
from common.errors import ConfigError
from engine.batch.forward import ForwardBatch
from engine.kv_cache.kv import KVPool
from engine.models.blocks.late_states import LateStates
from engine.models.blocks.protocol import Adapted
from engine.models.drafting import DraftHead
from engine.models.families import FAMILIES
from engine.models.fields import Fields
from engine.models.linear import Product
from engine.models.native import NativeCheckpoint
from engine.models.spec import ModelSpec
from engine.models.vision.seeing import Seeing

NO_DRAFTS = SpeculationConfig()


class Model(Protocol):
    """What the runner needs of a model."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def seeing(self) -> Seeing | None:
        """What makes embeddings of images; None: of a model that sees none."""
        ...

    @property
    def drafter(self) -> DraftHead | None:
        """What guesses tokens from its vectors; None: nothing does."""
        ...

    @property
    def products(self) -> Sequence[Product]:
        """Those that adapters may add to; without any it takes no adapters."""
        ...

    def forward(
        self,
        batch: ForwardBatch,
        pool: KVPool,
        future_tokens: Tensor,
        adapted: Adapted | None = None,
        late: LateStates | None = None,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Of one that generates."""
        ...

    def labels(self, hidden: Tensor) -> Tensor:
        """Of one that has labels, [n, num_labels]."""
        ...


class Servable(Protocol):
    """A checkpoint that can be served, before it is loaded.

    backend: the way, as nodes that pair compare it; computed: the same in words, with the reason.
    drafter: as they compare it, whose layer guesses tokens from the model's vectors.
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
        """Whether `refill` has all weights in memory twice; else it is one part of them."""
        ...

    def stored(self) -> Iterable[str]:
        """Names of the stored tensors that make the model.

        Raises:
            ConfigError: there is no checkpoint, or not one of this model.
        """
        ...

    def weight_bytes(self, device: torch.device, dtype: torch.dtype, quantize: Quantize) -> int:
        """What `load` takes.

        Raises:
            ConfigError: as `stored`, or nothing here multiplies what is asked for.
        """
        ...

    def load(self, device: torch.device, dtype: torch.dtype, quantize: Quantize) -> Model:
        """Raises ConfigError as `weight_bytes`."""
        ...

    def refill(self, model: Model, quantize: Quantize) -> None:
        """Puts its weights in the place of those that a model has which was loaded so, from a
        checkpoint of the same configuration. Nothing may compute with it meanwhile.

        Raises:
            ConfigError: as `load`; nothing has changed.
            EngineFault: they differ in more than numbers; some of them are there already.
        """
        ...

    def drain(self, model: Model) -> None:
        """Gives the memory of such a model's weights back to the system, until `refill`."""
        ...

    def config_hash(self) -> str:
        """Of all that the configuration says of what is computed, and that KV depends on."""
        ...


def open_checkpoint(
    directory: Path,
    backend: ModelBackend = "auto",
    speculation: SpeculationConfig = NO_DRAFTS,
) -> Servable:
    """Reads a checkpoint's configuration, and that of the drafter that is configured, if it has a
    layer.

    Raises:
        ConfigError: what is wrong with it, or why this model is not served.
    """
    kind = Fields.of(directory / "config.json").text("model_type")
    if backend == "native" or (backend == "auto" and kind in FAMILIES):
        return NativeCheckpoint(directory, speculation)
    if speculation.has_layer:
        raise ConfigError(
            f"engine.speculation.drafter: {speculation.drafter} is for models that are computed "
            f"natively, {kind} is not"
        )
    # Imported here: transformers takes a second, and native models have no use for it.
    from engine.models.transformers_backend import BorrowedCheckpoint

    because = "as asked for" if backend == "transformers" else f"{kind} has no blocks here"
    return BorrowedCheckpoint(directory, because)
