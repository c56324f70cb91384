"""The scheduler from outside: requests in, tokens and ends out, through loop and fake runner."""

import numpy as np
import pytest

from common.errors import EngineFault, FailedPrecondition
from engine.batch.batch import BatchResult, ForwardMode
from engine.batch.holding import PageHolding
from engine.batch.request import FinishReason, RequestEnd
from engine.kv_cache.pages import PageHolder
from engine.kv_cache.radix import PrefixCache
from tests.support.engine.engine_rig import BOTH, Rig, ints

EOS = (5, 6, 7, 8, 9, 10)


# Lengths and ends


@BOTH
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 65, 300])
def test_prompts_of_every_length_get_their_tokens(overlap, page_size, num_tokens):
    rig = Rig(overlap_schedule=overlap, page_size=page_size, chunked_prefill_tokens=64)
    rig.add([i % 97 for i in range(num_tokens)], max_tokens=20)
    rig.complete()


@BOTH
@pytest.mark.parametrize(
    "options, prompt, max_tokens, num_tokens",
    [
        pytest.param({}, [1, 2, 3], 1, 1, id="one token"),
        pytest.param({}, [1, 2, 3], 4, 4, id="limit"),
        pytest.param({"context_length": 40}, [1] * 30, 1000, 10, id="context"),
        pytest.param({"num_pages": 3}, [1] * 30, 1000, 3 * 16 + 1 - 30, id="pool"),
    ],
)
def test_a_length_limit_ends_a_request_and_costs_no_forward(
    overlap, options, prompt, max_tokens, num_tokens
):
    rig = Rig(overlap_schedule=overlap, **options)
    request = rig.add(prompt, max_tokens)
    rig.complete()
    assert len(rig.tokens[request.key]) == len(rig.runner.batches) == num_tokens


@BOTH
@pytest.mark.parametrize("after, max_tokens", [(1, 100), (4, 100), (4, 4)])
def test_eos_costs_one_forward_under_overlap_whose_token_is_discarded(overlap, after, max_tokens):
    """Not as the last allowed token. There it counts as stop."""
    rig = Rig(overlap_schedule=overlap, eos=EOS)
    request = rig.add(rig.stopping_prompt([1, 2], after), max_tokens)
    rig.complete()
    assert rig.finished[request.key].reason is FinishReason.STOP
    assert len(rig.runner.batches) == after + (overlap and after < max_tokens)


def test_stop_token_ids_end_a_request_and_ignored_eos_does_not():
    rig = Rig(eos=EOS)
    prompt = rig.stopping_prompt([1, 2], after=4)
    ignoring = rig.add(prompt, max_tokens=30, ignore_eos=True)
    third = rig.expected(ignoring)[0][2]
    stopping = rig.add(prompt, max_tokens=30, stop=(third,))
    rig.complete()
    assert len(rig.tokens[ignoring.key]) == 30
    assert len(rig.tokens[stopping.key]) <= 3


@BOTH
def test_logits_that_are_not_finite_end_only_their_request(overlap):
    rig = Rig(overlap_schedule=overlap, poison=96)
    bad = rig.add([*[1] * 40, 96], max_tokens=10)
    good = rig.add([2] * 40, max_tokens=10)
    rig.run()
    assert rig.finished[bad.key].reason is FinishReason.ERROR
    assert "NaN or Inf" in rig.finished[bad.key].error
    assert rig.tokens[bad.key] == []
    rig.check_answers(good)
    assert rig.cache.match(ints([1] * 40)).num_tokens == 0
    rig.assert_at_rest()


@BOTH
@pytest.mark.parametrize("mixed", [False, True], ids=["apart", "mixed"])
def test_an_early_chunk_that_is_not_finite_ends_its_request_at_that_chunk(overlap, mixed):
    """No token of the chunk is returned, and nothing before it is found in the cache."""
    options = {"overlap_schedule": overlap, "chunked_prefill_tokens": 32, "mixed_chunk": mixed}
    rig = Rig(poison=96, **options)
    good = rig.add([2] * 20, max_tokens=10)
    rig.step(3)
    prompt = [*[1] * 40, 96, *[1] * 200]
    bad = rig.add(prompt, max_tokens=10)
    rig.run()
    assert "NaN or Inf" in rig.finished[bad.key].error
    assert rig.tokens[bad.key] == []
    told = max(chunk.end for chunk in rig.chunks if chunk.request is bad)
    assert told <= 40
    assert rig.cache.match(ints(prompt)).num_tokens == 0
    chunks = [batch.starts[~batch.samples] for batch in rig.runner.batches]
    beyond = [starts for starts in chunks if len(starts) and starts.max() > 40]
    assert len(beyond) <= overlap  # the next one is launched already
    rig.complete(good)


def test_a_token_outside_the_vocabulary_is_an_error_of_its_request():
    rig = Rig(overlap_schedule=False)
    request = rig.add([1, 2, 3])
    batch = rig.scheduler.next_batch()
    outcome = rig.scheduler.finish(batch, BatchResult(ints([97])))
    assert [f.request for f in outcome.finished] == [request]
    assert outcome.finished[0].finish.reason is FinishReason.ERROR
    assert len(outcome.tokens) == 0


# The prefix cache


@BOTH
@pytest.mark.parametrize("length, cached", [(50, 48), (32, 16)], ids=["rest", "one token is left"])
def test_a_repeated_prompt_computes_only_what_is_not_cached(overlap, length, cached):
    rig = Rig(overlap_schedule=overlap)
    first = rig.add(range(length), max_tokens=20)
    rig.run()
    before = rig.runner.num_tokens
    second = rig.add(range(length), max_tokens=1)
    rig.complete()
    assert (first.cached_tokens, second.cached_tokens) == (0, cached)
    assert rig.runner.num_tokens - before == length - cached


def test_a_finished_request_leaves_its_output_in_the_cache_except_the_last_token():
    rig = Rig()
    request = rig.add([1] * 16, max_tokens=17)
    rig.run()
    whole = [*[1] * 16, *rig.tokens[request.key]]
    assert len(whole) == 33
    assert rig.cache.match(ints(whole)).num_tokens == 32
    follow_up = rig.add([*whole, 4], max_tokens=3)
    rig.run()
    assert follow_up.cached_tokens == 32
    rig.check_answers(follow_up)


@BOTH
def test_a_prompt_whose_first_token_ends_it_is_inserted_once(overlap, monkeypatch):
    """Longer responses are inserted at their end, with all but the newest token."""
    inserted, insert = [], PrefixCache.insert

    def insert_noted(cache, token_ids, *rest, **how):
        inserted.append(len(token_ids))
        insert(cache, token_ids, *rest, **how)

    monkeypatch.setattr(PrefixCache, "insert", insert_noted)
    rig = Rig(overlap_schedule=overlap)
    rig.add(range(40), max_tokens=1)
    rig.complete()
    assert inserted == [40]
    again = rig.add(range(40), max_tokens=12)
    rig.complete()
    assert inserted == [40, 40, 51] and again.cached_tokens == 32


def test_a_chunk_enters_the_tree_only_when_its_forward_is_done():
    rig = Rig(chunked_prefill_tokens=32)
    rig.add(range(64), max_tokens=2)
    rig.step()
    assert rig.cache.match(ints(range(64))).num_tokens == 0
    rig.step()
    assert rig.cache.match(ints(range(64))).num_tokens == 32
    rig.run()


def test_the_prefix_cache_of_an_idle_engine_is_within_its_size_limit():
    rig = Rig(max_cached_pages=5, chunked_prefill_tokens=32)
    for number in range(6):
        rig.add([number] * 40, max_tokens=20)
    rig.step(7)
    assert rig.cache.num_pages > 5  # pages in use
    rig.complete()
    assert rig.cache.num_pages == 5
    rig.add([5] * 40, max_tokens=1)
    rig.complete()
    assert rig.scheduler.counters()["cached_tokens"] == 32


def test_pages_beyond_the_size_limit_are_evicted_when_a_peer_has_read_them():
    rig = Rig(max_cached_pages=2, vandal=False)
    rig.add([1] * 70, max_tokens=4)
    rig.step(2)
    published = np.flatnonzero(rig.pages.holds(PageHolder.CACHE))
    rig.pages.hold(published, PageHolder.PUBLICATION)
    rig.run()
    assert rig.cache.num_pages == len(published) == 4
    rig.pages.drop(published, PageHolder.PUBLICATION)
    rig.step()
    assert rig.cache.num_pages == 2


# Ends from outside


def test_an_abort_while_waiting_ends_the_request_at_once():
    rig = Rig()
    request = rig.add([1, 2, 3])
    rig.abort(request)
    assert rig.finished[request.key].reason is FinishReason.ABORT
    rig.run()
    assert rig.tokens[request.key] == []
    rig.assert_at_rest()


@BOTH
@pytest.mark.parametrize("steps", range(1, 9))
def test_an_abort_at_any_step_ends_the_request_within_one_result(overlap, steps):
    """During its three chunks and its decode steps."""
    rig = Rig(overlap_schedule=overlap, chunked_prefill_tokens=32)
    request = rig.add(range(80), max_tokens=50)
    rig.add([5] * 20, max_tokens=20)
    rig.step(steps)
    rig.abort(request)
    rig.step()
    assert rig.finished[request.key] == RequestEnd(FinishReason.ABORT, "cancelled")
    rig.complete()


def test_an_abort_of_an_unknown_request_has_no_effect():
    rig = Rig()
    request = rig.request([1])
    assert rig.scheduler.abort(request, RequestEnd(FinishReason.ABORT)) is None
    rig.scheduler.add(request)
    rig.run()
    assert rig.scheduler.abort(request, RequestEnd(FinishReason.ABORT)) is None


def test_the_first_reason_to_end_a_request_is_reported():
    rig = Rig()
    request = rig.add([1], max_tokens=50)
    rig.step(3)
    assert rig.scheduler.abort(request, RequestEnd(FinishReason.ABORT, "first")) is None
    assert rig.scheduler.abort(request, RequestEnd(FinishReason.ABORT, "second")) is None
    rig.run()
    assert rig.finished[request.key].error == "first"


def test_requests_past_their_deadline_end_in_every_stage():
    rig = Rig(max_running_requests=1)
    running = rig.add([1], max_tokens=500, deadline=100.0)
    waiting = rig.add([2], max_tokens=5, deadline=100.0)
    patient = rig.add([3], max_tokens=5)
    rig.clock.now = 99.0
    rig.step(3)
    assert rig.finished == {}
    rig.clock.now = 101.0
    rig.step()
    assert "deadline" in rig.finished[waiting.key].error
    rig.run()
    assert rig.finished[running.key].reason is FinishReason.ERROR
    assert "deadline" in rig.finished[running.key].error
    rig.check_answers(patient)


def test_deadlines_are_checked_only_at_intervals():
    rig = Rig()
    rig.scheduler.expire(now=10.0)
    rig.add([1], deadline=1.0)
    assert rig.scheduler.expire(now=10.05) == []
    assert len(rig.scheduler.expire(now=10.11)) == 1


# Prebuilt


@BOTH
def test_a_request_with_complete_kv_joins_without_a_forward(overlap):
    rig = Rig(overlap_schedule=overlap)
    prompt = [i % 97 for i in range(50)]
    first = rig.expected(rig.request(prompt, 20))[0][0]
    request = rig.request(prompt, 20, generated=[first])
    assert rig.land(request)
    rig.join_landed()
    assert rig.cache.match(ints(prompt)).num_tokens == 48
    rig.complete()
    assert rig.runner.num_tokens == 19
    assert all(batch.mode is ForwardMode.DECODE for batch in rig.runner.batches)
    rig.assert_at_rest()


def test_a_request_cannot_join_without_a_slot_and_nothing_changes():
    rig = Rig(max_running_requests=1)
    rig.add([1], max_tokens=50)
    rig.step()
    request = rig.request([2] * 20, 5, generated=[3])
    pages = rig.scheduler.allocate(2, PageHolder.REQUEST)
    assert not rig.scheduler.join(request, PageHolding.of(pages))
    assert request.slot is None
    rig.pages.drop(pages, PageHolder.REQUEST)
    rig.run()


def test_a_request_that_has_ended_cannot_join():
    rig = Rig()
    pages = rig.scheduler.allocate(1, PageHolder.REQUEST)
    with pytest.raises(EngineFault, match="all its"):
        rig.scheduler.join(rig.request([2] * 5, 1, generated=[3]), PageHolding.of(pages))
    with pytest.raises(EngineFault, match="pages"):
        rig.scheduler.join(rig.request([2] * 20, 9, generated=[3]), PageHolding.of(pages))


def test_a_token_from_another_node_ends_a_request_alike():
    rig = Rig(eos=(5,), context_length=40)
    scheduler = rig.scheduler
    assert scheduler.finish_of(rig.request([1, 2], 9), 4) is None
    assert scheduler.finish_of(rig.request([1, 2], 9), 5).reason is FinishReason.STOP
    assert scheduler.finish_of(rig.request([1, 2], 9, ignore_eos=True), 5) is None
    assert scheduler.finish_of(rig.request([1, 2], 1), 4).reason is FinishReason.LENGTH
    assert scheduler.finish_of(rig.request([1] * 39, 9), 4).reason is FinishReason.LENGTH
    assert scheduler.finish_of(rig.request([1], 9), 97).reason is FinishReason.ERROR


# Self-checks


# READ and PUBLICATION seen failing when only the scheduler's own holds were checked.
@pytest.mark.parametrize("holder", PageHolder)
def test_a_leaked_page_is_detected_when_idle(holder):
    rig = Rig()
    rig.scheduler.check_idle()
    rig.pages.allocate(1, holder)
    with pytest.raises(EngineFault):
        rig.scheduler.check_idle()


@pytest.mark.parametrize("holder", [PageHolder.REQUEST, PageHolder.READ, PageHolder.PUBLICATION])
def test_pages_that_the_caller_names_are_no_leaks(holder):
    rig = Rig()
    pages = rig.pages.allocate(2, holder)
    rig.scheduler.check_idle({holder: [pages]})
    with pytest.raises(EngineFault):
        rig.scheduler.check_idle({holder: [pages, pages[:1]]})


def test_a_leaked_slot_is_detected_when_idle():
    rig = Rig()
    rig.table.acquire(rig.request([1]))
    with pytest.raises(EngineFault):
        rig.scheduler.check_idle()


def test_results_must_be_finished_in_the_order_of_launches():
    rig = Rig()
    rig.add([1], max_tokens=5)
    rig.scheduler.next_batch()
    second = rig.scheduler.next_batch()
    with pytest.raises(EngineFault, match="order"):
        rig.scheduler.finish(second, BatchResult(ints([1])))


def test_a_paused_scheduler_launches_nothing_and_no_request_waits_for_its_steps():
    rig = Rig()
    request = rig.add(range(40), max_tokens=4)
    assert rig.scheduler.awaits_steps
    rig.scheduler.paused = True
    assert rig.scheduler.at_rest and rig.scheduler.next_batch() is None
    assert rig.scheduler.has_work and not rig.scheduler.awaits_steps
    rig.scheduler.paused = False
    rig.run()
    assert request.slot is None and not rig.scheduler.has_work


def test_requests_that_start_over_wait_without_kv_in_order_of_arrival():
    rig = Rig(max_running_requests=3)
    requests = [
        rig.add(range(start, start + 20), max_tokens=8, ignore_eos=True) for start in (0, 50, 100)
    ]
    rig.run_until(lambda: rig.scheduler.queues()["on_device"] == 3)
    rig.scheduler.paused = True
    while rig.in_flight is not None:
        rig.step()
    rig.scheduler.requeue_all()
    rig.check()
    assert rig.pages.by_holder()["request"] == 0
    assert rig.scheduler.queues()["waiting"] == 3 and all(each.is_away for each in requests)
    rig.scheduler.paused = False
    rig.run()
    assert not any(each.is_away for each in requests)


def test_the_cache_is_flushed_only_when_idle():
    rig = Rig()
    rig.add(range(40), max_tokens=2)
    with pytest.raises(FailedPrecondition):
        rig.scheduler.flush_cache()
    rig.run()
    assert rig.scheduler.flush_cache() == 2


def test_queue_lengths_and_counters_are_reported():
    rig = Rig(max_running_requests=1)
    for _ in range(2):
        rig.add(range(40), max_tokens=3)
    rig.step()
    queues = rig.scheduler.queues()
    assert (queues["waiting"], queues["on_device"], queues["retracted"]) == (1, 1, 0)
    rig.run()
    counters = rig.scheduler.counters()
    assert counters["prompt_tokens"] == 80
    assert counters["cached_tokens"] == 32
    assert counters["generated_tokens"] == 6
    assert counters["finished"] == 2
    assert counters["steps"] == len(rig.runner.batches)
