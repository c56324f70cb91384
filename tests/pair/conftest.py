"""Fixtures: one tiny model of each architecture in memory, and the tokens that transformers
generates with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from common.config import CacheConfig, EngineConfig
from common.page_tables import PageTables
from engine.kv_cache.layout import KVLayout
from engine.sizing import kept_in
from tests.pair.rig import Asked, Loaded
from tests.support.engine.steps import Steps
from tests.support.models.checkpoints import confirmed_tokens, make_checkpoint, reference_model
from tests.support.models.noise_model import write


@dataclass(eq=False)
class Known:
    """A model, and its greedy tokens by prompt."""

    loaded: Loaded
    reference: PreTrainedModel
    remembered: dict[tuple[int, ...], list[int]]

    @property
    def vocabulary_size(self) -> int:
        return self.loaded.model.spec.vocabulary_size

    def tables(self, page_size: int, cache_dtype: str = "auto") -> PageTables:
        """Return the page tables of a request with a cache of this dtype."""
        model = self.loaded.model
        config = EngineConfig(model="", cache=CacheConfig(dtype=cache_dtype))
        dtype = kept_in(config, torch.device("cpu"))
        return KVLayout.of(model.spec.layers, page_size, model.dtype, dtype).tables

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the first `count` tokens that transformers generates after `prompt`, with or
        without EOS."""
        tokens = self.remembered.get(tuple(prompt), [])
        if len(tokens) < count:
            tokens = confirmed_tokens(self.reference, prompt, self._guessed(prompt, count))
            self.remembered[tuple(prompt)] = tokens
        return tokens[:count]

    def _guessed(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the tokens of the engine's model, without a scheduler."""
        steps = Steps(self.loaded.model, num_slots=1, context_length=len(prompt) + count)
        (tokens,) = steps.generate([prompt], count)
        steps.close()
        return tokens

    def check(self, *asked: Asked) -> None:
        """Check that these requests have the tokens of transformers, and as many as requested."""
        for one in asked:
            assert one.tokens == self.greedy(one.prompt, one.sampling.max_tokens)


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


@pytest.fixture(scope="session")
def noise(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Tokenizer]:
    """Return a model whose tokens are random, and its tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("noise") / "model"
    write(directory)
    return Loaded.from_directory(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
