"""Checkpoints in quantised formats, made from a checkpoint with float32 weights.

Each has a twin with the dequantised values as floats. Both must compute the same.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.models.checkpoints import edit_config

MODULES = ("_proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
GROUP = 32
BLOCK = (40, 48)  # neither divides the hidden size
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Format:
    """A format. encode: returns tensors by name suffix, and their values as floats."""

    config: dict[str, Any]
    encode: Callable[[Tensor], tuple[Tensors, Tensor]]


def requantised(
    source: Path, directory: Path, form: Format, spared: str | None = None
) -> tuple[Path, Path]:
    """Write the quantised checkpoint and its twin. Returns both.

    Args:
        spared: part of the names of matrices that stay floats.
    """
    quantised, twin = directory / "quantised", directory / "twin"
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(MODULES) and (spared is None or spared not in name):
            module = name.removesuffix(".weight")
            tensors, floats = form.encode(tensor)
            stored |= {f"{module}.{end}": part.contiguous() for end, part in tensors.items()}
            meant[name] = floats.contiguous()
        else:
            stored[name] = meant[name] = tensor
    for where, tensors in ((quantised, stored), (twin, meant)):
        shutil.copytree(source, where)
        save_file(tensors, where / "model.safetensors")
    edit_config(quantised, quantization_config=form.config)
    return quantised, twin


def in_mxfp4(source: Path, directory: Path) -> tuple[Path, Path]:
    """Write a gpt-oss checkpoint with random experts in MXFP4, and its twin."""
    quantised = shutil.copytree(source, directory / "quantised")
    twin = shutil.copytree(source, directory / "twin")
    tensors = load_file(source / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for name in (name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))):
        count, columns, rows = stored.pop(name).shape
        blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 123, (count, rows, columns // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert floats.shape == (count, columns, rows)
        meant[name] = floats.contiguous()
    save_file(stored, quantised / "model.safetensors")
    save_file(meant, twin / "model.safetensors")
    edit_config(quantised, quantization_config={"quant_method": "mxfp4"})
    return quantised, twin


def _fp8(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return numbers, numbers.float() * scale


def fp8_by_row(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers, floats = _fp8(weight, scale)
    return {"weight": numbers, "weight_scale": scale}, floats


def fp8_whole(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    numbers, floats = _fp8(weight, scale)
    given = torch.tensor(0.5)
    return {"weight": numbers, "weight_scale": scale, "input_scale": given}, floats


def fp8_by_block(weight: Tensor) -> tuple[Tensors, Tensor]:
    (rows, columns), (height, width) = weight.shape, BLOCK
    scale = torch.empty(-(-rows // height), -(-columns // width))
    spread = torch.empty_like(weight)
    for y in range(scale.shape[0]):
        for x in range(scale.shape[1]):
            place = (slice(y * height, (y + 1) * height), slice(x * width, (x + 1) * width))
            scale[y, x] = spread[place] = weight[place].abs().max() / 448
    numbers, floats = _fp8(weight, spread)
    return {"weight": numbers, "weight_scale_inv": scale}, floats


def int8_by_row(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127.5  # like llm-compressor: -128 is used too
    numbers = (weight / scale).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale


def _grouped(
    weight: Tensor, bits: int, group: int = GROUP
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return numbers from 0 on [out, in], scales and zeros [out, groups], and their values."""
    rows, columns = weight.shape
    grouped = weight.view(rows, columns // group, group)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round().clamp(0, 2**bits - 1)
    largest = 2**bits - 1
    numbers = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, largest)
    floats = ((numbers - zero[..., None]) * scale[..., None]).view(rows, columns)
    return numbers.view(rows, columns).int(), scale, zero.int(), floats


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack int32 [n, m] to [n, m * bits / 32], number by number."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] * bits // 32, dtype=torch.int64)
    per_word = 32 // bits
    for place in range(per_word):
        words |= numbers[:, place::per_word].long() << (bits * place)
    return words.to(torch.uint32).view(torch.int32)


def gptq(bits: int, *, version: str = "gptq", shuffled: bool = False) -> Format:
    def encode(weight: Tensor) -> tuple[Tensors, Tensor]:
        weight = weight.clone()
        weight[0, :GROUP].abs_()  # a zero point of 0, of which one less is the largest number
        order = torch.arange(weight.shape[1])
        if shuffled:  # the same for matrices with the same inputs, as quantisers do it
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
        numbers, scale, zero, floats = _grouped(weight[:, order], bits)
        back = order.argsort()
        less = 1 if version == "gptq" else 0
        zeros = (zero - less) & (2**bits - 1)
        tensors = {
            "qweight": _packed(numbers[:, back], bits).t(),
            "qzeros": _packed(zeros.t(), bits),
            "scales": scale.t().half(),
            "g_idx": (torch.arange(weight.shape[1]) // GROUP)[back].int(),
        }
        return tensors, floats[:, back]

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": shuffled}
    return Format(config | {"checkpoint_format": version}, encode)


def awq(group: int = GROUP) -> Format:
    places = [0, 2, 4, 6, 1, 3, 5, 7]  # output in nibble 0, 1, 2, ...

    def columns(numbers: Tensor) -> Tensor:
        return numbers.view(len(numbers), -1, 8)[:, :, places].reshape(len(numbers), -1)

    def encode(weight: Tensor) -> tuple[Tensors, Tensor]:
        numbers, scale, zero, floats = _grouped(weight, 4, group)
        tensors = {
            "qweight": _packed(columns(numbers.t().contiguous()), 4),
            "qzeros": _packed(columns(zero.t().contiguous()), 4),
            "scales": scale.t().half(),
        }
        return tensors, floats

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Format(config | {"zero_point": True}, encode)


def packed(bits: int, *, symmetric: bool) -> Format:
    def encode(weight: Tensor) -> tuple[Tensors, Tensor]:
        numbers, scale, zero, floats = _grouped(weight, bits)
        if symmetric:
            rows, columns = weight.shape
            grouped, half = weight.view(rows, -1, GROUP), 2 ** (bits - 1)
            scale = (grouped.abs().amax(2) / (half - 0.5)).half().float()
            signed = (grouped / scale[..., None]).round().clamp(-half, half - 1)
            floats = (signed * scale[..., None]).view(rows, columns)
            numbers = (signed + half).int().view(rows, columns)
        tensors = {
            "weight_packed": _packed(numbers, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _packed(zero.t(), bits).t()
        return tensors, floats

    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP}
    return Format(compressed("pack-quantized", weights | {"symmetric": symmetric}), encode)


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "sparsity_config": {},
        "config_groups": {"group_0": group},
    }


def _eight(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}


FORMATS = {
    "fp8 by block": Format(
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"},
        fp8_by_block,
    ),
    "fp8 whole": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8_whole),
    "fbgemm fp8": Format({"quant_method": "fbgemm_fp8"}, fp8_by_row),
    "compressed fp8 by row": Format(
        compressed("float-quantized", _eight("float", "channel")), fp8_by_row
    ),
    "compressed int8 by row": Format(
        compressed("int-quantized", _eight("int", "channel")), int8_by_row
    ),
    "compressed int4": packed(4, symmetric=True),
    "compressed int4 with zero points": packed(4, symmetric=False),
    "compressed packed int8": packed(8, symmetric=True),
    "awq": awq(),
    "gptq int4": gptq(4),
    "gptq int8": gptq(8),
    "gptq int4 in activation order": gptq(4, shuffled=True),
    "gptq v2": gptq(4, version="gptq_v2"),
}
INT8 = "compressed int8 by row"
