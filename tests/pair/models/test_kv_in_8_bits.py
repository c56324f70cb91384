"""KV in 8 bits, handed from one node to another. The reader continues as the writer would."""

from pathlib import Path

import pytest
import torch

from tests.pair.conftest import Known
from tests.pair.rig import Loaded, PairRig, Size, prompt
from tests.support.models.checkpoints import edit_tensors, make_checkpoint

LONG = 150
NUM_TOKENS = 20
ROOM = Size(num_pages=256)
NARROW = Size(num_pages=256, kv_dtype="fp8_e4m3")


@pytest.fixture(scope="module", params=["qwen3", "gemma2", "qwen3_next", "deepseek_v3"])
def known(request, model) -> Known:
    """Return models with full attention, windows, states and latents."""
    return model(request.param)


PROMPTS = [prompt(length, length) for length in (1, 16, 17, LONG)]


def answers(loaded: Loaded, prefill: list[Size], decode: Size) -> list[list[int]]:
    """Return the responses of two rounds, the second one from the cache."""
    chunks = {"chunked_prefill_tokens": 32}
    with PairRig(loaded, prefill=prefill, decode=[decode], **chunks) as rig:
        asked = []
        for _ in range(2):
            asked += [rig.ask(each, NUM_TOKENS) for each in PROMPTS]
            rig.run()
        return [one.tokens for one in asked]


def test_a_pair_answers_as_a_node_that_computes_its_prompts_itself(known):
    alone = answers(known.loaded, [], NARROW)
    assert answers(known.loaded, [NARROW], NARROW) == alone


def test_pages_are_half_as_large_as_of_16_bits_and_a_quarter_of_32(known):
    with PairRig(known.loaded, prefill=(), decode=[ROOM, NARROW]) as rig:
        wide, narrow = (node.engine.shape.layout for node in rig.decode)
        assert 4 * narrow.token_bytes == wide.token_bytes


def with_scales(directory: Path, key: float, value: float) -> Loaded:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        layers = {name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}
        for layer in layers:
            tensors[f"{layer}.self_attn.k_scale"] = torch.tensor(key)
            tensors[f"{layer}.self_attn.v_scale"] = torch.tensor([value])

    edit_tensors(make_checkpoint(directory, "qwen3"), change)
    return Loaded.from_directory(directory)


def test_scales_of_a_checkpoint_change_the_bytes_and_not_the_values(tmp_path: Path) -> None:
    """Powers of two cancel exactly, unless a number overflows or underflows."""
    size = Size(num_pages=256, kv_dtype="fp8_e5m2")
    plain, scaled, large = (
        answers(with_scales(tmp_path / name, *scales), [], size)
        for name, scales in (
            ("plain", (1.0, 1.0)),
            ("scaled", (0.25, 0.125)),
            ("large", (1e-8, 1.0)),  # then all keys are the largest number
        )
    )
    assert plain == scaled != large
