"""Samples after drafts, compared with a step-by-step oracle, for random drafts and acceptance."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.requests.sampling import GuidedDecoding, ReasoningTokens, SamplingParams
from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.table import SlotTable
from engine.grammar.compilers import GrammarCompilers, prepared, xgrammar
from engine.grammar.matching import (
    CompiledGuide,
    Match,
    MatchThreads,
    ReasoningStage,
    ReasoningTracker,
    allow,
    allows,
    words_of,
)
from engine.sampling.composition import SamplingFeatures, SamplingInputs, every_feature
from tests.support.specs import make_request

VOCABULARY = 40
NUM_SLOTS = 6
MAX_DRAFTS = 4
OPEN, CLOSE, EOS = 37, 38, 39
CPU = torch.device("cpu")


def _params(source: random.Random) -> SamplingParams:
    """Return random features except grammars."""
    fields: dict[str, Any] = {}
    if source.random() < 0.6:
        fields |= {"frequency_penalty": source.choice((0.0, 0.5, -0.4)), "presence_penalty": 0.3}
        fields["repetition_penalty"] = source.choice((1.0, 1.4))
    if source.random() < 0.4:
        fields["min_tokens"] = source.randrange(1, 60)
    if source.random() < 0.5:
        few = [source.randrange(VOCABULARY) for _ in range(5)]
        words = [tuple(source.choices(few, k=source.randrange(1, 4))) for _ in range(20)]
        fields["bad_word_ids"] = tuple(words)
    if source.random() < 0.4:
        opened = source.choice((None, OPEN))
        fields |= {
            "thought": ReasoningTokens(CLOSE, open=opened),
            "thinking_budget": source.randrange(0, 30),
        }
    if source.random() < 0.3:
        fields["logit_bias"] = ((3, 2.0), (EOS, 1.0))
    if source.random() < 0.3:
        fields["allowed_token_ids"] = tuple(range(0, VOCABULARY, 2))
    return SamplingParams(max_tokens=1000, seed=1, temperature=0.0, **fields)


class Row:
    """A request, and the device's state of it."""

    def __init__(self, slot: int, sampling: SamplingParams, tokens: list[int]) -> None:
        self.slot = slot
        self.sampling = sampling
        self.num_prompt = len(tokens)
        self.tokens = tokens  # the accepted ones


def _features(table: SlotTable) -> SamplingFeatures:
    return every_feature(table, VOCABULARY, [EOS], CPU)


def _edited(works: Sequence[Any], logits: Tensor) -> Tensor:
    for work in works:
        work.before(work.tensors(), logits)
    return logits


class StepByStep:
    """Edits logits of one request at a time, from all its tokens."""

    def __init__(self) -> None:
        self._table = SlotTable(1, 512, 16)
        self._features = _features(self._table)

    def edited(self, row: Row, tokens: list[int], logits: Tensor) -> Tensor:
        """Return the logits after these tokens."""
        request = make_request(
            tokens, key=1, num_generated=len(tokens) - row.num_prompt, sampling=row.sampling
        )
        self._table.acquire(request)
        ends = np.array([len(tokens)], np.int32)
        rows = np.zeros(1, np.int32), ends - 1, ends, np.ones(1, np.bool_)
        inputs = self._features.build(ScheduleBatch(1, ForwardMode.DECODE, *rows))
        assert not inputs.late
        edited = _edited(inputs.works, logits.clone()[None])[0]
        self._table.release(request)
        return edited


@dataclass
class Launched:
    rows: list[Row]  # rows with more drafts first
    drafts: list[int]
    batch: ScheduleBatch
    inputs: SamplingInputs


class Simulation:
    """A scheduler and a device without a model: logits are random."""

    def __init__(self, source: random.Random, *, overlap: bool) -> None:
        self._random = source
        self._overlap = overlap
        self._table = SlotTable(NUM_SLOTS, 512, 16)
        self._features = _features(self._table)
        self._oracle = StepByStep()
        self._logits = torch.Generator().manual_seed(source.randrange(1 << 30))
        self._rows: list[Row] = []
        self._in_flight: Launched | None = None
        self._number = 0
        self.num_compared = 0
        self.num_accepted = 0
        for _ in range(3):
            tokens = [source.randrange(VOCABULARY) for _ in range(source.randrange(1, 9))]
            sampling = _params(source)
            slot = self._table.acquire(make_request(tokens, key=1, sampling=sampling))
            assert slot is not None
            self._rows.append(Row(slot, sampling, tokens))

    def step(self) -> None:
        """Launch a step before the previous one is finished, and then sample it."""
        launched = self._launch()
        if self._in_flight is not None:
            self._finish(self._in_flight)
        self._in_flight = self._sampled(launched)
        if not self._overlap:
            self._finish(self._in_flight)
            self._in_flight = None

    def _launch(self) -> Launched:
        table, source = self._table, self._random
        drafts = [source.choice((0, 0, 1, 2, MAX_DRAFTS)) for _ in self._rows]
        order = sorted(range(len(self._rows)), key=lambda number: -drafts[number])
        rows, drafts = [self._rows[n] for n in order], [drafts[n] for n in order]
        slots = np.array([row.slot for row in rows])
        length, known = table.length[slots], table.known[slots]
        for slot, count in zip(slots.tolist(), drafts, strict=True):
            past = int(table.length[slot]) + count
            for place in range(int(table.known[slot]), past):
                table.tokens[slot, place] = source.randrange(VOCABULARY)
        early = length - 1 - known
        self._number += 1
        batch = ScheduleBatch(
            self._number,
            ForwardMode.VERIFY if any(drafts) else ForwardMode.DECODE,
            slots.astype(np.int32),
            (length - 1).astype(np.int32),
            (length + np.array(drafts)).astype(np.int32),
            np.ones(len(rows), np.bool_),
            early=early.astype(np.int32) if (early > 0).any() else None,
        )
        inputs = self._features.build(batch)
        table.length[slots] += np.array(drafts, np.int32) + 1
        return Launched(rows, drafts, batch, inputs)

    def _sampled(self, launched: Launched) -> Launched:
        """Edit random logits, and compare them with those of the oracle. The sampled tokens are
        often the drafts."""
        table, works = self._table, launched.inputs.works
        if launched.inputs.late:
            works = (*works, *self._features.build_late(launched.batch, launched.inputs.late))
        places = list(enumerate([-1] * len(launched.rows)))  # the last sample of each row
        for number, count in enumerate(launched.drafts):
            places += [(number, after) for after in range(count)]
        logits = torch.randn(len(places), VOCABULARY, generator=self._logits) * 2
        befores, copies = [], logits.clone()
        for number, after in places:
            row, count = launched.rows[number], launched.drafts[number]
            drafts = table.tokens[row.slot, len(row.tokens) :][: count if after < 0 else after]
            befores.append([*row.tokens, *drafts.tolist()])
        told = _edited(works, logits)
        by_place = {}
        for place, (before, (number, after)) in enumerate(zip(befores, places, strict=True)):
            row, count = launched.rows[number], launched.drafts[number]
            expected = self._oracle.edited(row, before, copies[place])
            torch.testing.assert_close(told[place], expected, atol=1e-5, rtol=1e-5)
            self.num_compared += 1
            by_place[number, count if after < 0 else after] = place
        tokens = told.argmax(dim=1).int()
        for (number, after), place in by_place.items():  # accepted drafts
            row, count = launched.rows[number], launched.drafts[number]
            draft = int(table.tokens[row.slot, len(row.tokens) + after]) if after < count else -1
            if draft >= 0 and self._random.random() < 0.7 and told[place, draft] > -1e20:
                tokens[place] = draft
        for work in works:
            work.after(work.tensors(), tokens)
        for number, row in enumerate(launched.rows):
            run = []
            for after in range(launched.drafts[number] + 1):
                run.append(int(tokens[by_place[number, after]]))
                place = len(row.tokens) + after
                if after < launched.drafts[number] and table.tokens[row.slot, place] != run[-1]:
                    break
            self.num_accepted += len(run) - 1
            row.tokens = [*row.tokens, *run]
        return launched

    def _finish(self, launched: Launched) -> None:
        table = self._table
        for row, count in zip(launched.rows, launched.drafts, strict=True):
            known, end = int(table.known[row.slot]), len(row.tokens)
            table.tokens[row.slot, known:end] = row.tokens[known:end]
            table.length[row.slot] -= count - (end - known - 1)
            table.known[row.slot] = end


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "normal"])
@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 12))]
)
def test_logits_after_drafts_equal_those_step_by_step(seed: int, overlap: bool) -> None:
    """Seen failing with rejected drafts that stay counted, with drafts that are not counted,
    with accepted tokens that are not counted, with budgets and bad words that use only known
    tokens, with positions of the launch, and with a bias after the penalties."""
    simulation = Simulation(random.Random(seed), overlap=overlap)
    for _ in range(25):
        simulation.step()
    assert simulation.num_compared > 100
    assert simulation.num_accepted > 10


# Grammars -----------------------------------------------------------------------------------------

WORDS = [bytes([byte]) for byte in range(256)] + [b"true", b'"name', b'": ', b'": "', b", ", b""]
END = len(WORDS) - 1
GUIDES = [
    GuidedDecoding("json_schema", '{"type": "object", "properties": {"name": {"type": "string"}, '
                   '"ok": {"type": "boolean"}}, "required": ["name", "ok"]}'),
    GuidedDecoding("regex", "(ab|a[0-9]{2}c)*d"),
    GuidedDecoding("ebnf", 'root ::= "yes" | "no" | "yellow" root'),
]  # fmt: skip


@pytest.fixture(scope="module")
def threads():
    made = MatchThreads(lambda: None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def compilers() -> GrammarCompilers:
    return GrammarCompilers(WORDS, [END])


class Oracle:
    """A matcher that processes all tokens from the first one for every mask."""

    def __init__(self, grammar: Any, thought: ReasoningTokens | None, thinking: Any) -> None:
        self._grammar = grammar
        self._thought = thought
        self._thinking = thinking

    def mask(self, tokens: Sequence[int]) -> Any:
        matcher, reader = xgrammar.GrammarMatcher(self._grammar), ReasoningTracker(self._thought)
        for token in tokens:
            for each in reader.read([token]):
                if not matcher.is_terminated():
                    assert matcher.accept_token(each)
        mask = np.full(len(self._thinking), -1, np.int32)
        if reader.stage is ReasoningStage.INSIDE:
            return self._thinking
        if not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask[None], 0)
            if reader.stage is ReasoningStage.AHEAD and self._thought.open is not None:
                allow(mask, self._thought.open)
        return mask


def _allowed(source: random.Random, mask: Any) -> int:
    tokens = [token for token in range(len(WORDS)) if allows(mask, token)]
    return source.choice(tokens)


@pytest.mark.parametrize("opened", [False, None, 7], ids=["no reasoning", "reasoning", "perhaps"])
@pytest.mark.parametrize("guide", range(len(GUIDES)))
def test_masks_along_drafts_equal_those_step_by_step(compilers, threads, guide, opened) -> None:
    """Along allowed and forbidden drafts, with any number of them accepted."""
    grammar = compilers.compiled(prepared(GUIDES[guide]))
    thought = None if opened is False else ReasoningTokens(8, open=opened)
    thinking = np.full(words_of(len(WORDS)), -1, np.int32)
    oracle = Oracle(grammar, thought, thinking)
    for seed in range(15):
        source = random.Random(seed)
        match = Match(CompiledGuide(grammar, WORDS), thought, thinking, threads)
        tokens: list[int] = []
        new: list[int] = []
        for _ in range(20):
            drafts: list[int] = []
            for _ in range(source.randrange(MAX_DRAFTS + 1)):
                if source.random() < 0.2:
                    drafts.append(source.randrange(len(WORDS)))
                    break
                drafts.append(_allowed(source, oracle.mask([*tokens, *drafts])))
            if source.random() < 0.5:  # like proposed drafts
                match.ask(new, drafts, room := source.randrange(MAX_DRAFTS + 3))
                if not match.continued:
                    threads.drive([match])
                path = match.continuation
                assert len(path) <= max(room, len(drafts))
                for count, token in enumerate(path):
                    assert allows(oracle.mask([*tokens, *path[:count]]), token)
                new, drafts = [], list(path[:MAX_DRAFTS])
            match.ask(new, drafts)
            if not match.ready:
                threads.drive([match])
            assert match.ready and not match.fault
            for count, mask in enumerate(match.masks):
                assert (mask == oracle.mask([*tokens, *drafts[:count]])).all()
            if len(match.masks) <= len(drafts):
                assert not allows(match.masks[-1], drafts[len(match.masks) - 1])
            new = drafts[: source.randrange(len(match.masks))]
            new = [*new, _allowed(source, oracle.mask([*tokens, *new]))]
            tokens = [*tokens, *new]
            if END in new:
                break


@pytest.mark.parametrize(
    ("text", "continuation"),
    [
        (b"", [b"{", b'"name', b'": "']),  # then the text is free
        (b'{"name": "x"', [b",", b" ", b'"', b"o", b"k", b'": ']),
        (b'{"name": "x", "ok": f', [b"a", b"l", b"s", b"e", b"}", b""]),
    ],
)
def test_a_grammar_continues_with_the_forced_text(compilers, threads, text, continuation) -> None:
    """In its longest tokens, with spaces where JSON usually has them."""
    grammar = compilers.compiled(prepared(GUIDES[0]))
    thinking = np.full(words_of(len(WORDS)), -1, np.int32)
    match = Match(CompiledGuide(grammar, WORDS), None, thinking, threads)
    match.ask(list(text), [], 9)
    threads.drive([match])
    assert [WORDS[token] for token in match.continuation] == continuation
