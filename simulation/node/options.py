"""Options of simulated nodes: the cost model that they select, and unsupported ones."""

from functools import reduce
from typing import Any

from common.config import DecodeConfig, EngineConfig, NodeConfig, PrefillConfig
from common.errors import ConfigError
from simulation.cost import StepCost

_UNSUPPORTED = (
    "engine.dtype",
    "engine.quantize",
    "engine.model_backend",
    "engine.weights_dir",
    "engine.profile_dir",
    "engine.threads",
    "engine.cpu_kernels",
    "engine.cuda_graphs",
    "engine.early_launch",
    "engine.parallel.pp",
    "engine.parallel.experts",
    "engine.parallel.redundant_experts",
    "engine.parallel.rebalance_steps",
    "engine.parallel.collectives",
    "engine.parallel.hosts",
    "engine.parallel.dp",
    "engine.cache.memory_fraction",
    "engine.cache.dtype",
    "engine.offload.disk_dir",
    "engine.scheduler.split_prefill_ms",
    "engine.scheduler.prefill_delayer",
    "engine.lora",
    "engine.hidden_states",
    "engine.routed_experts",
    "engine.input_embeddings",
    "engine.batch_invariant",
    "transfer.backend",
    "transfer.listen_port",
    "transfer.encrypt",
    "transfer.min_link_gib_per_s",
    "kv_events",
)


def check_config(config: NodeConfig) -> None:
    """Check that a simulated node supports the configuration.

    Raises:
        ConfigError: names all unsupported options.
    """
    standard = _STANDARD[type(config)]
    changed = [name for name in _UNSUPPORTED if _value(config, name) != _value(standard, name)]
    if config.engine.speculative.has_layers:
        changed.append("engine.speculative.method")
    if changed:
        options = ", ".join(changed)
        raise ConfigError(f"simulated nodes do not support {options}: leave the default")
    if not cost_of(config.engine).has_drafts and config.engine.speculative.method != "none":
        raise ConfigError(
            f"engine.speculative.method: {config.engine.device} has no times of steps with drafts"
        )


def cost_of(config: EngineConfig) -> StepCost:
    """Return the costs of a node. Raises ConfigError if they are unknown."""
    try:
        return StepCost.of(config.simulated_gpu, config.model, config.parallel.tp)
    except ValueError as error:
        raise ConfigError(f"engine.device: {config.device}: {error}") from error


def _value(config: NodeConfig, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


_STANDARD: dict[type[NodeConfig], NodeConfig] = {
    record: record.model_validate({"engine": {"model": ""}})
    for record in (PrefillConfig, DecodeConfig)
}
