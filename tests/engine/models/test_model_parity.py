"""Our forward compared with transformers (eager, float32): logits and greedy tokens through
pages."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.config import LoraConfig
from engine.models import load
from engine.models.families import read_decoder
from tests.support.engine.steps import Recorder, Steps, logits_after, prompt
from tests.support.hardware import devices
from tests.support.hardware.devices import CPU, CUDA
from tests.support.models.adapters import make_adapter, merge
from tests.support.models.checkpoints import (
    EXPERT_ARCHITECTURES,
    NATIVE_ARCHITECTURES,
    greedy_tokens,
    make_checkpoint,
    reference_model,
    to_transformers_4,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS = {
    **{
        name: (name, {})
        for name in NATIVE_ARCHITECTURES
        if name != "qwen3_5_moe_text"  # experts and layers like those of other architectures
    },
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama one kv head, head_dim 24": ("llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
    ),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama tanh gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral window": ("mistral", {"sliding_window": 21}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2 yarn, own scales": (
        "qwen2",
        {
            "rope_parameters": YARN
            | {"mscale": 1.2, "mscale_all_dim": 0.7, "beta_fast": 8, "truncate": False}
        },
    ),
    "qwen2 some layers windowed": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 2,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3 tied, biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 alternating windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3_moe normalised, biased": ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe window in all layers": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 21},
    ),
    "qwen3_moe some layers dense": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen2_moe alternating windows, no bias": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "num_hidden_layers": 3,
            "qkv_bias": False,
        },
    ),
    "mixtral window, every expert": ("mixtral", {"sliding_window": 17, "num_experts_per_tok": 4}),
    "dots1 window, not normalised": (
        "dots1",
        {"sliding_window": 17, "max_window_layers": 1, "norm_topk_prob": False},
    ),
    "deepseek_v2 greedy, no latents of queries": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": None},
    ),
    "deepseek_v3 yarn, biased": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}, "attention_bias": True},
    ),
    "deepseek_v3 halves rotated, one group, not normalised": (
        "deepseek_v3",
        {"rope_interleave": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "qwen3_next all heads rotated, a value head each, wide convolution": (
        "qwen3_next",
        {
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 6,
            "attention_bias": True,
            "mlp_only_layers": [1],
            "layer_types": [*("full_attention",) * 2, *("linear_attention",) * 2],
        },
    ),
    # These models' scores and logits are small: a cap of 3 has an effect, and one of 30 almost
    # none.
    "gemma2 low caps": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 3.0}),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2 biased, untied, gelu, own windows": (
        "gemma2",
        {
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_activation": "gelu",
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "gemma3_text capped, far tokens nearer where there is no window": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 3.0,
        },
    ),
}


@pytest.fixture(params=["torch", "compiled", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A CPU with operations of torch or compiled ones, or a GPU with its kernels."""
    if request.param == "cuda":
        return CUDA
    devices.use(request.param, monkeypatch)
    return CPU


LOGITS_PROMPT = prompt(118)  # after all windows, and two pages decoded


@pytest.fixture(scope="module")
def variant_of(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """Return a function that returns a variant, and transformers' logits after each token of
    `LOGITS_PROMPT`. All devices share them."""

    @functools.cache
    def of(variant: str) -> tuple[Path, torch.Tensor]:
        architecture, overrides = VARIANTS[variant]
        directory = checkpoint(architecture, **overrides)
        with torch.no_grad():
            return directory, reference_model(directory)(torch.tensor([LOGITS_PROMPT])).logits[0]

    return of


@pytest.mark.parametrize(
    "variant",
    [pytest.param(each, marks=[pytest.mark.long] * (n % 3 > 0)) for n, each in enumerate(VARIANTS)],
)
def test_logits_of_chunks_and_decode_steps_are_those_of_transformers(variant_of, variant, device):
    tokens, (directory, expected) = LOGITS_PROMPT, variant_of(variant)
    # Chunks of all kinds, then one token at a time.
    ends = [1, 16, 30, 33, 94, 95, *range(96, len(tokens) + 1)]
    model = load(directory, device, torch.float32)
    actual = logits_after(model, tokens, ends).cpu()
    assert (actual - expected[[end - 1 for end in ends]]).abs().max() <= 1e-4


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_rows_with_adapters_equal_models_with_merged_adapters(tmp_path, architecture, device):
    """Two adapters of different ranks and none, in the same forwards."""
    directory = make_checkpoint(tmp_path / "model", architecture)
    model = load(directory, device, torch.float32)
    modules = sorted({name.rpartition(".")[2] for each in model.products for name in each.modules})
    names = {"a": 4, "b": 7}
    for seed, (name, rank) in enumerate(names.items()):
        reference = reference_model(directory)
        make_adapter(tmp_path / name, reference, seed=seed, rank=rank, modules=modules)
    lora = LoraConfig(adapter_dir=tmp_path, preload=tuple(names), max_loras=2, max_rank=8)
    prompts = [prompt(length, seed) for seed, length in enumerate([1, 16, 70, 33, 40, 17])]
    wanted = [*names, "", *names, ""]
    steps = Steps(model, num_slots=len(prompts), lora=lora)
    told = steps.generate(prompts, 4, chunk=32, adapters=wanted)
    steps.close()
    for name in ("", *names):
        reference = reference_model(directory)
        if name:
            merge(reference, tmp_path / name)
        rows = [row for row, each in enumerate(wanted) if each == name]
        expected = greedy_tokens(reference, [prompts[row] for row in rows], 4)
        assert [told[row] for row in rows] == expected


def test_rows_of_a_mixed_batch_equal_those_alone(tmp_path):
    model = Recorder(load(make_checkpoint(tmp_path), CPU, torch.float32))
    rows = [(prompt(70, 1), 20, 70), (prompt(40, 2), 0, 40), (prompt(33, 3), 32, 33)]

    def logits(*batches):
        steps = Steps(model, overlap=False)
        slots = [steps.add(tokens) for tokens, _, _ in rows]
        for slot, (_, start, _) in zip(slots, rows, strict=True):
            if start:
                steps.launch([(slot, 0, start)], samples=[False])
        model.seen.clear()
        for batch in batches:
            steps.launch([(slots[i], *rows[i][1:]) for i in batch])
        steps.close()
        return torch.cat(model.seen)

    torch.testing.assert_close(logits([0, 1, 2]), logits([0], [1], [2]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "variant",
    [
        *("llama llama3", "qwen2 yarn", "mistral window", "qwen3", "gemma2", "gemma3_text"),
        *EXPERT_ARCHITECTURES,
        "deepseek_v3 yarn, biased",
    ],
)
def test_a_transformers_4_config_gives_the_same_model(tmp_path, variant):
    architecture, overrides = VARIANTS[variant]
    directory = make_checkpoint(tmp_path, architecture, **overrides)
    new = read_decoder(directory)
    to_transformers_4(directory)
    config = json.loads((directory / "config.json").read_text())
    assert "rope_theta" in config and "torch_dtype" in config and "rope_parameters" not in config
    assert read_decoder(directory) == new


def test_shards_give_the_same_weights_as_one_file(tmp_path):
    whole = make_checkpoint(tmp_path / "whole", "qwen2")
    parts = make_checkpoint(tmp_path / "parts", "qwen2", max_shard_size="60KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    models = [load(directory, CPU, torch.float32) for directory in (whole, parts)]
    assert torch.equal(*(logits_after(model, prompt(20)) for model in models))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_half_precision_is_close_to_float32(tmp_path, dtype, architecture):
    directory = make_checkpoint(tmp_path, architecture)
    exact, rounded = (
        logits_after(load(directory, CPU, kind), prompt(50), (20, 40, 50))[-1]
        for kind in (torch.float32, dtype)
    )
    assert rounded.dtype == (torch.float32 if architecture == "gemma2" else dtype)
    assert (exact - rounded).abs().max() < 0.05 * exact.std()
