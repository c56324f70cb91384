"""The sizes of prompt chunks: by configuration, by device, or without chunks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from engine import sizing
from engine.build import build
from engine.footprint import largest_forward
from tests.support.engine.engine_rig import Rig
from tests.support.models.checkpoints import make_checkpoint, read_spec

First = Callable[[int, list[int]], list[int]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model")))


def _config(directory: str, chunk_tokens: int) -> EngineConfig:
    return EngineConfig(
        model=directory,
        device="cpu",
        context_length=40,
        cache=CacheConfig(num_pages=16),
        scheduler=SchedulerConfig(chunked_prefill_tokens=chunk_tokens),
    )


@pytest.fixture
def first_forward(directory: str) -> Iterator[First]:
    """Yield a function that returns the tokens of each prompt that an engine's first forward
    computes."""
    exits = ExitStack()

    def of(chunk_tokens: int, lengths: list[int]) -> list[int]:
        config = _config(directory, chunk_tokens)
        engine = build(config)
        exits.callback(engine.backend.stream.close)
        scheduler = engine.scheduler(config, lambda request, pages: None)
        requests = Rig()
        for number, length in enumerate(lengths):
            scheduler.add(requests.request([number + 3] * length, 1))
        batch = scheduler.next_batch()
        assert batch is not None
        return batch.ends.tolist()

    with exits:
        yield of


# Seen failing without EngineShape's chunk in Engine.scheduler: [39].
def test_the_chunk_size_follows_from_the_speed_of_the_machine(first_forward, monkeypatch):
    monkeypatch.setattr(sizing, "_cpu_flops", lambda dtype, quantize: 1.0)
    assert first_forward(0, [39]) == [16]


# Seen failing with the rate of float32 for every dtype: 16.
def test_the_chunk_size_uses_the_rate_in_the_models_own_dtype(directory, monkeypatch):
    monkeypatch.setattr(
        sizing, "_cpu_flops", lambda dtype, quantize: 1e15 if dtype is torch.bfloat16 else 1.0
    )
    chunks = [
        sizing.resolve_shape(
            _config(directory, 0), read_spec(Path(directory)), dtype=dtype, free=1 << 30
        ).chunk_tokens
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert chunks == [16, sizing.DEVICE_CHUNK_TOKENS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rate_is_measured_in_every_dtype(dtype):
    assert sizing._cpu_flops(dtype, "none") > 1e6


def test_the_configured_chunk_size_is_used(first_forward):
    assert first_forward(32, [39]) == [32]


# Seen failing with a chunk of the context's length: [32], and [30, 0] before that.
def test_prompts_are_not_cut_if_chunking_is_disabled(first_forward):
    assert first_forward(-1, [39]) == [39]
    assert first_forward(-1, [30, 39, 39]) == [30, 39, 39]


def test_memory_is_measured_for_the_largest_forward(directory):
    for chunk_tokens, largest in ((32, 32), (-1, 16384)):
        config = _config(directory, chunk_tokens)
        spec = read_spec(Path(directory))
        shape = sizing.resolve_shape(config, spec, dtype=torch.float32, free=1 << 30)
        assert largest_forward(shape, max_running=4) == largest + 4
