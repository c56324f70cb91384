"""Required files of a model directory, errors when they are missing, and the model's
fingerprint."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from common.config import SpeculativeConfig
from common.errors import ConfigError
from engine.models import load, tokenizer_hash
from engine.models.families import read_decoder
from tests.support.models.checkpoints import (
    END_TOKEN_ID,
    edit_config,
    edit_tensors,
    fingerprint,
    make_checkpoint,
    read_spec,
)
from tests.support.models.drafters import make_hybrid_mtp

CPU = torch.device("cpu")


@pytest.fixture
def pristine(checkpoint):
    return checkpoint("qwen3")


@pytest.fixture
def directory(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "copy")


def load_error(directory):
    with pytest.raises(ConfigError) as error:
        load(directory, CPU, torch.float32)
    return str(error.value)


@pytest.mark.parametrize(
    "architecture, changes, words",
    [
        ("qwen3", {"model_type": ...}, ["model_type", "string"]),
        ("qwen3", {"hidden_size": ...}, ["hidden_size", "positive integer", "nothing"]),
        ("qwen3", {"hidden_size": "64"}, ["hidden_size", '"64"']),
        ("qwen3", {"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ("qwen3", {"num_key_value_heads": 3}, ["num_key_value_heads", "divisor"]),
        ("qwen3", {"tie_word_embeddings": 1}, ["tie_word_embeddings", "true or false"]),
        ("qwen3", {"head_dim": 31}, ["head_dim", "31"]),
        ("qwen3", {"hidden_act": "relu"}, ["hidden_act", "relu", "silu, gelu, gelu_pytorch_tanh"]),
        ("qwen3", {"dtype": "float64"}, ["dtype", "float64", "bfloat16"]),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic"}},
            ["dynamic", "yarn", "llama3", "linear"],
        ),
        ("qwen3", {"rope_parameters": {"rope_type": "longrope"}}, ["longrope", "yarn"]),
        ("qwen3", {"rope_parameters": {"rope_type": "linear"}}, ["factor", "number"]),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ("qwen3", {"rope_parameters": [1]}, ["rope_parameters", "object"]),
        ("qwen3", {"eos_token_id": "x"}, ["eos_token_id", "token id"]),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full"]},
            ["layer_types"],
        ),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "false"]),
        ("gemma2", {"hidden_activation": "relu"}, ["hidden_activation", "gelu_pytorch_tanh"]),
        ("gemma2", {"attn_logit_softcapping": 0.0}, ["attn_logit_softcapping", "positive", "null"]),
        ("gemma2", {"final_logit_softcapping": -1.0}, ["final_logit_softcapping", "positive"]),
        ("gemma2", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "positive"]),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ["topk_method", "group_limited_greedy"]),
        ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob", "false"]),
        ("deepseek_v2", {"n_group": 5}, ["n_group", "12 experts"]),
        ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq", "1"]),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, ["qk_rope_head_dim", "even"]),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}, ["attention_bias"]),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_configuration_is_reported_by_field(
    tmp_path, directory, architecture, changes, words
):
    if architecture != "qwen3":
        directory = make_checkpoint(tmp_path / "other", architecture)
    edit_config(directory, "generation_config.json", eos_token_id=...)
    edit_config(directory, **changes)
    message = load_error(directory)
    assert all(word in message for word in words), message


def test_missing_or_invalid_files_are_reported_by_name(directory):
    (directory / "config.json").write_text("{")
    assert "config.json" in load_error(directory)
    (directory / "config.json").unlink()
    assert "config.json" in load_error(directory)


def test_a_directory_without_safetensors_is_reported(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "model.safetensors" in load_error(directory)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), ["misses 1", "layers.1.mlp.up"]),
        (lambda t: t.update(extra=torch.zeros(2)), ["unexpected", "extra"]),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(63)}),
            ["model.norm.weight", "(63,)", "(64,)"],
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            ["model.norm.weight", "I8", "BF16"],
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_tensors_that_do_not_fit_the_configuration_are_reported_by_name(directory, change, words):
    edit_tensors(directory, change)
    message = load_error(directory)
    assert all(word in message for word in words), message


def test_stored_rotation_frequencies_and_a_tied_head_are_accepted(tmp_path):
    directory = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    before = fingerprint(directory)
    edit_tensors(
        directory,
        lambda t: t.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
                "lm_head.weight": torch.zeros(320, 64),
            }
        ),
    )
    load(directory, CPU, torch.float32)
    assert fingerprint(directory) == before


@pytest.mark.parametrize("kept_bytes", [4, 20, 5000])
def test_a_truncated_file_is_rejected(directory, kept_bytes):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert "model.safetensors" in load_error(directory)


@pytest.mark.parametrize(
    "index",
    ["[]", '{"weight_map": {"a": "gone"}}', '{"weight_map": {"a": "../model.safetensors"}}'],
)
def test_an_invalid_index_is_rejected(directory, index):
    (directory / "model.safetensors.index.json").write_text(index)
    assert "index.json" in load_error(directory)


@pytest.mark.parametrize(
    "generation, config, expected",
    [(5, 6, (5,)), ([7, 8], 6, (7, 8)), (..., 6, (6,)), (None, [6, 9], (6, 9)), (..., ..., ())],
)
def test_eos_comes_from_the_generation_config_then_from_the_config(
    directory, generation, config, expected
):
    edit_config(directory, "generation_config.json", eos_token_id=generation)
    edit_config(directory, eos_token_id=config)
    assert read_spec(directory).eos_token_ids == expected


def test_eos_may_be_only_in_the_text_config(directory):
    edit_config(directory, "generation_config.json", eos_token_id=...)
    edit_config(directory, eos_token_id=..., text_config={"eos_token_id": [4]})
    assert read_spec(directory).eos_token_ids == (4,)


def test_a_generation_config_is_not_required(directory):
    (directory / "generation_config.json").unlink()
    assert read_spec(directory).eos_token_ids == (END_TOKEN_ID,)


@pytest.mark.parametrize(
    "architecture, changes, expected",
    [
        ("mistral", {}, (4096,) * 2),  # filled in by transformers
        ("mistral", {"sliding_window": None}, (None,) * 2),
        ("mistral", {"sliding_window": 33}, (33,) * 2),
        ("gemma2", {}, (4096, None)),
        ("gemma2", {"sliding_window": 33}, (33, None)),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, (None, 4096)),
    ],
)
def test_windows_are_filled_in_like_by_transformers(tmp_path, architecture, changes, expected):
    directory = make_checkpoint(tmp_path, architecture)
    edit_config(directory, **({"sliding_window": ..., "layer_types": ...} | changes))
    assert tuple(layer.mixer.window for layer in read_decoder(directory).layers) == expected


def test_the_draft_layer_of_deepseek_v3_is_left_out(tmp_path):
    directory = make_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=2)
    edit_tensors(
        directory, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(2)})
    )
    edit_config(directory, num_nextn_predict_layers=1)
    assert len(load(directory, CPU, torch.float32).layers) == 2
    edit_config(directory, num_nextn_predict_layers=0)
    assert "model.layers.2.eh_proj.weight" in load_error(directory)


def test_yarn_extends_the_context_from_its_original_length(directory):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    edit_config(directory, rope_parameters=rope)
    assert read_spec(directory).context_length == 4096


def test_fingerprints_do_not_depend_on_place_and_format_of_a_model(pristine, tmp_path):
    other = make_checkpoint(tmp_path / "shards", "qwen3", max_shard_size="60KB")
    assert len(list(other.glob("*.safetensors"))) > 2
    assert fingerprint(other) == fingerprint(pristine)
    assert fingerprint(pristine)["architecture"] == "qwen3"


def test_fingerprints_differ_in_the_field_that_differs(pristine, directory, tmp_path):
    expected = fingerprint(pristine)

    def differing():
        actual = fingerprint(directory)
        return {name for name in expected if actual[name] != expected[name]}

    edit_config(directory, eos_token_id=3, dtype="bfloat16")
    assert differing() == set()
    edit_config(directory, rms_norm_eps=1e-5)
    assert differing() == {"config"}
    edit_config(directory, rms_norm_eps=1e-6)
    edit_tensors(directory, lambda t: t["model.layers.1.mlp.up_proj.weight"].mul_(2))
    assert differing() == {"weights"}


def test_the_tokenizer_has_its_own_hash(pristine, directory):
    assert tokenizer_hash(directory) == tokenizer_hash(pristine) != ""
    (directory / "tokenizer.json").write_text("{}")
    assert tokenizer_hash(directory) != tokenizer_hash(pristine)
    assert fingerprint(directory) == fingerprint(pristine)
    (directory / "tokenizer.json").unlink()
    assert tokenizer_hash(directory) == ""


def test_weights_do_not_change_with_the_file(directory):
    path, decoder = directory / "model.safetensors", load(directory, CPU, torch.float32)
    before = decoder.ends.embedding.clone()
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(decoder.ends.embedding, before)


def test_norms_stored_as_differences_from_one_are_complete_and_exact_in_any_dtype(tmp_path):
    directory = make_checkpoint(tmp_path, "gemma2")
    stored = load_file(directory / "model.safetensors")
    decoder = load(directory, CPU, torch.bfloat16)
    layer, prefix = decoder.layers[1], "model.layers.1."
    for norm, name in (
        (decoder.ends.norm, "model.norm"),
        (layer.mixer_norm, f"{prefix}input_layernorm"),
        (layer.mixer_post_norm, f"{prefix}post_attention_layernorm"),
        (layer.ffn_norm, f"{prefix}pre_feedforward_layernorm"),
        (layer.ffn_post_norm, f"{prefix}post_feedforward_layernorm"),
    ):
        assert torch.equal(norm.weight, 1 + stored[f"{name}.weight"])
    assert decoder.ends.embedding.dtype == torch.bfloat16
    assert layer.mixer.qkv.apply(decoder.ends.embedding[:3]).dtype == torch.bfloat16


def test_experts_in_one_tensor_equal_separate_ones(tmp_path):
    """Experts stacked as in Qwen3.5's checkpoints, including those of the draft layer."""
    one_by_one = make_hybrid_mtp(make_checkpoint(tmp_path / "one", "qwen3_5_moe_text"))
    stacked = shutil.copytree(one_by_one, tmp_path / "stacked")

    def stack(tensors):
        for layer in {name.partition("experts.")[0] for name in tensors if ".experts." in name}:
            gate, up, down = (
                [tensors.pop(f"{layer}experts.{n}.{name}_proj.weight") for n in range(8)]
                for name in ("gate", "up", "down")
            )
            both = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
            tensors[f"{layer}experts.gate_up_proj"] = torch.stack(both)
            tensors[f"{layer}experts.down_proj"] = torch.stack(down)

    edit_tensors(stacked, stack)
    mtp = SpeculativeConfig(method="mtp")
    models = [load(path, CPU, torch.float32, speculation=mtp) for path in (one_by_one, stacked)]
    x, weights = torch.randn(5, 64), torch.rand(5, 3)
    ids = torch.randint(8, (5, 3), dtype=torch.int32)
    for layers in zip(*([*m.layers, m.drafter.layer.body] for m in models), strict=True):
        first, second = (layer.ffn.experts.apply(x, weights, ids) for layer in layers)
        assert torch.equal(first, second)
