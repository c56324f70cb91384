"""Memory that is given back is the system's again, and what comes there later is right."""

import re
from pathlib import Path

import pytest
import torch

from engine.models import load, open_checkpoint
from kernels.cpu.memory import empty_in_huge_pages, give_back, take
from tests.engine.test_model_precision import logits_of
from tests.engine.test_refill import CPU, TOKENS, int8
from tests.support.checkpoints import make_checkpoint

MIB = 1 << 20


def own_bytes() -> int:
    """Memory of this process that is backed by no file."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


@pytest.mark.parametrize(
    "make", [lambda n: empty_in_huge_pages((n,), torch.uint8), lambda n: torch.empty(n).byte()]
)
def test_a_tensor_without_its_memory_keeps_its_place(make):
    tensor = make(96 * MIB)
    tensor.fill_(7)
    address, before = tensor.data_ptr(), own_bytes()
    give_back(tensor)
    assert own_bytes() < before - 64 * MIB
    assert tensor.data_ptr() == address and not tensor[MIB : 2 * MIB].any()
    tensor.fill_(9)
    assert own_bytes() > before - 64 * MIB and tensor.min() == 9


def test_memory_is_there_before_anybody_writes_and_is_what_it_was():
    tensor = empty_in_huge_pages((96 * MIB,), torch.uint8)
    tensor[:100] = 7
    before = own_bytes()
    take(tensor.data_ptr() + 50, 96 * MIB - 50)
    assert own_bytes() > before + 64 * MIB
    assert bool((tensor[:100] == 7).all()) and not tensor[100 : 2 * MIB].any()
    take(8, 8)  # which is nobody's


def test_the_ends_of_a_tensor_are_nobody_elses_memory():
    around = torch.full((4 * MIB,), 7, dtype=torch.uint8)
    inner = torch.frombuffer(memoryview(around.numpy())[100 : 2 * MIB + 100], dtype=torch.uint8)
    give_back(inner)
    assert bool((around[:100] == 7).all()) and bool((around[2 * MIB + 100 :] == 7).all())


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "qwen3_next", "deepseek_v2"])
@pytest.mark.parametrize(
    "dtype, quantize",
    [
        (torch.float32, "none"),
        (torch.bfloat16, "none"),
        pytest.param(torch.float32, "int8", marks=int8),
    ],
)
def test_a_model_that_was_without_weights_computes_what_it_did(
    tmp_path, architecture, dtype, quantize
):
    servable = open_checkpoint(make_checkpoint(tmp_path, architecture))
    model = servable.load(CPU, dtype, quantize)
    before = logits_of(model, TOKENS)
    servable.drain(model)
    servable.refill(model, quantize)
    torch.testing.assert_close(logits_of(model, TOKENS), before, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_given_back_take_no_memory(tmp_path, dtype):
    directory = make_checkpoint(
        tmp_path, "qwen3", hidden_size=512, intermediate_size=8192, num_hidden_layers=3
    )
    servable = open_checkpoint(directory)
    model = load(directory, CPU, dtype)
    num_bytes = servable.weight_bytes(CPU, dtype, "none")
    assert num_bytes > 64 * MIB
    before = own_bytes()
    servable.drain(model)
    assert own_bytes() < before - 0.8 * num_bytes
