"""Triton attention with fixed segments: the bits of a query depend only on its own keys.

In the interpreter, so in float32 or with products in float32. The part `bits` of `tools.bench.gpu`
makes the same comparison on a GPU.
"""

import pytest
import torch

from kernels import device
from kernels.attention import extend, paged, split_plan
from kernels.attention.extend import AttentionTile
from tests.kernels.attention.attention_case import Case
from tests.kernels.conftest import DEVICE
from tools.bench.gpu.operations.equal_queries import AttentionShape, KeysAndQueries, compare
from tools.bench.gpu.operations.equal_rows import as_bits

LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def _segments(by_kernels, monkeypatch):
    monkeypatch.setattr(paged, "SEGMENT", 64)
    device.use_batch_invariant(True)
    yield
    device.use_batch_invariant(False)


def prompt_of(length, dtype=torch.float32, **shape):
    return KeysAndQueries(length, AttentionShape(**shape), dtype, DEVICE)


def differing(prompt, seed=0, **options):
    """Return how many numbers differ from those of decode rows alone, by kind of step."""
    found = compare(prompt, seed=seed, tokens=4, **options)
    return {name: each.differing for name, each in found.items()}


NONE = {"batch": 0, "prompt": 0, "chunks": 0, "verify": 0}
CASES = {
    "heads": ({}, None),
    "window": ({}, 5),
    "window and many heads": ({"heads": 7, "head_dim": 40}, 80),
    "two of keys": ({"heads": 4, "kv_heads": 2}, None),
    "sharp": ({"sharpness": 30.0}, None),
    "half": ({"dtype": torch.float16, "head_dim": 64}, 80),
    "pages in 8 bits": ({"kept_in": torch.float8_e4m3fn}, None),
    "latents": ({"heads": 6, "head_dim": 40, "value_dim": 32}, None),
    "zeros": ({"zeros": True}, 5),
}


MORE = ("window and many heads", "two of keys", "latents")  # cases of `make test-long`


@pytest.mark.parametrize(
    "shape, window",
    [
        pytest.param(*case, id=name, marks=LONG if name in MORE else ())
        for name, case in CASES.items()
    ],
)
def test_a_query_has_the_same_bits_in_every_kind_of_step(shape, window):
    assert differing(prompt_of(100, **shape), window=window) == NONE


@pytest.mark.parametrize("window", [pytest.param(None, marks=LONG), 80])
def test_sinks_and_caps_change_no_bit(window):
    sinks = torch.randn(2, device=DEVICE)
    options = {"window": window, "soft_cap": 5.0, "sinks": sinks}
    assert differing(prompt_of(100), **options) == NONE


@pytest.mark.parametrize(
    "slots, multiprocessors",
    [pytest.param(0, 3, marks=LONG), (7, 3), pytest.param(1000, 40, marks=LONG)],
)
def test_the_division_among_programs_changes_no_bit(monkeypatch, slots, multiprocessors):
    """From complete rows in one program to one program for each segment, with some rows
    complete."""
    prompt = prompt_of(200)
    rows = [(0, 20), (90, 94), (199, 200), (100, 110), (64, 65), (180, 200)]
    expected = prompt.attend(rows)
    sinks = torch.randn(2, device=DEVICE)
    with_sinks = prompt.attend(rows, sinks=sinks)
    monkeypatch.setattr(device, "num_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(split_plan, "OCCUPYING_ITEMS", 1000)
    lanes = split_plan.fixed_lanes(2, 24, 4)
    monkeypatch.setattr(split_plan, "PARTIAL_BYTES", slots * lanes * 24 * 4)
    assert torch.equal(as_bits(prompt.attend(rows)), as_bits(expected))
    assert torch.equal(as_bits(prompt.attend(rows, sinks=sinks)), as_bits(with_sinks))


@pytest.mark.parametrize("window", [pytest.param(None, marks=LONG), 70])
def test_rows_of_fixed_segments_are_right(window):
    rows = [(20, 100), (0, 9), (4, 300), (2, 65), (1, 0), (3, 64), (1, 129), (1, 213), (1, 1)]
    case = Case(rows, heads=6)
    case.check(window)
    case.check(window, 2.0, torch.randn(6, device=DEVICE), atol=1e-5, rtol=1e-4)


def test_outputs_are_gated_alike_in_every_kind_of_step():
    prompt = prompt_of(100)
    gate = torch.randn(100, 2, 24, device=DEVICE)
    whole = prompt.attend([(0, 100)], gate=gate)
    for token in (17, 64, 99):
        alone = prompt.attend([(token, token + 1)], decode=True, gate=gate[token : token + 1])
        assert torch.equal(as_bits(alone[0]), as_bits(whole[token]))


def test_a_segment_has_the_full_size_by_default(monkeypatch):
    monkeypatch.setattr(paged, "SEGMENT", split_plan.SEGMENT)
    prompt, rows = prompt_of(2100, head_dim=16), [(1500, 1501), (2099, 2100)]
    together = prompt.attend(rows, decode=True)
    assert torch.equal(as_bits(prompt.attend(rows[1:], decode=True)), as_bits(together[1:]))
    assert torch.equal(as_bits(prompt.attend([(2080, 2100)])[-1]), as_bits(together[1]))


def test_rounding_does_not_depend_on_other_rows_of_a_tile(monkeypatch):
    """The kernel with a rescaling tolerance for each tile is not used."""
    monkeypatch.setattr(extend, "_tile", lambda *size, **kind: AttentionTile(16, 16, 4, 2, slack=8))
    prompt = prompt_of(100)
    assert differing(prompt) == NONE
    device.use_batch_invariant(False)
    monkeypatch.setattr(paged, "lanes_of_items", lambda *sizes, **kinds: None)
    found = differing(prompt)
    assert found["prompt"] and found["chunks"]


def test_the_even_division_of_keys_depends_on_the_batch():
    device.use_batch_invariant(False)
    prompt, rows = prompt_of(530), [(399, 400), (529, 530), (100, 101)]
    together = prompt.attend(rows, decode=True)
    alone = prompt.attend(rows[1:2], decode=True)
    assert not torch.equal(as_bits(alone), as_bits(together[1:2]))
