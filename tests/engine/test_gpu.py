"""The engine on a CUDA device: streams, graphs, memory, and the tokens of transformers."""

import numpy as np
import pytest
import torch

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from common.errors import ConfigError
from common.requests.sampling import SamplingParams
from engine.batch.batch import PageCopies
from engine.build import build
from engine.models import load
from engine.runner.graphs import CudaRecorder
from tests.support.engine.steps import GREEDY, Steps, prompt
from tests.support.hardware.devices import CUDA
from tests.support.models.checkpoints import (
    NATIVE_ARCHITECTURES,
    greedy_tokens,
    make_checkpoint,
    reference_model,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", NATIVE_ARCHITECTURES)
def test_greedy_tokens_by_graphs_are_those_of_transformers(tmp_path, architecture):
    """tests/engine/models/test_model_parity.py tests this without graphs."""
    directory = make_checkpoint(tmp_path, architecture)
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 15, 16, 17, 200))]
    expected = greedy_tokens(reference_model(directory), prompts, 12)
    steps = Steps(load(directory, CUDA, torch.float32), num_slots=5, recorder=CudaRecorder())
    steps.capture_all()
    assert steps.generate(prompts, 12, chunk=32) == expected
    steps.close()


def test_tokens_equal_those_of_a_cpu_with_any_sampling(tmp_path):
    directory = make_checkpoint(tmp_path)
    params = [
        SamplingParams(max_tokens=9999, seed=8, temperature=0.8, top_k=20, min_p=0.01),
        SamplingParams(max_tokens=9999, seed=7, temperature=1.3, top_p=0.9),
        SamplingParams(max_tokens=9999, seed=1, temperature=0.0, repetition_penalty=1.5),
    ]
    answers = []
    for device in (torch.device("cpu"), CUDA):
        steps = Steps(load(directory, device, torch.float32))
        answers.append(steps.generate([prompt(20, seed) for seed in range(3)], 21, params))
        steps.close()
    assert answers[0] == answers[1]


def test_pages_are_copied_to_host_memory_and_back(tmp_path):
    steps = Steps(load(make_checkpoint(tmp_path), CUDA, torch.float32))
    slot, other = steps.add(prompt(40)), steps.add(prompt(5))
    for each in (slot, other):
        steps.prefill(each)
    steps.settle()
    pages = steps.table.pages_of(slot)
    host_pages = np.arange(len(pages), dtype=np.int32)[::-1].copy()
    before = steps.pool.tensor.cpu()
    copies = PageCopies(pages, host_pages)
    length = int(steps.table.length[other])
    steps.launch([(other, length - 1, length)], swap_out=copies)
    steps.settle()
    steps.pool.tensor[torch.from_numpy(pages).long().to(CUDA)] = 0xFF  # NaN
    length = int(steps.table.length[other])
    steps.launch([(other, length - 1, length)], swap_in=copies)
    steps.settle()
    steps.close()
    written = steps.pool.tensor.cpu()[pages[:3]]  # 40 tokens
    assert torch.equal(written, before[pages[:3]])


def test_the_pool_uses_the_memory_left_by_weights_graphs_and_the_largest_forward(tmp_path):
    directory = make_checkpoint(tmp_path, max_position_embeddings=32768)
    total = torch.cuda.mem_get_info(CUDA)[1]
    engine = build(
        EngineConfig(
            model=str(directory),
            device="cuda:0",
            cache=CacheConfig(memory_fraction=0.2, swap_pages=4),
            scheduler=SchedulerConfig(max_running_requests=4096),
        )
    )
    assert engine.model.dtype == torch.bfloat16
    assert 0.1 * total < engine.pool.num_bytes < 0.2 * total
    assert torch.cuda.memory_reserved(CUDA) < 0.2 * total
    engine.backend.stream.close()


def test_a_model_that_does_not_fit_is_one_line_with_the_numbers(tmp_path):
    directory = make_checkpoint(tmp_path)
    config = EngineConfig(
        model=str(directory), device="cuda:0", cache=CacheConfig(memory_fraction=0.001)
    )
    with pytest.raises(ConfigError, match="GiB"):
        build(config)


def test_a_launch_returns_while_the_device_still_works(tmp_path):
    steps = Steps(load(make_checkpoint(tmp_path), CUDA, torch.float32))
    slot = steps.add(prompt(20), GREEDY)
    steps.prefill(slot)
    steps.settle()
    busy = torch.cuda.Event()

    def work():
        torch.cuda._sleep(2_000_000_000)  # about a second
        busy.record()

    steps.stream.submit(work)
    steps.decode(slot)
    assert not busy.query()
    steps.settle()
    steps.close()
