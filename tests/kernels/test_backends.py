"""Operations of optional packages give the same results as ours, with calls that their releases
accept."""

import gc
import sys
from pathlib import Path

import pytest
import torch

from kernels.attention.arguments import Scoring
from kernels.attention.paged import paged_attention
from kernels.backends.fla import FlashLinearAttention
from kernels.backends.flashinfer import FlashInfer
from kernels.backends.package import Package, Unavailable
from kernels.linear_attention.delta_rule import delta_rule
from kernels.narrow import NARROW
from tests.kernels.attention.attention_case import SCALE, Case
from tests.kernels.conftest import DEVICE
from tests.kernels.linear_attention.state_case import NONE, cells_of, pages_of, rows_of
from tests.kernels.linear_attention.test_delta_rule import inputs
from tests.support.hardware import optional_packages
from tests.support.hardware.recorded import PACKAGES, Recorded, record

EXTENDS = [(5, 40), (33, 33), (1, 17), (16, 16)]
VERIFIES = [(4, 90), (4, 16), (1, 33)]
DECODES = [(1, 1), (1, 16), (1, 70)]


@pytest.fixture
def package():
    return optional_packages.flashinfer()


@pytest.fixture
def case_of(package):
    """Cases whose plans are made by FlashInfer."""
    planner = staticmethod(FlashInfer(package, DEVICE).plan_attention)
    return type("PlannedCase", (Case,), {"planner": planner})


@pytest.mark.parametrize("rows", [EXTENDS, VERIFIES, DECODES], ids=["extend", "verify", "decode"])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_attention_through_pages_of_any_layout(case_of, package, rows, window):
    for page_size, enveloped in ((16, True), (32, False)):
        case_of(rows, page_size=page_size, enveloped=enveloped).check(window)
    kinds = {type(wrapper).__name__ for wrapper in package.plans}
    assert kinds == {"Decode" if rows is DECODES else "Extend"}


@pytest.mark.parametrize("rows", [EXTENDS, DECODES], ids=["extend", "decode"])
def test_soft_caps_sinks_and_gates(case_of, rows):
    case = case_of(rows)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 0.0], device=DEVICE)
    case.check(soft_cap=0.7)
    case.check(window=20, sinks=sinks)
    gate = torch.randn_like(case.q)
    found = paged_attention(
        case.q, case.kv, case.plan(), Scoring(SCALE, soft_cap=0.7, sinks=sinks), gate=gate
    )
    expected = case.expected(soft_cap=0.7, sinks=sinks) * gate.flatten(1).double().sigmoid()
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kept_in", sorted(NARROW, key=str))
def test_pages_in_8_bits(case_of, kept_in):
    for rows in (EXTENDS, DECODES):
        case_of(rows, kept_in=kept_in).check()


@pytest.mark.parametrize("rows", [EXTENDS, VERIFIES, DECODES], ids=["extend", "verify", "decode"])
def test_latents(case_of, package, rows):
    case_of(rows, heads=4, kv_heads=1, head_dim=24, value_dim=16).check()
    assert [type(wrapper).__name__ for wrapper in package.plans] == ["Latent"]


def test_a_step_without_rows_over_latents(case_of):
    case = case_of([(1, 16)], heads=2, kv_heads=1, head_dim=24, value_dim=16)
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    plan = case.plan(
        page_starts=empty, lengths=empty, query_starts=starts, num_tokens=0, num_decodes=0
    )
    assert paged_attention(case.q[:0], case.kv, plan, Scoring(SCALE)).shape == (0, 32)


def test_layers_share_a_plan_and_steps_share_wrappers(case_of, package):
    case = case_of(EXTENDS)

    def attend(plan, scale=SCALE):
        return paged_attention(case.q, case.kv, plan, Scoring(scale))

    first, second = case.plan(), case.plan(window=20)
    expected = attend(first)
    windowed = attend(second)
    assert torch.equal(attend(first), expected)  # the second plan has another wrapper
    assert len(package.plans) == len(set(package.plans)) == 2
    attend(first, scale=2 * SCALE)
    assert len(set(package.plans)) == 3 and torch.equal(attend(first), expected)
    del first
    gc.collect()
    third, fourth = case.plan(window=20), case.plan()
    for plan, result in (
        (third, windowed),
        (fourth, expected),
        (third, windowed),
        (second, windowed),
    ):
        assert torch.equal(attend(plan), result)
    assert len(package.plans) == 5 and len(set(package.plans)) == 3


@pytest.mark.parametrize(
    "counts, marks, kept",
    [
        ([70], None, None),
        ([70, 40, 1], None, None),
        ([70, 40, 33], [64, 40, 0], [7, 8, NONE]),  # within a row, at its end, and none
        ([50], [50], [7]),
        ([60, 33], [16, 32], [NONE, 8]),
    ],
)
def test_prompts_of_delta_nets(counts, marks, kept):
    package = optional_packages.fla()
    reads, writes = [NONE, 2, 3][: len(counts)], [1, 2, 5][: len(counts)]
    x, gates = inputs(sum(counts))
    rows = rows_of(counts, reads, writes, marks=marks, kept=kept)
    found = []
    for rule in (delta_rule, FlashLinearAttention(package).delta_rule):
        torch.manual_seed(1)
        cells, pool = cells_of(4, (16, 8))
        cells.write(pages_of(range(10), 4), torch.randn(10, 4, 16, 8, device=DEVICE))
        found.append((rule(x, gates, cells, rows), pool))
    for own, others in zip(*found, strict=True):
        torch.testing.assert_close(own, others, atol=2e-5, rtol=1e-4, equal_nan=True)
    assert package.calls == (2 if marks and marks != counts else 1)


def test_states_without_pages_are_not_written():
    x, gates = inputs(60)
    cells, pool = cells_of(4, (16, 8))
    rule = FlashLinearAttention(optional_packages.fla()).delta_rule
    rule(x, gates, cells, rows_of([60], [NONE], [NONE]))
    assert bool(pool.isnan().all())


def test_short_rows_use_our_own_kernel():
    package = optional_packages.fla()
    x, gates = inputs(10)
    cells, _ = cells_of(4, (16, 8))
    FlashLinearAttention(package).delta_rule(x, gates, cells, rows_of([9, 1], [NONE] * 2, [1, 2]))
    assert package.calls == 0


def distribution(directory: Path, version: str, module: str = "") -> Package:
    """Make an importable package of a release."""
    (directory / "some_package.py").write_text(module)
    info = directory / f"some_package-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: some-package\nVersion: {version}\n"
    )
    return Package("some-package", "some_package", "0.7")


@pytest.mark.parametrize("version", ["0.7", "0.7.4", "0.7.0rc1"])
def test_a_tested_release_is_imported(tmp_path, monkeypatch, version):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_package", raising=False)
    assert distribution(tmp_path, version, "answer = 42").load().answer == 42


@pytest.mark.parametrize("version", ["0.8.0", "0.70.1", "1.7"])
def test_another_release_is_rejected(tmp_path, monkeypatch, version):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        Unavailable, match=f"{version} has not been tested: install some-package==0.7"
    ):
        distribution(tmp_path, version).load()


def test_a_missing_or_broken_package_is_rejected(tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match="nothing-here is not installed: install nothing-here==1"):
        Package("nothing-here", "nothing_here", "1").load()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_package", raising=False)
    broken = distribution(tmp_path, "0.7.1", "import nothing_here")
    with pytest.raises(Unavailable, match=r"some-package 0.7.1 cannot be imported: .*nothing_here"):
        broken.load()


@pytest.mark.parametrize("name", PACKAGES)
def test_recorded_signatures_are_those_of_the_package(name):
    package, names = PACKAGES[name]
    recorded = Recorded(name)
    assert f"{recorded.version}.".startswith(f"{package.tested}.")
    if package.installed() != recorded.version:
        pytest.skip(f"{package.distribution} {recorded.version} is not installed")
    assert record(package.load(), names) == recorded.signatures
