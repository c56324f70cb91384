"""Sleep mode of nodes that remain paired: memory is released and restored, and no response uses
KV that was released."""

import shutil
from contextlib import contextmanager

import pytest

from common.pausing import PauseMode
from kvtransfer.messages import OpenHandoff
from node.messages import (
    ContinueGeneration,
    PauseGeneration,
    PutWeights,
    ReleaseMemory,
    ResumeMemory,
)
from tests.pair.models.test_weight_updates import (
    MANY,
    PROMPT,
    ask,
    greedy,
    pause,
    prepared,
    rig,
    shelf,
)
from tests.pair.operations.test_pauses import call_node, computes_nothing, one_runs, resumed

__all__ = ["greedy", "rig", "shelf"]  # fixtures

ALL = ("kv_cache", "weights")


def released(rig, *nodes, tags=ALL):
    for node in nodes or (*rig.decode, *rig.prefill):
        assert not call_node(rig, node, ReleaseMemory(tags)).error


def taken_again(rig, *nodes, tags=ALL):
    for node in nodes or rig.nodes:
        assert not call_node(rig, node, ResumeMemory(tags)).error


@contextmanager
def asleep(rig, greedy, tags):
    """Release memory of paused nodes while inside the context. Check that they then compute
    nothing, and that their responses are right afterwards."""
    assert ask(rig).tokens == greedy("old", PROMPT, 8)
    running = rig.ask(PROMPT, MANY)
    one_runs(rig)
    refused = call_node(rig, rig.decode[0], ReleaseMemory(tags)).error
    assert refused == "this node has requests: pause it first"
    pause(rig)
    released(rig, tags=tags)
    for node in rig.nodes:
        assert "memory is released" in call_node(rig, node, ContinueGeneration()).error
    late = rig.ask(PROMPT, 8)
    assert computes_nothing(rig) and not late.ended
    yield
    taken_again(rig, tags=tags)
    assert computes_nothing(rig)
    rig.until_paired()
    resumed(rig)
    rig.run()
    assert running.tokens == greedy("old", PROMPT, MANY)
    assert late.tokens == greedy("old", PROMPT, 8)
    rig.flush(*rig.nodes)
    handed = len(rig.wires.said(OpenHandoff))
    again = ask(rig)
    assert (again.tokens, again.cached_tokens) == (greedy("old", PROMPT, 8), 0)
    assert len(rig.wires.said(OpenHandoff)) == handed + 1


@pytest.mark.parametrize("tags", [("kv_cache",), ("weights",), ALL])
def test_paused_nodes_release_memory_and_respond_correctly_afterwards(rig, greedy, tags):
    pairs = rig.wires.num_begun
    with asleep(rig, greedy, tags):
        for node in rig.nodes:
            assert node.pages("free") == node.engine.pages.num_pages
            assert node.engine.pool.tensor.any() == ("kv_cache" not in tags)
    assert rig.wires.num_begun == pairs


def test_idle_nodes_sleep_without_a_pause_and_resume_by_themselves(rig, greedy):
    assert ask(rig).tokens == greedy("old", PROMPT, 8)
    rig.until_free()
    released(rig)
    late = rig.ask(PROMPT, 8)
    assert computes_nothing(rig) and not late.ended
    taken_again(rig, tags=("kv_cache",))
    assert computes_nothing(rig) and not late.ended
    taken_again(rig, tags=("weights",))
    rig.run()
    assert (late.tokens, late.cached_tokens) == (greedy("old", PROMPT, 8), 0)


def test_a_node_paused_during_sleep_remains_paused(rig):
    (node,) = rig.decode
    released(rig, node)
    assert not call_node(rig, node, PauseGeneration(PauseMode("retract"))).fresh
    taken_again(rig, node)
    assert node.role.scheduler.paused
    resumed(rig, node)


def test_an_update_after_sleep_writes_into_the_restored_weights(rig, greedy):
    pause(rig)
    released(rig)
    for node in rig.nodes:
        weights = prepared(rig, node)
        assert "memory is released" in call_node(rig, node, PutWeights(weights)).error
        taken_again(rig, node, tags=("weights",))
        assert not call_node(rig, node, PutWeights(weights)).error
        released(rig, node, tags=("weights",))
        taken_again(rig, node)
        assert node.control.weights == weights
    resumed(rig)
    assert ask(rig).tokens == greedy("new", PROMPT, 8)


def test_a_node_whose_weights_cannot_be_loaded_remains_asleep(rig, shelf, greedy):
    (node,) = rig.decode
    stored, aside = shelf / "old" / "model.safetensors", shelf / "aside"
    released(rig, node)
    shutil.move(stored, aside)
    try:
        assert "cannot be read again" in call_node(rig, node, ResumeMemory(ALL)).error
        shutil.copy(shelf / "new" / "model.safetensors", stored)
        assert "the files have changed" in call_node(rig, node, ResumeMemory(ALL)).error
        assert node.role.scheduler.paused
    finally:
        shutil.move(aside, stored)
    taken_again(rig, node)
    assert ask(rig).tokens == greedy("old", PROMPT, 8)
