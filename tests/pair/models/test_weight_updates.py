"""New weights on a prefill and a decode node. KV of the previous weights is never used again."""

import pytest

from common.pausing import PauseMode
from engine.batch.request import FinishReason
from kvtransfer.messages import OpenHandoff
from node.messages import ContinueGeneration, PauseGeneration, PrepareWeights, PutWeights
from tests.pair.operations.test_pauses import call_node, one_runs, resumed
from tests.pair.rig import Loaded, PairRig, Size
from tests.support.models.checkpoints import greedy_tokens, make_checkpoint, reference_model

PROMPT = list(range(5, 75))
MANY = 30  # tokens


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("old", "new")):
        make_checkpoint(root / name, seed=seed)
    return root


@pytest.fixture(scope="module")
def greedy(shelf):
    models = {name: reference_model(shelf / name) for name in ("old", "new")}

    def tokens(name, prompt, count):
        (found,) = greedy_tokens(models[name], [prompt], count)
        return found

    return tokens


@pytest.fixture
def rig(shelf):
    """Yield a rig of two engines with models of their own. The second producer stays unchanged."""
    loaded = Loaded.from_directory(shelf / "old")
    size = Size(weights_dir=shelf)
    with PairRig(loaded, prefill=[size], decode=[size], own_models=True) as rig:
        yield rig


def prepared(rig, node, path="new") -> bytes:
    answer = call_node(rig, node, PrepareWeights(path))
    assert not answer.error
    return answer.weights


def put(rig, node, path="new") -> bytes:
    """Update the weights of the node, which is paused."""
    weights = prepared(rig, node, path)
    answer = call_node(rig, node, PutWeights(weights))
    assert not answer.error and node.control.weights == weights
    return weights


def pause(rig, *nodes, mode="retract"):
    for node in nodes or (*rig.decode, *rig.prefill):
        assert not call_node(rig, node, PauseGeneration(PauseMode(mode))).error


def updated(rig, *nodes, path="new"):
    """Update the weights of nodes, by default of all, during a pause."""
    pause(rig, *nodes)
    for node in nodes or rig.nodes:
        put(rig, node, path)
        assert node.pages("cache") == 0
    resumed(rig, *nodes)


def ask(rig, *, count=8):
    asked = rig.ask(PROMPT, count)
    rig.run(asked)
    return asked


def test_kv_of_the_previous_weights_is_not_found(rig, greedy):
    assert ask(rig).tokens == greedy("old", PROMPT, 8)
    assert ask(rig).cached_tokens > 0
    updated(rig)
    again = ask(rig)
    assert (again.tokens, again.cached_tokens) == (greedy("new", PROMPT, 8), 0)
    assert ask(rig).cached_tokens > 0
    updated(rig, path="old")
    back = ask(rig)
    assert (back.tokens, back.cached_tokens) == (greedy("old", PROMPT, 8), 0)


def test_a_running_request_continues_from_its_tokens_with_the_new_weights(rig, greedy):
    asked = rig.ask(PROMPT, MANY)
    one_runs(rig)
    pause(rig)
    late = rig.ask(PROMPT, 8)
    num_old = len(asked.tokens)
    assert num_old < MANY
    for node in rig.nodes:
        put(rig, node)
    resumed(rig)
    rig.run()
    assert asked.tokens[:num_old] == greedy("old", PROMPT, MANY)[:num_old]
    rest = greedy("new", [*PROMPT, *asked.tokens[:num_old]], MANY - num_old)
    assert asked.tokens[num_old:] == rest
    assert late.tokens == greedy("new", PROMPT, 8)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_nodes_with_different_weights_do_not_pair_until_they_have_the_same(rig, greedy, first):
    (producer,), (consumer,) = rig.prefill, rig.decode
    assert ask(rig).tokens == greedy("old", PROMPT, 8)
    early, late = (producer, consumer) if first == "prefill" else (consumer, producer)
    updated(rig, early)
    rig.until(lambda: not consumer.control.sources.links, "the pair has ended")
    rig.flush(*rig.nodes)
    alone, handed = ask(rig), producer.count("handoffs_completed")
    name = "new" if early is consumer else "old"
    assert (alone.tokens, alone.cached_tokens) == (greedy(name, PROMPT, 8), 0)
    updated(rig, late)
    rig.until_paired()
    rig.flush(*rig.nodes)
    assert ask(rig).tokens == greedy("new", PROMPT, 8)
    assert (producer.count("handoffs_completed"), producer.count("refused/weights")) == (
        handed + 1,
        0,
    )
    opens = rig.wires.said(OpenHandoff)
    assert len({each.weights for each in opens}) == 2


@pytest.mark.parametrize("fresh", ["prefill", "decode"])
def test_updated_weights_equal_those_of_a_node_that_was_started_with_them(shelf, greedy, fresh):
    same = [Size(weights_dir=shelf)]
    sizes = {"prefill": same, "decode": same}
    sizes[fresh] = [Size(weights_dir=shelf, started_with=shelf / "new")]
    loaded = Loaded.from_directory(shelf / "old")
    with PairRig(loaded, **sizes, own_models=True, paired=False) as rig:
        (producer,), (consumer,) = rig.prefill, rig.decode
        changed, started = (consumer, producer) if fresh == "prefill" else (producer, consumer)
        updated(rig, changed)
        assert changed.control.weights == started.control.weights
        rig.until_paired()
        assert ask(rig).tokens == greedy("new", PROMPT, 8)
        assert producer.count("handoffs_completed") == 1
        updated(rig, changed, path="old")
        rig.until(lambda: not consumer.control.sources.links, "the pair has ended")


def test_weights_are_updated_only_during_a_pause_and_the_pause_lasts_as_long(rig, greedy):
    (node,) = rig.decode
    weights = prepared(rig, node)
    assert call_node(rig, node, PutWeights(weights)).error == "this node is not paused"
    asked = rig.ask(PROMPT, MANY)
    one_runs(rig)
    pause(rig, node, mode="in_place")
    before = len(node.router.answers)
    rig.command(node, PutWeights(weights))
    rig.command(node, ContinueGeneration())
    rig.until(lambda: len(node.router.answers) == before + 2, "two answers")
    refused, changed = node.router.answers[before:]
    assert refused.error == "its weights are being changed" and node.role.scheduler.paused
    assert not changed.error and node.control.weights == weights
    resumed(rig, node)
    rig.run()
    assert asked.reason is FinishReason.LENGTH
    tail = greedy("new", [*PROMPT, *asked.tokens[:-1]], 1)
    assert asked.tokens[-1:] == tail


def test_a_node_with_incomplete_weights_does_not_continue(rig, shelf):
    (node,) = rig.decode
    make_checkpoint(shelf / "vanishing", seed=5)
    weights = prepared(rig, node, "vanishing")
    (shelf / "vanishing" / "model.safetensors").unlink()
    pause(rig, node)
    assert "incomplete" in call_node(rig, node, PutWeights(weights)).error
    assert call_node(rig, node, ContinueGeneration()).error == "its weights are incomplete"
    put(rig, node, "old")
    resumed(rig, node)


def test_files_of_other_weights_are_not_used(shelf, greedy, tmp_path):
    """Not even those of the first weights after these are restored: everything cached is gone."""
    loaded = Loaded.from_directory(shelf / "old")
    size = Size(num_pages=12, tier_pages=40, weights_dir=shelf, disk_dir=tmp_path, swap_pages=0)
    with PairRig(loaded, prefill=(), decode=[size], own_models=True) as rig:
        (node,) = rig.decode
        assert ask(rig).tokens == greedy("old", PROMPT, 8)
        rig.until(lambda: len(node.engine.tiers.files.cache.index) >= 4, "pages are in files")
        for weights in ("new", "old", "new"):
            pause(rig)
            put(rig, node, weights)
            assert not len(node.engine.tiers.files.cache.index)
            resumed(rig)
            again = ask(rig)
            assert (again.tokens, again.cached_tokens) == (greedy(weights, PROMPT, 8), 0)
            assert ask(rig).cached_tokens > 0
    with PairRig(loaded, prefill=(), decode=[size], own_models=True) as rig:
        asked = ask(rig)
        assert asked.tokens == greedy("old", PROMPT, 8)
        assert not rig.decode[0].engine.tiers.host_tokens
