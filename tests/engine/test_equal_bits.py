"""On a CPU, the logits and KV of a request have the same bits however it is computed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kv_cache.layout import NO_TABLE
from engine.models import Model, load
from tests.support.engine.steps import Recorder, Steps, prompt
from tests.support.hardware.devices import CPU, need_invariant_products, use
from tests.support.models.checkpoints import (
    HYBRID_ARCHITECTURES,
    LATENT_ARCHITECTURES,
    make_checkpoint,
)
from tests.support.models.quantized_checkpoints import FORMATS, in_mxfp4, requantised
from tests.support.models.tiny_models import make_tiny

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "dots1"),
    *LATENT_ARCHITECTURES,
    *HYBRID_ARCHITECTURES,
)
# Computed by transformers: other norms, activations, rotations and biases.
CLASSES = (
    *(("gpt2", precision) for precision in ("float32", "bfloat16", "int8")),
    *(("gpt_neox", "float32"), ("gpt_neox", "bfloat16"), ("phi3", "float32")),
    ("cohere2", "float32"),
)
PRECISIONS = {
    "float32": (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "int8": (torch.bfloat16, "int8"),
}
# Every block in every precision, and every family in one.
OF_EACH_KIND = ("qwen3", "gemma3_text", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
CASES = [(family, "float32") for family in FAMILIES]
CASES += [(family, precision) for family in OF_EACH_KIND for precision in ("bfloat16", "int8")]
PROMPT = prompt(530)  # more than a segment of attention
NUM_TOKENS = 13
NUM_DRAFTS = 3


class Result(NamedTuple):
    tokens: list[int]
    logits: Tensor  # [NUM_TOKENS, vocabulary]
    kv: list[Tensor]  # of every layer, of all tokens except the last
    states: list[Tensor]  # after all tokens except the last


class Run:
    """A request, the logits of its tokens, and its KV."""

    def __init__(self, model: Model, page_size: int = 16) -> None:
        self.recorder = Recorder(model)
        self.steps = Steps(
            self.recorder, overlap=False, num_slots=9, context_length=640, page_size=page_size
        )
        self.logits: list[Tensor] = []

    def keep(self, start: int, end: int | None) -> None:
        """Store logits of the last step."""
        self.logits += self.recorder.seen[-1][start:end]

    def decode(self, slots: Sequence[int], count: int) -> None:
        """Decode all slots, and store the first one's logits."""
        for _ in range(count):
            self.steps.decode(*slots)
            self.keep(0, 1)

    def finish(self, slot: int) -> Result:
        """Finish the request. Return all tokens, the stored logits, and the KV or state of every
        layer."""
        steps = self.steps
        tokens = steps.table.tokens_of(slot).tolist()
        kv = []
        for view, place in zip(steps.pool.layers, steps.pool.layout.places, strict=True):
            if place.table == NO_TABLE:
                continue
            pages = steps.table.page_table[slot, place.table]
            stored = view[torch.from_numpy(pages)].permute(1, 2, 0, 3, 4).flatten(2, 3)
            kv.append(stored[:, :, : len(PROMPT) + NUM_TOKENS - 2].clone())
        own = torch.from_numpy(steps.table.state[slot : slot + 1])
        states = [cells.read(own) for layer in steps.pool.cells for cells in layer.values()]
        steps.close()
        return Result(tokens, torch.stack(self.logits[:NUM_TOKENS]), kv, states)


def alone(model: Model, chunk: int = 10_000, page_size: int = 16) -> Result:
    run = Run(model, page_size)
    slot = run.steps.add(PROMPT)
    run.steps.prefill(slot, chunk=chunk)
    run.keep(-1, None)
    run.decode([slot], NUM_TOKENS - 1)
    return run.finish(slot)


def in_a_batch(model: Model) -> Result:
    """Compute it beside eight requests whose prompts are computed in the same steps."""
    run = Run(model)
    others = [run.steps.add(prompt(10 + 60 * i, seed=i + 1)) for i in range(8)]
    slot = run.steps.add(PROMPT)
    run.steps.launch(
        [(other, 0, int(run.steps.table.known[other])) for other in others[:4]]
        + [(slot, 0, len(PROMPT))]
    )
    run.keep(-1, None)
    for other in others[4:]:
        run.steps.prefill(other)
    run.decode([slot, *others], NUM_TOKENS - 1)
    return run.finish(slot)


def replayed(model: Model, tokens: Sequence[int]) -> Result:
    """Compute each token as the last one of a prompt, over the KV of the previous one."""
    run = Run(model)
    for i in range(NUM_TOKENS):
        slot = run.steps.add(tokens[: len(PROMPT) + i])
        run.steps.prefill(slot)
        run.keep(-1, None)
        if i < NUM_TOKENS - 1:
            run.steps.remove(slot)
    return run.finish(slot)


def verified(model: Model, tokens: Sequence[int], right: int = NUM_DRAFTS) -> Result:
    """Compute with drafts, the first of which are right."""
    run = Run(model)
    slot = run.steps.add(PROMPT)
    run.steps.prefill(slot)
    run.keep(-1, None)
    table = run.steps.table
    while len(run.logits) < NUM_TOKENS:
        length = int(table.length[slot])
        drafts = np.array(tokens[length : length + right] + [0] * (NUM_DRAFTS - right))
        drafts[right:] = (tokens[min(length + right, len(tokens) - 1)] + 1) % 256
        table.tokens[slot, length : length + NUM_DRAFTS] = drafts
        run.steps.launch([(slot, length - 1, length + NUM_DRAFTS)], verify=True)
        run.keep(1, right + 2)
        if right == NUM_DRAFTS:
            run.keep(0, 1)  # the samples of a step start with those after rows' last tokens
    return run.finish(slot)


def check(model: Model) -> None:
    reference = alone(model)
    ways: dict[str, Callable[[], Result]] = {
        "pages of 64": lambda: alone(model, page_size=64),
        "chunks of 37": lambda: alone(model, chunk=37),
        "chunks of 1": lambda: alone(model, chunk=1),
        "batch": lambda: in_a_batch(model),
        "replay": lambda: replayed(model, reference.tokens),
        "verify": lambda: verified(model, reference.tokens),
        "rejected drafts": lambda: verified(model, reference.tokens, right=1),
    }
    for name, way in ways.items():
        result = way()
        differing = int((result.logits != reference.logits).any(1).sum())
        assert not differing, f"{name}: logits of {differing} of {NUM_TOKENS} tokens differ"
        for layer, (own, other) in enumerate(zip(result.kv, reference.kv, strict=True)):
            assert torch.equal(own, other), f"{name}: KV of layer {layer} differs"
        for number, (own, other) in enumerate(zip(result.states, reference.states, strict=True)):
            assert torch.equal(own, other), f"{name}: state {number} differs"


def narrow(directory: Path, family: str) -> Path:
    """Return a checkpoint with 4-bit weights."""
    source = make_checkpoint(directory / "source", family, moe_intermediate_size=64)
    if family == "gpt_oss":
        return in_mxfp4(source, directory)[0]
    return requantised(source, directory, FORMATS["awq"])[0]


def of_class(directory: Path, kind: str) -> Path:
    """Return a checkpoint of transformers, in sizes that are no multiples of a vector."""
    inner = {"n_inner": 90} if kind == "gpt2" else {"intermediate_size": 90}
    return make_tiny(directory, kind, max_position_embeddings=1024, **inner)


LONG = [
    *((make_checkpoint, *case, "native") for case in CASES),
    *((narrow, family, "float32", "native") for family in ("qwen3_moe", "gpt_oss")),
    *((of_class, *case, "transformers") for case in CLASSES),
]


@pytest.mark.parametrize(
    "make, kind, precision, backend",
    [
        (narrow, "qwen3", "float32", "native"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
    ],
)
def test_a_request_has_the_same_bits_however_it_is_computed(
    tmp_path, monkeypatch, make, kind, precision, backend
):
    use("compiled", monkeypatch)
    need_invariant_products(*PRECISIONS[precision])
    model = load(make(tmp_path, kind), CPU, *PRECISIONS[precision], backend)
    model.compute_in_one_way()
    check(model)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_tied_head_and_windows_have_the_same_bits(tmp_path, monkeypatch, family):
    use("compiled", monkeypatch)
    need_invariant_products(torch.float32)
    directory = make_checkpoint(tmp_path, family, tie_word_embeddings=True)
    model = load(directory, CPU, torch.float32)
    reference = alone(model)
    for result in (in_a_batch(model), alone(model, chunk=37), verified(model, reference.tokens)):
        assert torch.equal(result.logits, reference.logits)
