"""Pauses of generation: nothing is computed or lost, and waiting requests keep their deadlines."""

import time

import pytest
from grpc import StatusCode

from common.pausing import PauseMode
from common.requests.pooling import PoolingMode, PoolingParams
from engine.batch.request import FinishReason
from engine.scheduler.scheduler import DEADLINE_CHECK_S
from node.messages import Command, ContinueGeneration, PauseGeneration
from tests.pair.features.test_pooled_calls import call
from tests.pair.rig import Node, PairRig, Size

PROMPTS = [list(range(5, 5 + length)) for length in (1, 40, 90)]
MANY = 30  # tokens
SHORT_S = 0.5


def call_node(rig: PairRig, node: Node, command: Command):
    """Return the node's response."""
    before = len(node.router.answers)
    rig.command(node, command)
    rig.until(lambda: len(node.router.answers) > before, f"{command} is answered")
    return node.router.answers[-1]


def paused(rig: PairRig, mode: str, *nodes: Node) -> None:
    for node in nodes or (*rig.decode, *rig.prefill):
        answer = call_node(rig, node, PauseGeneration(PauseMode(mode)))
        assert not answer.error and answer.fresh


def resumed(rig: PairRig, *nodes: Node) -> None:
    for node in nodes or rig.nodes:
        assert call_node(rig, node, ContinueGeneration()).integer == 1


def computes_nothing(rig: PairRig) -> bool:
    """Return whether no node launches a step during some turns."""
    before = [node.count("steps") for node in rig.nodes]
    for _ in range(20):
        rig.turn()
    return before == [node.count("steps") for node in rig.nodes]


def one_runs(rig: PairRig, node: int = 0) -> None:
    """Run until the first of these requests has just started, so none has ended."""
    rig.until(lambda: rig.decode[node].queue("on_device"), "one runs")


@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.long)], ids=["overlap", "normal"]
)
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_continue_unchanged_after_a_pause(known, mode, overlap):
    with PairRig(known.loaded, overlap_schedule=overlap) as rig:
        asked = [rig.ask(prompt, MANY) for prompt in PROMPTS]
        one_runs(rig)
        paused(rig, mode)
        assert computes_nothing(rig) and not any(one.ended for one in asked)
        assert rig.decode[0].pages("request") == 0 or mode == "in_place"
        late = rig.ask(PROMPTS[1], MANY)
        assert computes_nothing(rig) and not late.tokens
        assert rig.decode[0].queue("paused") >= 1
        resumed(rig)
        rig.run()
        known.check(*asked, late)


def test_an_aborting_pause_ends_only_present_requests(known):
    with PairRig(known.loaded) as rig:
        asked = [rig.ask(prompt, MANY) for prompt in PROMPTS]
        one_runs(rig)
        answer = call_node(rig, rig.decode[0], PauseGeneration(PauseMode("abort")))
        assert answer.integer == len(asked)
        assert [one.reason for one in asked] == [FinishReason.ABORT] * len(asked)
        assert {one.ended.error for one in asked} == {"aborted: generation was paused"}
        late = rig.ask(PROMPTS[1])
        assert computes_nothing(rig)
        resumed(rig, rig.decode[0])
        rig.run()
        assert late.tokens == known.greedy(PROMPTS[1], 8)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_hand_off_is_paused_between_its_chunks_and_loses_nothing(known, mode):
    prompt = list(range(5, 135))
    with PairRig(known.loaded, chunked_prefill_tokens=16) as rig:
        asked = rig.ask(prompt)
        rig.until(lambda: rig.prefill[0].queue("chunked"), "a prompt between its chunks")
        paused(rig, mode)
        assert computes_nothing(rig)
        resumed(rig)
        rig.run()
        assert asked.tokens == known.greedy(prompt, 8)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_with_kv_in_host_memory_are_paused_too(known, mode):
    prompts = [[10 * number, *range(40)] for number in range(4)]
    with PairRig(
        known.loaded,
        decode=[Size(num_pages=14, max_running_requests=4, swap_pages=32)],
        new_token_ratio=0.02,
    ) as rig:
        (node,) = rig.decode
        # The pages granted to others keep the first request on the host until they run.
        asked = [rig.ask(prompt, 100) for prompt in prompts]
        rig.until(lambda: node.queue("retracted"), "one is off the device")
        paused(rig, mode)
        assert computes_nothing(rig)
        assert mode == "in_place" or node.role.scheduler.num_host_pages_used == 0
        resumed(rig)
        rig.run()
        known.check(*asked)


def test_prompts_avoid_a_paused_prefill_node(known):
    prompt = PROMPTS[2]
    with PairRig(known.loaded, prefill=[Size(), Size()]) as rig:
        paused(rig, "retract", rig.prefill[0])
        asked = rig.serve(prompt)
        assert asked.tokens == known.greedy(prompt, 8)
        counts = [node.count("handoffs_completed") for node in rig.prefill]
        assert (counts, rig.prefill[0].count("refused/paused")) == ([0, 1], 1)
        resumed(rig, rig.prefill[0])


def test_requests_that_wait_for_the_end_of_a_pause_keep_their_deadlines(known):
    with PairRig(known.loaded) as rig:
        runs = rig.ask(PROMPTS[1], MANY)
        one_runs(rig)
        (node,) = rig.decode
        paused(rig, "in_place", node)
        no_time = rig.ask(PROMPTS[0], budget_s=SHORT_S)
        no_turn = rig.ask(PROMPTS[0], queue_s=SHORT_S)
        cancelled = rig.ask(PROMPTS[0])
        rig.turn()
        rig.let_time_pass(time.monotonic() + SHORT_S + DEADLINE_CHECK_S)
        rig.cancel(cancelled)
        rig.run(no_time, no_turn, cancelled)
        codes = [one.ended.error_code for one in (no_time, no_turn)]
        assert codes == [
            StatusCode.DEADLINE_EXCEEDED.value[0],
            StatusCode.RESOURCE_EXHAUSTED.value[0],
        ]
        assert "pause" in no_time.ended.error and "paused" in no_turn.ended.error
        assert no_turn.ended.retry_after_s > 0.0 and cancelled.reason is FinishReason.ABORT
        resumed(rig, node)
        rig.run()
        assert runs.tokens == known.greedy(PROMPTS[1], MANY)


def test_a_colocated_node_computes_its_prompts_after_the_pause(known):
    with PairRig(known.loaded, prefill=[], mode="colocated", chunked_prefill_tokens=16) as rig:
        (node,) = rig.decode
        asked = [rig.ask(prompt, MANY) for prompt in PROMPTS]
        rig.until(lambda: node.queue("chunked"), "a prompt between its chunks")
        paused(rig, "retract")
        assert node.pages("request") == 0 and node.queue("waiting") > 0
        assert computes_nothing(rig)
        resumed(rig)
        rig.run()
        known.check(*asked)


def test_a_second_pause_may_be_stricter_and_a_pause_may_be_cancelled(known):
    with PairRig(known.loaded) as rig:
        (node,) = rig.decode
        asked = rig.ask(PROMPTS[1], MANY)
        one_runs(rig)
        paused(rig, "in_place", node)
        answer = call_node(rig, node, PauseGeneration(PauseMode("retract")))
        assert not answer.fresh and node.pages("request") == 0
        rig.command(node, ContinueGeneration())
        rig.command(node, PauseGeneration(PauseMode("retract")))
        rig.command(node, ContinueGeneration())
        before = len(node.router.answers)
        rig.until(lambda: len(node.router.answers) == before + 3, "three answers")
        *_, continued, called_off = node.router.answers
        assert continued.integer == 1
        assert called_off.error == "it was resumed before it was paused"
        assert call_node(rig, node, ContinueGeneration()).integer == 0
        rig.run()
        assert asked.tokens == known.greedy(PROMPTS[1], MANY)


@pytest.mark.parametrize("mode, status", [("retract", 0), ("abort", StatusCode.CANCELLED.value[0])])
def test_prompts_of_pooling_calls_are_paused_too(known, mode, status):
    calling = {"prompts": [range(130)], "pooling": PoolingParams(PoolingMode.MEAN)}
    with PairRig(known.loaded, chunked_prefill_tokens=16) as rig:
        (node,) = rig.prefill
        call(node, 1, **calling)
        rig.until(lambda: len(node.router.pooled) == 1, "it is answered")
        rig.flush(node)
        call(node, 1, **calling)
        rig.until(lambda: node.queue("chunked"), "a prompt between its chunks")
        paused(rig, mode, node)
        assert node.pages("request") == 0 and computes_nothing(rig)
        resumed(rig, node)
        rig.until(lambda: len(node.router.pooled) == 2, "it is answered again")
        whole, again = node.router.pooled
        assert again.error_code == status
        assert again.vectors == (whole.vectors if not status else ())


def test_a_migration_of_a_paused_request_fails_and_the_request_stays(known):
    with PairRig(known.loaded, decode=[Size(), Size()], migrates=True) as rig:
        asked = rig.ask(PROMPTS[1], 40)
        one_runs(rig)
        source, target = rig.decode
        successor = rig.move(asked, 0, 1)
        rig.until_granted(0)
        paused(rig, "retract", source)
        assert source.pages("request") == 0 or asked.ended
        resumed(rig, source)
        rig.run()
        assert (asked.reason is FinishReason.MOVED) == (successor.reason is FinishReason.LENGTH)
        if asked.reason is not FinishReason.MOVED:
            assert asked.tokens == known.greedy(PROMPTS[1], 40)
        paused(rig, "in_place", target)
        other = rig.ask(PROMPTS[2], 40)
        one_runs(rig)
        refused = rig.move(other, 0, 1)
        rig.run(refused, other)
        assert refused.ended.error == "not migrated: this node is paused"
        assert other.tokens == known.greedy(PROMPTS[2], 40)
        resumed(rig, target)
