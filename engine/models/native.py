"""A checkpoint of a native family, before it is loaded."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from common.config import SpeculativeConfig
from common.errors import ConfigError
from common.model_directory import model_directory
from common.process.resources import trim
from engine.models.checkpoint import stored_names
from engine.models.decoder import Decoder, DecoderSpec
from engine.models.draft_checkpoints import DRAFT_FLAG, DraftModelCheckpoint, EagleCheckpoint
from engine.models.drafting import DraftSpec
from engine.models.families import read_decoder
from engine.models.refill import drain, found
from engine.models.spec import LoadTarget, ModelSpec
from engine.models.vision.seeing import ReceivingTower, VisionInput
from engine.models.weights import StoredDecoder
from engine.ranks import Share
from engine.ranks.expert_placement import LayerSlots


class NativeCheckpoint:
    """A checkpoint of a native family, see LoadableModel."""

    backend = "native"
    refilled_whole = False

    def __init__(self, directory: Path, speculation: SpeculativeConfig) -> None:
        """Read the configuration.

        Args:
            speculation: its drafter becomes part of the model if it has layers.
        Raises:
            ConfigError: the configuration is invalid or not supported.
        """
        self._directory = directory
        self._sight = VisionInput.of(directory)
        names = stored_names(directory)
        decoder = read_decoder(directory, names)
        if self._sight is not None:
            files, model = self._sight.files, decoder.model
            model = replace(
                model,
                image_token_side=files.token_side,
                image_token_size=model.hidden_size * (1 + decoder.feature_layers),
                image_tokens_per_side=files.tokens_per_side,
                video_frames=0 if files.video is None else files.frames,
                whole_images=files.whole,
                axial_images=files.axial,
            )
            decoder = replace(decoder, model=model)
        if speculation.has_layers and speculation.method != "mtp" and self._sight is not None:
            raise ConfigError(
                f"engine.speculative.method: {speculation.method} is not supported for models with "
                "images. To serve texts with it, remove vision_config from config.json"
            )
        self._beside: EagleCheckpoint | DraftModelCheckpoint | None = None
        if speculation.method == "mtp":
            decoder = decoder.drafting(_offered(decoder, names, directory))
        elif speculation.has_layers:
            beside = model_directory(speculation.draft_model, weights=True)
            drafter = EagleCheckpoint if speculation.method == "eagle" else DraftModelCheckpoint
            self._beside = drafter(beside, decoder.model)
            decoder = replace(decoder, model=self._beside.added_to(decoder.model))
        self._decoder = decoder
        self._weights = StoredDecoder(directory, decoder)

    @property
    def computed(self) -> str:
        return (
            "natively" if self._sight is None else "natively, and images by transformers' encoder"
        )

    @property
    def spec(self) -> ModelSpec:
        return self._decoder.model

    @cached_property
    def drafter(self) -> str:
        if self._beside is not None:
            return self._beside.name()
        return "none" if self._decoder.drafter is None else "mtp"

    def stored(self) -> Iterable[str]:
        stored = self._weights.stored()
        return stored if self._sight is None else (*stored, *self._sight.stored())

    def weight_bytes(self, target: LoadTarget) -> int:
        self._check_stages(target.share)
        num_bytes = self._weights.weight_bytes(target)
        if self._sight is not None and target.share.node_rank == 0:
            num_bytes += self._sight.weight_bytes(target.dtype)
        if self._beside is not None:
            num_bytes += self._beside.weight_bytes(target)
        return num_bytes

    def _check_stages(self, share: Share) -> None:
        """Raise ConfigError if layers of the second pipeline stage need image features."""
        wanted, num_layers = self._decoder.feature_layers, len(self._decoder.layers)
        if share.is_first_stage and len(share.layers(num_layers)) < wanted and self._sight:
            raise ConfigError(
                f"engine.parallel.pp: the first {wanted} of {num_layers} layers add features of "
                "images, and must be in the first stage"
            )

    def load(self, target: LoadTarget) -> Decoder:
        model, share = self._weights.load(target), target.share
        if self._sight is not None and share.node_rank == 0:
            model.seeing = self._sight.load(target.device, target.dtype, share.group)
        elif self._sight is not None and share.is_first_stage and share.group is not None:
            model.receiving = ReceivingTower(share.group, self._decoder.feature_layers)
        if self._beside is not None:
            model.drafter = self._beside.load(model)
        return model

    def refill(self, model: object) -> None:
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"{self._directory}: the running model does not use the native implementation"
            )
        # A drafter with its own checkpoint is kept when the weights are updated.
        drained = self._beside if model.drained else None
        if drained is not None and drained.name() != model.drained:
            raise ConfigError(f"{DRAFT_FLAG}: the files have changed since they were loaded")
        self._weights.refill(model)
        if self._sight is not None and model.seeing is not None:
            self._sight.refill(model.seeing)
        if drained is not None:
            drained.refill(model)
        model.drained = ""

    def move_experts(self, model: object, moves: Mapping[str, LayerSlots]) -> None:
        assert isinstance(model, Decoder)
        self._weights.move_experts(model, moves)

    def drain(self, model: object) -> None:
        assert isinstance(model, Decoder)
        drain(_parts(model))
        if model.seeing is not None:
            model.seeing.drain()
        model.drained = self.drafter
        trim()

    def tensors(self, model: object) -> Iterable[Tensor]:
        assert isinstance(model, Decoder)
        yield from found(Tensor, _parts(model))
        if model.seeing is not None:
            yield from model.seeing.tensors()

    def config_hash(self) -> str:
        model = replace(self.spec, architecture="", dtype=torch.float32, eos_token_ids=())
        decoder = replace(self._decoder, model=model, prefix="", head="")
        seen = "" if self._sight is None else self._sight.config_hash()
        return hashlib.sha256(f"{decoder!r}{seen}".encode()).hexdigest()


def _parts(model: Decoder) -> list[object]:
    """Return the parts of a model and of its drafter. A part may occur twice."""
    return [*model.parts, *(() if model.drafter is None else model.drafter.parts)]


def _offered(decoder: DecoderSpec, names: Collection[str], directory: Path) -> DraftSpec:
    """Return the checkpoint's own draft layer. Raise ConfigError if it has none. `names`: stored
    tensors, empty without weights."""
    offered = decoder.offered
    if offered is None or (names and not any(name.startswith(offered.prefix) for name in names)):
        raise ConfigError(
            f"engine.speculative.method: mtp needs an MTP layer in the checkpoint (of "
            f"deepseek_v3, with num_nextn_predict_layers, qwen3_next or qwen3_5), and {directory} "
            "has none"
        )
    return offered
