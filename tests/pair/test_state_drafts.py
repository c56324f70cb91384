"""Drafts on a model that keeps states in some of its layers: answers are those without, so no state
has taken in what was wrong, wherever it goes. Greedy tokens and migrations are in
test_speculation.py."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.config import SpeculativeConfig
from engine.kv_cache.layout import KVLayout
from engine.models import load
from engine.speculative import AllDrafts, HeadDrafter, NgramDrafter, Speculator
from tests.pair.conftest import Known
from tests.pair.rig import Asked, Loaded, PairRig, Size
from tests.support.drafters import make_followed_hybrid, recall, speculator

NUM_TOKENS = 30
NUM_PAGES = 160
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
BOLD = {"new_token_ratio": 0.1, "min_new_token_ratio": 0.1}
CPU = torch.device("cpu")
MTP = SpeculativeConfig(method="mtp")
LONG = pytest.mark.long
WAYS = [pytest.param({}, id="greedy", marks=LONG), pytest.param(SAMPLED, id="sampled")]
REPEATING = Speculator(NgramDrafter(1), AllDrafts(5), 5)


@pytest.fixture(scope="module")
def known(model) -> Known:
    return model("qwen3_next")


def _prompts(known: Known) -> list[list[int]]:
    """Return prompts with lengths around a page's edge."""
    source = random.Random(5)
    lengths = (3, 16, 33, 40)
    return [[source.randrange(known.vocabulary_size) for _ in range(n)] for n in lengths]


def _greedy(known: Known, prompts: list[list[int]]) -> list[list[int]]:
    return [known.greedy(prompt, NUM_TOKENS) for prompt in prompts]


def _size(kind: str, known: Known, texts: list[list[int]], **fields: Any) -> Size:
    guessed = speculator(kind, recall(texts), known.vocabulary_size, 4)
    return Size(
        **{"num_pages": NUM_PAGES, "max_running_requests": 32, "speculator": guessed, **fields}
    )


@pytest.mark.parametrize("sampling", WAYS)
def test_drafts_by_repetition_change_no_token(known: Known, sampling: dict[str, Any]) -> None:
    """Restrict the sampling to few tokens, which repeat themselves."""
    reported: dict[bool, list[list[int]]] = {}
    room = Size(num_pages=NUM_PAGES, max_running_requests=32)
    for guesses in (False, True):
        size = replace(room, speculator=REPEATING) if guesses else room
        with PairRig(known.loaded, prefill=[room], decode=[size]) as rig:
            few = {"allowed_token_ids": (5, 6, 7), **sampling}
            asked = [rig.ask(prompt, NUM_TOKENS, **few) for prompt in _prompts(known)]
            rig.run()
            reported[guesses] = [one.tokens for one in asked]
            assert not guesses or min(rig.decode[0].drafts()) > 0
    assert reported[True] == reported[False]


def _answers(known: Known, size: Size) -> tuple[list[Asked], int]:
    """Sampled ones, and such as have no drafts, in one batch; and how many drafts stood."""
    ways = [SAMPLED, {**SAMPLED, "min_p": 0.02, "seed": 8}, {"frequency_penalty": 0.6, **SAMPLED}]
    room = Size(num_pages=NUM_PAGES)
    with PairRig(known.loaded, prefill=[room], decode=[size]) as rig:
        asked = [rig.ask(p, NUM_TOKENS, **way) for p in _prompts(known)[2:] for way in ways]
        rig.run()
        return asked, rig.decode[0].drafts()[0] if size.speculator else 0


@pytest.mark.parametrize(
    "kind", ["random", *(pytest.param(kind, marks=LONG) for kind in ("right", "wrong"))]
)
def test_sampled_tokens_are_the_same_beside_rows_without_drafts(known: Known, kind: str) -> None:
    plain, _ = _answers(known, Size(num_pages=NUM_PAGES, max_running_requests=32))
    texts = [[*one.prompt, *one.tokens] for one in plain]
    reported, accepted = _answers(known, _size(kind, known, texts))
    assert [one.tokens for one in reported] == [one.tokens for one in plain]
    assert (accepted > 0) == (kind != "wrong")


@pytest.mark.parametrize("swap_pages", [NUM_PAGES, pytest.param(0, marks=LONG)])
def test_who_leaves_the_device_among_drafts_takes_the_right_state_along(
    known: Known, swap_pages: int
) -> None:
    prompts = [[first] * 12 for first in range(1, 6)]
    answers = _greedy(known, prompts)
    texts = [p + a for p, a in zip(prompts, answers, strict=True)]
    tables = known.tables(16)
    num_pages = 5 * tables.pages_for(20)  # all may begin
    size = _size("random", known, texts, num_pages=num_pages, swap_pages=swap_pages)
    room = Size(num_pages=NUM_PAGES)
    with PairRig(known.loaded, prefill=[room], decode=[size], **BOLD) as rig:
        asked = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts]
        rig.run()
        assert [one.tokens for one in asked] == answers
        assert rig.decode[0].count("retractions") > 0
        assert min(rig.decode[0].drafts()) > 0


def test_a_node_that_prefills_by_itself_has_drafts_beside_prompts_and_goes_on_from_states(
    known: Known,
) -> None:
    """A second turn begins where the first one's prompt has left a state."""
    prompts = _prompts(known)
    answers = _greedy(known, prompts)
    texts = [p + a for p, a in zip(prompts, answers, strict=True)]
    size = _size("random", known, texts)
    chunks = {"chunked_prefill_tokens": 16, "mixed_chunk": True}
    with PairRig(known.loaded, prefill=(), decode=[size], **chunks) as rig:
        first = rig.ask(prompts[0], NUM_TOKENS)
        rig.until(lambda: len(first.tokens) > 4, "it generates")
        others = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts[1:]]
        rig.run()
        assert [one.tokens for one in (first, *others)] == answers
        assert min(rig.decode[0].drafts()) > 0
        turn = [*texts[2], 9, 8, 7]
        second = rig.serve(turn, 8)
        assert second.cached_tokens == (len(prompts[2]) - 1) // 16 * 16
        assert second.tokens == known.greedy(turn, 8)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A hybrid whose layer for drafts is right, if it is given the right vectors."""
    directory = make_followed_hybrid(tmp_path_factory.mktemp("followed"))
    return Loaded(directory, load(directory, CPU, torch.float32, speculation=MTP))


def _followed(loaded: Loaded, prompt: list[int], count: int) -> list[int]:
    weight, tokens = loaded.model.logits(torch.eye(loaded.model.spec.hidden_size)), [prompt[-1]]
    for _ in range(count):
        tokens.append(int(weight[tokens[-1]].argmax()))
    return tokens[1:]


def _guessing(num_pages: int = NUM_PAGES) -> Size:
    drafts = Speculator(HeadDrafter(), AllDrafts(3), 3)
    return Size(num_pages=num_pages, max_running_requests=32, speculator=drafts)


def test_a_layer_that_is_right_is_right_behind_prompts_of_another_node_and_off_the_device(
    followed: Loaded,
) -> None:
    spec = followed.model.spec
    tables = KVLayout.of(spec.layers, 16, torch.float32, draft=spec.draft).tables
    prompts = [[first, *range(first)] for first in (9, 12, 14, 15)]
    room, small = Size(num_pages=NUM_PAGES), _guessing(len(prompts) * tables.pages_for(16))
    with PairRig(followed, prefill=[room], decode=[small], **BOLD) as rig:
        asked = [rig.ask(prompt, 60) for prompt in prompts]
        rig.run()
        for prompt, one in zip(prompts, asked, strict=True):
            assert one.tokens == _followed(followed, prompt, 60)
        assert rig.decode[0].count("retractions") > 0
        accepted, rejected = rig.decode[0].drafts()
        assert accepted > 0 and rejected == 0


def test_a_layer_that_is_right_is_right_after_a_move(followed: Loaded) -> None:
    prompt, room = [7, *range(35)], Size(num_pages=NUM_PAGES)
    with PairRig(followed, prefill=[room], decode=[_guessing(), _guessing()], migrates=True) as rig:
        asked = rig.ask(prompt, 60)
        assert rig.moved_midway(asked) == _followed(followed, prompt, 60)
        assert rig.decode[0].drafts()[1] == rig.decode[1].drafts()[1] == 0
        assert rig.decode[1].drafts()[0] > 0
