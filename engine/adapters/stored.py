"""An adapter in PEFT's file format: adapter_config.json and adapter_model.safetensors.

Unsupported options are rejected by name, before tensors are read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from common.errors import ConfigError
from common.requests.namespace import IDENTITY_BYTES, AdapterId
from engine.models.checkpoint import FLOATS, Checkpoint, StoredTensor
from engine.models.fields import Fields
from engine.models.linear import MatrixPart, Product, kept

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"

# All other fields of a configuration describe training, or are implied by the tensors.
_OFF = ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "use_bdlora")
_NONE = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
)


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The matrices of one module: y += up (down x). In host memory.

    Attributes:
        down: [rank, in].
        up: [out, rank], multiplied by the adapter's scale.
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraAdapter:
    """An adapter in host memory.

    Attributes:
        id: derived from its content, independent of name and location.
        pairs: by the full name of the module.
    """

    id: AdapterId
    pairs: Mapping[str, LoraPair]

    @property
    def num_bytes(self) -> int:
        return sum(pair.down.nbytes + pair.up.nbytes for pair in self.pairs.values())


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """The limits of an adapter.

    Attributes:
        max_bytes: limit of its file, and of the converted matrices.
    """

    max_rank: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReader:
    """Reads adapters for the part of a model that this rank has. For any thread.

    Attributes:
        dtype: compute dtype of the model.
        pinned: whether to use page-locked memory.
        elsewhere: name prefixes of modules that other ranks have. Those ranks check them.
    """

    products: Sequence[Product]
    limits: AdapterLimits
    dtype: torch.dtype
    pinned: bool = False
    elsewhere: tuple[str, ...] = ()

    def read(self, directory: Path) -> LoraAdapter:
        """Read an adapter.

        Raises:
            ConfigError: the adapter does not exist, is too large, or does not match this model. The
                message has the reason.
        """
        _check_size(directory / CONFIG, MAX_CONFIG_BYTES)
        _check_size(directory / WEIGHTS, self.limits.max_bytes)
        scale = _scale(Fields.of(directory / CONFIG))
        stored = Checkpoint(directory, [directory / WEIGHTS])
        modules = {name: part for product in self.products for name, part in product.parts.items()}
        names = _modules(directory, stored.tensors)
        own = {name for name in names if not name.startswith(self.elsewhere)}
        num_bytes = 0
        for name in sorted(own):
            numbers = _check_module(directory, stored.tensors, name, modules)
            num_bytes += self.dtype.itemsize * numbers
        _check_rank(directory, stored.tensors, names, self.limits.max_rank)
        if num_bytes > self.limits.max_bytes:
            raise ConfigError(
                f"{directory}: {num_bytes} bytes in {self.dtype}, {self.limits.max_bytes} allowed"
            )
        digest = blake2b(digest_size=IDENTITY_BYTES, person=b"baton adapter")
        pairs = {}
        for name in names:
            down, up = (stored.read(f"{_PREFIX}{name}{side}") for side in (_DOWN, _UP))
            shape = tuple(down.shape)
            digest.update(f"{name} {down.dtype} {up.dtype} {shape} {scale!r}\n".encode())
            for tensor in (down, up):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            if name in own:
                part = modules[name]
                own_up = (kept(up, part.outputs).float() * scale).to(self.dtype)
                own_down = part.cut_inputs(down).to(self.dtype)
                pairs[name] = LoraPair(self._held(own_down), self._held(own_up))
        return LoraAdapter(digest.digest(), pairs)

    def _held(self, tensor: Tensor) -> Tensor:
        """Return a copy in its own memory, which later changes of the file do not affect."""
        return tensor.pin_memory() if self.pinned else tensor.clone()


def _check_size(path: Path, max_bytes: int) -> None:
    try:
        num_bytes = path.stat().st_size
    except OSError:
        raise ConfigError(f"{path}: no such file") from None
    if not path.is_file():
        raise ConfigError(f"{path}: not a file")
    if num_bytes > max_bytes:
        raise ConfigError(f"{path}: {num_bytes} bytes, {max_bytes} allowed")


def _scale(config: Fields) -> float:
    """Return the factor of up (down x)."""
    kind = config.text("peft_type")
    if kind != "LORA":
        raise config.wrong("peft_type", '"LORA"')
    for name in _OFF:
        if config.flag(name, False):
            raise config.wrong(name, "false")
    if config.text("bias", "none") != "none":
        raise config.wrong("bias", '"none"')
    for name in _NONE:
        if name in config and not config.is_blank(name):
            raise config.wrong(name, "absent: it is not supported")
    rank, alpha = config.integer("r"), config.number("lora_alpha")
    if not math.isfinite(alpha):
        raise config.wrong("lora_alpha", "finite")
    return alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)


def _modules(directory: Path, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return the sorted names of the modules to which the adapter adds."""
    found: dict[str, set[str]] = {}
    for name in tensors:
        side = next((side for side in (_DOWN, _UP) if name.endswith(side)), None)
        if side is None or not name.startswith(_PREFIX):
            raise ConfigError(f"{directory}: {name} is not a matrix of a LoRA adapter")
        found.setdefault(name.removeprefix(_PREFIX).removesuffix(side), set()).add(side)
    for module, sides in found.items():
        if len(sides) < 2:
            raise ConfigError(f"{directory}: {module} has only {sides.pop()}")
    if not found:
        raise ConfigError(f"{directory}: it has no tensors")
    return sorted(found)


def _check_module(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    name: str,
    modules: Mapping[str, MatrixPart],
) -> int:
    """Check the pair of a module. Return the number of values that are kept."""
    if name not in modules:
        raise ConfigError(f"{directory}: the model has no {name} that an adapter may change")
    part = modules[name]
    outputs, inputs = part.rows, part.columns
    down, up = (tensors[f"{_PREFIX}{name}{side}"] for side in (_DOWN, _UP))
    for tensor in (down, up):
        if tensor.dtype not in FLOATS:
            raise ConfigError(f"{directory}: {name} is {tensor.dtype}, expected a float type")
    rank = down.shape[0] if down.shape else 0
    if not rank or down.shape != (rank, inputs) or up.shape != (outputs, rank):
        raise ConfigError(
            f"{directory}: {name} has shapes {down.shape} and {up.shape}, the model expects "
            f"({rank or 'rank'}, {inputs}) and ({outputs}, {rank or 'rank'})"
        )
    return rank * (len(part.inputs) + part.num_outputs)


def _check_rank(
    directory: Path, tensors: Mapping[str, StoredTensor], names: Sequence[str], max_rank: int
) -> None:
    rank = max(tensors[f"{_PREFIX}{name}{_DOWN}"].shape[0] for name in names)
    if rank > max_rank:
        raise ConfigError(f"{directory}: rank {rank}, engine.lora.max_rank is {max_rank}")
