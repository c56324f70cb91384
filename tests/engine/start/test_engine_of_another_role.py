"""An engine that is reused for another role: the same memory, plus the parts of that role."""

from pathlib import Path

import pytest

from common.config import CacheConfig, EngineConfig, OffloadConfig
from common.errors import ConfigError
from engine.build import build
from tests.support.models.checkpoints import make_checkpoint
from tests.support.specs import cpu_config


def test_another_role_has_the_same_pool_and_tree_and_its_own_host_pages(tmp_path: Path) -> None:
    cache = CacheConfig(num_pages=16, swap_pages=0)
    config = cpu_config(make_checkpoint(tmp_path), cache=cache)

    def wanting(host_pages: int) -> EngineConfig:
        return config.model_copy(update={"cache": CacheConfig(num_pages=16, swap_pages=host_pages)})

    engine = build(config)
    try:
        other = engine.equipped(wanting(5))
        assert (engine.shape.host_pages, other.shape.host_pages) == (0, 5)
        assert (other.pool, other.cache, other.pages) == (engine.pool, engine.cache, engine.pages)
        assert other.backend.host_pool.num_pages == 5
        assert other.equipped(config).shape == engine.shape
        with pytest.raises(ConfigError, match="swap_pages: 1000000000000 pages take"):
            engine.equipped(wanting(10**12))
    finally:
        engine.close()


def test_host_memory_with_evicted_prefixes_is_kept(tmp_path: Path) -> None:
    cache, offload = CacheConfig(num_pages=16, swap_pages=3), OffloadConfig(cpu_bytes=1 << 20)
    config = cpu_config(make_checkpoint(tmp_path), cache=cache, offload=offload)
    engine = build(config)
    try:
        without = CacheConfig(num_pages=16, swap_pages=0)
        other = engine.equipped(config.model_copy(update={"cache": without}))
        assert (other.tiers, other.backend.host_pool) == (engine.tiers, engine.backend.host_pool)
    finally:
        engine.close()
