"""Ranks with parts of a native model compute the same as one process with the whole model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.config import LoraConfig, Quantize, SpeculativeConfig
from common.errors import ConfigError
from engine.batch.batch import TO_GUESS
from engine.batch.images import VisibleImage
from engine.kv_cache.states import own_heads
from engine.models import open_checkpoint
from engine.models.blocks.experts import ExpertsBlock
from engine.models.linear import onednn, rounding_of
from engine.models.spec import LoadTarget
from engine.models.vision.seeing import KEPT_BYTES
from engine.models.weights import placed_experts
from engine.ranks import WHOLE, Share
from engine.ranks.expert_placement import ExpertPlacement, LayerSlots, balanced
from tests.support.engine.steps import Recorder, Steps
from tests.support.engine.thread_ranks import run_ranks
from tests.support.hardware.devices import CPU, CPU_AND_CUDA
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.models.drafters import (
    make_draft,
    make_eagle,
    make_eagle3,
    make_hybrid_mtp,
    make_mtp,
)
from tests.support.models.quantized_checkpoints import FORMATS, INT8, in_mxfp4, requantised
from tests.support.models.vision import make_vision_checkpoint, picture

VOCABULARY = 259  # of 2 ranks: 130 and 129; of 4 ranks: 65, 65, 65 and 64
NUM_TOKENS = 69 + 5 + 2 * 2  # of `compute`
LARGE_PAGES = {"page_size": 256, "context_length": 256, "num_slots": 2}  # with room for a cell

# Architecture, ranks, and differences from the usual sizes of the checkpoint and the pool.
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


def loaded(
    directory: Path, share: Share, quantize: Quantize = "none", device: torch.device = CPU
) -> Any:
    return open_checkpoint(directory).load(LoadTarget(device, torch.float32, quantize, share))


def compute(
    directory: Path,
    share: Share,
    quantize: Quantize = "none",
    device: torch.device = CPU,
    **options: Any,
) -> Computed:
    """Compute two prompts in chunks, and two steps of both."""
    return computed(loaded(directory, share, quantize, device), share, **options)


def computed(model: Any, share: Share, **options: Any) -> Computed:
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
    state = torch.from_numpy(table.state[slots]).to(model.device)
    cells = {
        (layer, name): view.read(state).transpose(0, 1)
        for layer, of_layer in enumerate(pool.cells)
        for name, view in of_layer.items()
    }
    return Computed(torch.cat(recorder.seen), pages, cells, nbytes(model))


def nbytes(model: Any) -> int:
    """Return the bytes of all weights."""
    storages = [tensor.untyped_storage() for tensor in tensors(model)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def tensors(model: Any) -> Iterator[Tensor]:
    """Yield all stored weights."""

    def within(part: object) -> Iterator[Tensor]:
        if isinstance(part, Tensor):
            yield part
        elif is_dataclass(part):
            for each in fields(part):
                if each.name not in ("rotation", "columns", "table", "counts"):  # not stored
                    yield from within(getattr(part, each.name))
        elif isinstance(part, tuple | list):
            for each in part:
                yield from within(each)

    return within(tuple(model.parts))


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


def said_bytes(directory: Path, share: Share, device: torch.device = CPU) -> int:
    """Return the reported memory, which is known before a rank can call any collective."""
    return open_checkpoint(directory).weight_bytes(LoadTarget(device, torch.float32, share=share))


def same(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape and bool((one == one).any())
    torch.testing.assert_close(one, other, rtol=1e-3, atol=3e-4, equal_nan=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_ranks_compute_the_whole_model(variant: str, device: torch.device, tmp_path: Path) -> None:
    """All ranks are on one device."""
    architecture, size, config, options = VARIANTS[variant]
    directory = make_checkpoint(tmp_path, architecture, vocab_size=VOCABULARY, **config)
    options = {"device": device, **options}
    whole = compute(directory, WHOLE, **options)
    ranks = run_ranks(size, lambda share: compute(directory, share, **options))
    check(whole, ranks, same)
    for rank, own in enumerate(ranks):
        assert said_bytes(directory, Share(rank, size), device) == own.num_bytes < whole.num_bytes


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_whole_experts_compute_the_whole_model(
    architecture: str, size: int, tmp_path: Path
) -> None:
    """With shared experts, with biases, and stored in one tensor."""
    directory = make_checkpoint(tmp_path, architecture, vocab_size=VOCABULARY)
    whole = compute(directory, WHOLE)
    ranks = run_ranks(size, lambda share: compute(directory, replace(share, whole_experts=True)))
    check(whole, ranks, same)
    for rank, own in enumerate(ranks):
        share = Share(rank, size, whole_experts=True)
        assert said_bytes(directory, share) == own.num_bytes < whole.num_bytes


def placed(share: Share, redundant: int) -> Share:
    placement = ExpertPlacement(share.size, redundant, counts_tokens=True)
    return replace(share, whole_experts=True, placement=placement)


def rebalance(directory: Path, model: Any, share: Share) -> Mapping[str, LayerSlots]:
    """Move experts according to rank 0's counts. All ranks have seen the same tokens."""
    assert share.group is not None and share.placement is not None
    moves = {}
    for experts in placed_experts(model):
        counts = torch.zeros(experts.shape.count, dtype=torch.int64)
        if share.rank == 0:
            assert experts.counts is not None
            counts = experts.counts
            assert counts.sum() == NUM_TOKENS * model.layers[-1].ffn.routing.k
        counts = share.group.broadcast(counts)
        before = share.placement.slots(experts.layer, experts.shape.count)
        # Few tokens are almost balanced.
        moves[experts.layer] = balanced([10 ** int(count) for count in counts.argsort()], before)
    open_checkpoint(directory).move_experts(model, moves)
    return moves


@pytest.mark.parametrize(
    ("architecture", "size", "redundant"),
    [
        ("qwen3_moe", 2, 0),
        ("qwen3_moe", 4, 4),
        ("qwen2_moe", 2, 4),
        ("gpt_oss", 2, 2),
        ("deepseek_v3", 4, 4),
    ],
)
def test_ranks_with_replicas_compute_the_whole_model(
    architecture: str, size: int, redundant: int, tmp_path: Path
) -> None:
    """Also after experts have moved."""
    directory = make_checkpoint(tmp_path, architecture, vocab_size=VOCABULARY)
    whole = compute(directory, WHOLE)

    def twice(share: Share) -> tuple[Computed, Computed, Mapping[str, LayerSlots]]:
        share = placed(share, redundant)
        model = loaded(directory, share)
        first = computed(model, share)
        moves = rebalance(directory, model, share)
        return first, computed(model, share), moves

    first, second, moves = zip(*run_ranks(size, twice), strict=True)
    check(whole, first, same)
    check(whole, second, same)
    assert moves[0] and all(each == moves[0] for each in moves)
    for rank, own in enumerate(first):
        share = placed(Share(rank, size), redundant)
        assert said_bytes(directory, share) == own.num_bytes


def test_whole_experts_of_a_model_without_experts_are_rejected(tmp_path: Path) -> None:
    loadable = open_checkpoint(make_checkpoint(tmp_path, "qwen3"))
    with pytest.raises(ConfigError, match=r"engine\.parallel\.experts: the model has no experts"):
        loadable.weight_bytes(LoadTarget(CPU, torch.float32, share=Share(0, 2, whole_experts=True)))


@pytest.mark.parametrize(
    "form", ["gptq int4 in activation order", "awq", "fp8 by block", INT8, "mxfp4"]
)
def test_quantized_checkpoints_are_divided_after_they_are_widened(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "multiplies_int8", lambda: False)  # or each part scales its inputs
    architecture = "gpt_oss" if form == "mxfp4" else "qwen3"
    source = make_checkpoint(tmp_path / "source", architecture, vocab_size=VOCABULARY)
    directory, _ = (
        in_mxfp4(source, tmp_path)
        if form == "mxfp4"
        else requantised(source, tmp_path, FORMATS[form])
    )
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
    whole = loaded(directory, WHOLE, quantize)
    ranks = [loaded(directory, Share(rank, 2), quantize) for rank in (0, 1)]
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


def test_int8_by_parts_rounds_differently() -> None:
    assert rounding_of(CPU, "int8", None, ranks=2) == "int8 by parts"
    assert rounding_of(CPU, "none", None, ranks=2) == "none"


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
def test_models_that_ranks_cannot_split_are_rejected_with_numbers(
    architecture: str, size: int, config: Mapping[str, Any], why: str, tmp_path: Path
) -> None:
    loadable = open_checkpoint(make_checkpoint(tmp_path, architecture, **config))
    for weighed in (loadable.weight_bytes, loadable.load):
        with pytest.raises(ConfigError, match=why):
            weighed(LoadTarget(CPU, torch.float32, share=Share(0, size)))


LAYERS: Mapping[str, Callable[[Path], tuple[Path, SpeculativeConfig]]] = {
    "eagle": lambda root: with_head(root, make_eagle),
    "eagle3": lambda root: with_head(root, make_eagle3),
    "draft model": lambda root: with_head(root, make_draft, "draft_model"),
    "mtp": lambda root: with_layer(make_mtp(make_checkpoint(root, "deepseek_v3"))),
    "qwen3_next": lambda root: with_layer(make_hybrid_mtp(make_checkpoint(root, "qwen3_next"))),
}


def with_head(
    root: Path, make: Callable[[Path, Path], Path], method: Any = "eagle"
) -> tuple[Path, SpeculativeConfig]:
    model = make_checkpoint(root / "model", "llama", num_hidden_layers=4)
    head = make(root / "head", model)
    return model, SpeculativeConfig(method=method, draft_model=str(head))


def with_layer(model: Path) -> tuple[Path, SpeculativeConfig]:
    return model, SpeculativeConfig(method="mtp")


@pytest.mark.long
def test_ranks_with_replicas_draft_like_the_whole_model(tmp_path: Path) -> None:
    """Also after experts have moved, some of which belong to the draft layer."""
    directory, speculation = LAYERS["mtp"](tmp_path)
    whole = drafts(directory, speculation, WHOLE)

    def after_moves(share: Share) -> tuple[list[int], Tensor]:
        share = placed(share, 4)
        checkpoint = open_checkpoint(directory, speculation=speculation)
        model: Any = checkpoint.load(LoadTarget(CPU, torch.float32, share=share))
        layers = placed_experts(model)
        slots = share.placement.slots  # type: ignore[union-attr]
        moves = {each.layer: slots(each.layer, each.shape.count)[::-1] for each in layers}
        assert len(moves) == sum(isinstance(each.ffn, ExpertsBlock) for each in model.layers) + 1
        checkpoint.move_experts(model, moves)
        return drafted(model, speculation, share)

    for own in run_ranks(2, after_moves):
        assert own[0] == whole[0]
        same(own[1], whole[1])


@pytest.mark.parametrize("layer", LAYERS)
def test_ranks_draft_like_the_whole_model(layer: str, tmp_path: Path) -> None:
    directory, speculation = LAYERS[layer](tmp_path)
    whole = drafts(directory, speculation, WHOLE)
    for own in run_ranks(2, lambda share: drafts(directory, speculation, share)):
        assert own[0] == whole[0]
        same(own[1], whole[1])


def drafts(
    directory: Path, speculation: SpeculativeConfig, share: Share
) -> tuple[list[int], Tensor]:
    """Return the tokens of a request with drafts, and the drafter's logits."""
    loadable = open_checkpoint(directory, speculation=speculation)
    return drafted(loadable.load(LoadTarget(CPU, torch.float32, share=share)), speculation, share)


def drafted(model: Any, speculation: SpeculativeConfig, share: Share) -> tuple[list[int], Tensor]:
    part = "decoder" if speculation.method == "draft_model" else "layer"
    layer = NotingLayer(getattr(model.drafter, part))
    setattr(model.drafter, part, layer)
    steps = Steps(model, overlap=False, share=share, **LARGE_PAGES)
    slot = steps.add([*range(40), 5, 6])
    steps.prefill(slot, chunk=30)
    for _ in range(3):
        known, length = int(steps.table.known[slot]), int(steps.table.length[slot])
        steps.table.tokens[slot, known : length + 2] = TO_GUESS
        steps.launch([(slot, length - 1, length + 2)], verify=True)
    steps.close()
    return steps.table.tokens_of(slot).tolist(), torch.cat(layer.seen)


class NotingLayer:
    """A draft layer or draft model that stores its logits."""

    def __init__(self, layer: Any) -> None:
        self.seen: list[Tensor] = []
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def logits(self, *given: Any) -> Tensor:
        logits: Tensor = self._layer.logits(*given)
        self.seen.append(logits.clone())
        return logits


def test_adapters_are_divided_like_the_products_that_they_add_to(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3")
    make_adapter(tmp_path / "one", reference_model(directory))
    lora = LoraConfig(adapter_dir=tmp_path, preload=("one",), max_loras=1, max_rank=8)

    def generate(share: Share, adapter: str) -> list[list[int]]:
        model = loaded(directory, share)
        steps = Steps(model, lora=lora, share=share)
        tokens = steps.generate([[*range(30)], [7, 8]], 6, adapters=[adapter, adapter])
        steps.close()
        return tokens

    expected = generate(WHOLE, "one")
    assert expected != generate(WHOLE, "")
    assert run_ranks(2, lambda share: generate(share, "one")) == [expected, expected]


def test_rank_0_encodes_images_for_all(tmp_path: Path) -> None:
    directory = make_vision_checkpoint(tmp_path)
    image = picture(2, 3, seed=1)
    seen = VisibleImage(image, 1, 5, place=3)

    def embedded(share: Share) -> Tensor:
        model = loaded(directory, share)
        x = torch.zeros(8, model.spec.hidden_size)
        if share.rank == 0:
            model.seeing.embed([seen], x)
        else:
            assert model.seeing is None
            model.receiving.embed([VisibleImage(None, 1, 5, place=3)], x)
        return x

    expected = embedded(WHOLE)
    assert expected.any()
    for own in run_ranks(2, embedded):
        assert torch.equal(own, expected)
    first, second = (said_bytes(directory, Share(rank, 2)) for rank in (0, 1))
    assert first - second > KEPT_BYTES


def test_a_rank_is_updated_with_its_part(tmp_path: Path) -> None:
    old, new = (make_checkpoint(tmp_path / str(seed), "gpt_oss", seed=seed) for seed in (0, 1))

    def refilled(share: Share) -> None:
        model = loaded(old, share)
        open_checkpoint(new).refill(model)
        for one, other in zip(tensors(model), tensors(loaded(new, share)), strict=True):
            assert torch.equal(one, other)

    run_ranks(2, refilled)
