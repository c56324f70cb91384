"""Refusals at a full queue, and the requests that are never refused."""

from node.messages import AbortRequests
from tests.pair.rig import PairRig, Size

PROMPT = list(range(40, 90))
FULL = 8  # RESOURCE_EXHAUSTED


def _busy(rig: PairRig, num_waiting: int) -> None:
    """One that runs for long, and prompts that wait for its only slot."""
    running = rig.ask(PROMPT, 100, prefill=[])
    rig.until(lambda: running.tokens, "it runs")
    for number in range(num_waiting):
        rig.ask([number], 2, prefill=[])
    rig.until(lambda: rig.decode[0].queue("waiting") == num_waiting, "they wait")


def test_no_more_requests_wait_than_may_in_both_queues_together(known):
    with PairRig(known.loaded, decode=[Size(max_running_requests=1, max_queued_requests=3)]) as rig:
        _busy(rig, 2)
        last, refused = rig.ask([7], 2), rig.ask([8], 2)
        rig.run(refused)
        assert refused.ended.error_code == FULL and "(3 requests)" in refused.ended.error
        rig.run()
        assert last.tokens == known.greedy([7], 2)


# Seen failing with the bound in Scheduler.add: RESOURCE_EXHAUSTED after one token.
def test_a_request_that_has_told_a_token_goes_on_here_however_many_wait(known):
    with PairRig(known.loaded, decode=[Size(max_running_requests=2, max_queued_requests=2)]) as rig:
        (decode,) = rig.decode
        rig.faults[0].freeze()
        told = rig.ask(PROMPT, 8, request_id="told")
        rig.until(lambda: told.tokens, "its first token is told, its KV has not landed")
        _busy(rig, 2)
        assert told.ended is None
        rig.tell(rig.prefill[0], AbortRequests("told"))
        rig.until(lambda: decode.count("handoffs_failed"), "it is lost")
        rig.faults[0].release()
        rig.run()
        assert told.tokens == known.greedy(PROMPT, 8)


# Seen failing with one bound for all: RESOURCE_EXHAUSTED of an answer half told.
def test_a_replay_is_taken_where_new_requests_are_refused(known):
    tokens = known.greedy(PROMPT, 8)
    with PairRig(known.loaded, decode=[Size(max_running_requests=1, max_queued_requests=2)]) as rig:
        _busy(rig, 2)
        refused = rig.ask(PROMPT, 8, prefill=[])
        replayed = rig.serve(PROMPT, 8, generated=tokens[:3], prefill=[])
        assert refused.ended.error_code == FULL
        assert replayed.tokens == tokens[3:]


# Seen failing with prompts that count until their grant only.
def test_a_prefill_node_counts_granted_prompts_too(known):
    producer = Size(max_running_requests=1, max_queued_requests=2)
    with PairRig(known.loaded, prefill=[producer], chunked_prefill_tokens=16) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        asked = [rig.ask([n] * 200) for n in range(2)]
        rig.until(lambda: decode.queue("transfer") == 2, "both are granted", decode)
        rig.settle()
        rig.until(lambda: prefill.queue("on_device"), "the first is computed", prefill)
        asked += [rig.ask([n] * 200) for n in range(2, 4)]
        rig.until(lambda: decode.count("handoffs_opened") == 4, "the others are opened", decode)
        rig.settle()  # while the first is computed
        rig.run()
        assert prefill.count("refused/overloaded") == 1
        known.check(*asked)
