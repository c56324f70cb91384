"""The choice of experts, compared with a softmax in float64."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kernels.experts import routing
from kernels.experts.routing import Routing, route
from tests.kernels.conftest import DEVICE


@pytest.mark.parametrize(
    "n, num_experts, k", [(0, 8, 2), (1, 1, 1), (5, 8, 2), (3, 60, 4), (2, 128, 8)]
)
@pytest.mark.parametrize("normalise", [False, True])
def test_the_likeliest_experts_are_first_with_their_weights(
    implementation, n, num_experts, k, normalise
):
    logits = torch.randn(n, num_experts, device=DEVICE) * 3
    weights, ids = route(logits, Routing(k, normalise))
    expected, expected_ids = torch.softmax(logits.double(), -1).topk(k)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=1e-5)


def test_equally_likely_experts_are_all_different(implementation):
    weights, ids = route(torch.zeros(3, 12, device=DEVICE), Routing(12, False))
    assert (ids.sort(-1).values == torch.arange(12, device=DEVICE)).all()
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 12))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_choose_existing_experts(implementation, odd):
    logits = torch.randn(2, 5, device=DEVICE)
    logits[0] = odd
    weights, ids = route(logits, Routing(3, True))
    assert ((ids >= 0) & (ids < 5)).all()
    assert weights[1].isfinite().all() and not weights[0].isfinite().all()


@pytest.mark.parametrize(
    "shape, k", [((2, 3), 4), ((2, 3), 0), ((3,), 1), ((1, routing.MAX_EXPERTS + 1), 1)]
)
def test_wrong_shapes_are_rejected(shape, k):
    with pytest.raises(ValueError, match="experts"):
        route(torch.zeros(shape), Routing(k, False))


# experts, groups, chosen groups, experts of a token
GROUPED = [(16, 4, 2, 3), (60, 5, 1, 4), (64, 8, 4, 8), (8, 1, 1, 2)]


@pytest.mark.parametrize("num_experts, groups, chosen, k", GROUPED)
def test_deepseek_v3s_router_chooses_the_same_experts(
    implementation, num_experts, groups, chosen, k
):
    config = DeepseekV3Config(
        hidden_size=8,
        num_attention_heads=1,
        n_routed_experts=num_experts,
        n_group=groups,
        topk_group=chosen,
        num_experts_per_tok=k,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config).to(DEVICE)
    router.weight.data.normal_()
    router.e_score_correction_bias.normal_(0.0, 0.3)
    x = torch.randn(5, 8, device=DEVICE)
    with torch.no_grad():
        logits, expected, expected_ids = router(x)
    routing = Routing(k, True, "sigmoid", 2.5, groups, chosen, 2)
    _same(*route(logits, routing, router.e_score_correction_bias), expected, expected_ids)


def test_deepseek_v2s_router_chooses_the_same_experts(implementation):
    config = DeepseekV2Config(
        hidden_size=8,
        num_attention_heads=1,
        n_routed_experts=24,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    )
    router = DeepseekV2TopkRouter(config).to(DEVICE)
    router.weight.data.normal_()
    with torch.no_grad():
        logits, expected, expected_ids = router(torch.randn(5, 8, device=DEVICE))
    routing = Routing(3, False, scale=16.0, groups=4, chosen_groups=2)
    _same(*route(logits, routing), expected, expected_ids)


def _same(weights, ids, expected, expected_ids):
    """Compare weights and experts, regardless of the order of a token's experts."""
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.long().gather(1, order), expected_ids.gather(1, expected_order))
    torch.testing.assert_close(weights.gather(1, order), expected.gather(1, expected_order))


@pytest.mark.parametrize(
    "routing, bias",
    [
        (Routing(2, True, groups=5), None),
        (Routing(2, True, groups=4, chosen_groups=5), None),
        (Routing(3, True, groups=6, chosen_groups=1), None),
        (Routing(1, True, groups=12, group_top=2), None),
        (Routing(2, True), torch.zeros(11)),
    ],
)
def test_groups_that_do_not_fit_are_rejected(routing, bias):
    with pytest.raises(ValueError, match=r"experts|bias"):
        route(torch.zeros(1, 12), routing, bias)
