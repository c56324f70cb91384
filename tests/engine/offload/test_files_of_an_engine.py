"""Files of the offload tier in an assembled engine: the properties that determine their version."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.config import CacheConfig, EngineConfig, OffloadConfig
from common.errors import ConfigError
from engine.batch.batch import Ints
from engine.batch.holding import PageHolding
from engine.build import Engine, build
from engine.kv_cache.pages import PageHolder
from engine.models.checkpoint import Checkpoint
from tests.support.models.checkpoints import make_checkpoint
from tests.support.specs import cpu_config

TOKENS = np.arange(5, 69, dtype=np.int32)  # four pages
PATIENCE_S = 120.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


def config_of(model: Path, files: Path, disk_bytes: int = 1 << 20, **cache: Any) -> EngineConfig:
    return cpu_config(
        model,
        cache=CacheConfig(**{"num_pages": 16, "swap_pages": 0, **cache}),
        offload=OffloadConfig(cpu_bytes=1 << 20, disk_dir=files, disk_bytes=disk_bytes),
    )


def engine_of(model: Path, files: Path, **cache: Any) -> Engine:
    return build(config_of(model, files, **cache))


def kept(engine: Engine) -> int:
    """Return how many pages of these tokens the files have."""
    return len(engine.tiers.files.cache.index)


def poll_until(engine: Engine, condition: Callable[[], object]) -> None:
    """Run a turn of the tiers now, and after each event of their threads."""
    news = threading.Event()
    engine.backend.copier.notify = news.set
    engine.tiers.poll()
    while not condition():
        assert news.wait(PATIENCE_S)
        news.clear()
        engine.tiers.poll()


def bring_four_pages(engine: Engine, tokens: Ints) -> int:
    """Load these tokens from files. Return the number of tokens on the device."""
    over: list[bool] = []
    match = engine.tiers.match(tokens, b"")
    assert match is not None and len(match.filed) == 4
    assert engine.tiers.load_match(match, 16, lambda: over.append(True))
    poll_until(engine, lambda: over)
    return engine.cache.match(tokens).num_tokens


def fill(engine: Engine) -> None:
    """Insert the present content of four pages, as if it had been computed."""
    pages = engine.cache.allocate(4, PageHolder.REQUEST)
    assert pages is not None
    engine.pool.tensor[pages.tolist()] = 7
    engine.cache.insert(TOKENS, PageHolding.of(pages))
    engine.pages.drop(pages, PageHolder.REQUEST)
    poll_until(engine, lambda: kept(engine) == 4 and not engine.tiers.busy)


def filled(model: Path, files: Path) -> dict[str, str]:
    engine = engine_of(model, files)
    try:
        fill(engine)
        return engine.fingerprint
    finally:
        engine.close()


def change_one_number(model: Path) -> None:
    """Change the last number of the largest tensor."""
    stored = max(Checkpoint(model).tensors.values(), key=lambda each: each.num_bytes)
    content = bytearray(stored.path.read_bytes())
    content[stored.offset + stored.num_bytes - 3] ^= 1
    stored.path.write_bytes(content)


def test_the_same_model_finds_its_pages_in_any_directory(model: Path, tmp_path: Path) -> None:
    filled(model, tmp_path / "files")
    engine = engine_of(shutil.copytree(model, tmp_path / "elsewhere"), tmp_path / "files")
    assert kept(engine) == 4
    assert bring_four_pages(engine, TOKENS) == len(TOKENS)
    match = engine.cache.match(TOKENS)
    assert (engine.pool.tensor[match.holding.flat().tolist()] == 7).all()
    engine.close()


def test_weights_that_differ_in_one_number_find_no_page(model: Path, tmp_path: Path) -> None:
    told = filled(model, tmp_path / "files")
    change_one_number(model)
    engine = engine_of(model, tmp_path / "files")
    assert {key for key in told if engine.fingerprint[key] != told[key]} == {"weights"}
    assert kept(engine) == 0 and engine.tiers.match(TOKENS, b"") is None
    engine.close()


def test_pages_of_another_dtype_are_not_used(model: Path, tmp_path: Path) -> None:
    filled(model, tmp_path / "files")
    engine = engine_of(model, tmp_path / "files", dtype="fp8_e4m3")
    assert kept(engine) == 0
    engine.close()


@pytest.mark.parametrize(
    "told, sentence",
    [
        ({"disk_dir": "x", "cpu_bytes": 1}, "disk_dir and disk_bytes must be set together"),
        ({"disk_bytes": 1, "cpu_bytes": 1}, "disk_dir and disk_bytes must be set together"),
        ({"disk_dir": "x", "disk_bytes": 1}, "needs cpu_bytes"),
    ],
)
def test_an_incomplete_configuration_of_files_is_rejected(
    told: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        OffloadConfig.model_validate(told)


def test_files_smaller_than_a_page_are_rejected(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.offload\.disk_bytes: 4097 bytes are less than a page"
    ):
        build(config_of(model, tmp_path / "files", disk_bytes=4097))
