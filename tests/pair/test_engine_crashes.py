"""Requests that were running when an engine of a prefill node crashed. They then run alone, and
end at the second crash."""

from grpc import StatusCode

from common.request import CRASHED_TWICE
from kvtransfer.messages import PagesReady
from tests.pair.rig import PairRig, Size
from tests.pair.states import LONG, OTHER

NUM_TOKENS = 8


FIRST = 1  # the key of the first request of a decode node


def _lose_engine(rig: PairRig, producer: int) -> None:
    """Crash the engine of a producer, as its frontend reports it, in the middle of the first
    prompt."""
    reported = _num_ready(rig)

    def the_consumer_knows() -> bool:
        rig.settle()  # before the next chunk: there are only a few
        return bool(rig.prefill[producer].queue("chunked") and _num_ready(rig) > reported)

    rig.until(the_consumer_knows, "a prompt is between its chunks, and the consumer knows")
    rig.wires.cut(rig.prefill[producer].front, rig.decode[0].front, engine_died=True)


def _num_ready(rig: PairRig) -> int:
    """Count the Ready messages of the first request, and of no other."""
    return sum(isinstance(each, PagesReady) and each.id.request == FIRST for each in rig.wires.seen)


def _trials(rig: PairRig) -> set[int]:
    return set(rig.decode[0].router.trials) - {0}


def test_a_prompt_that_was_running_in_a_crash_continues_alone_on_both_nodes(known):
    with PairRig(known.loaded, prefill=[Size(), Size()], chunked_prefill_tokens=32) as rig:
        under_way, other = rig.ask(LONG, NUM_TOKENS), rig.ask(OTHER, NUM_TOKENS)
        _lose_engine(rig, 0)
        scheduler = rig.prefill[1].role.scheduler
        rig.until(lambda: scheduler.running_alone, "it computes alone at the other prefill node")
        rig.run()
        known.check(under_way, other)
        assert under_way.number in _trials(rig)


def test_a_prompt_that_was_alone_in_a_second_crash_ends(known):
    with PairRig(known.loaded, prefill=[Size(), Size(), Size()], chunked_prefill_tokens=32) as rig:
        guilty, other = rig.ask(LONG, NUM_TOKENS), rig.ask(OTHER, NUM_TOKENS, prefill=[2])
        _lose_engine(rig, 0)
        _lose_engine(rig, 1)
        rig.run()
        assert guilty.ended is not None
        assert (guilty.ended.error_code, guilty.ended.error) == (
            StatusCode.INTERNAL.value[0],
            CRASHED_TWICE,
        )
        assert other.tokens == known.greedy(OTHER, NUM_TOKENS)
        assert rig.decode[0].count("local_prefills") == 0


def test_a_request_submitted_with_a_crash_is_reported_before_it_is_computed_and_completes(known):
    with PairRig(known.loaded, prefill=[]) as rig:
        suspect = rig.ask(LONG, NUM_TOKENS, engine_crashes=1)
        others = [rig.ask(OTHER, NUM_TOKENS), rig.ask(OTHER[:9], NUM_TOKENS)]
        rig.until(lambda: rig.decode[0].router.trials, "it computes alone")
        assert not suspect.tokens
        rig.run()
        known.check(suspect, *others)
        reported = rig.decode[0].router.trials
        assert _trials(rig) == {suspect.number} and reported[-1] == 0
