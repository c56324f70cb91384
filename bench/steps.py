"""Times of engine steps: runs chosen steps on an engine in this process, without a node."""

import statistics
import time
from collections.abc import Iterator

import numpy as np

from common.config import CacheConfig, EngineConfig
from common.errors import ConfigError
from common.request import RequestSpec
from common.requests.sampling import SamplingParams
from engine.batch.batch import BatchResult, LaunchedBatch, ScheduleBatch
from engine.batch.holding import PageHolding
from engine.batch.request import FinishReason, Request, RequestEnd
from engine.build import Engine, build
from engine.kv_cache.pages import PageHolder
from engine.loop.loop import EventLoop
from engine.scheduler.results import StepOutcome
from engine.scheduler.scheduler import Scheduler
from simulation.cost.measured import MeasuredStep

_FAR = 1e12  # seconds: requests have no deadline
_FIRST_TOKEN = 3  # lower ids may be special
_WARM_UP = 3  # steps before the first measured one
_SEED = 1


def random_request(
    key: int,
    random: np.random.Generator,
    num_tokens: int,
    vocabulary: int,
    max_tokens: int = 1 << 20,
    temperature: float = 0.0,
) -> Request:
    """Return a request of random tokens, by default greedy and practically without end."""
    ids = random.integers(_FIRST_TOKEN, vocabulary, num_tokens, dtype=np.int32)
    sampling = SamplingParams(
        max_tokens=max_tokens, seed=key, temperature=temperature, ignore_eos=True
    )
    spec = RequestSpec(token_ids=ids.tobytes(), sampling=sampling)
    return Request.of(spec, key=key, deadline=_FAR, arrived=0.0, origin=(1, key))


class StepTimer:
    """An engine whose steps are timed. Its requests are greedy and have random tokens.

    Decode steps overlap as configured, so their time is the interval between two steps. Steps with
    prompts do not overlap, so their time includes the scheduler's.

    Args:
        config: configuration for one rank. The prefix cache is not used.

    Raises:
        ConfigError: the model is not supported or does not fit.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.parallel.num_ranks > 1 or config.parallel.dp > 1:
            raise ConfigError("engine.parallel: steps of one rank can be timed, not of several")
        if config.speculative.method != "none":
            raise ConfigError("engine.speculative.method: steps with drafts cannot be timed")
        cache: CacheConfig = config.cache.model_copy(update={"prefix_cache": False})
        config = config.model_copy(update={"cache": cache})
        self.engine: Engine = build(config)
        tables = self.engine.core.shape.tables
        if tables.num_tables > 1 or tables.state_pages or not self.engine.core.limits.generates:
            self.engine.close()
            raise ConfigError(
                "model: steps of models with windows or states, or without a head for text, cannot "
                "be timed"
            )
        self._page_size = tables.page_size
        self._role = _TimedRole(self.engine.scheduler(config, lambda request, holding: None))
        runner, overlap = self.engine.runner, config.scheduler.overlap_schedule
        self._decode_loop = EventLoop(self._role, runner, overlap=overlap)
        self._prefill_loop = EventLoop(self._role, runner, overlap=False)
        self._random, self._key = np.random.default_rng(_SEED), 0

    @property
    def kv_capacity_tokens(self) -> int:
        return self.engine.core.shape.num_pages * self._page_size

    def decode(self, rows: int, context: int, steps: int) -> MeasuredStep:
        """Return the median time of `steps` decode steps with `rows` rows.

        Their KV is zeros or left from other requests, which takes the same time.
        """
        context = max(context, steps // 2 + 2)
        longest = context + _WARM_UP + steps
        for _ in range(rows):
            self._join(context - steps // 2, longest)
        in_flight: LaunchedBatch | None = None
        times = []
        for step in range(_WARM_UP + steps):
            began = time.perf_counter()
            in_flight = self._decode_loop.step(in_flight)
            if step >= _WARM_UP:
                times.append(time.perf_counter() - began)
        self._end(in_flight)
        return MeasuredStep("decode", rows, rows, context, statistics.median(times))

    def prefill(self, tokens: int) -> Iterator[MeasuredStep]:
        """Compute a prompt, and yield the time of each of its chunks."""
        self._role.scheduler.add(self._request(tokens, max_tokens=1))
        while self._role.scheduler.has_work:
            began = time.perf_counter()
            self._prefill_loop.step(None)
            seconds = time.perf_counter() - began
            batch = self._role.last
            assert batch is not None
            yield MeasuredStep("prefill", batch.num_tokens, 1, int(batch.ends[0]), seconds)

    def close(self) -> None:
        self.engine.close()

    def _request(self, tokens: int, max_tokens: int) -> Request:
        self._key += 1
        vocabulary = self.engine.model.spec.vocabulary_size
        return random_request(self._key, self._random, tokens, vocabulary, max_tokens)

    def _join(self, tokens: int, longest: int) -> None:
        """Add a request with `tokens` tokens to the running batch."""
        scheduler = self._role.scheduler
        pages = scheduler.allocate(-(-tokens // self._page_size), PageHolder.REQUEST)
        request = self._request(tokens, max_tokens=longest)
        if pages is None or not scheduler.join(request, PageHolding.of(pages)):
            raise ConfigError(f"the pool of {self.kv_capacity_tokens} tokens has no room")
        self._role.running.append(request)

    def _end(self, in_flight: LaunchedBatch | None) -> None:
        for request in self._role.running:
            self._role.scheduler.abort(request, RequestEnd(FinishReason.STOP))
        while in_flight is not None:
            in_flight = self._decode_loop.step(in_flight)
        self._role.running.clear()


class SchedulingRole:
    """An engine role that only schedules."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def poll(self) -> None:
        self.scheduler.expire()

    def next_batch(self) -> ScheduleBatch | None:
        return self.scheduler.next_batch()

    def finish(self, batch: ScheduleBatch, result: BatchResult) -> None:
        self.finished(batch, self.scheduler.finish(batch, result))

    def finished(self, batch: ScheduleBatch, outcome: StepOutcome) -> None:
        """Do nothing. Subclasses may record the step."""

    def idle(self) -> None:
        raise AssertionError("there is work")


class _TimedRole(SchedulingRole):
    """Remembers the last batch."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.running: list[Request] = []
        self.last: ScheduleBatch | None = None

    def finished(self, batch: ScheduleBatch, outcome: StepOutcome) -> None:
        self.last = batch
