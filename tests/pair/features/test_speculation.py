"""Drafts on real models. Responses equal those without drafts, greedy and sampled, in any batch
and wherever the requests continue."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from common.request import NOT_PREDICTED
from common.requests.sampling import GuidedDecoding
from engine.batch.request import FinishReason
from engine.speculative import DraftPolicy, NgramDrafter, Speculator
from tests.pair.conftest import Known
from tests.pair.rig import Asked, PairRig, Size, random_prompts
from tests.support.models.drafters import KINDS, recall, speculator

NUM_TOKENS = 40
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
LONG = pytest.mark.long
OTHERS = ("gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text")
ROOM = Size(num_pages=160)  # also for models with states
WITH_STATES = pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next"])
AS_MANY_KINDS = pytest.mark.parametrize(
    "architecture, kind",
    [
        *((architecture, "random") for architecture in ("qwen3", "qwen3_next")),
        *(
            pytest.param(architecture, kind, marks=LONG)
            for architecture in ("qwen3", "qwen3_next")
            for kind in ("right", "wrong")
        ),
    ],
)
# Options that forbid drafts, and options that do not.
PARTICULAR: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"frequency_penalty": 0.6, "repetition_penalty": 1.2, **SAMPLED},
    {"logit_bias": ((5, 2.0),)},
    {"logit_bias": ((5, 2.0),), "min_tokens": 9},
    {"guide": GuidedDecoding("regex", "[a-z ]{200}")},
)


def _prompts(vocabulary_size: int) -> list[list[int]]:
    """Return prompts with lengths around a page boundary. Some repeat themselves."""
    prompts = random_prompts(vocabulary_size, 3, 15, 16, 33, 70)
    return [*prompts, prompts[0] * 12, prompts[1] * 3]


def _guessing(kind: str, known: Known, prompts: list[list[int]]) -> Size:
    answers = [[*prompt, *known.greedy(prompt, NUM_TOKENS)] for prompt in prompts]
    guesses = speculator(kind, recall(answers), known.vocabulary_size, 4)
    return replace(ROOM, max_running_requests=32, speculator=guesses)


def _repeating() -> Size:
    return Size(max_running_requests=32, speculator=Speculator(NgramDrafter(1), DraftPolicy(5), 5))


@pytest.mark.parametrize(
    "architecture, kind, overlap",
    [
        *(("qwen3", kind, True) for kind in (*KINDS, "ngram")),
        # Windows, latents, states and experts.
        *((architecture, "random", True) for architecture in ("qwen3_next", "gemma3_text")),
        *(pytest.param(architecture, "random", True, marks=LONG) for architecture in OTHERS),
        *(pytest.param("qwen3", kind, False, marks=LONG) for kind in (*KINDS, "ngram")),
        *(pytest.param("qwen3_next", kind, True, marks=LONG) for kind in ("right", "wrong")),
        pytest.param("qwen3_next", "random", False, marks=LONG),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    model: Callable[[str], Known], architecture: str, kind: str, overlap: bool
) -> None:
    """Seen failing with the state after all drafts, and with the state before them."""
    known = model(architecture)
    prompts = _prompts(known.vocabulary_size)
    size = _repeating() if kind == "ngram" else _guessing(kind, known, prompts)
    with PairRig(known.loaded, prefill=[ROOM], decode=[size], overlap_schedule=overlap) as rig:
        asked = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts]
        rig.run()
        known.check(*asked)
        accepted, rejected = rig.decode[0].drafts()
        assert accepted + rejected > 0
        assert (accepted > 0) == (kind != "wrong")
        assert (rejected > 0) == (kind != "right")


@pytest.mark.parametrize("kind", ["random", pytest.param("right", marks=LONG)])
@pytest.mark.parametrize(
    "asked_for",
    [
        {"logprobs": 3, **SAMPLED},
        {"logprobs": 0, "logit_bias": ((5, 4.0), (9, -100.0))},
        {"allowed_token_ids": tuple(range(3, 60)), "logprobs": 1, "temperature": 1.5, "seed": 3},
    ],
    ids=["logprobs", "bias", "allowed"],
)
def test_options_that_treat_every_token_alike_work_with_drafts(
    known: Known, kind: str, asked_for: dict[str, Any]
) -> None:
    """Log-probabilities equal those without drafts, for each token that is sent and for no other: a
    stop token ends one of the responses among drafts.

    Seen failing with those of a row's last token alone, and with those after the end.
    """
    prompts = [*_prompts(known.vocabulary_size)[3:5], [7, 8, 9] * 5]

    def ask(rig: PairRig, stops: dict[int, int]) -> list[Asked]:
        asked = [
            rig.ask(
                prompt,
                NUM_TOKENS,
                stop_token_ids=(stops[number],) if number in stops else (),
                **{"seed": number, **asked_for},
            )
            for number, prompt in enumerate(prompts)
        ]
        asked.append(rig.ask(prompts[0], NUM_TOKENS))
        rig.run()
        return asked

    with PairRig(known.loaded) as rig:
        stop = ask(rig, {})[1].tokens[NUM_TOKENS // 2]
        plain = ask(rig, {1: stop})
    texts = [[*one.prompt, *one.tokens, 1, 1, 1] for one in plain]
    guessed = speculator(kind, recall(texts), known.vocabulary_size, 4)
    with PairRig(known.loaded, decode=[Size(max_running_requests=32, speculator=guessed)]) as rig:
        reported = ask(rig, {1: stop})
        assert rig.decode[0].drafts()[0] > len(prompts) * NUM_TOKENS // 3
    for one, other in zip(reported, plain, strict=True):
        assert one.tokens == other.tokens
        assert (
            len(one.logprobs) == len(other.logprobs) == (one is not reported[-1]) * len(one.tokens)
        )
        for mine, its in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.top_tokens == its.top_tokens
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-4)
            assert mine.top_logprobs == pytest.approx(its.top_logprobs, abs=1e-4)


def _answers(known: Known, size: Size, prompts: list[list[int]]) -> tuple[list[Asked], int]:
    """Return greedy, sampled and special responses of one batch, and the number of accepted
    drafts."""
    ways = [{}, SAMPLED, {**SAMPLED, "min_p": 0.02, "top_k": 9, "seed": 8}, *PARTICULAR]
    with PairRig(known.loaded, prefill=[ROOM], decode=[size]) as rig:
        asked = [rig.ask(p, NUM_TOKENS, **way) for p in prompts for way in ways]
        rig.run()
        return asked, rig.decode[0].drafts()[0] if size.speculator else 0


@AS_MANY_KINDS
def test_sampled_requests_and_requests_that_forbid_drafts_share_a_batch(
    model: Callable[[str], Known], architecture: str, kind: str
) -> None:
    """Sampled responses recur as drafts. At any temperature a draft is accepted if the request's
    own noise would have drawn it.

    Seen failing with rows that are not moved back, and with samples whose positions are not.
    """
    known, size = model(architecture), replace(ROOM, max_running_requests=32)
    prompts = _prompts(known.vocabulary_size)[3:5]
    plain, _ = _answers(known, size, prompts)
    texts = [[*one.prompt, *one.tokens] for one in plain]
    guessed = speculator(kind, recall(texts), known.vocabulary_size, 3)
    reported, accepted = _answers(known, replace(size, speculator=guessed), prompts)
    assert [one.tokens for one in reported] == [one.tokens for one in plain]
    assert (accepted > 0) == (kind != "wrong")
    for one, other in zip(reported, plain, strict=True):
        tops = [[each.top_tokens for each in answer.logprobs] for answer in (one, other)]
        assert tops[0] == tops[1]


@AS_MANY_KINDS
@pytest.mark.parametrize("swap_pages", [ROOM.num_pages, pytest.param(0, marks=LONG)])
def test_requests_with_drafts_are_retracted_from_a_small_pool(
    model: Callable[[str], Known], architecture: str, kind: str, swap_pages: int
) -> None:
    known = model(architecture)
    prompts = [[first] * 12 for first in range(1, 9)]
    answers = [[*prompt, *known.greedy(prompt, NUM_TOKENS)] for prompt in prompts]
    guessed = speculator(kind, recall(answers), known.vocabulary_size, 4)
    size = Size(
        num_pages=len(prompts) * known.tables(16).pages_for(20),  # all may start
        swap_pages=swap_pages,
        max_running_requests=40,
        speculator=guessed,
    )
    with PairRig(known.loaded, prefill=[ROOM], decode=[size], new_token_ratio=0.1) as rig:
        asked = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts]
        rig.run()
        assert [one.tokens for one in asked] == [known.greedy(p, NUM_TOKENS) for p in prompts]
        assert rig.decode[0].count("retractions") > 0
        assert (min(rig.decode[0].drafts()) > 0) == (kind == "random")


@pytest.mark.parametrize(
    "architecture, sampling",
    [
        pytest.param("qwen3", {}, id="greedy"),
        pytest.param("qwen3", SAMPLED, id="sampled"),
        pytest.param("qwen3_next", {}, id="states-greedy", marks=LONG),
        pytest.param("qwen3_next", SAMPLED, id="states-sampled"),
    ],
)
def test_a_request_with_drafts_migrates(
    model: Callable[[str], Known], architecture: str, sampling: dict[str, Any]
) -> None:
    known, prompt = model(architecture), tuple(range(5, 45))
    fields = {"seed": 1, **sampling}
    with PairRig(known.loaded, prefill=[ROOM], decode=[ROOM]) as rig:
        undisturbed = rig.serve(prompt, 60, **fields)
    guesses = recall([[*prompt, *undisturbed.tokens]])
    sizes = [
        replace(ROOM, speculator=speculator("random", guesses, known.vocabulary_size, 3))
        for _ in range(2)
    ]
    with PairRig(known.loaded, prefill=[ROOM], decode=sizes, migrates=True) as rig:
        asked = rig.ask(prompt, 60, **fields)
        assert rig.moved_midway(asked) == undisturbed.tokens
        assert rig.decode[1].count("prompt_tokens") == 0
        assert min(rig.decode[0].drafts()) + min(rig.decode[1].drafts()) > 0


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_predictions_change_no_response(known: Known, sampling: dict[str, Any]) -> None:
    """Correct predictions, predictions with an error in the middle, and predictions of another
    text share a batch with a request without one."""
    prompt = _prompts(known.vocabulary_size)[3]
    fields = {"seed": 1, **sampling}
    with PairRig(known.loaded) as rig:
        undisturbed = rig.serve(prompt, NUM_TOKENS, **fields)
    answer = undisturbed.tokens
    expected = [answer, [*answer[:15], 5, 5, 5, *answer[18:]], list(reversed(answer)), []]
    clueless = speculator("right", recall([]), known.vocabulary_size, 4)
    with PairRig(known.loaded, decode=[Size(speculator=clueless, max_running_requests=32)]) as rig:
        asked = [rig.ask(prompt, NUM_TOKENS, prediction=text, **fields) for text in expected]
        rig.run()
        assert all(one.tokens == answer for one in asked)
        assert asked[0].predicted.accepted > NUM_TOKENS // 2
        assert asked[1].predicted.accepted > 0
        assert asked[3].predicted == NOT_PREDICTED
        reported = sum((one.predicted for one in asked), NOT_PREDICTED)
        assert (reported.accepted, reported.rejected) == rig.decode[0].drafts()


def test_a_prediction_with_tokens_outside_the_vocabulary_is_rejected(known: Known) -> None:
    with PairRig(known.loaded) as rig:
        asked = rig.serve([1, 2, 3], 4, prediction=[known.vocabulary_size])
        assert asked.reason is FinishReason.ERROR
        assert asked.ended is not None and "prediction" in asked.ended.error


@WITH_STATES
def test_a_node_that_prefills_by_itself_has_drafts_beside_prompts(
    model: Callable[[str], Known], architecture: str
) -> None:
    known = model(architecture)
    prompts = _prompts(known.vocabulary_size)
    with PairRig(
        known.loaded,
        prefill=(),
        decode=[_guessing("random", known, prompts)],
        chunked_prefill_tokens=16,
        mixed_chunk=architecture == "qwen3_next",
    ) as rig:
        first = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts[:3]]
        rig.until(lambda: len(first[0].tokens) > 4, "it generates")
        others = [rig.ask(prompt, NUM_TOKENS) for prompt in prompts[3:]]
        rig.run()
        reported = [one.tokens for one in (*first, *others)]
        assert reported == [known.greedy(prompt, NUM_TOKENS) for prompt in prompts]
        assert min(rig.decode[0].drafts()) > 0


@WITH_STATES
def test_only_accepted_tokens_enter_the_prefix_cache(
    model: Callable[[str], Known], architecture: str
) -> None:
    """A second turn finds the prompt and response of the first, or the state that its prompt has
    left, and continues correctly."""
    known = model(architecture)
    prompt = _prompts(known.vocabulary_size)[3]
    texts = [[*prompt, *known.greedy(prompt, NUM_TOKENS)]]
    guessed = speculator("random", recall(texts), known.vocabulary_size, 4)
    size = replace(ROOM, speculator=guessed)
    with PairRig(known.loaded, prefill=(), decode=[size], chunked_prefill_tokens=16) as rig:
        first = rig.serve(prompt, NUM_TOKENS)
        turn = [*prompt, *first.tokens, 9, 8, 7]
        second = rig.serve(turn, 8)
        told = 0 if architecture == "qwen3_next" else NUM_TOKENS
        assert second.cached_tokens == (len(prompt) + told - 1) // 16 * 16
        assert second.tokens == known.greedy(turn, 8)
