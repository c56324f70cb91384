"""RoPE variants: inverse frequencies from a configuration.

All arithmetic is in float32, as in transformers, so that the angles of distant tokens are equal.
"""

import math

import torch
from torch import Tensor

from common.errors import ConfigError
from engine.batch.images import AXES
from engine.models.blocks.rotation import AxialRope, Rope
from engine.models.fields import Fields

SUPPORTED = ("default", "linear", "llama3", "yarn")


def parse_rope(
    config: Fields,
    head_dim: int,
    context_length: int,
    *,
    theta: float = 1e4,
    rotated: float | None = None,
) -> Rope:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

    Args:
        theta: default if neither has it.
        rotated: default share of a head's numbers that are rotated. None: all must be.
    Raises:
        ConfigError: the variant is not supported. The message names the supported ones.
    """
    rope = _rope_fields(config)
    rotated = _rotated(config, rotated)
    theta = config.number("rope_theta", theta)
    return rope_of(rope, head_dim, context_length, theta=theta, rotated=rotated)


def _rotated(fields: Fields, rotated: float | None) -> float | None:
    if rotated is not None:
        return fields.number("partial_rotary_factor", rotated)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.wrong("partial_rotary_factor", "1")
    return None


def rope_of(
    rope: Fields, head_dim: int, context_length: int, *, theta: float, rotated: float | None = None
) -> Rope:
    """Return the RoPE of one object of rope parameters. See `parse_rope`."""
    theta = rope.number("rope_theta", theta)
    kind = _kind(rope)
    rotated = _rotated(rope, rotated)
    size = head_dim if rotated is None else int(head_dim * rotated)
    if not 0 < size <= head_dim or size % 2:
        raise rope.wrong("partial_rotary_factor", f"an even part of a head of {head_dim}")
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / theta**exponents
    scale = 1.0
    match kind:
        case "default" | "mrope":  # mrope affects the axes, not the frequencies
            pass
        case "linear":
            frequencies = frequencies / rope.number("factor")
        case "llama3":
            frequencies = _llama3(frequencies, rope, context_length)
        case "yarn":
            frequencies, scale = _yarn(theta**exponents, theta, rope, context_length)
        case _:
            raise ConfigError(f"RoPE variant {kind!r} is not supported; {', '.join(SUPPORTED)} are")
    return Rope(tuple(frequencies.tolist()), scale)


def in_sections(config: Fields, rope: Rope, sections: tuple[int, ...]) -> AxialRope:
    """Return a rope whose consecutive sections of pairs rotate by time, height and width, and so on
    cyclically.

    Args:
        sections: default number of pairs of each section.
    Raises:
        ConfigError: the sections do not add up to all pairs.
    """
    fields, num_pairs = _rope_fields(config), len(rope.inverse_frequencies)
    sections = fields.counts("mrope_section") or sections
    if sum(sections) != num_pairs:
        raise fields.wrong("mrope_section", f"parts of {num_pairs}, half of a head")
    axes = [number % AXES for number, size in enumerate(sections) for _ in range(size)]
    return AxialRope(rope.inverse_frequencies, rope.scale, tuple(axes))


def interleaved(config: Fields, rope: Rope, sections: tuple[int, ...]) -> AxialRope:
    """Return a rope whose pairs rotate by time, height and width in turn. Pairs after the end of a
    section of height or width rotate by time.

    Args:
        sections: default number of pairs of each section.

    Source: Qwen3-VL, apply_interleaved_mrope of its reference code.
    """
    fields = _rope_fields(config)
    sections = fields.counts("mrope_section") or sections
    if len(sections) != AXES:
        raise fields.wrong("mrope_section", f"{AXES} numbers of pairs")
    pairs = range(len(rope.inverse_frequencies))
    axes = [pair % AXES if pair < AXES * sections[pair % AXES] else 0 for pair in pairs]
    return AxialRope(rope.inverse_frequencies, rope.scale, tuple(axes))


def _rope_fields(config: Fields) -> Fields:
    return config.nested("rope_parameters" if "rope_parameters" in config else "rope_scaling")


def _kind(rope: Fields) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def extended_context(config: Fields, context_length: int) -> int:
    """Return the context length with yarn. Its factor multiplies the original length, not
    max_position_embeddings."""
    rope = _rope_fields(config)
    if _kind(rope) != "yarn":
        return context_length
    original = rope.integer("original_max_position_embeddings", context_length)
    return max(context_length, int(original * rope.number("factor")))


def score_scale(config: Fields) -> float:
    """Return the factor by which attention scores grow with yarn's context extension.

    It differs from 1 if `mscale_all_dim` is set, as in DeepSeek-V2 and later.
    """
    rope = _rope_fields(config)
    if _kind(rope) != "yarn":
        return 1.0
    return _magnitude(rope.number("factor"), rope.number("mscale_all_dim", 0.0)) ** 2


def _llama3(frequencies: Tensor, rope: Fields, context_length: int) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate between.

    Source: Llama 3.1 reference code, apply_scaling.
    """
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.integer("original_max_position_embeddings", context_length)
    turns = original * frequencies / (2 * math.pi)  # rotations over the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn(periods: Tensor, theta: float, rope: Fields, context_length: int) -> tuple[Tensor, float]:
    """Return yarn's frequencies and scale.

    Source: YaRN, Peng et al. 2023, sections 3.2 to 3.4.
    """
    factor = rope.number("factor")
    original = rope.integer("original_max_position_embeddings", context_length)
    head_dim = 2 * len(periods)

    def dimension(turns: float) -> float:
        """Return the dimension whose angle makes this number of turns over the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.number("beta_fast", 32)), dimension(rope.number("beta_slow", 1))
    if rope.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(len(periods)) - low) / width).clamp(0.0, 1.0)
    frequencies = interpolated / (factor * periods) + (1 - interpolated) / periods
    return frequencies, _yarn_scale(factor, rope)


def _yarn_scale(factor: float, rope: Fields) -> float:
    if "attention_factor" in rope:
        return rope.number("attention_factor")

    mscale, all_dim = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
