"""The part bits of the GPU bench in Triton's interpreter: it finds rows that depend on others,
and its record permits a GPU."""

import re
from pathlib import Path

import pytest
import torch

import kernels
from engine import batch_invariance
from kernels import device
from kernels.experts import grouped_mlp
from kernels.layers import linear, quantised_linear
from kernels.layers.quantised_linear import ProductTile
from tests.support.hardware import interpreter
from tools.bench.gpu.operations import equal_rows
from tools.bench.gpu.parts import bits
from tools.bench.gpu.process import guarded
from tools.bench.gpu.setting import Setting

GPU = torch.device("cuda", 0)
MOVES = "moves numbers and computes none"
STATES = "models with states are refused on GPUs"
NOT_COMPARED = {
    "kernels.attention.expand_latents": "not launched with the setting",
    "kernels.attention.extend": "not launched with fixed segments",
    "kernels.attention.split_kv": "compared by equal_queries",
    "kernels.attention.split_plan": "computes integers",
    "kernels.layers.embedding": MOVES,
    "kernels.linear_attention.causal_conv": STATES,
    "kernels.linear_attention.delta_rule": STATES,
    "kernels.linear_attention.gated_norm": STATES,
    "kernels.pages.pack": MOVES,
    "kernels.pages.store_kv": MOVES,
    "kernels.sampling.bitmask": MOVES,
    "kernels.sampling.early_rows": MOVES,
    "kernels.sampling.outline": "part of sampled tokens and of logprobs",
    "kernels.sampling.verify": "compares integers",
}


@pytest.fixture
def setting(monkeypatch):
    interpreter.patch_language_once()
    monkeypatch.setattr(device, "uses_triton", lambda tensor: True)
    device.use_batch_invariant(True)
    yield Setting.make({}, dry=True)
    device.use_batch_invariant(False)


def differing(setting, *names):
    """Return how many numbers of these operations, or of all, depend on other rows."""
    found = {
        name: equal_rows.compare(operation, equal_rows.DRY_COUNTS, setting.device)
        for name, operation in equal_rows.operations(setting, torch.float32)
        if not names or name in names
    }
    assert all(each.numbers for each in found.values())
    return {name: each.differing for name, each in found.items()}


@pytest.mark.long
def test_no_row_of_an_operation_depends_on_others(setting):
    found = differing(setting)
    assert len(found) > 15 and set(found.values()) == {0}


def test_every_kernel_is_compared():
    root = Path(kernels.__file__).parent
    launching = {
        ".".join(("kernels", *path.relative_to(root).with_suffix("").parts))
        for path in root.rglob("*.py")
        if re.search(r"_kernel\[", path.read_text())
    }
    compared = re.findall(r"^from (kernels\.\S+)", Path(equal_rows.__file__).read_text(), re.M)
    assert launching - set(compared) == set(NOT_COMPARED)


def test_a_product_by_torch_is_found(setting, monkeypatch):
    monkeypatch.setattr(linear, "multiplied", lambda x, w, own, bias: torch.addmm(bias, x, w.t()))
    assert differing(setting, "linear qkv")["linear qkv"]


@pytest.mark.parametrize("name", ["linear qkv", "linear int4"])
def test_a_summation_length_that_depends_on_the_rows_is_found(setting, monkeypatch, name):
    def tile_for(num_rows, element_size, group):
        return ProductTile(64, 32, 16 if num_rows > 64 else 32, 4, 2)

    monkeypatch.setattr(quantised_linear, "tile_for", tile_for)
    assert differing(setting, name)[name]


@pytest.mark.long
def test_experts_with_another_summation_length_for_many_pairs_are_found(setting, monkeypatch):
    shipped = grouped_mlp.tile_for

    def tile_for(element_size, num_pairs, *rest):
        tile = shipped(element_size, num_pairs, *rest)
        return tile._replace(depth=16) if num_pairs > 256 else tile

    monkeypatch.setattr(grouped_mlp, "tile_for", tile_for)
    assert differing(setting, "experts")["experts"]


def verdict(setting, monkeypatch, rows):
    """Return the part's last row after these, as on a GPU."""
    monkeypatch.setattr(bits, "_compared", lambda setting: iter(rows))
    on_gpu = Setting(GPU, torch.bfloat16, setting.clock, setting.ceilings, dry=False)
    return list(guarded("bits", bits.measure(on_gpu)))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        batch_invariance, "gpu_arithmetic", lambda where: f"GPU {where.index} release 1"
    )
    return tmp_path


def test_a_run_without_a_difference_permits_the_gpu(setting, cache, monkeypatch):
    assert not batch_invariance.has_passed(GPU)
    (*_, last) = verdict(setting, monkeypatch, [{"table": "rows", "differing": 0}])
    assert last["passed"] and last["record"].startswith(str(cache))
    assert batch_invariance.has_passed(GPU)
    assert not batch_invariance.has_passed(torch.device("cuda", 1))
    monkeypatch.setattr(
        batch_invariance, "gpu_arithmetic", lambda where: f"GPU {where.index} release 2"
    )
    assert not batch_invariance.has_passed(GPU)


@pytest.mark.parametrize(
    "row",
    [{"table": "rows", "differing": 1}, {"table": "notes", "what": "norm", "note": "failed"}],
    ids=["a difference", "an operation that failed"],
)
def test_a_run_with_a_difference_or_a_missing_operation_permits_no_gpu(
    setting, cache, monkeypatch, row
):
    batch_invariance.record(GPU, passed=True)
    *_, last, failure = verdict(setting, monkeypatch, [{"table": "rows", "differing": 0}, row])
    assert not last["passed"] and "bits depend on the batch" in failure["note"]
    assert not batch_invariance.has_passed(GPU)


@pytest.mark.long
def test_the_dry_run_compares_attention_and_a_model(setting):
    rows = list(bits.measure(setting))
    assert {row["table"] for row in rows} == {"rows", "models", "verdict"}
    assert rows[-1]["passed"] and rows[-1]["record"] == "none"
    assert {row["way"] for row in rows if row["table"] == "rows"} >= {"chunks", "verify", "prompt"}
