"""Models compute the same with Triton's kernels as with the references."""

from collections import Counter

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from triton.runtime.jit import KernelInterface

from common.requests.sampling import SamplingParams
from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.forward import BatchBuilder
from engine.batch.table import SlotTable
from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.models import load
from kernels import device
from kernels.attention.expansion import LatentExpansion
from tests.support.engine.steps import GREEDY, Steps, prompt
from tests.support.hardware import interpreter
from tests.support.models.checkpoints import make_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.INTERPRETED:
    interpreter.patch_language_once()
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=9999, seed=8, temperature=0.8, top_k=20, top_p=0.95, min_p=0.01),
    SamplingParams(max_tokens=9999, seed=1, temperature=1.0, repetition_penalty=1.5),
]


def generate(model):
    """Generate for two prompts in chunks, and for one that joins while they decode, in the same
    forward."""
    steps = Steps(model, num_slots=3)
    first, second, third = (
        steps.add(prompt(length, length), params)
        for length, params in zip((20, 3, 7), PARAMS, strict=True)
    )
    steps.prefill(first, chunk=16)
    steps.prefill(second)
    for _ in range(2):
        steps.decode(first, second)
    decodes = [(slot, int(steps.table.length[slot])) for slot in (first, second)]
    steps.launch([(third, 0, 7), *((slot, end - 1, end) for slot, end in decodes)])
    for _ in range(3):
        steps.decode(first, second, third)
    steps.settle()
    steps.close()
    return [steps.remove(slot) for slot in (first, second, third)]


@pytest.mark.long  # tests/kernels tests each kernel
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "qwen2_moe"])
def test_kernels_and_references_give_the_same_tokens(tmp_path, monkeypatch, architecture):
    directory = make_checkpoint(tmp_path, architecture)
    answers = []
    for triton in (False, True):
        monkeypatch.setattr(device, "uses_triton", lambda tensor, triton=triton: triton)
        answers.append(generate(load(directory, DEVICE, torch.float32)))
    assert answers[0] == answers[1]


class Latents:
    """A model with latents and a step of two rows: a chunk of 130 tokens after 40 cached ones,
    and a decode row."""

    def __init__(self, directory):
        self.model = load(directory, DEVICE, torch.float32)
        self.layout = KVLayout.of(self.model.spec.layers, 16, torch.float32)
        table = SlotTable(2, 256, 16, self.layout.windows, self.layout.state_pages)
        table.tokens[:] = np.random.default_rng(0).integers(0, 256, table.tokens.shape)
        table.page_table[:, 0] = np.random.default_rng(1).permutation(32).reshape(2, 16)
        self.table = table

    def batch(self, starts, ends):
        """Return a batch that computes the hidden states of all its tokens."""
        starts, ends = np.array(starts, np.int32), np.array(ends, np.int32)
        self.table.known[:] = ends
        both = np.arange(2, dtype=np.int32), np.ones(2, np.bool_)
        step = ScheduleBatch(1, ForwardMode.MIXED, both[0], starts, ends, both[1])
        batch = BatchBuilder(self.table).build(step).to(DEVICE)[0]
        return replace(batch, sampled=torch.arange(len(batch.token_ids), device=DEVICE))

    def hidden(self, *, expanded):
        pool = KVPool(self.layout, 32, DEVICE)
        future = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        batches = self.batch([0, 0], [40, 20]), self.batch([40, 20], [170, 21])
        with torch.inference_mode():
            for batch in batches:
                chosen = batch if expanded else replace(batch, extends=())
                hidden = self.model.forward(chosen, pool, future)
        return hidden


@pytest.mark.long
def test_a_model_computes_the_same_with_expanded_latents_as_without(tmp_path, monkeypatch):
    launches, launcher = Counter(), KernelInterface.__getitem__

    def counted(kernel, grid):
        launches.update([kernel.fn.__name__])
        return launcher(kernel, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", counted)
    monkeypatch.setattr(LatentExpansion, "heads_at_once", lambda *of: 3)  # and one head alone
    latents = Latents(make_checkpoint(tmp_path, "deepseek_v3", first_k_dense_replace=2))
    found = {}
    for triton, expanded in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr(device, "uses_triton", lambda tensor, triton=triton: triton)
        launches.clear()
        found[triton, expanded] = latents.hidden(expanded=expanded)
        assert launches["_expand_kernel"] == (2 * 2 if expanded else 0)  # twice in each layer
    expected = found.pop((False, False))
    for hidden in found.values():
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
