"""Measure the cost of a grammar per step: the masks of 64 rows.

    python -m tools.bench.grammar [--rows 64] [--vocabulary 151000]

For each grammar, every row follows a response of its own. In each step, the grammar accepts the
previous step's tokens, and a thread for which the engine thread waits makes every row's mask. The
figures are medians over the steps: wall time, which needs an idle machine, and the engine thread's
own CPU time. Rows are held if their grammar is too slow for a step, which ends the measurement.

The vocabulary is generated: bytes, and words of syllables, digits and JSON's signs, as large as
Qwen's. A step's forward is launched before all this work (`EventLoop.step`), so the work is hidden
if it is shorter than the forward.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from common.request import RequestSpec
from common.requests.guide import JSON_OBJECT, GuidedDecoding
from common.requests.sampling import SamplingParams
from engine.batch.request import Request
from engine.batch.table import SlotTable
from engine.grammar.bits import words_of
from engine.grammar.compilers import GrammarCompilers, prepared
from engine.grammar.matching import CompiledGuide, Match, MatchThreads
from engine.sampling.grammar import GrammarMatcher
from tools.bench.support import record

STEPS = 40
ROWS = 64
VOCABULARY = 151_000
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 5},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    "required": ["name", "age", "tags", "address"],
}
GUIDES = {
    "object": JSON_OBJECT,
    "person": GuidedDecoding("json_schema", json.dumps(PERSON)),
    "enum of 1000": GuidedDecoding(
        "json_schema", json.dumps({"enum": [f"value {i}" for i in range(1000)]})
    ),
    "date": GuidedDecoding("regex", "[0-9]{4}-[01][0-9]-[0-3][0-9]T.*"),
    "ambiguous": GuidedDecoding("ebnf", 'root ::= root root | "a" | "b" | ""'),
}


def vocabulary(size: int) -> list[bytes]:
    """Return the vocabulary. Its last token ends a response."""
    draw = random.Random(1)
    consonants, vowels = "bcdfghklmnprst", "aeiou"
    syllables = ["".join(each) for each in itertools.product(consonants, vowels, "bdlmnrst ")]
    words = {bytes([byte]): None for byte in range(256)}
    for length in (2, 3):
        words |= {
            "".join(each).encode(): None for each in itertools.product('"{}[]:, ', repeat=length)
        }
    while len(words) < size - 1:
        word = "".join(draw.choices(syllables, k=draw.choice((1, 2, 2, 3, 4))))
        word = str(draw.randrange(10**6)) if draw.random() < 0.01 else draw.choice(("", " ")) + word
        words[word.encode()] = None
    return [*words, b""]


class Cost(NamedTuple):
    """The cost of one step. held: number of held rows."""

    passed_s: float
    cpu_s: float
    held: int


def begin(compiled: CompiledGuide, num_words: int, threads: MatchThreads) -> Match:
    """Return an answer's match before its first token."""
    match = Match(compiled, None, np.full(words_of(num_words), -1, np.int32), threads)
    match.drive()
    return match


def walks(
    compiler: GrammarCompilers, guide: GuidedDecoding, words: Sequence[bytes], rows: int
) -> Iterator[Cost]:
    """Return the cost of each step. A row that has ended starts again."""
    compiled = CompiledGuide(compiler.compiled(prepared(guide)))
    threads = MatchThreads(lambda: None)
    draw = np.random.default_rng(3)
    table = SlotTable(rows, STEPS + 8, 16, (None,))
    grammar = GrammarMatcher(table, len(words))
    slots = np.arange(rows, dtype=np.intp)
    requests = [_request(row, guide) for row in range(rows)]

    def new_answer(row: int) -> None:
        table.num_prompt[row] = table.known[row] = 1
        requests[row].match = begin(compiled, len(words), threads)
        grammar.acquire(row, requests[row])

    for row in range(rows):
        new_answer(row)
    for _ in range(STEPS):
        began, began_cpu = time.monotonic(), time.thread_time()
        work = grammar.build(slots, slots, table.known[slots])
        held = int(np.count_nonzero(table.unchosen))
        yield Cost(time.monotonic() - began, time.thread_time() - began_cpu, held)
        if held:
            break
        masks = np.unpackbits(
            work.bitmask.numpy().view(np.uint8), axis=1, bitorder="little", count=len(words)
        )
        for row in range(rows):
            allowed = masks[row].nonzero()[0]
            token = int(draw.choice(allowed))
            if token == len(words) - 1 or not len(allowed):
                new_answer(row)
                continue
            table.tokens[row, table.known[row]] = token
            table.known[row] += 1
    threads.close()


def _request(key: int, guide: GuidedDecoding) -> Request:
    sampling = SamplingParams(max_tokens=STEPS, seed=key, guide=guide)
    return Request.of(
        RequestSpec(token_ids=np.zeros(1, np.int32).tobytes(), sampling=sampling),
        key=key,
        deadline=math.inf,
        arrived=0.0,
        origin=(0, key),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    arguments = parser.parse_args()
    words = vocabulary(arguments.vocabulary)
    compiler = GrammarCompilers(words, [len(words) - 1])
    figures = []
    for name, guide in GUIDES.items():
        began = time.thread_time()
        compiler.compiled(prepared(guide))
        compile_s = time.thread_time() - began
        steps = [*walks(compiler, guide, words, arguments.rows)]
        passed = sorted(step.passed_s for step in steps)
        row = {
            "grammar": name,
            "compile_s": compile_s,
            "step_us": statistics.median(passed) * 1e6,
            "p95_us": passed[int(len(passed) * 0.95)] * 1e6,
            "engine_us": statistics.median(step.cpu_s for step in steps) * 1e6,
            "held": max(step.held for step in steps),
        }
        figures.append(row)
    columns = {
        "grammar": "{grammar}",
        "compiled in": "{compile_s:.2f} s",
        "a step": "{step_us:.0f} us",
        "p95": "{p95_us:.0f} us",
        "engine thread": "{engine_us:.0f} us",
        "held": "{held}",
    }
    record.table(figures, columns)
    record.emit("grammar", {"rows": arguments.rows, "vocabulary": len(words)}, figures)


if __name__ == "__main__":
    main()
