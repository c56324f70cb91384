"""The cost model of simulated nodes: its accuracy, what it refuses, and models from files."""

import json
import subprocess
import sys
from statistics import mean

import msgspec
import pytest
import torch

from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedKV, RecurrentState, StateCells
from simulation.cost import StepCost, StepShape
from simulation.cost.calibration import sample
from simulation.cost.kernels import GPUS
from simulation.cost.models import MODELS, DeltaNetShape, model_shape
from simulation.cost.step_cost import ModelledTimes

LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
DECODE = StepShape((1,) * 64, (1000,) * 64)
PREFILL = StepShape((2048,), (2048,))


@pytest.mark.parametrize("gpu, product", [("h100", 0.1), ("h200", 0.1), ("b200", 0.12)])
def test_the_mean_error_over_public_measurements_is_small(gpu, product):
    limits = {"product": product, "decode": 0.1, "prefill": 0.1, "experts": 0.25}
    for kernel, limit in limits.items():
        rows = [row for row in sample() if (row.gpu, row.kernel) == (gpu, kernel)]
        assert len(rows) == 60
        assert mean(abs(row.predicted_us(GPUS[gpu]) / row.us - 1) for row in rows) < limit, kernel


def test_an_unsupported_gpu_rank_count_or_path_is_rejected_by_name():
    for arguments, name in (
        (("h1000", "llama-3-8b"), "h1000"),
        (("h100", "llama-9"), "llama-9"),
        (("h100", "llama-3-8b", 3), "tp 3"),
        (("h100", "llama-3-70b"), "does not fit"),
    ):
        with pytest.raises(ValueError, match=name):
            StepCost.of(*arguments)
    with pytest.raises(ValueError, match="pigeon"):
        StepCost.of("h100", "llama-3-8b").transfer_s(1, "pigeon")


def test_steps_cost_more_for_more_work_and_less_with_more_gpus():
    cost = StepCost.of("h100", "llama-3-8b")
    assert cost.step_s(StepShape((1,), (500,))) == pytest.approx(6.7e-3, rel=0.05)  # the weights
    for shape in (DECODE, PREFILL):
        times = [StepCost.of("h100", "llama-3-8b", tp).step_s(shape) for tp in (1, 2, 4, 8)]
        assert times == sorted(times, reverse=True)
    longer = StepShape((2048,), (8192,))  # the last chunk of a long prompt
    assert cost.step_s(longer) > 1.1 * cost.step_s(PREFILL)
    assert cost.step_s(DECODE) < StepCost.of("h100", "mixtral-8x7b", 2).step_s(DECODE)


def test_a_checkpoint_costs_as_much_as_the_model_of_its_dimensions(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    known, read = (StepCost.of("h100", each) for each in ("llama-3-8b", str(tmp_path)))
    assert read.step_s(PREFILL) == known.step_s(PREFILL)
    assert (read.weight_bytes, read.kv_capacity_tokens) == (
        known.weight_bytes,
        known.kv_capacity_tokens,
    )
    for wrong, name in (
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"sliding_window": 4096}, "layers with a window"),
        ({"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "expected 32"),
        ({"layer_types": ["linear_attention"] * 32}, "without attention"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": -1}, "vocab_size is -1"),
    ):
        file.write_text(json.dumps(LLAMA | wrong))
        with pytest.raises(ValueError, match=name):
            StepCost.of("h100", str(tmp_path))


def test_the_cost_model_loads_no_heavy_library():
    code = "import sys, simulation.cost, simulation.cost.calibration; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "transformers"} & set(loaded.stdout.split())


@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-3-12b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_have_the_layout_of_the_engine(model, page_size):
    shape = MODELS[model]
    net = shape.delta_net
    layers = [
        *[PagedKV(shape.kv_heads, shape.head_dim)] * shape.full,
        *[PagedKV(shape.kv_heads, shape.head_dim, shape.window)] * shape.windowed,
    ]
    if shape.recurrent:
        matrices = StateCells("", net.value_heads, (net.key_dim, net.value_dim), torch.float32)
        convolved = (net.channels // net.key_heads, net.width - 1)
        states = (matrices, StateCells("", net.key_heads, convolved))
        layers += [RecurrentState(states)] * shape.recurrent
    layout = KVLayout.of(layers, page_size, torch.bfloat16)
    tables = shape.kv.tables(page_size)
    assert (tables.windows, shape.kv.page_bytes(page_size)) == (layout.windows, layout.page_bytes)
    assert tables.state_pages == pytest.approx(layout.state_pages, rel=0.05)  # parts are not cut


def test_a_window_and_a_state_save_the_time_of_long_contexts():
    long, short = StepShape((1,) * 8, (100_000,) * 8), StepShape((1,) * 8, (1000,) * 8)
    growth = {}
    for model, tp in (("qwen3-8b", 1), ("gemma-3-12b", 1), ("qwen3-next-80b-a3b", 4)):
        cost = StepCost.of("h100", model, tp)
        parts = min(tp, MODELS[model].kv_heads)  # ranks with KV of their own
        growth[model] = (cost.step_s(long) - cost.step_s(short)) * parts / cost.kv_bytes_per_token
    assert growth["gemma-3-12b"] == pytest.approx(growth["qwen3-8b"] * 8 / 48, rel=0.1)
    assert growth["qwen3-next-80b-a3b"] == pytest.approx(growth["qwen3-8b"], rel=0.1)
    prompt = StepShape((8192,), (8192,))
    full = msgspec.structs.replace(MODELS["gemma-3-12b"], windowed=0)
    windowed_s, full_s = (
        ModelledTimes(GPUS["h100"], each, 1).step_s(prompt)
        for each in (MODELS["gemma-3-12b"], full)
    )
    assert 0.5 * full_s < windowed_s < 0.95 * full_s


def test_windows_and_states_are_read_from_a_checkpoint(tmp_path):
    kinds = ["sliding_attention", "linear_attention", "full_attention", "full_attention"] * 8
    net = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel_dim": 4}
    net |= {"linear_key_head_dim": 64, "linear_value_head_dim": 32}
    config = LLAMA | net | {"layer_types": kinds, "sliding_window": 128}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    found = model_shape(str(tmp_path))
    assert (found.full, found.windowed, found.window, found.recurrent) == (16, 8, 128, 8)
    assert found.delta_net == DeltaNetShape(4, 8, 64, 32, 4)
    for fields, expected in (
        ({"full_attention_interval": 4}, (8, 0, 24)),
        ({"sliding_window": 64, "sliding_window_pattern": 2}, (16, 16, 0)),
    ):
        file.write_text(json.dumps(LLAMA | net | fields))
        found = model_shape(str(tmp_path))
        assert (found.full, found.windowed, found.recurrent) == expected
