"""Drafts for requests whose tokens depend on previous tokens. Responses equal those without
drafts, for every feature and drafter."""

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from common.config import LoraConfig, SpeculativeConfig
from common.requests.sampling import GuidedDecoding, ReasoningTokens
from engine.models.drafting import drawn
from engine.runner import forwards
from engine.speculative import DraftPolicy, HeadDrafter, NgramDrafter, Speculator
from tests.pair.features.test_grammars import gated
from tests.pair.rig import Asked, Loaded, PairRig, Size
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.drafters import make_draft, make_eagle, make_mtp, recall, speculator

NUM_TOKENS = 66
NUM_DRAFTS = 4
HOT = {"temperature": 1.0, "seed": 5}
OPEN, CLOSE, END = 91, 92, 258
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 6, "maxItems": 9},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = GuidedDecoding("json_schema", json.dumps(SCHEMA))
WORDS = GuidedDecoding("regex", "([a-e]{2} ){12,40}z")
FEW = tuple(range(60, 72))  # so that many pairs of tokens are bad words
BAD_WORDS = (
    *((one, other) for one, other in itertools.product(FEW, FEW) if (one + other) % 3 == 0),
    *((one, 62, other) for one, other in itertools.product(FEW, FEW) if (one + other) % 3 == 1),
)
THOUGHT = {"thought": ReasoningTokens(CLOSE, open=None), "thinking_budget": 20}
FEATURES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "min_tokens": {"min_tokens": 40, "ignore_eos": False, "logit_bias": ((END, 40.0),)},
    "bad words": {"bad_word_ids": BAD_WORDS, "allowed_token_ids": FEW, "logprobs": 2},
    "thinking": {**THOUGHT, "logit_bias": ((CLOSE, -3.0),)},
    "json": {"guide": PERSON, "ignore_eos": False},
    "words": {"guide": WORDS, "ignore_eos": False, "logprobs": 1},
    "printable": {"guide": GuidedDecoding("regex", "[ -~]{80}")},  # every sample is such a token
    "words, penalised": {"guide": WORDS, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "words behind reasoning": {"guide": WORDS, **THOUGHT, "min_tokens": 60},
    "reasoning or not": {
        "guide": WORDS,
        "thought": ReasoningTokens(CLOSE, open=OPEN),
        "logit_bias": ((OPEN, 60.0), (CLOSE, 3.0)),
        "bad_word_ids": BAD_WORDS,
    },
    "prompt logprobs": {"prompt_logprobs": 1, "presence_penalty": 0.5},
}


def _asked(rig: PairRig, features: Sequence[str], **fields: Any) -> list[Asked]:
    """Run a greedy and a sampled request for each feature. No two have the same prompt."""
    ways = [(name, sampled) for name in features for sampled in ({}, HOT)]
    asked = [
        rig.ask([number, 200, *range(30, 41)], NUM_TOKENS, **FEATURES[name], **sampled, **fields)
        for number, (name, sampled) in enumerate(ways)
    ]
    rig.run()
    assert all(one.reason is not None and one.reason.name in ("STOP", "LENGTH") for one in asked)
    return asked


def _check_alike(reported: Sequence[Asked], plain: Sequence[Asked]) -> None:
    for one, other in zip(reported, plain, strict=True):
        assert one.tokens == other.tokens
        for mine, its in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.top_tokens == its.top_tokens
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)


def _size(**fields: Any) -> Size:
    return Size(**{"num_pages": 256, "max_running_requests": 64, **fields})


@pytest.fixture(scope="module")
def plain(noise) -> dict[str, list[Asked]]:
    """The responses without drafts."""
    loaded, _ = noise
    found = {}
    with PairRig(loaded, prefill=[Size(num_pages=256)], decode=[_size()]) as rig:
        asked = _asked(rig, list(FEATURES))
        for number, name in enumerate(FEATURES):
            found[name] = asked[2 * number : 2 * number + 2]
    return found


def _texts(plain: dict[str, list[Asked]]) -> list[list[int]]:
    return [[*one.prompt, *one.tokens] for asked in plain.values() for one in asked]


def _ngram() -> Speculator:
    return Speculator(NgramDrafter(2), DraftPolicy(NUM_DRAFTS), NUM_DRAFTS)


def _drafter(kind: str, plain: dict[str, list[Asked]], vocabulary_size: int) -> Speculator:
    if kind == "ngram":
        return _ngram()
    return speculator(kind, recall(_texts(plain)), vocabulary_size, NUM_DRAFTS)


@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.long)], ids=["overlap", "normal"]
)
# "random" in all features at once is quick in the test of a small pool.
@pytest.mark.parametrize(
    "kind", [*(pytest.param(each, marks=pytest.mark.long) for each in ("right", "random")), "ngram"]
)
def test_responses_equal_those_without_drafts(noise, plain, kind, overlap):
    """All features in one batch.

    Seen failing with the first mask for all drafts of a row, if the penalties count rejected
    drafts, and if matchers are not rolled back.
    """
    loaded, _ = noise
    size = _size(speculator=_drafter(kind, plain, loaded.model.spec.vocabulary_size))
    with PairRig(
        loaded, prefill=[Size(num_pages=256)], decode=[size], overlap_schedule=overlap
    ) as rig:
        reported = _asked(rig, list(FEATURES))
        accepted, rejected = rig.decode[0].drafts()
    _check_alike(reported, [one for asked in plain.values() for one in asked])
    num_tokens = sum(len(one.tokens) for one in reported)
    assert accepted > num_tokens * {"right": 0.6, "random": 0.3, "ngram": 0.05}[kind]
    assert (rejected > 0) == (kind != "right")


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_has_drafts(noise, plain, name):
    """A drafter that is right most of the time has most drafts accepted, for each feature alone."""
    loaded, _ = noise
    size = _size(speculator=_drafter("random", plain, loaded.model.spec.vocabulary_size))
    with PairRig(loaded, prefill=(), decode=[size]) as rig:
        asked = [
            rig.ask(one.prompt, NUM_TOKENS, **FEATURES[name], **sampled)
            for one, sampled in zip(plain[name], ({}, HOT), strict=True)
        ]
        rig.run()
        _check_alike(asked, plain[name])
        accepted, _ = rig.decode[0].drafts()
    assert accepted > 0.4 * sum(len(one.tokens) for one in asked)


@pytest.fixture(
    scope="module",
    params=[
        "eagle",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("mtp", "draft_model")),
    ],
)
def with_layer(request, tmp_path_factory, noise) -> Loaded:
    """A model with a random draft layer, or a random draft model."""
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "mtp":
        model = make_mtp(make_checkpoint(root / "model", "deepseek_v3"))
        speculation = SpeculativeConfig(method="mtp")
    else:
        model = noise[0].directory
        make = make_eagle if request.param == "eagle" else make_draft
        drafter = make(root / "drafter", model)
        speculation = SpeculativeConfig(method=request.param, draft_model=str(drafter))
    return Loaded.from_directory(model, speculation=speculation)


class RecallingLayer:
    """The drafts of a layer that reproduces the responses, except for some tokens."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = {text[0]: text for text in texts}
        self._random = random.Random(1)
        self.table: Any = None  # of the node

    def __call__(self, steps: Any, batch: Any, num_rows: Sequence[int], *others: Any) -> Tensor:
        token_ids = drawn(steps, batch, num_rows, *others)
        for number, count in enumerate(num_rows):
            for row in range(count):
                text = self._texts[int(self.table.tokens[int(batch.slots[row]), 0])]
                place = int(batch.query_starts[row]) + number + 1
                position = int(batch.positions[place])
                if position < len(text) and self._random.random() < 0.75:
                    token_ids[place] = text[position]
        return token_ids


@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.long)], ids=["overlap", "normal"]
)
def test_responses_equal_those_without_drafts_of_a_layer(with_layer, monkeypatch, overlap):
    """The host receives the drafts of the layer before it computes masks and counts.

    Seen failing without these drafts.
    """
    with PairRig(with_layer, prefill=[Size(num_pages=256)], decode=[_size()]) as rig:
        plain = _asked(rig, list(FEATURES))
    recalling = RecallingLayer([[*one.prompt, *one.tokens] for one in plain])
    size = _size(speculator=Speculator(HeadDrafter(), DraftPolicy(NUM_DRAFTS), NUM_DRAFTS))
    with PairRig(
        with_layer, prefill=[Size(num_pages=256)], decode=[size], overlap_schedule=overlap
    ) as rig:
        recalling.table = rig.decode[0].engine.core.table
        monkeypatch.setattr(forwards, "drawn", recalling)
        reported = _asked(rig, list(FEATURES))
        accepted, rejected = rig.decode[0].drafts()
    _check_alike(reported, plain)
    assert accepted > 0.3 * sum(len(one.tokens) for one in reported)
    assert rejected > 0


def test_constrained_requests_with_drafts_are_retracted_and_continue(noise, plain):
    """Their matchers and counts are rebuilt from their tokens."""
    loaded, _ = noise
    drafts = _drafter("random", plain, loaded.model.spec.vocabulary_size)
    size = _size(num_pages=28, speculator=drafts)
    with PairRig(loaded, decode=[size], new_token_ratio=0.1) as rig:
        reported = _asked(rig, list(FEATURES))
        assert rig.decode[0].count("retractions") > 0
        assert min(rig.decode[0].drafts()) > 0
    _check_alike(reported, [one for asked in plain.values() for one in asked])


@pytest.mark.parametrize("name", ["penalties", "words, penalised", "words behind reasoning"])
def test_constrained_requests_with_drafts_migrate_and_are_replayed(noise, plain, name):
    loaded, _ = noise
    one, vocabulary_size = plain[name][1], loaded.model.spec.vocabulary_size
    sizes = [_size(speculator=_drafter("random", plain, vocabulary_size)) for _ in range(2)]
    fields = {**FEATURES[name], **HOT}
    with PairRig(loaded, decode=sizes, migrates=True) as rig:
        assert rig.moved_midway(rig.ask(one.prompt, NUM_TOKENS, **fields), 12) == one.tokens
        rest = rig.serve(one.prompt, NUM_TOKENS, generated=one.tokens[:25], **fields)
        assert one.tokens[:25] + rest.tokens == one.tokens


@pytest.mark.parametrize(
    "at", [9, *(pytest.param(step, marks=pytest.mark.long) for step in (10, 11, 12))]
)
def test_a_row_with_drafts_and_a_slow_matcher_waits_alone(noise, plain, monkeypatch, at):
    """The row is computed again when its mask is ready. No token or draft of the first step is
    used."""
    loaded, _ = noise
    stands, gate = gated(
        monkeypatch,
        "_look_ahead",
        lambda match: match.num_followed >= at and match._wanted and not match._room,
    )
    one, other = plain["printable"][0], plain["penalties"][0]
    size = _size(speculator=_drafter("random", plain, loaded.model.spec.vocabulary_size))
    with PairRig(loaded, prefill=(), decode=[size]) as rig:
        slow = rig.ask(one.prompt, NUM_TOKENS, **FEATURES["printable"])
        rig.until(stands.is_set, "a matcher stands still")
        try:
            rig.run(free := rig.ask(other.prompt, NUM_TOKENS, **FEATURES["penalties"]))
            assert free.tokens == other.tokens and not slow.ended
        finally:
            gate.set()
        rig.run()
        assert slow.tokens == one.tokens
        assert rig.decode[0].count("draft_tokens/accepted") > 0


def test_a_grammar_drafts_the_text_that_it_forces(noise):
    """There is no text to repeat."""
    loaded, tokenizer = noise
    drafts = Speculator(NgramDrafter(16), DraftPolicy(NUM_DRAFTS), NUM_DRAFTS)
    fields = {"guide": GuidedDecoding("regex", "[ab](forced text)[cd](, and more of it)[ef]")}
    found = []
    for speculation in (None, drafts):
        with PairRig(loaded, prefill=(), decode=[_size(speculator=speculation)]) as rig:
            found.append(rig.serve(range(40, 50), NUM_TOKENS, **fields, **HOT))
            counted = rig.decode[0].drafts() if speculation else (0, 0)
    assert found[0].tokens == found[1].tokens
    text = tokenizer.decode(found[1].tokens, skip_special_tokens=True)
    assert "forced text" in text
    accepted, rejected = counted
    assert accepted > 0.6 * len(text)
    assert rejected <= 2 * NUM_DRAFTS


@pytest.mark.parametrize("kind", ["recalled", "draft_model"])
def test_constrained_requests_with_adapters_have_drafts(known, tmp_path, kind):
    """A draft model has no adapters, and drafts the tokens of the model without them."""
    make_adapter(tmp_path / "a", known.reference, seed=1, rank=4)
    lora = LoraConfig(adapter_dir=tmp_path, preload=("a",), max_loras=2, max_rank=16)
    fields = {**FEATURES["words, penalised"], **HOT}

    def answered(size: Size, loaded: Loaded) -> tuple[list[Asked], tuple[int, int]]:
        with PairRig(loaded, prefill=(), decode=[size]) as rig:
            adapters = dict(rig.decode[0].engine.loader.names())["a"], b""
            asked = [
                rig.ask([number, *range(30, 50)], NUM_TOKENS, adapter=adapter, **fields)
                for number, adapter in enumerate(adapters * 2)
            ]
            rig.run()
            return asked, rig.decode[0].drafts() if size.speculator else (0, 0)

    plain, _ = answered(_size(lora=lora), known.loaded)
    if kind == "draft_model":
        itself = known.loaded.directory
        speculation = SpeculativeConfig(method=kind, draft_model=str(itself))
        loaded = Loaded.from_directory(itself, speculation=speculation)
        drafts, least = Speculator(HeadDrafter(), DraftPolicy(NUM_DRAFTS), NUM_DRAFTS), 0.0
    else:
        texts = [[*one.prompt, *one.tokens] for one in plain]
        drafts = speculator("random", recall(texts), known.vocabulary_size, NUM_DRAFTS)
        loaded, least = known.loaded, 0.3
    reported, (accepted, rejected) = answered(_size(lora=lora, speculator=drafts), loaded)
    _check_alike(reported, plain)
    assert accepted > least * sum(len(one.tokens) for one in reported)
    assert rejected > 0
