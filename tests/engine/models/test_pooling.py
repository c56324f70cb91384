"""Prompts without generated tokens, through scheduler, runner and cache, compared with the
states and heads of transformers."""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from common.config import CacheConfig, EngineConfig, SchedulerConfig
from common.errors import InvalidRequest
from common.requests.pooling import PoolingMode, PoolingParams
from common.requests.sampling import SamplingParams
from engine.batch.request import FinishReason, Request
from engine.build import Engine, build
from engine.loop.loop import EventLoop
from tests.support.engine.scheduler_role import SchedulerRole
from tests.support.models.checkpoints import VOCABULARY_SIZE, make_checkpoint
from tests.support.specs import cpu_config

CHUNK = 32
LAST, MEAN = PoolingParams(PoolingMode.LAST), PoolingParams(PoolingMode.MEAN)


class Pools(SchedulerRole):
    """Stores pooled results and first tokens. `run` turns the loop until all requests have
    ended."""

    def __init__(self, engine: Engine, config: EngineConfig, *, overlap: bool = True) -> None:
        super().__init__()
        self.use(engine, config)
        self.loop = EventLoop(self, engine.runner, overlap=overlap)
        self.pooled: dict[int, np.ndarray] = {}
        self.reasons: set[FinishReason] = set()

    def finish(self, batch, result):
        outcome = super().finish(batch, result)
        for chunk in outcome.chunks:
            if chunk.pooled is not None:
                self.pooled[chunk.request.key] = chunk.pooled
            if chunk.first_token is not None:
                self.answers[chunk.request.key].append(chunk.first_token)
        self.reasons |= {finished.finish.reason for finished in outcome.finished}
        return outcome

    def ask(self, tokens, pooling: PoolingParams | None, **sampling: object) -> Request:
        """Request one token after this prompt, or its pooled result."""
        sampled = SamplingParams(max_tokens=1, seed=0, temperature=0.0, **sampling)
        return self.add(tokens, sampling=sampled, pooling=pooling)

    def run(self) -> None:
        super().run()
        self.scheduler.check_idle()


@pytest.fixture
def pools():
    made: list[Engine] = []

    def make(directory, *, overlap=True, backend="auto", **cache: object) -> Pools:
        config = cpu_config(
            directory,
            dtype="float32",
            model_backend=backend,
            cache=CacheConfig(num_pages=128, **cache),
            scheduler=SchedulerConfig(chunked_prefill_tokens=CHUNK, max_running_requests=8),
        )
        made.append(build(config))
        return Pools(made[-1], config, overlap=overlap)

    yield make
    for engine in made:
        engine.guides.close()
        engine.backend.stream.close()


@pytest.fixture
def generator(checkpoint):
    return checkpoint("qwen3")


@pytest.fixture
def classifier(checkpoint):
    made_by = AutoModelForSequenceClassification
    return checkpoint("llama", made_by=made_by, num_labels=3, pad_token_id=0)


def prompts(*lengths: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(1, 256, (n,), generator=random).tolist() for n in lengths]


def states(directory, tokens) -> torch.Tensor:
    """Return [tokens, hidden] after the decoder's own last norm."""
    model = AutoModel.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0]


def close(found, expected) -> None:
    torch.testing.assert_close(torch.from_numpy(np.array(found)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_every_kind_of_pooling_equals_pooled_states_of_transformers(
    pools, generator, overlap, prefix_cache
):
    rig = pools(generator, overlap=overlap, prefix_cache=prefix_cache)
    texts = prompts(1, 16, 33, 100)
    wanted = [rig.ask(text, PoolingParams(pool)) for text in texts for pool in (1, 2, 3)]
    told = rig.ask(texts[3], PoolingParams(PoolingMode.TOKENS, (7, 300, 0)))
    rig.run()
    for number, text in enumerate(texts):
        expected = states(generator, text)
        last, mean, first = (rig.pooled[each.key] for each in wanted[3 * number : 3 * number + 3])
        close(last, expected[-1])
        close(mean / len(text), expected.mean(dim=0))
        close(first, expected[0])
    model = AutoModelForCausalLM.from_pretrained(generator, dtype=torch.float32)
    with torch.no_grad():
        likely = model(torch.tensor([texts[3]])).logits[0, -1].log_softmax(dim=-1)
    close(rig.pooled[told.key], likely[[7, 300, 0]])
    assert rig.reasons == {FinishReason.STOP}


def test_pooled_and_generating_prompts_share_steps(pools, generator):
    alone, mixed = pools(generator), pools(generator)
    asked = {"logprobs": 1, "prompt_logprobs": 1}
    texts = prompts(5, 40, 7, 90)
    for number, text in enumerate(texts):  # some request other results of the same step
        mixed.ask(text, [None, LAST, None, MEAN][number], **({} if number % 2 else asked))
        alone.ask(text, None)
    mixed.run()
    alone.run()
    assert mixed.answers == {key: alone.answers[key] for key in (1, 3)}
    close(mixed.pooled[2], states(generator, texts[1])[-1])
    close(mixed.pooled[4] / 90, states(generator, texts[3]).mean(dim=0))


def test_results_of_the_last_token_use_the_cache_and_others_compute_every_token(pools, generator):
    rig = pools(generator)
    (text,) = prompts(70)
    first = rig.ask(text, LAST)
    rig.run()
    again, whole = rig.ask(text, LAST), rig.ask(text, MEAN)
    rig.run()
    assert (first.cached_tokens, again.cached_tokens, whole.cached_tokens) == (0, 64, 0)
    close(rig.pooled[again.key], torch.from_numpy(np.array(rig.pooled[first.key])))
    close(rig.pooled[whole.key] / len(text), states(generator, text).mean(dim=0))


def test_a_classifier_gives_the_results_of_transformers(pools, classifier):
    rig = pools(classifier)
    texts = prompts(3, 50)
    wanted = [rig.ask(text, PoolingParams(PoolingMode.LABELS)) for text in texts]
    embedded = rig.ask(texts[1], LAST)
    rig.run()
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype=torch.float32)
    for request, text in zip(wanted, texts, strict=True):
        with torch.no_grad():
            close(rig.pooled[request.key], model(torch.tensor([text])).logits[0])
    close(rig.pooled[embedded.key], states(classifier, texts[1])[-1])


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_saved_without_a_head_is_pooled(pools, tmp_path, tied):
    make_checkpoint(tmp_path, "qwen3", made_by=AutoModel, tie_word_embeddings=tied)
    rig = pools(tmp_path)
    assert rig.engine.model.spec.generates is tied
    (text,) = prompts(20)
    request = rig.ask(text, LAST)
    rig.run()
    close(rig.pooled[request.key], states(tmp_path, text)[-1])


def test_a_model_of_the_transformers_backend_is_pooled(pools, generator):
    rig = pools(generator, backend="transformers")
    (text,) = prompts(40)
    request = rig.ask(text, MEAN)
    rig.run()
    close(rig.pooled[request.key] / len(text), states(generator, text).mean(dim=0))


def test_results_that_need_a_missing_head_are_rejected(pools, generator, classifier):
    limits = pools(generator).engine.core.limits
    with pytest.raises(InvalidRequest, match="no classification head"):
        limits.check_pooling(PoolingParams(PoolingMode.LABELS))
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        limits.check_pooling(PoolingParams(PoolingMode.TOKENS, (VOCABULARY_SIZE,)))
    limits = pools(classifier).engine.core.limits
    with pytest.raises(InvalidRequest, match="cannot generate"):
        limits.check_sampling(SamplingParams(max_tokens=1, seed=0))
    with pytest.raises(InvalidRequest, match="no language model head"):
        limits.check_pooling(PoolingParams(PoolingMode.TOKENS, (1,)))
