"""Random LoRA adapters in PEFT's format, and the oracle: the model with their products merged."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

ALL_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZE = 0.05  # size of an adapter's numbers, so that its products are as large as the weights


def make_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 64.0,
    modules: Sequence[str] = ALL_MODULES,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Write an adapter for these modules of all layers. Returns `directory`.

    Args:
        config: additional fields of the adapter's configuration.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules and isinstance(module, torch.nn.Linear):
            outputs, inputs = module.weight.shape
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                drawn = torch.randn(shape, generator=generator) * SIZE
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = drawn.to(dtype)
    assert tensors
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": list(modules),
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


def merge(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Add an adapter's products to the weights of `model`, and return the model."""
    fields = json.loads((directory / "adapter_config.json").read_text())
    rank = fields["r"]
    scale = fields["lora_alpha"] / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    tensors = load_file(directory / "adapter_model.safetensors")
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            with torch.no_grad():
                model.get_submodule(module).weight += scale * up.float() @ down.float()
    return model
