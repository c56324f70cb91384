"""Attention of a model class, probed with one token and without weights, and the keys that
queries see under the rule of a mask."""

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.models.transformers_backend import attention
from engine.models.transformers_backend.plan import UnsupportedModel
from engine.models.transformers_backend.probe import MaskRange, probe, seen_by
from kernels.attention.arguments import Scoring
from tests.support.models.tiny_models import tiny_config

LAYERS = 4


def probed(num_layers=LAYERS, head_dim=16, is_causal=True, **said):
    """Return a Llama whose attention is called with these arguments."""
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_config("llama", head_dim=head_dim)).eval()
    for layer in model.model.layers:
        layer.self_attn.is_causal = is_causal
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | said), with_kwargs=True
        )
    return probe(model, num_layers).layers


def test_every_layer_reports_its_heads_and_keeps_its_own_keys_and_values():
    layers = probed()
    assert [layer.layer for layer in layers] == [layer.shares for layer in layers] == [0, 1, 2, 3]
    assert {(each.heads, each.kv_heads, each.head_dim, each.window) for each in layers} == {
        (4, 2, 16, None)
    }


def test_a_layer_without_a_mask_reports_its_window():
    assert {layer.window for layer in probed(attention_mask=None, sliding_window=7)} == {7}
    assert {layer.window for layer in probed(attention_mask=None)} == {None}


@pytest.mark.parametrize(
    "said, reason",
    [
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "creates its own attention mask"),
        ({"is_causal": False}, "its attention is not causal"),
        ({"position_bias": torch.zeros(1)}, "its attention uses position_bias"),
        ({"head_dim": 264}, "head_dim is 264, at most 256 is supported"),
        ({"num_layers": LAYERS + 1}, "4 of 5 layers call attention"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_attention_that_pages_do_not_support_is_rejected(said, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        probed(**said)


def test_a_class_without_a_scale_has_the_usual_one():
    class Layer:
        def attend(self, q, k, v, scoring):
            self.asked = scoring
            return v.transpose(0, 1)

    module, layer = torch.nn.Module(), Layer()
    attention.attach(module, layer)
    call = ALL_ATTENTION_FUNCTIONS[attention.NAME]
    call(module, *torch.zeros(3, 1, 2, 5, 16), None)
    assert layer.asked == Scoring(0.25)
    call(module, *torch.zeros(3, 1, 2, 5, 16), None, scaling=3.0, softcap=2.0)
    assert layer.asked == Scoring(3.0, soft_cap=2.0)


def causal(batch, head, query, key):
    return key <= query


def window(batch, head, query, key):
    return (key <= query) & (key > query - 9)


def chunks(batch, head, query, key):
    return (key <= query) & (key // 50 == query // 50)


def packed(batch, head, query, key):
    return (key <= query) & (torch.zeros(50)[query] == torch.zeros(50)[key])


@pytest.mark.parametrize(
    "rule, chunk, seen",
    [
        (causal, None, MaskRange()),
        (window, None, MaskRange(window=9)),
        (chunks, 50, MaskRange(limit=50)),
        (packed, 50, MaskRange(limit=50)),
        (causal, 50, MaskRange()),  # of a layer without chunked attention
    ],
)
def test_a_rule_gives_the_keys_that_queries_see(rule, chunk, seen):
    assert seen_by(rule, chunk) == seen


@pytest.mark.parametrize(
    "rule, reason",
    [
        (chunks, "neither causal nor a sliding window"),
        (packed, "depends on more than positions"),
        (lambda batch, head, query, key: key <= query + 1, "is not causal"),
        (lambda batch, head, query, key: (key <= query) & (key % 5 != 3), "skips recent tokens"),
    ],
)
def test_a_rule_that_is_no_window_is_rejected(rule, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        seen_by(rule, None)
