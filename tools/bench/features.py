"""Measure the cost of each row feature per decode step, on the engine thread and on the device.

    python -m tools.bench.features [--rows 64] [--vocabulary 151000] [--steps 40]

Steps are built with overlap, as in the engine: a step is built while the previous step's token is
computed. The parts that need that token are built once it is known. Then one thread of this CPU
computes the device's part, from random logits to tokens.

Either every row uses the feature, or only one row. Rows are greedy unless noted otherwise. The
figures are medians over the steps of thread CPU time, so that other processes hardly count. Logits
and vocabulary belong to no model, and there is no forward.

A stop expression is not part of a step, because the router searches for it in each row's text.
`tools.bench.adapters` measures LoRA adapters, and `tools.bench.speculation` measures drafts.
"""

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from api.text.expressions import Automaton
from api.text.stops import StopConditions, StopRules
from common.request import RequestSpec
from common.requests.reasoning import ReasoningTokens
from common.requests.sampling import SamplingParams
from engine.batch.batch import ForwardMode, Ints, ScheduleBatch
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.grammar.compilers import GrammarCompilers, prepared
from engine.grammar.matching import CompiledGuide, MatchThreads
from engine.runner.cpu import use_cpu
from engine.sampling.composition import SamplingFeatures, SamplingInputs, every_feature
from tools.bench.grammar import GUIDES, begin, vocabulary
from tools.bench.support import record

ROWS, VOCABULARY, STEPS = 64, 151_000, 40
WARM_UP = 3
PROMPT = 256
CLOSE = 4  # the token that ends reasoning
NUM_LOGITS = 4  # different logits in turn, so that a step does not find its input in a CPU cache
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 1.0},
    "temperature, top_p": {"temperature": 1.0, "top_p": 0.9},
    "16 biases": {"logit_bias": tuple((token, -1.5) for token in range(300, 316))},
    "min_tokens": {"min_tokens": 4000},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "100 allowed tokens": {"allowed_token_ids": tuple(range(1000, 1100))},
    "16 bad words, 1 token each": {"bad_word_ids": tuple((n,) for n in range(300, 316))},
    "16 bad words, 2 tokens each": {"bad_word_ids": tuple((n, n + 9) for n in range(300, 316))},
    "logprobs, sampled": {"logprobs": 0},
    "logprobs, 5 likeliest": {"logprobs": 5},
    "JSON schema": {"guide": GUIDES["person"]},
    "regex": {"guide": GUIDES["date"]},
    "thinking budget": {"thinking_budget": 10_000, "thought": ReasoningTokens(CLOSE)},
}
EXPRESSION = r"(END|STOP)[.!]? *\d{3}"
TEXT = "a word, and number 27 "  # text appended to each row


@dataclass(frozen=True, slots=True)
class Costs:
    """Median costs of one step.

    built_us: of the engine thread; device_us: of the device's part.
    """

    built_us: float
    device_us: float


class Steps:
    """Rows of a table, and steps over all of them. A row restarts when its response ends."""

    def __init__(self, requests: Sequence[Request], num_words: int, num_steps: int) -> None:
        self._eos = num_words - 1
        context = PROMPT + num_steps + WARM_UP + 1
        self._requests = requests
        self._table = SlotTable(len(requests), context, 16)
        device = torch.device("cpu")
        self._features: SamplingFeatures = every_feature(
            self._table, num_words, (self._eos,), device
        )
        for request in requests:
            self._table.acquire(request, (self._eos,))
        self._slots = np.arange(len(requests), dtype=np.int32)
        self._coming: NDArray[np.int32] = np.full(len(requests), -1, np.int32)
        self._number = 0

    def step(self, logits: torch.Tensor) -> tuple[float, float]:
        """Run one step. Returns seconds of the engine thread and of the device.

        Args:
            logits: of every row; they are overwritten.
        """
        batch = self._batch(self._table.known + (self._coming >= 0))
        began = time.thread_time()
        work = self._features.build(batch)
        built_s = time.thread_time() - began
        ended = self._tell()
        began = time.thread_time()
        late = (
            SamplingInputs(works=self._features.build_late(batch, work.late)) if work.late else None
        )
        sent = [*work.tensors(), *(late.tensors() if late else ())]
        built_s += time.thread_time() - began
        whole = SamplingInputs(work.columns, work.works + (late.works if late else ()), work.late)
        began = time.thread_time()
        tokens, _ = whole.choose(logits, sent)
        device_s = time.thread_time() - began
        self._coming = tokens.numpy().copy()
        self._coming[ended] = -1
        return built_s, device_s

    def _batch(self, ends: Ints) -> ScheduleBatch:
        self._number += 1
        return ScheduleBatch(
            step=self._number,
            mode=ForwardMode.DECODE,
            slots=self._slots,
            starts=ends - 1,
            ends=ends,
            samples=np.ones(len(ends), np.bool_),
        )

    def _tell(self) -> list[int]:
        """Finish the previous step. Returns the rows whose responses have ended, which start
        again."""
        (rows,) = (self._coming >= 0).nonzero()
        self._table.tokens[rows, self._table.known[rows]] = self._coming[rows]
        self._table.known[rows] += 1
        ended: list[int] = (self._coming == self._eos).nonzero()[0].tolist()
        for row in ended:
            request = self._requests[row]
            self._table.release(request)
            if (match := request.match) is not None:
                request.match = begin(match.compiled, self._eos + 1, match.threads)
            self._table.acquire(self._requests[row], (self._eos,))
        return ended


def measure(requests: Sequence[Request], logits: Sequence[torch.Tensor], steps: int) -> Costs:
    system = Steps(requests, logits[0].shape[1], steps)
    scratch = torch.empty_like(logits[0])
    built, device = [], []
    for number in range(WARM_UP + steps):
        scratch.copy_(logits[number % len(logits)])
        built_s, device_s = system.step(scratch)
        built.append(built_s)
        device.append(device_s)
    return Costs(
        statistics.median(built[WARM_UP:]) * 1e6, statistics.median(device[WARM_UP:]) * 1e6
    )


def requests_of(
    fields: Mapping[str, Any], asking: int, rows: int, words: int, compiler: GrammarCompilers
) -> list[Request]:
    """Return requests, the first `asking` of which use the feature."""
    draw = np.random.default_rng(1)
    plain = {"max_tokens": 5000, "temperature": 0.0}
    made = []
    threads = MatchThreads(lambda: None)
    for row in range(rows):
        own = fields if row < asking else {}
        sampling = SamplingParams(**{**plain, "seed": row, **own})
        request = Request.of(
            RequestSpec(
                token_ids=draw.integers(300, words - 1, PROMPT, dtype=np.int32).tobytes(),
                sampling=sampling,
            ),
            key=row,
            deadline=math.inf,
            arrived=0.0,
            origin=(0, row),
        )
        if sampling.guide is not None:
            compiled = CompiledGuide(compiler.compiled(prepared(sampling.guide)))
            request.match = begin(compiled, words, threads)
        made.append(request)
    return made


def measure_stops(rows: int, steps: int) -> float:
    """Return the router's microseconds for one token of each of `rows` rows."""

    rules = StopRules((), Automaton([EXPRESSION]))

    def watcher() -> StopConditions:
        stops = rules.begin()
        assert stops is not None
        return stops

    watchers = [watcher() for _ in range(rows)]
    times = []
    for number in range(steps):
        piece = TEXT[number % len(TEXT) :][:4]
        began = time.thread_time()
        for stops in watchers:
            stops.push(piece)
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    use_cpu(1, "auto")
    words = vocabulary(arguments.vocabulary)
    compiler = GrammarCompilers(words, [len(words) - 1])
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.rows, len(words))
    logits = [torch.randn(shape, generator=generator) for _ in range(NUM_LOGITS)]
    figures = []
    with torch.inference_mode():
        for name, fields in FEATURES.items():
            row: dict[str, Any] = {"feature": name}
            for column, asking in (("all", arguments.rows), ("one", 1)):
                requests = requests_of(fields, asking, arguments.rows, len(words), compiler)
                costs = measure(requests, logits, arguments.steps)
                row |= {
                    f"built_{column}_us": round(costs.built_us, 1),
                    f"device_{column}_us": round(costs.device_us),
                }
            figures.append(row)
    columns = {
        "feature": "{feature}",
        "built, every row": "{built_all_us:.0f} us",
        "one row": "{built_one_us:.0f} us",
        "device, every row": "{device_all_us} us",
        "one row ": "{device_one_us} us",
    }
    record.table(figures, columns)
    stops = {
        f"{n}_us": round(measure_stops(rows, arguments.steps), 1)
        for n, rows in (("all", arguments.rows), ("one", 1))
    }
    record.say(
        "router, a stop expression: every row {all_us} us, one row {one_us} us".format(**stops)
    )
    config = {"rows": arguments.rows, "vocabulary": len(words), "steps": arguments.steps}
    record.emit("features", config, figures, stop_regex=stops)


if __name__ == "__main__":
    main()
