"""Qwen2.5-VL: Qwen2 with image tokens, which are rotated by their rows and columns.
engine/models/vision/ makes the embeddings of images."""

from dataclasses import replace

from engine.models.blocks.layer import LayerSpec
from engine.models.blocks.rotation import AxialRope
from engine.models.decoder import DecoderSpec
from engine.models.families import common
from engine.models.families.qwen2 import windows
from engine.models.fields import Fields

_SECTIONS = (16, 24, 24)


def qwen2_5_vl(config: Fields, eos_token_ids: tuple[int, ...]) -> DecoderSpec:
    """Return the decoder. In configurations of transformers 4, the text model's fields are at the
    top level."""
    text = config.nested("text_config") if "text_config" in config else config
    norm = common.norm(text, eps=1e-5)
    mixer = common.attention(text, common.even_head_dim(text), qkv_bias=True, rope_theta=1e6)
    mixer = replace(mixer, rope=_axial(text, mixer.rope.inverse_frequencies, mixer.rope.scale))
    layers = [
        LayerSpec(replace(mixer, window=window), common.dense(text), norm)
        for window in windows(text)
    ]
    spec = common.decoder(text, eos_token_ids or text.token_ids("eos_token_id"), layers, norm)
    tied = config.flag("tie_word_embeddings", spec.tied_embeddings)
    return replace(spec, tied_embeddings=tied, unused=("visual.",))


def _axial(text: Fields, frequencies: tuple[float, ...], scale: float) -> AxialRope:
    rope = text.nested("rope_parameters" if "rope_parameters" in text else "rope_scaling")
    sections = rope.counts("mrope_section") or _SECTIONS
    if sum(sections) != len(frequencies):
        raise rope.wrong("mrope_section", f"parts of {len(frequencies)}, half of a head")
    return AxialRope(frequencies, scale, sections)
