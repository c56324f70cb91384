"""Ranks with parts of a transformers class compute the same as one process with the class."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Olmo2Config

from common.config import Quantize
from common.errors import ConfigError
from engine.models import open_checkpoint
from engine.models.checkpoint import Checkpoint
from engine.models.linear import onednn
from engine.models.spec import LoadTarget
from engine.models.transformers_backend.loading import parts_of
from engine.models.transformers_backend.model import TransformersModel
from engine.models.transformers_backend.plan import ParameterCut
from engine.ranks import WHOLE, Share
from tests.support.engine.steps import Recorder, Steps
from tests.support.engine.thread_ranks import run_ranks
from tests.support.models import weights
from tests.support.models.tiny_models import make_tiny

CPU = torch.device("cpu")
FOUND = Path(__file__).parents[3] / "docs/generate/architectures.jsonl"
NO_PLAN = "transformers has no tensor-parallel plan for it"

# Kind, ranks, and differences from the tiny checkpoint.
QUICK: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "gpt_neox": ("gpt_neox", 2, {}),  # one matrix for Q, K and V by head; biases of sums
    "olmo2": ("olmo2", 4, {}),  # whole KV, because norms need all heads
    "phi3": ("phi3", 2, {"vocab_size": 263}),  # two packed matrices, of which all ranks have parts
    # Sinks, and more ranks than KV heads.
    "granite_swa": ("granite_swa", 4, {"layer_types": ["sliding_attention", "full_attention"]}),
    "aria_text": ("aria_text", 2, {}),  # experts with transposed matrices
    "deepseek_v2": ("deepseek_v2", 2, {}),  # K and V made of latents
    "qwen3_moe": ("qwen3_moe", 2, {"tie_word_embeddings": True}),
    "phi": ("phi", 2, {"vocab_size": 263}),  # a head with biases
}
TWO_LAYERS = {"num_hidden_layers": 2}
_LOADING = threading.Lock()  # transformers sets globals while it loads


@dataclass(frozen=True)
class Computed:
    """logits: of all steps. pages: keys and values by layer. num_bytes: of the weights."""

    logits: Tensor
    pages: Sequence[Tensor]
    num_bytes: int


def load(
    directory: Path, share: Share, dtype: torch.dtype = torch.float32, quantize: Quantize = "none"
) -> TransformersModel:
    with _LOADING:
        loadable = open_checkpoint(directory, "transformers")
        model = loadable.load(LoadTarget(CPU, dtype, quantize, share))
    assert isinstance(model, TransformersModel)
    return model


def compute(directory: Path, share: Share, model: TransformersModel | None = None) -> Computed:
    """Compute two prompts in chunks, and two steps of both."""
    model = load(directory, share) if model is None else model
    recorder: Any = Recorder(model)
    longest = min(50, model.spec.context_length - 3)
    steps = Steps(recorder, overlap=False, num_slots=2, context_length=longest + 3, share=share)
    slots = [steps.add([token % 200 for token in range(7, 7 * n + 7, 7)]) for n in (longest, 5)]
    for slot in slots:
        steps.prefill(slot, chunk=32)
    for _ in range(2):
        steps.decode(*slots)
    steps.close()
    pool, table = steps.pool, steps.table
    pages = [
        pool.layers[layer][torch.from_numpy(table.page_table[slots, place.table]).flatten()]
        for layer, place in enumerate(pool.layout.places)
    ]
    return Computed(torch.cat(recorder.seen), pages, nbytes(model))


def nbytes(model: TransformersModel) -> int:
    parts = parts_of(model.modules)
    storages = [each.untyped_storage() for each in parts if isinstance(each, Tensor)]
    held = [each for each in parts if not isinstance(each, Tensor)]
    return weights.nbytes(held) + sum(
        {each.data_ptr(): each.nbytes() for each in storages}.values()
    )


def same(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape and bool((one == one).any())
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)


def check(directory: Path, size: int) -> None:
    """Compare logits, the pages of every rank, and the reported memory."""
    loadable = open_checkpoint(directory, "transformers")
    whole = compute(directory, WHOLE)
    ranks = run_ranks(size, lambda share: compute(directory, share))
    for rank, own in enumerate(ranks):
        assert torch.equal(own.logits.nan_to_num(), ranks[0].logits.nan_to_num())
        same(own.logits, whole.logits)
        for state, pages, every in zip(loadable.spec.layers, own.pages, whole.pages, strict=True):
            heads = state.own(rank, size)
            same(pages, every[:, heads.start : heads.stop])
        said = loadable.weight_bytes(LoadTarget(CPU, torch.float32, share=Share(rank, size)))
        assert said == own.num_bytes < whole.num_bytes


@pytest.mark.parametrize("name", QUICK)
def test_ranks_compute_the_whole_class(name: str, tmp_path: Path) -> None:
    kind, size, fields = QUICK[name]
    directory = make_tiny(tmp_path, kind, **TWO_LAYERS, **fields)
    layers = open_checkpoint(directory, "transformers").spec.layers
    assert {layer.share(0, size) == layer for layer in layers} == {kind in ("olmo2", "phi3")}
    check(directory, size)


SERVED = {
    line["kind"]: line["ranks"]
    for line in map(json.loads, FOUND.read_text().splitlines())
    if line["asked"] and line["same"] == line["asked"]
}


@pytest.mark.long
@pytest.mark.parametrize("kind", SERVED)
def test_ranks_compute_every_class_that_has_a_plan(kind: str, tmp_path: Path) -> None:
    directory, reason = make_tiny(tmp_path, kind), SERVED[kind]
    if not reason:
        check(directory, 2)
        return
    loadable = open_checkpoint(directory, "transformers")
    with pytest.raises(ConfigError, match=reason):
        loadable.weight_bytes(LoadTarget(CPU, torch.float32, share=Share(0, 2)))


@pytest.mark.parametrize(
    ("kind", "share", "fields", "why"),
    [
        ("opt", Share(0, 2), {}, f"engine.parallel.tp: OPTForCausalLM .* 2 ranks: {NO_PLAN}"),
        ("granite", Share(0, 3), {}, "3 ranks .* 4 attention heads"),
        (
            "granite",
            Share(0, 6),
            {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96},
            "6 ranks .* 4 KV heads",
        ),
        ("granite", Share(0, 2), {"intermediate_size": 95}, r"2 ranks .* 95 numbers of .*mlp\."),
        ("mixtral", Share(0, 2, whole_experts=True), {}, r"engine\.parallel\.experts: Mixtral"),
        # A norm of all heads, with a weight for each, which the plan does not contain.
        ("cohere", Share(0, 2), {"use_qk_norm": True}, "plan does not match its configuration"),
        # The inner numbers are compared with their mean.
        (
            "gemma3n_text",
            Share(0, 2),
            {"activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]},
            "it adds or compares values that are split between ranks",
        ),
    ],
)
def test_classes_that_ranks_cannot_divide_are_rejected(
    kind: str, share: Share, fields: Mapping[str, Any], why: str, tmp_path: Path
) -> None:
    loadable = open_checkpoint(make_tiny(tmp_path, kind, **fields), "transformers")
    with pytest.raises(ConfigError, match=why):
        loadable.weight_bytes(LoadTarget(CPU, torch.float32, share=share))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"layers.*.mlp": "all_reduce"}, r"sums .*\.0\.mlp and .*\.0\.mlp\.down_proj"),
        (
            {"norm": "moe_tp_experts"},
            r"sums .* model\.norm, but does not split model\.norm\.weight",
        ),
        ({"norm": "sequence_parallel"}, "unsupported style sequence_parallel for model.norm"),
        ({"norm": "colwise"}, "splits model.norm, which is not a linear layer"),
        ({"layers.*.mlp.up_proj.weight": "colwise"}, r"splits .*up_proj\.weight, but does not sum"),
    ],
)
def test_unsupported_plans_are_rejected_by_name(
    entries: Mapping[str, str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {**(Olmo2Config.base_model_tp_plan or {}), **entries}
    monkeypatch.setattr(Olmo2Config, "base_model_tp_plan", plan)
    loadable = open_checkpoint(make_tiny(tmp_path, "olmo2"), "transformers")
    with pytest.raises(ConfigError, match=why):
        loadable.weight_bytes(LoadTarget(CPU, torch.float32, share=Share(0, 2)))


def test_a_rank_updates_its_weights(tmp_path: Path) -> None:
    fields = {"tie_word_embeddings": True, **TWO_LAYERS}
    first = make_tiny(tmp_path / "a", "jais2", **fields)
    second = make_tiny(tmp_path / "b", "jais2", **fields, seed=1)

    def logits(share: Share) -> Tensor:
        model, loadable = load(first, share), open_checkpoint(second, "transformers")
        loadable.drain(model)
        with _LOADING:
            loadable.refill(model)
        return compute(second, share, model).logits

    expected = compute(second, WHOLE).logits
    for own in run_ranks(2, logits):
        same(own, expected)


@pytest.mark.parametrize(
    "quantize",
    [
        "none",
        pytest.param(
            "int8", marks=pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here")
        ),
    ],
)
def test_parts_of_products_use_the_fast_forms_of_the_processor(
    quantize: Quantize, tmp_path: Path
) -> None:
    directory = make_tiny(tmp_path, "hyperclovax", tie_word_embeddings=True, **TWO_LAYERS)
    loadable = open_checkpoint(directory, "transformers")

    def logits(share: Share) -> Tensor:
        model = load(directory, share, dtype=torch.bfloat16, quantize=quantize)
        said = loadable.weight_bytes(LoadTarget(CPU, torch.bfloat16, quantize, share))
        assert said == nbytes(model)
        return compute(directory, share, model).logits.float()

    expected = compute(directory, WHOLE).logits
    for own in run_ranks(2, logits):
        assert (own - expected)[:2].abs().max() < 0.2 * expected.std()


def test_a_rank_reads_a_tensor_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything except its part is freed before the next tensor is read."""
    directory = make_tiny(tmp_path, "jais2", **TWO_LAYERS)
    read, cut = Checkpoint.read, ParameterCut.of
    events: list[tuple[str, str]] = []

    def reading(checkpoint: Checkpoint, name: str) -> Tensor:
        events.append(("read", name))
        return read(checkpoint, name)

    def cutting(own: ParameterCut, whole: Tensor, share: Share) -> Tensor:
        if not whole.is_meta:
            events.append(("cut", own.name))
        return cut(own, whole, share)

    monkeypatch.setattr(Checkpoint, "read", reading)
    monkeypatch.setattr(ParameterCut, "of", cutting)
    load(directory, Share(1, 2))
    found = [(events[at - 1], event) for at, event in enumerate(events) if event[0] == "cut"]
    assert found and all(before == ("read", name) for before, (_, name) in found)


def test_parts_differ_between_ranks(tmp_path: Path) -> None:
    """Each rank has the rows and columns of its heads, and only rank 0 the biases of sums."""
    directory = make_tiny(tmp_path, "jais2", **TWO_LAYERS)
    whole, first, second = (load(directory, share) for share in (WHOLE, Share(0, 2), Share(1, 2)))
    products = [dict(model.modules[0].named_parameters()) for model in (whole, first, second)]
    name = "layers.0.mlp.{}".format
    up, down, bias = name("up_proj.weight"), name("down_proj.weight"), name("down_proj.bias")
    assert torch.equal(torch.cat([each[up] for each in products[1:]]), products[0][up])
    assert torch.equal(torch.cat([each[down] for each in products[1:]], 1), products[0][down])
    assert torch.equal(products[1][bias], products[0][bias]) and bias not in products[2]
