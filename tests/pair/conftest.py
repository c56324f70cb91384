"""One tiny model of each architecture, in memory once, and what transformers makes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from common.config import CacheConfig, EngineConfig
from common.page_tables import PageTables
from engine.kv_cache.layout import KVLayout
from engine.sizing import kept_in
from tests.support.checkpoints import greedy_tokens, make_checkpoint, reference_model
from tests.support.pair_node import Loaded


@dataclass(eq=False)
class Known:
    """A model, and its greedy tokens by prompt."""

    loaded: Loaded
    reference: object
    remembered: dict[tuple[int, ...], list[int]]

    @property
    def vocabulary_size(self) -> int:
        return self.loaded.model.spec.vocabulary_size

    def tables(self, page_size: int, cache_dtype: str = "auto") -> PageTables:
        """Return the page tables of a request, with the cache in this dtype."""
        model = self.loaded.model
        config = EngineConfig(model="", cache=CacheConfig(dtype=cache_dtype))
        dtype = kept_in(config, torch.device("cpu"))
        return KVLayout.of(model.spec.layers, page_size, model.dtype, dtype).tables

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The first `count` tokens that transformers generates after `prompt`, EOS or not."""
        tokens = self.remembered.get(tuple(prompt), [])
        if len(tokens) < count:
            (tokens,) = greedy_tokens(self.reference, [prompt], count)
            self.remembered[tuple(prompt)] = tokens
        return tokens[:count]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    made: dict[str, Known] = {}

    def of(architecture: str) -> Known:
        if architecture not in made:
            directory = make_checkpoint(tmp_path_factory.mktemp(architecture), architecture)
            loaded = Loaded.from_directory(directory)
            made[architecture] = Known(loaded, reference_model(directory), {})
        return made[architecture]

    return of


@pytest.fixture(scope="session")
def known(model: Callable[[str], Known]) -> Known:
    """Return a model for tests that are independent of the architecture."""
    return model("qwen3")
