"""The gain of overlap and its hazard: a forward still on the device may write pages of a request
that has already ended."""

import pytest

from engine.batch.batch import ForwardMode
from tests.support.engine.engine_rig import Rig

EOS = (5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_is_launched_before_the_last_one_is_done_unless_configured_otherwise(overlap):
    rig = Rig(overlap_schedule=overlap)
    rig.add([1, 2, 3], max_tokens=5)
    rig.complete()
    assert rig.runner.done_at_launch == [max(0, step - overlap) for step in range(5)]


@pytest.mark.parametrize("overlap_prefills", [True, False])
def test_two_consecutive_prefills_overlap_unless_configured_otherwise(overlap_prefills):
    rig = Rig(overlap_prefills=overlap_prefills, mixed_chunk=False)
    rig.add([1] * 20, max_tokens=5)
    rig.step()
    rig.add([2] * 20, max_tokens=5)
    rig.step()
    assert [batch.mode for batch in rig.runner.batches] == [ForwardMode.EXTEND] * 2
    assert rig.runner.done_at_launch == ([0, 0] if overlap_prefills else [0, 1])
    rig.run()


def test_a_decode_after_a_prefill_overlaps_in_any_case():
    rig = Rig(overlap_prefills=False)
    rig.add([1] * 20, max_tokens=5)
    rig.step(2)
    assert rig.runner.done_at_launch == [0, 0]


@pytest.mark.parametrize("after", [3, 4])
def test_a_page_is_closed_to_transfers_while_a_forward_may_still_write_it(after):
    """The request ends with EOS, whose last tokens are on their own page, while the next forward is
    on the device. Its pages are requested at once, KV of another request is read into them, and
    only then the stale forward runs.

    Seen failing without the STEP holds of next_batch and finish: the request that joined got wrong
    tokens.
    """
    rig = Rig(num_pages=2, vandal=False, eos=EOS, prefix_cache=False)
    ending = rig.add(rig.stopping_prompt([1] * 14, after), max_tokens=100)
    rig.run_until(lambda: ending.key in rig.finished)
    assert rig.in_flight is not None
    assert rig.runner.num_done == len(rig.runner.batches) - 1
    prompt = [3] * 31
    first = rig.expected(rig.request(prompt, 9))[0][0]
    landing = rig.request(prompt, 2, generated=[first], ignore_eos=True)
    rig.run_until(lambda: rig.land(landing))
    rig.step()
    rig.join_landed()
    rig.run()
    assert rig.tokens[landing.key] == rig.expected(landing)[0]
    rig.assert_at_rest()


def test_a_slot_is_not_reused_while_a_forward_uses_it():
    """Seen failing without the wait for launched steps in SlotTable.release: the token of the
    stale forward was returned as the next request's."""
    rig = Rig(max_running_requests=1, eos=EOS)
    prompt = rig.stopping_prompt([1] * 14, 3)
    ending = rig.add(prompt, max_tokens=100)
    following = rig.add([9, 9], max_tokens=4, ignore_eos=True)
    rig.run_until(lambda: ending.key in rig.finished)
    assert following.slot is None
    rig.run()
    for request in (ending, following):
        assert rig.tokens[request.key] == rig.expected(request)[0]


def test_a_batch_never_changes_after_its_launch():
    rig = Rig(num_pages=6, new_token_ratio=0.02)
    for i in range(4):
        rig.add([i] * 14, max_tokens=60)
    seen = []

    def remember() -> None:
        for batch in rig.runner.batches[len(seen) :]:
            columns = (batch.slots, batch.starts, batch.ends, batch.samples)
            seen.append((columns, [column.copy() for column in columns]))

    rig.before_poll.append(remember)
    rig.run()
    for columns, copies in seen:
        for column, copy in zip(columns, copies, strict=True):
            assert (column == copy).all()
