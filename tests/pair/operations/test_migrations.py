"""Live migration between decode nodes. The client notices no more than a pause."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from grpc import StatusCode

from common.config import PrefixSharingConfig
from common.requests.sampling import GuidedDecoding, ReasoningTokens
from engine.batch.batch import ForwardMode, ScheduleBatch
from engine.batch.request import FinishReason, Request
from engine.kv_cache.pages import PageHolder
from kvtransfer.messages import GrantHandoff, PagesReady
from node.messages import DrainNode, MigrateFrom
from tests.pair.conftest import Known
from tests.pair.rig import PATIENT, Asked, PairRig, Size, joined
from tests.support.models.drafters import recall, speculator

PROMPT = tuple(range(5, 45))
TWO = (Size(), Size())


def _begin(rig: PairRig, num_tokens: int, max_tokens: int = 40, **sampling: object) -> Asked:
    """Start a request on the first decode node, and run until it has at least this many tokens."""
    asked = rig.ask(PROMPT, max_tokens, **sampling)
    rig.until(lambda: len(asked.tokens) >= num_tokens, "it generates")
    return asked


def _move(rig: PairRig, asked: Asked, source: int = 0) -> Asked:
    """Request the migration to the other decode node, and wait until the source is asked to
    pause. Return the second submission."""
    successor = rig.move(asked, source, 1 - source)
    rig.until_granted(source)
    return successor


@pytest.mark.parametrize("overlap", [True, False])
def test_a_migrated_request_continues_where_it_paused(known: Known, overlap: bool) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True, overlap_schedule=overlap) as rig:
        tokens = rig.moved_midway(rig.ask(PROMPT, 40))
        assert rig.asked[-1].reason is FinishReason.LENGTH
        assert tokens == known.greedy(PROMPT, 40)
        # Nothing is computed again: the second node computes no prompt token.
        assert rig.decode[1].count("prompt_tokens") == 0
        assert rig.decode[1].count("moves/here") == rig.decode[0].count("moves/away") == 1


def test_a_request_migrates_there_and_back_and_there_again(known: Known) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        asked, tokens, at = _begin(rig, 3), [], 0
        for _ in range(3):
            num_known = len(asked.tokens)
            successor = _move(rig, _with(asked, tokens), at)
            rig.until(
                lambda asked=asked, successor=successor: asked.ended and len(successor.tokens) > 2,
                "it moves",
            )
            tokens += asked.tokens[:num_known]
            asked, at = successor, 1 - at
        rig.run()
        assert tokens + asked.tokens == known.greedy(PROMPT, 40)


def _with(asked: Asked, tokens: list[int]) -> Asked:
    """Return the submission as its router knows it, with the tokens of the previous ones."""
    return replace(asked, tokens=[*tokens, *asked.tokens])


BAD_WORDS = ((20,), (21, 22), (23, 24, 25))
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.6, "repetition_penalty": 1.2}


CARRIED: dict[str, dict[str, Any]] = {
    "sampled-with-penalties": SAMPLED,
    "grammar": {"guide": GuidedDecoding("regex", "[a-z ]{200}"), "max_tokens": 60},
    "thinking-budget": {"thought": ReasoningTokens(close=3), "thinking_budget": 20},
    "least-tokens-and-bias": SAMPLED
    | {"min_tokens": 30, "stop_token_ids": (9,), "logit_bias": ((9, 100.0),)},
    "bad-words": SAMPLED | {"allowed_token_ids": tuple(range(20, 26)), "bad_word_ids": BAD_WORDS},
}
QUICK = ("sampled-with-penalties", "grammar")


# Of log-probabilities: test_returned_rows.py.
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(sampling, id=name, marks=() if name in QUICK else pytest.mark.long)
        for name, sampling in CARRIED.items()
    ],
)
def test_a_request_migrates_with_all_its_options(known: Known, sampling: dict[str, Any]) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        sampling = {"seed": 7, **sampling}
        undisturbed = rig.serve(PROMPT, **{"max_tokens": 40, **sampling})
        assert "thought" not in sampling or undisturbed.tokens.index(3) == 20
        asked = rig.ask(PROMPT, **{"max_tokens": 40, **sampling})
        tokens, successor = rig.moved_midway(asked), rig.asked[-1]
        assert tokens == undisturbed.tokens
        assert successor.reason is undisturbed.reason


@pytest.mark.parametrize(
    "architecture", [pytest.param("gpt_oss", marks=pytest.mark.long), "qwen3_next"]
)
def test_windows_and_states_migrate(model: Callable[[str], Known], architecture: str) -> None:
    known = model(architecture)
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        tokens = rig.moved_midway(rig.ask(PROMPT, 40), 9)
        assert tokens == known.greedy(PROMPT, 40)


def test_states_migrate_when_the_drafts_in_flight_are_rejected(
    model: Callable[[str], Known],
) -> None:
    """The source pauses while a step verifies drafts, all of which are rejected."""
    known = model("qwen3_next")
    answer = known.greedy(PROMPT, 40)
    guesses = recall([[*PROMPT, *answer]])
    sizes = [
        Size(num_pages=160, speculator=speculator("wrong", guesses, known.vocabulary_size, 3))
        for _ in range(2)
    ]
    with PairRig(known.loaded, decode=sizes, migrates=True) as rig:
        source, in_flight = rig.decode[0], list[ForwardMode]()
        pause = source.role.scheduler.pause

        def note(request: Request) -> bool:
            in_flight.append(source.in_flight.batch.mode)
            return pause(request)

        source.role.scheduler.pause = note
        assert rig.moved_midway(rig.ask(PROMPT, 40), 9) == answer
        assert in_flight == [ForwardMode.VERIFY]
        accepted, rejected = source.drafts()
        assert accepted == 0 and rejected > 0


def test_a_prefix_cached_at_the_target_is_not_read_again(known: Known) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        rig.run(rig.ask(PROMPT, 1, node=1))
        rig.run(rig.ask((*PROMPT, 3), 2, node=1))
        asked = _begin(rig, 4)
        _move(rig, asked)
        rig.run()
        (grant,) = [each for each in rig.wires.said(GrantHandoff) if each.room_tokens]
        assert grant.prefix_tokens == 32
        assert grant.gib_per_s > 0.0  # by which the source limits its pause


def test_no_step_is_launched_ahead_while_a_migration_is_arriving(known: Known) -> None:
    """The request would miss the running step, and the one queued behind it."""
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        target = rig.decode[1]
        launch, seen = target.engine.runner.launch, list[tuple[bool, bool]]()

        def note(batch: ScheduleBatch) -> Any:
            seen.append((target.queue("transfer") > 0, target.in_flight is not None))
            return launch(batch)

        target.engine.runner.launch = note
        other = rig.ask(PROMPT[1:], 400, node=1)
        rig.until(lambda: (False, True) in seen, "a step is launched ahead")
        _, successor = _paused(rig)
        rig.until(lambda: (True, False) in seen or successor.ended, "the other one goes on")
        rig.wires.release()
        rig.run(successor)
        assert (True, True) not in seen
        rig.cancel(other, node=1)


# Failed migrations --------------------------------------------------------------------------------


def _paused(rig: PairRig) -> tuple[Asked, Asked]:
    """Return a paused request and its migration. Ready has been sent and does not arrive."""
    asked = _begin(rig, 4)
    rig.wires.hold_back(PagesReady)
    successor = _move(rig, asked)
    pages = rig.decode[0].engine.pages
    rig.until(lambda: pages.holds(PageHolder.PUBLICATION).any(), "it is paused")
    return asked, successor


def _stays(rig: PairRig, known: Known, asked: Asked, successor: Asked) -> None:
    """Check that the request continues at the source, and that the migration ended silently."""
    rig.until(lambda: successor.ended, "the mover ends")
    assert successor.ended.error_code == StatusCode.UNAVAILABLE.value[0]
    assert not successor.tokens
    rig.run()
    assert asked.tokens == known.greedy(PROMPT, 40) and asked.reason is FinishReason.LENGTH
    assert rig.decode[0].count("moves/refused") == 1


@pytest.mark.parametrize("sides", [("consumer",), ("producer",), ("consumer", "producer")])
def test_a_request_continues_at_the_source_when_the_stream_is_cut(
    known: Known, sides: tuple[str]
) -> None:
    transfer = PATIENT.model_copy(update={"heartbeat_s": 0.2, "max_missed_heartbeats": 10})
    with PairRig(known.loaded, decode=TWO, migrates=True, transfer=transfer) as rig:
        asked, successor = _paused(rig)
        rig.wires.cut(rig.decode[0].front, rig.decode[1].front, sides)
        rig.wires.release()
        rig.wires.heal()
        _stays(rig, known, asked, successor)


def test_a_request_continues_at_the_source_when_its_migration_is_cancelled(known: Known) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        asked, successor = _paused(rig)
        rig.cancel(successor, node=1)
        rig.until(lambda: successor.ended and not rig.decode[0].queue("migrating"), "it goes on")
        rig.wires.release()
        rig.run()
        assert successor.reason is FinishReason.ABORT and not successor.tokens
        assert asked.tokens == known.greedy(PROMPT, 40)


def test_a_pause_for_a_migration_is_limited(known: Known) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        asked, successor = _paused(rig)
        rig.until(lambda: len(asked.tokens) == 40, "it goes on after its longest pause")
        rig.wires.release()
        _stays(rig, known, asked, successor)


def test_a_paused_request_may_be_cancelled(known: Known) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        asked, successor = _paused(rig)
        rig.cancel(asked)
        rig.until(lambda: asked.ended, "it is cancelled")
        rig.wires.release()
        rig.run()
        assert asked.reason is FinishReason.ABORT and not successor.tokens


def test_an_unknown_ticket_and_an_unpaired_source_end_the_migration(known: Known) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        asked = _begin(rig, 4, 400)
        nobody = MigrateFrom(rig.decode[0].front.address, 5)
        nowhere = MigrateFrom("nowhere:1", asked.ticket)
        movers = [
            rig.ask(PROMPT, 400, generated=asked.tokens, node=1, move_from=source)
            for source in (nobody, nowhere)
        ]
        rig.run(*movers)
        errors = [mover.ended.error for mover in movers]
        assert "no request on this node has this ticket" in errors[0]
        assert "not paired" in errors[1]
        rig.cancel(asked)


def test_only_one_of_two_migrations_of_a_request_succeeds(known: Known) -> None:
    """The router has lost its stream of the first one, and assumes that it has failed."""
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        asked = _begin(rig, 4)
        num_known = len(asked.tokens)
        movers = [rig.move(asked, 0, 1) for _ in range(2)]
        rig.until_granted(0)
        rig.run()
        assert asked.reason is FinishReason.MOVED
        (winner,) = [mover for mover in movers if mover.reason is FinishReason.LENGTH]
        assert joined(asked, winner, num_known) == known.greedy(PROMPT, 40)


def test_a_draining_node_migrates_its_requests_and_ends(known: Known) -> None:
    with PairRig(known.loaded, decode=TWO, migrates=True) as rig:
        source = rig.decode[0]
        asked = _begin(rig, 4, 400)
        rig.command(source, DrainNode())
        rig.until(lambda: source.control.draining, "it drains")
        successor = _move(rig, asked)
        rig.until(lambda: source.router.drained, "nothing is left to do")
        assert asked.reason is FinishReason.MOVED
        rig.cancel(successor, node=1)


# Copies before the pause --------------------------------------------------------------------------


def _copied(rig: PairRig) -> list[int]:
    """Return how many tokens the target had when it requested the rest."""
    return [each.prefix_tokens for each in rig.wires.said(GrantHandoff) if each.room_tokens]


@pytest.mark.parametrize("architecture", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_the_pause_covers_only_tokens_generated_after_the_copy(
    model: Callable[[str], Known], architecture: str
) -> None:
    """The generated tokens are copied before the pause, too: the source inserts them into its
    tree on request."""
    known = model(architecture)
    with PairRig(known.loaded, decode=TWO, prefix_sharing=PrefixSharingConfig()) as rig:
        asked = _begin(rig, 30, 200)
        num_known = len(asked.tokens)
        successor = _move(rig, asked)
        rig.until(lambda: asked.ended and len(successor.tokens) > 20, "it goes on")
        assert asked.reason is FinishReason.MOVED
        assert _copied(rig) == [(len(PROMPT) + num_known - 1) // 16 * 16]
        assert rig.decode[1].count("prefix_fetches/completed") == 1
        assert rig.decode[1].count("prompt_tokens") == 0
        tokens = joined(asked, successor, num_known)
        assert tokens == known.greedy(PROMPT, 200)[: len(tokens)]
        rig.cancel(successor, node=1)


def test_states_are_read_during_the_pause(model: Callable[[str], Known]) -> None:
    """The target uses the newest state. Earlier copies do not interfere."""
    known = model("qwen3_next")
    with PairRig(known.loaded, decode=TWO, prefix_sharing=PrefixSharingConfig()) as rig:
        tokens = rig.moved_midway(rig.ask(PROMPT, 100), 30)
        assert tokens == known.greedy(PROMPT, 100)


@pytest.mark.parametrize(
    "source, target, copied",
    [
        # At most an eighth of the pool is reserved for readers, but the request loses nothing by
        # this.
        pytest.param(Size(num_pages=23), Size(), True, id="much-of-the-pool"),
        pytest.param(Size(), Size(prefix_cache=False), False, id="no-cache-for-it"),
    ],
)
def test_pages_that_are_not_copied_before_are_read_during_the_pause(
    known: Known, source: Size, target: Size, copied: bool
) -> None:
    with PairRig(
        known.loaded, decode=(source, target), prefix_sharing=PrefixSharingConfig()
    ) as rig:
        tokens = rig.moved_midway(rig.ask(PROMPT, 100), 30)
        assert [bool(num_tokens) for num_tokens in _copied(rig)] == [copied]
        assert tokens == known.greedy(PROMPT, 100)


@pytest.mark.parametrize("what", ["cancelled", "cut", "ended"])
def test_a_request_keeps_running_during_the_copy(known: Known, what: str) -> None:
    transfer = PATIENT.model_copy(update={"heartbeat_s": 0.2, "max_missed_heartbeats": 10})
    with PairRig(
        known.loaded, decode=TWO, prefix_sharing=PrefixSharingConfig(), transfer=transfer
    ) as rig:
        source, target = rig.decode
        asked = _begin(rig, 30, 100)
        rig.wires.hold_back(PagesReady)
        successor = rig.move(asked, 0, 1)
        rig.until_news(
            lambda: source.engine.pages.holds(PageHolder.PUBLICATION).any(), "it is copied", source
        )
        assert target.queue("fetching") == 1
        match what:
            case "cancelled":
                rig.cancel(successor, node=1)
            case "cut":
                rig.wires.cut(source.front, target.front, ("consumer", "producer"))
            case "ended":
                rig.until(lambda: asked.ended, "it comes to its end")
        rig.wires.release()
        rig.wires.heal()
        rig.run()
        assert asked.tokens == known.greedy(PROMPT, 100) and asked.reason is FinishReason.LENGTH
        assert successor.ended and not successor.tokens
        assert not source.engine.pages.holds(PageHolder.PUBLICATION).any()
        assert not target.engine.pages.holds(PageHolder.READ).any()
