"""Paged attention compared with a float64 softmax over each query's own keys, for both
implementations."""

import pytest
import torch

from kernels import device
from kernels.attention import reference
from kernels.attention.arguments import Scoring
from kernels.attention.paged import paged_attention
from tests.kernels.attention.attention_case import SCALE, Case
from tests.kernels.conftest import check_refused

ROWS = [
    [(1, 1)],
    [(1, 17), (1, 1), (1, 65), (1, 16), (1, 5)],  # decode, lengths around pages and tiles
    [(17, 17), (3, 3)],
    [(5, 40), (1, 64), (20, 20), (1, 7)],  # chunk after a prefix, decode and a prompt, mixed
]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("page_size, window", [(16, None), (16, 7), (32, 16), (64, None), (64, 50)])
def test_every_query_sees_exactly_its_keys(implementation, rows, page_size, window):
    Case(rows, page_size=page_size).check(window)


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim",
    [(1, 1, 2), (6, 2, 10), (3, 3, 24), (8, 1, 32), (20, 1, 16), (4, 1, 64)],
)
def test_query_heads_share_kv_heads_in_order(implementation, heads, kv_heads, head_dim):
    rows = [(1, 20), (4, 30), (1, 9)]
    Case(rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim).check()


@pytest.mark.parametrize("head_dim", [16, 24])
@pytest.mark.parametrize("enveloped", [True, False])
def test_half_precision_and_any_strides(implementation, head_dim, enveloped):
    rows = [(70, 75), (3, 3), (1, 90)]
    case = Case(rows, head_dim=head_dim, dtype=torch.float16, enveloped=enveloped)
    case.check(atol=2e-3, rtol=2e-3)


def test_queries_may_be_stored_by_head(implementation):
    """Accept queries in the layout of other libraries: all tokens of a head together."""
    case = Case([(17, 17), (1, 20), (1, 9)])
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    case.check()


@pytest.mark.parametrize("head_dim, kv_heads", [(24, 4), (128, 1)])
def test_bfloat16(implementation, head_dim, kv_heads):
    if implementation == "triton":
        pytest.skip("its interpreter computes bfloat16 wrongly")
    rows = [(70, 75), (200, 200), (3, 3), (1, 90)]
    case = Case(rows, head_dim=head_dim, kv_heads=kv_heads, dtype=torch.bfloat16)
    case.check(atol=2e-2, rtol=2e-2)
    case.check(60, atol=2e-2, rtol=2e-2)


def test_scores_are_capped(implementation):
    case = Case([(1, 20), (17, 17), (4, 30), (1, 9)], page_size=16)
    case.q *= 10
    case.check(soft_cap=2.0)
    case.check(7, soft_cap=2.0)


@pytest.mark.parametrize("window", [None, 7, 550])
def test_sinks_add_to_the_denominator_of_every_query(implementation, window):
    """Sinks that take almost nothing, some, and almost everything, for rows in one piece and in
    several, alone in a chunk or with others."""
    case = Case([(17, 17), (2, 30), (1, 20), (1, 600), (1, 1)], heads=6, page_size=16)
    sinks = torch.tensor([-40.0, -1.0, 0.0, 1.5, 6.0, 40.0], device=case.q.device)
    case.check(window, sinks=sinks, atol=1e-5, rtol=1e-4)
    half = sinks.to(torch.bfloat16)
    case.check(window, 2.0, half, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "rows", [[(5, 40), (1, 64), (20, 20), (1, 7)], [(1, 0), (1, 600)]], ids=str
)
@pytest.mark.parametrize("kept_in", [None, torch.float8_e5m2])
def test_outputs_are_multiplied_by_the_sigmoids_of_gates(implementation, rows, kept_in):
    Case(rows, head_dim=24, kept_in=kept_in).check_gated()


def test_gates_of_another_shape_are_rejected():
    case = Case([(1, 5)])
    for gate in (case.q[:, :2], case.q.half()):
        with pytest.raises(ValueError, match="gate"):
            paged_attention(case.q, case.kv, case.plan(), Scoring(SCALE), gate=gate)


def test_padding_rows_with_sinks_are_zero(implementation):
    sinks = torch.tensor([0.0, 9.0, -9.0, 1.0])
    case = Case([(3, 3), (1, 0), (1, 4), (1, 0)])
    assert not case.attend(sinks=sinks.to(case.q.device))[[3, 5]].any()


def test_padding_rows_are_zero(implementation):
    Case([(1, 20), (1, 0), (1, 3), (1, 0)]).check()
    Case([(1, 0)]).check()
    Case([(1, 0), (2, 2), (1, 0), (1, 4)]).check()


def test_rows_without_queries_are_ignored(implementation):
    Case([(3, 20), (0, 5), (2, 9), (1, 4)]).check()


def test_layers_of_one_plan_are_independent(implementation):
    case = Case([(4, 20), (1, 70), (1, 3)])
    plan = case.plan()
    first = paged_attention(case.q, case.kv, plan, Scoring(0.3))
    paged_attention(-case.q, case.kv, plan, Scoring(0.1))
    again = paged_attention(case.q, case.kv, plan, Scoring(0.3))
    assert torch.equal(first, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(32, 8, 128), (16, 8, 64), (8, 4, 256)])
@pytest.mark.parametrize(
    "page_size, window, soft_cap", [(16, None, None), (64, 1000, 50.0), (128, None, None)]
)
def test_production_shapes(
    monkeypatch, dtype, tolerance, heads, kv_heads, head_dim, page_size, window, soft_cap
):
    monkeypatch.setattr(device, "uses_triton", lambda tensor: True)
    rows = [(700, 1900), (1, 40), (2048, 2048), (5, 4000)]
    rows += [(1, 8000), *((1, 100 + 37 * row) for row in range(60)), (1, 0), (1, 1)]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    Case(rows, dtype=dtype, **shape).check(window, soft_cap, atol=tolerance, rtol=tolerance)


def test_long_rows_are_divided(implementation):
    """Around several pieces of keys, with windows that start inside one."""
    rows = [(1, 1030), (1, 512), (1, 513), (1, 3)]
    case = Case(rows, heads=7, kv_heads=1, head_dim=24, page_size=32)
    case.q *= 5
    case.check(atol=1e-5, rtol=1e-4)
    case.check(600, atol=1e-5, rtol=1e-4)


def test_a_query_that_is_not_finite_gives_nan(implementation):
    """Otherwise a row whose forward failed would get a token."""
    case = Case([(1, 40), (1, 20)])
    case.q[0, 0, 3] = float("nan")
    head_dim = case.q.shape[2]
    assert case.attend()[0, :head_dim].isnan().all()
    assert not case.attend()[1].isnan().any()


def test_wrong_arguments_are_rejected(implementation):
    case = Case([(1, 5), (1, 6)])
    check_refused("page_starts", case.plan, page_starts=case.page_starts[:1])
    check_refused("query_starts", case.plan, query_starts=case.query_starts[:2])
    check_refused("window", case.plan, window=0)
    check_refused("decodes", case.plan, num_decodes=3)
    check_refused("heads", case.plan, heads=3)
    plan = case.plan()
    check_refused("tokens", paged_attention, case.q[:1], case.kv, plan, Scoring(1.0))
    check_refused("fit", paged_attention, case.q[:, :3], case.kv, plan, Scoring(1.0))
    check_refused("kv", paged_attention, case.q, case.kv[:, :, 0], plan, Scoring(1.0))
    check_refused("above 0", paged_attention, case.q, case.kv, plan, Scoring(0.0))
    check_refused("above 0", paged_attention, case.q, case.kv, plan, Scoring(1.0, soft_cap=0.0))
    too_few = Scoring(1.0, sinks=torch.zeros(3))
    check_refused("sinks", paged_attention, case.q, case.kv, plan, too_few)


@pytest.fixture
def by_reference(monkeypatch):
    monkeypatch.setattr(device, "uses_triton", lambda tensor: False)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [None, 1, 7, 16, 50, 1000])
def test_chunks_of_more_queries_than_share_a_mask(by_reference, page_size, window):
    Case([(300, 310), (1, 100), (2, 31)], page_size=page_size).check(window)


@pytest.mark.parametrize("group_bytes", [1, 3000, 9000])
def test_rows_agree_however_they_are_grouped(by_reference, monkeypatch, group_bytes):
    monkeypatch.setattr(reference, "GROUP_BYTES", group_bytes)
    case = Case([(1, 40), (1, 3), (1, 17), (1, 64), (1, 16)])
    case.check()
    case.check(20)
