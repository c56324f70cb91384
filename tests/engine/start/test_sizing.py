"""Memory that an engine uses: by the free memory, the configuration, and its container."""

import math

import pytest
import torch

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from common.errors import ConfigError
from engine.sizing import container_bytes, free_bytes, kept_in, resolve_device, resolve_shape
from tests.support.models.checkpoints import make_checkpoint, read_spec


def shape(tmp_path, *, free, **cache):
    config = EngineConfig(
        model=str(tmp_path),
        device="cpu",
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(chunked_prefill_tokens=64, max_running_requests=4),
    )
    spec = read_spec(make_checkpoint(tmp_path))
    return resolve_shape(config, spec, dtype=torch.float32, free=free)


def test_pages_use_the_free_memory_but_no_more_than_requests_can_use(tmp_path):
    page_bytes = shape(tmp_path, free=1 << 30).layout.page_bytes
    assert shape(tmp_path, free=10 * page_bytes).num_pages == 10
    assert shape(tmp_path, free=1 << 30).num_pages == 4 * 1024 // 16


def test_on_a_cpu_pages_use_an_eighth_of_free_memory_or_a_gib_if_larger(tmp_path):
    # Seen failing with 1 GiB for any free memory, and with all free memory.
    spec = read_spec(make_checkpoint(tmp_path, max_position_embeddings=1 << 20))
    config = EngineConfig(model=str(tmp_path), device="cpu")
    for free_gib, pool_gib in ((0.5, 0.5), (4, 1), (64, 8)):
        sized = resolve_shape(config, spec, dtype=torch.bfloat16, free=int(free_gib * 2**30))
        assert sized.num_pages * sized.layout.page_bytes == int(pool_gib * 2**30)


def test_activations_of_split_prefill_reduce_the_pages(tmp_path):
    spec = read_spec(make_checkpoint(tmp_path))

    def room(limit_ms):
        steps = SchedulerConfig(chunked_prefill_tokens=64, split_prefill_ms=limit_ms)
        config = EngineConfig(model=str(tmp_path), device="cpu", scheduler=steps)
        sized = resolve_shape(config, spec, dtype=torch.float32, free=1 << 20)
        return sized.num_pages * sized.layout.page_bytes, sized.layout.page_bytes

    (plain, page_bytes), (split, _) = room(0.0), room(10.0)
    held = 2 * 64 * spec.hidden_size * 4
    assert abs(plain - split - held) < page_bytes


def test_a_model_that_does_not_fit_is_reported_in_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"not enough memory for a KV pool: 0\.000 GiB"):
        shape(tmp_path, free=100)
    with pytest.raises(ConfigError, match="1000 pages"):
        shape(tmp_path, free=1 << 20, num_pages=1000)


def test_by_default_host_memory_has_as_many_pages_as_the_device(tmp_path):
    assert shape(tmp_path, free=1 << 30, num_pages=7).host_pages == 7
    assert shape(tmp_path, free=1 << 30, num_pages=7, swap_pages=3).host_pages == 3


def test_the_limit_of_a_container_is_respected(tmp_path):
    assert container_bytes(tmp_path / "no such directory") == math.inf
    (tmp_path / "memory.current").write_text("400\n")
    for limit, left in (("max", math.inf), ("1000", 600), ("300", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert container_bytes(tmp_path) == left


def test_a_fraction_of_the_host_is_respected():
    cpu = torch.device("cpu")
    assert 0 < free_bytes(cpu, 0.1) < free_bytes(cpu, 0.9)


@pytest.mark.parametrize("name", ["cuda:99", "mps", "gpu"])
def test_a_missing_device_is_reported_by_name(name):
    with pytest.raises(ConfigError, match=name):
        resolve_device(name)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_in_8_bits_four_times_as_many_tokens_fit_as_in_32(tmp_path, dtype):
    page_bytes = shape(tmp_path, free=1 << 30).layout.page_bytes
    assert shape(tmp_path, free=10 * page_bytes, dtype=dtype).num_pages == 40


# Seen failing without the check of the capability.
def test_a_gpu_without_8_bit_floats_is_rejected(tmp_path, monkeypatch):
    config = EngineConfig(model=str(tmp_path), cache=CacheConfig(dtype="fp8_e4m3"))
    capability = [(8, 6)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    gpu = torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"fp8_e4m3 needs .* 8\.9 or above, cuda:0 has 8\.6"):
        kept_in(config, gpu)
    capability[0] = (8, 9)
    assert kept_in(config, gpu) is torch.float8_e4m3fn
