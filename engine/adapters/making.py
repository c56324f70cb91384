"""Construction of an engine's adapters from its configuration."""

from common.config import LoraConfig
from common.errors import ConfigError, ServingError
from engine.adapters.bank import AdapterBank, bank_bytes
from engine.adapters.library import AdapterCache
from engine.adapters.shelf import AdapterDirectory
from engine.adapters.stored import AdapterLimits
from engine.models import Model


def bank_of(config: LoraConfig, model: Model, free: int) -> AdapterBank:
    """Return the bank for a model.

    Args:
        free: bytes of the device that it may use.
    Raises:
        ConfigError: it would need more, or the model supports no adapters.
    """
    num_slots = 0 if config.adapter_dir is None else config.max_loras
    if num_slots and not model.products:
        raise ConfigError(
            "engine.lora.adapter_dir: adapters are added to what is computed natively alone, and "
            "this model is computed by transformers"
        )
    needed = bank_bytes(model.products, num_slots, config.max_rank, model.dtype)
    if needed > free:
        raise ConfigError(
            f"engine.lora.max_loras: {num_slots} slots of rank {config.max_rank} take "
            f"{needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB may be used"
        )
    return AdapterBank(model.products, num_slots, config.max_rank, model.device, model.dtype)


def shelf_of(config: LoraConfig, model: Model) -> AdapterDirectory:
    limits = AdapterLimits(config.max_rank, config.max_cpu_lora_bytes)
    pinned = model.device.type == "cuda"
    return AdapterDirectory(config.adapter_dir, model.products, limits, model.dtype, pinned=pinned)


def load_all(config: LoraConfig, shelf: AdapterDirectory, library: AdapterCache) -> None:
    """Load the configured adapters at start.

    Raises:
        ConfigError: one of them is invalid, or there are too many.
    """
    for each in config.preload:
        name, _, path = each.partition("=")
        try:
            library.add(name, shelf.read(path or name))
        except ServingError as error:
            raise ConfigError(f"engine.lora.preload: {name}: {error}") from error
    if len(library.names()) < len(config.preload):
        raise ConfigError("engine.lora.preload: more than max_cpu_loras or max_cpu_lora_bytes")
