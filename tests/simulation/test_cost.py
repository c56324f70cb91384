"""The cost model of simulated nodes: its accuracy, what it refuses, and models from files."""

import json
import subprocess
import sys
from statistics import mean

import pytest

from simulation.cost import StepCost, StepShape
from simulation.cost.calibration import sample
from simulation.cost.gpus import GPUS

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


def test_a_gpu_model_rank_count_or_path_that_is_not_supported_is_named():
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
        ({"sliding_window": 4096}, "sliding_attention"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
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
