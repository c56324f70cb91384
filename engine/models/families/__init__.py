"""Families of native models: each file reads config.json of one family and returns a DecoderSpec.

Configurations of transformers 4 and 5 are supported. A family's defaults are those of its
configuration class in transformers.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from common.errors import ConfigError
from engine.models.decoder import DecoderSpec
from engine.models.families.common import beside_encoder, with_heads, with_names
from engine.models.families.deepseek import deepseek_v2, deepseek_v3
from engine.models.families.gemma import gemma2, gemma3, gemma3_with_images
from engine.models.families.gpt_oss import gpt_oss
from engine.models.families.llama import llama, llava, mistral, mixtral
from engine.models.families.qwen2 import qwen2, qwen2_5_vl, qwen2_moe
from engine.models.families.qwen3 import dots1, qwen3, qwen3_moe, qwen3_vl, qwen3_vl_moe
from engine.models.families.qwen3_hybrid import qwen3_5, qwen3_5_moe, qwen3_next
from engine.models.fields import Fields, eos_token_ids

# By model_type.
FAMILIES: Mapping[str, Callable[[Fields], DecoderSpec]] = {
    "llama": llama,
    "llava": llava,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3": qwen3,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "gemma2": gemma2,
    "gemma3": gemma3_with_images,
    "gemma3_text": gemma3,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "dots1": dots1,
    "gpt_oss": gpt_oss,
    "qwen3_moe": qwen3_moe,
    "qwen2_moe": qwen2_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": partial(beside_encoder, family=qwen3_5),
    "qwen3_5_moe": partial(beside_encoder, family=qwen3_5_moe),
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "mixtral": mixtral,
}


def read_decoder(directory: Path, names: Collection[str] = ()) -> DecoderSpec:
    """Read config.json and generation_config.json.

    Args:
        names: names of the stored tensors. Empty: those of the family.
    Raises:
        ConfigError: fields are missing, invalid or not supported. The message names the file, the
            field and the expected value.
    """
    config = Fields.of(directory / "config.json")
    family = FAMILIES.get(config.text("model_type"))
    if family is None:
        raise ConfigError(
            f"{directory}: model_type {config.text('model_type')!r} is not supported; "
            f"{', '.join(FAMILIES)} are"
        )
    decoder = with_names(with_heads(family(config), config), names)
    model = replace(decoder.model, eos_token_ids=eos_token_ids(directory, config))
    return replace(decoder, model=model)
