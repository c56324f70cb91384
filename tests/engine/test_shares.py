"""Ranks with parts of a native model compute the same as one process with the whole model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config import Quantize
from common.errors import ConfigError
from engine.kv_cache.states import own_heads
from engine.models import open_checkpoint
from engine.models.linear import onednn, rounding_of
from engine.ranks import WHOLE, Share
from tests.support.checkpoints import make_checkpoint
from tests.support.quantised import FORMATS, INT8, requantised
from tests.support.steps import Recorder, Steps
from tests.support.thread_ranks import run_ranks

CPU = torch.device("cpu")
VOCABULARY = 259  # of 2 ranks: 130 and 129; of 4 ranks: 65, 65, 65 and 64
LARGE_PAGES = {"page_size": 256, "context_length": 256, "num_slots": 2}  # with room for a cell

# Architecture, ranks, and what differs from the checkpoint's and the pool's usual sizes.
VARIANTS: Mapping[str, tuple[str, int, Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen3": ("qwen3", 2, {}, {}),
    "qwen3, more ranks than KV heads": ("qwen3", 4, {}, {}),
    "llama biased": ("llama", 2, {"attention_bias": True, "mlp_bias": True}, {}),
    "gemma2": ("gemma2", 2, {}, {}),
    "gpt_oss": ("gpt_oss", 2, {}, {}),
    "qwen2_moe": ("qwen2_moe", 2, {}, {}),
    "qwen3_moe": ("qwen3_moe", 4, {}, {}),
    "deepseek_v2": ("deepseek_v2", 2, {"q_lora_rank": None}, {}),
    "deepseek_v3": ("deepseek_v3", 4, {"attention_bias": True}, {}),
    "qwen3_next": ("qwen3_next", 2, {}, LARGE_PAGES),
    "qwen3_5": ("qwen3_5_text", 2, {}, LARGE_PAGES),
}


@dataclass(frozen=True)
class Computed:
    """The results of one rank.

    Attributes:
        logits: of all steps.
        pages: keys and values, or latents, by layer: [pages, heads, vectors, tokens, size].
        cells: states by layer and name: [heads, ...].
        num_bytes: of the loaded weights.
    """

    logits: Tensor
    pages: Mapping[int, Tensor]
    cells: Mapping[tuple[int, str], Tensor]
    num_bytes: int


def compute(directory: Path, share: Share, quantize: Quantize = "none", **options: Any) -> Computed:
    """Compute two prompts in chunks, and two steps of both."""
    servable = open_checkpoint(directory)
    model = servable.load(CPU, torch.float32, quantize, share)
    recorder: Any = Recorder(model)
    steps = Steps(recorder, overlap=False, share=share, **{"context_length": 96, **options})
    prompts = ([*range(1, 70)], [200, 7, 7, 9, 31])
    slots = [steps.add(tokens) for tokens in prompts]
    for slot in slots:
        steps.prefill(slot, chunk=48)
    for _ in range(2):
        steps.decode(*slots)
    steps.close()
    pool, table = steps.pool, steps.table
    pages = {
        layer: pool.layers[layer][torch.from_numpy(table.page_table[slots, place.table]).flatten()]
        for layer, place in enumerate(pool.layout.places)
        if place.state.token_numbers
    }
    state = torch.from_numpy(table.state[slots])
    cells = {
        (layer, name): view.read(state).transpose(0, 1)
        for layer, of_layer in enumerate(pool.cells)
        for name, view in of_layer.items()
    }
    return Computed(torch.cat(recorder.seen), pages, cells, nbytes(model))


def nbytes(model: Any) -> int:
    """Return the bytes of all weights."""
    seen: dict[int, int] = {}

    def add(part: object) -> None:
        if isinstance(part, Tensor):
            storage = part.untyped_storage()
            seen[storage.data_ptr()] = max(seen.get(storage.data_ptr(), 0), storage.nbytes())
        elif is_dataclass(part):
            for each in fields(part):
                if each.name not in ("rotation", "columns"):  # computed, not stored
                    add(getattr(part, each.name))
        elif isinstance(part, tuple | list):
            for each in part:
                add(each)

    for part in model.parts:
        add(part)
    return sum(seen.values())


def check(
    whole: Computed, ranks: Sequence[Computed], close: Callable[[Tensor, Tensor], None]
) -> None:
    close(ranks[0].logits, whole.logits)
    for rank, own in enumerate(ranks):
        assert torch.equal(own.logits, ranks[0].logits)
        assert own.pages.keys() == whole.pages.keys() and own.cells.keys() == whole.cells.keys()
        for layer, pages in own.pages.items():
            every = whole.pages[layer]
            heads = own_heads(every.shape[1], rank, len(ranks))
            close(pages, every[:, heads.start : heads.stop])
        for name, cells in own.cells.items():
            heads = own_heads(len(whole.cells[name]), rank, len(ranks))
            close(cells, whole.cells[name][heads.start : heads.stop])


def same(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape and bool((one == one).any())
    torch.testing.assert_close(one, other, rtol=1e-3, atol=3e-4, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_compute_the_whole_model(variant: str, tmp_path: Path) -> None:
    architecture, size, config, options = VARIANTS[variant]
    directory = make_checkpoint(tmp_path, architecture, vocab_size=VOCABULARY, **config)
    whole = compute(directory, WHOLE, **options)
    ranks = run_ranks(size, lambda share: compute(directory, share, **options))
    check(whole, ranks, same)
    for rank, own in enumerate(ranks):
        # Memory is reported before a rank can call any collective.
        said = open_checkpoint(directory).weight_bytes(
            CPU, torch.float32, "none", Share(rank, size)
        )
        assert said == own.num_bytes < whole.num_bytes


@pytest.mark.parametrize("form", ["gptq int4 in activation order", "awq", "fp8 by block", INT8])
def test_quantised_checkpoints_are_cut_after_they_are_widened(form: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3", vocab_size=VOCABULARY)
    directory, _ = requantised(source, tmp_path, FORMATS[form])
    whole = compute(directory, WHOLE)
    check(whole, run_ranks(2, lambda share: compute(directory, share)), same)


@pytest.mark.parametrize("stored", ["floats", "int8"])
def test_int8_numbers_of_a_rank_are_those_of_the_whole_model(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_int8(monkeypatch)
    directory = make_checkpoint(tmp_path / "floats", "qwen3", vocab_size=VOCABULARY)
    quantize: Quantize = "int8"
    if stored == "int8":
        directory, _ = requantised(directory, tmp_path, FORMATS[INT8])
        quantize = "none"
    servable = open_checkpoint(directory)
    whole: Any = servable.load(CPU, torch.float32, quantize)
    ranks: Any = [servable.load(CPU, torch.float32, quantize, Share(rank, 2)) for rank in (0, 1)]
    inner = 48
    for rank, model in enumerate(ranks):
        net, every = model.layers[0].ffn, whole.layers[0].ffn
        assert torch.equal(net.down.scale, every.down.scale)
        assert torch.equal(net.down.weight, every.down.weight[:, inner * rank :][:, :inner])
        rows = [*range(inner * rank, inner * (rank + 1))]
        rows += [96 + row for row in rows]
        assert torch.equal(net.gate_up.scale, every.gate_up.scale[rows])
        assert torch.equal(net.gate_up.weight, every.gate_up.weight[rows])

    expected = compute(directory, WHOLE, quantize).logits[:2]  # no row has a sampled token yet
    for own in run_ranks(2, lambda share: compute(directory, share, quantize)):
        found = own.logits[:2]
        assert float((found - expected).norm() / expected.norm()) < 0.1  # inputs have other scales


def multiply_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply int8 by plain products, on every CPU."""

    def product(x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        return (x.float() @ weight.float().t()).mul_(scale).add_(offset)

    monkeypatch.setattr(onednn, "multiplies_int8", lambda: True)
    monkeypatch.setattr(onednn, "pack_int8", lambda numbers: numbers.clone())
    monkeypatch.setattr(onednn, "int8_product", product)


def test_int8_by_parts_is_another_rounding() -> None:
    assert rounding_of(CPU, "int8", int8_stored=False, ranks=2) == "int8 by parts"
    assert rounding_of(CPU, "none", int8_stored=False, ranks=2) == "none"


@pytest.mark.parametrize(
    ("architecture", "size", "config", "why"),
    [
        ("qwen3", 3, {}, "3 ranks cannot have equal parts of 4 attention heads"),
        ("qwen3", 2, {"num_key_value_heads": 4, "intermediate_size": 95}, "2 ranks .* 95 inner"),
        (
            "qwen3",
            6,
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            "6 ranks cannot have equal parts of 4 KV heads",
        ),
        ("qwen3_next", 4, {}, "4 ranks .* 2 key heads of a delta net"),
        ("qwen3_moe", 4, {"moe_intermediate_size": 46}, "4 ranks .* 46 inner numbers of experts"),
    ],
)
def test_models_that_ranks_cannot_split_are_refused_with_numbers(
    architecture: str, size: int, config: Mapping[str, Any], why: str, tmp_path: Path
) -> None:
    servable = open_checkpoint(make_checkpoint(tmp_path, architecture, **config))
    for weighed in (servable.weight_bytes, servable.load):
        with pytest.raises(ConfigError, match=why):
            weighed(CPU, torch.float32, "none", Share(0, size))


def test_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    servable = open_checkpoint(make_checkpoint(tmp_path), "transformers")
    with pytest.raises(ConfigError, match=r"engine\.parallel\.tp: qwen3 .* transformers.* 2 ranks"):
        servable.load(CPU, torch.float32, "none", Share(0, 2))
