"""A role that has only a scheduler, and traffic for tests of ranks."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.config import (
    CacheConfig,
    EngineConfig,
    InputEmbeddingsConfig,
    LoraConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from common.request import GIVEN_TOKEN, InputEmbeddings
from common.requests.pooling import PoolingMode, PoolingParams
from common.requests.sampling import SamplingParams
from engine.batch.request import Request
from engine.build import Engine
from engine.loop.loop import EventLoop
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import make_checkpoint, reference_model
from tests.support.specs import cpu_config, make_request

Make = Callable[[Path], dict[str, Any]]  # makes a model, and returns fields of EngineConfig


NUM_PAGES = 26


def config_of(tp: int = 1, num_pages: int = NUM_PAGES, **fields: Any) -> EngineConfig:
    parallel = fields.pop("parallel", {})
    return cpu_config(
        **{"dtype": "float32", **fields},
        parallel=ParallelConfig(tp=tp, **parallel),
        cache=CacheConfig(num_pages=num_pages, swap_pages=2 * num_pages),
        scheduler=SchedulerConfig(
            chunked_prefill_tokens=32,
            max_running_requests=12,
            new_token_ratio=0.05,
            min_new_token_ratio=0.01,
        ),
    )


class SchedulerRole:
    """A role that has only a scheduler, and collects the tokens of its requests."""

    def __init__(self) -> None:
        self.answers: dict[int, list[int]] = defaultdict(list)
        self.added = self.ended = 0

    def use(self, engine: Engine, config: EngineConfig) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler(config, lambda request, holding: None)
        self.loop = EventLoop(self, engine.runner)

    def run(self) -> None:
        """Run until all requests have ended."""
        in_flight = None
        while self.scheduler.has_work or in_flight is not None:
            in_flight = self.loop.step(in_flight)

    def poll(self) -> None:
        pass

    def next_batch(self) -> Any:
        return self.scheduler.next_batch()

    def finish(self, batch: Any, result: Any) -> Any:
        outcome = self.scheduler.finish(batch, result)
        for key, token in zip(outcome.requests, outcome.tokens, strict=True):
            self.answers[int(key)].append(int(token))
        for finished in outcome.finished:
            assert not finished.finish.error
            self.engine.adapters.release(finished.request.key)
            self.ended += 1
        return outcome

    def idle(self) -> None:
        pass

    def add(self, tokens: Sequence[int], *, adapter: str = "", **options: Any) -> Request:
        self.added += 1
        named = {"adapter": self.engine.adapters.library.names()[adapter]} if adapter else {}
        request = make_request(tokens, key=self.added, **named, **options)
        self.schedule(request)
        return request

    def schedule(self, request: Request) -> None:
        self.engine.adapters.hold(request)
        assert self.engine.adapters.take_slot(request)
        self.scheduler.add(request)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens that repeat after a while, so that prompt lookup finds drafts."""
    drawn = np.random.default_rng(seed).integers(1, 250, min(length, 12)).tolist()
    return (drawn * length)[:length]


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 7, "temperature": 0.0, **changes})


EVERY_SAMPLING = (
    sampled(),
    sampled(temperature=0.9, top_p=0.9),
    sampled(temperature=1.2, top_k=20, min_p=0.01, max_tokens=40),
    sampled(repetition_penalty=1.3, presence_penalty=0.5),
    sampled(logprobs=2, logit_bias=((5, 3.0),)),
    sampled(prompt_logprobs=1, max_tokens=9),
    sampled(bad_word_ids=((3,), (7, 8, 9)), temperature=0.8),
)
EVERY_POOLING = (
    PoolingParams(PoolingMode.LAST),
    PoolingParams(PoolingMode.MEAN),
    PoolingParams(PoolingMode.FIRST),
    PoolingParams(PoolingMode.TOKENS, (7, 100, 0)),
)


def serve_every_sampling(serving: Any, *, pooled: bool = False) -> None:
    """Serve requests with every kind of sampling, and pooled ones beside them."""
    for number, sampling in enumerate(EVERY_SAMPLING):
        serving.add(prompt(5 + 16 * number, number), sampling=sampling)
        if pooled:
            pooling = EVERY_POOLING[number % len(EVERY_POOLING)]
            serving.add(prompt(20, number), sampling=sampled(max_tokens=1), pooling=pooling)
    serving.run()


def serve_text(serving: Any, *, pooled: bool = False) -> None:
    """Serve every kind of sampling, then more tokens than the pages have room for."""
    serve_every_sampling(serving, pooled=pooled)
    for number in range(8):
        serving.add(prompt(10, number), sampling=sampled(max_tokens=70, ignore_eos=True))
    serving.run()


def serve_adapters(serving: Any) -> None:
    """Serve requests with more adapters than slots."""
    for names in (("a", "", "b"), ("c", "a", "")):
        for number, name in enumerate(names):
            serving.add(prompt(20 + number, number), adapter=name, sampling=EVERY_SAMPLING[number])
        serving.run()


def plain(architecture: str = "qwen3", **sizes: Any) -> Make:
    return lambda root: {"model": str(make_checkpoint(root, architecture, **sizes))}


def drafted(
    method: str, architecture: str, make: Callable[..., Path] | None = None, **sizes: Any
) -> Make:
    def made(root: Path) -> dict[str, Any]:
        model = make_checkpoint(root / "model", architecture, **sizes)
        head = {}
        if method in ("eagle", "draft_model"):
            assert make is not None
            head["draft_model"] = str(make(root / "drafter", model))
        elif make is not None:
            make(model)
        speculative = SpeculativeConfig(
            method=method, adaptive=False, num_speculative_tokens=3, prompt_lookup_min=1, **head
        )
        return {"model": str(model), "speculative": speculative}

    return made


def given(root: Path) -> dict[str, Any]:
    model = str(make_checkpoint(root, "qwen3"))
    return {"model": model, "input_embeddings": InputEmbeddingsConfig(enabled=True)}


def serve_given(serving: SchedulerRole) -> None:
    """Serve input embeddings in chunks, beside a prompt of tokens."""
    rng, hidden = np.random.default_rng(5), serving.engine.model.spec.hidden_size
    for length in (5, 70):
        values = rng.normal(0, 0.02, (length, hidden)).astype(np.float32).tobytes()
        embeddings = InputEmbeddings.of(values, length)
        serving.add([GIVEN_TOKEN] * length, input_embeddings=embeddings, sampling=sampled())
        serving.add(prompt(length), sampling=sampled())
    serving.run()


def adapted(*preload: str) -> Make:
    """Make adapters a, b and c, of which some are loaded at the start."""

    def made(root: Path) -> dict[str, Any]:
        model = make_checkpoint(root / "model")
        for seed, name in enumerate("abc"):
            make_adapter(root / "shelf" / name, reference_model(model), seed=seed)
        lora = LoraConfig(adapter_dir=root / "shelf", max_loras=2, preload=preload)
        return {"model": str(model), "lora": lora}

    return made
