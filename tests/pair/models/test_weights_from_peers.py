"""Weights that a node reads from another node, over the path of KV. They are applied as a whole
or not at all."""

import shutil
import threading
from contextlib import contextmanager

import pytest

from common.config import PrefixSharingConfig
from engine.models.one_file import ReceivedFile
from kvtransfer.messages import OpenHandoff, PagesReleased, ReadsDone, Weights
from node.messages import (
    ContinueGeneration,
    PrepareWeights,
    PutWeights,
    ReleaseMemory,
    ResumeMemory,
    TakeWeights,
)
from node.sharing import weight_reads
from tests.pair.models.test_weight_updates import MANY, PROMPT, ask, greedy, pause, put, shelf
from tests.pair.operations.test_pauses import call_node, one_runs, resumed
from tests.pair.rig import Loaded, PairRig, Size

__all__ = ["greedy", "shelf"]  # fixtures

CHANGING = "its weights are being changed"


class Pair:
    """Two nodes that may pair. One has been started with the new weights."""

    def __init__(self, rig, lender, taker):
        self.rig, self.lender, self.taker = rig, lender, taker
        self.num_answers = 0

    def fetch(self, *, of=None, weights=None):
        """Ask the reading node to fetch the weights."""
        lender = of or self.lender
        command = TakeWeights(weights or lender.control.weights, lender.front.address)
        self.rig.command(self.taker, command)
        self.num_answers = len(self.taker.router.answers)

    def answer(self):
        """Return the reading node's response to the last request."""
        answers, before = self.taker.router.answers, self.num_answers
        self.rig.until(lambda: len(answers) > before, "the answer")
        return answers[-1]

    def take(self, **asked):
        self.fetch(**asked)
        return self.answer()

    @property
    def num_opened(self):
        opened = self.rig.wires.said(OpenHandoff)
        return sum(isinstance(each.source, Weights) for each in opened)

    def until_halfway(self):
        """Run until some pieces have arrived. No more arrive before `release` of Done."""
        self.rig.wires.hold_back(ReadsDone)
        self.rig.until(lambda: self.num_opened, "some are asked for")
        self.rig.settle()

    def still_has(self, answers):
        """Check that the node still computes with its previous weights."""
        assert not self.taker.role.busy
        resumed(self.rig, self.taker)
        asked = self.rig.ask(PROMPT, 8)
        self.rig.run(asked)
        assert (asked.tokens, asked.cached_tokens) == (answers("old", PROMPT, 8), 0)


def pair_of(shelf, lender="prefill", new="new"):
    size = Size(weights_dir=shelf)
    fresh = Size(weights_dir=shelf, started_with=shelf / new)
    sizes = {"prefill": [size], "decode": [size], lender: [fresh]}
    loaded = Loaded.from_directory(shelf / "old")
    return PairRig(
        loaded, **sizes, own_models=True, paired=False, prefix_sharing=PrefixSharingConfig()
    )


@pytest.fixture
def pair(shelf):
    with pair_of(shelf) as rig:
        yield Pair(rig, rig.prefill[0], rig.decode[0])


@contextmanager
def impatient():
    """Let a reader soon abandon a fetch that makes no progress. For tests of impossible fetches,
    not of slow ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_reads, "STILL_S", 0.5)
        yield


@pytest.mark.parametrize("lender", ["prefill", "decode"])
def test_a_node_with_fetched_weights_uses_them_and_finds_no_old_kv(shelf, greedy, lender):
    with pair_of(shelf, lender) as rig:
        nodes = {"prefill": rig.prefill[0], "decode": rig.decode[0]}
        has, takes = nodes.pop(lender), *nodes.values()
        pair = Pair(rig, has, takes)
        before = ask(rig)
        assert before.tokens == greedy("old" if takes in rig.decode else "new", PROMPT, 8)
        pause(rig, takes)
        answer = pair.take()
        assert not answer.error and takes.control.weights == answer.weights == has.control.weights
        assert takes.pages("cache") == 0 and pair.num_opened > 2
        resumed(rig, takes)
        rig.until_paired()
        rig.flush(rig.decode[0])
        asked = ask(rig)
        assert asked.tokens == greedy("new", PROMPT, 8)
        assert rig.prefill[0].count("handoffs_completed") == 1
        assert (asked.cached_tokens > 0) == (has in rig.prefill and before.cached_tokens > 0)


def test_running_requests_continue_and_new_ones_start_with_the_fetched_weights(pair, greedy):
    rig = pair.rig
    asked = rig.ask(PROMPT, MANY)
    one_runs(rig)
    pause(rig, pair.taker)
    num_old = len(asked.tokens)
    pair.fetch()
    pair.until_halfway()
    late = rig.ask(PROMPT, 8)
    rig.wires.release()
    assert not pair.answer().error
    resumed(rig, pair.taker)
    rig.run()
    assert asked.tokens[:num_old] == greedy("old", PROMPT, MANY)[:num_old]
    rest = greedy("new", [*PROMPT, *asked.tokens[:num_old]], MANY - num_old)
    assert asked.tokens[num_old:] == rest
    assert late.tokens == greedy("new", PROMPT, 8)


def test_the_source_continues_to_serve_and_a_lost_stream_repeats_only_a_part(pair, greedy):
    rig = pair.rig
    pause(rig, pair.taker)
    rig.wires.hold_back(PagesReleased)
    pair.fetch()
    rig.until(lambda: pair.num_opened, "some are asked for")
    refused = call_node(rig, pair.taker, ContinueGeneration())
    assert refused.error == CHANGING
    pair.num_answers += 1
    rig.wires.cut(pair.lender.front, pair.taker.front)
    rig.wires.release()
    rig.wires.heal()
    assert not pair.answer().error
    resumed(rig, pair.taker)
    rig.run(asked := rig.ask(PROMPT, 8))
    assert asked.tokens == greedy("new", PROMPT, 8)


def test_no_weights_are_applied_if_the_source_fails_halfway(pair, greedy):
    pause(pair.rig, pair.taker)
    pair.fetch()
    pair.until_halfway()
    pair.rig.wires.cut(pair.lender.front, pair.taker.front)
    pair.rig.wires.release()
    with impatient():
        error = pair.answer().error
    # Depends on which is detected first: the end of the stream or the lack of progress.
    assert "it does not pair with this node" in error or "it sends no weights" in error
    pair.still_has(greedy)


@pytest.mark.parametrize(
    "spoil, why",
    [
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes()[:-8] + bytes(8)),
            "the content differs from the expected hash",
            id="changed",
        ),
        pytest.param(
            lambda path: path.write_bytes(path.read_bytes()[:-8]), "cannot be read", id="cut-off"
        ),
        pytest.param(lambda path: path.unlink(), "cannot be read again", id="gone"),
    ],
)
def test_weights_other_than_requested_are_not_applied(shelf, greedy, tmp_path, spoil, why):
    for name in ("old", "new"):
        shutil.copytree(shelf / name, tmp_path / name)
    with pair_of(tmp_path) as rig:
        pair = Pair(rig, rig.prefill[0], rig.decode[0])
        pause(rig, pair.taker)
        spoil(tmp_path / "new" / "model.safetensors")
        answer = pair.take()
        assert why in answer.error and pair.lender.front.address in answer.error
        pair.still_has(greedy)


def test_a_node_with_other_weights_serves_none_and_a_running_node_fetches_none(pair, greedy):
    assert pair.take().error == "this node is not paused"
    pause(pair.rig, pair.taker)
    # there is nothing to fetch
    assert pair.take(of=pair.taker).weights == pair.taker.control.weights
    with impatient():
        assert "it does not pair with this node" in pair.take(weights=b"o" * 16).error
    pair.still_has(greedy)


def test_fetched_weights_are_served_to_other_nodes(shelf, greedy):
    """The reader was started with other weights, and the node with the files has other weights
    by then."""
    size = Size(weights_dir=shelf)
    first = Size(weights_dir=shelf, started_with=shelf / "new")
    loaded = Loaded.from_directory(shelf / "old")
    nodes = {"prefill": [first, size], "decode": [size]}
    with PairRig(
        loaded, **nodes, own_models=True, paired=False, prefix_sharing=PrefixSharingConfig()
    ) as rig:
        (first, last), (middle,) = rig.prefill, rig.decode
        pause(rig)
        taken = Pair(rig, first, middle).take()
        assert not taken.error
        put(rig, first, "old")
        assert middle.control.weights == taken.weights != first.control.weights
        answer = Pair(rig, middle, last).take()
        assert not answer.error and answer.weights == last.control.weights == taken.weights
        put(rig, first, "new")
        resumed(rig)
        rig.until_paired()
        for producer in ([0], [1]):
            rig.flush(middle)
            rig.run(asked := rig.ask(PROMPT, 8, prefill=producer))
            assert asked.tokens == greedy("new", PROMPT, 8)


def test_fetched_weights_are_kept_until_the_next_update(pair, greedy):
    """So memory never has more copies than with weights that replace them."""
    rig = pair.rig
    pause(rig)
    assert not pair.take().error
    assert not call_node(rig, pair.taker, ReleaseMemory(("weights",))).error
    assert not call_node(rig, pair.taker, ResumeMemory(("weights",))).error
    with impatient():
        assert "it does not pair with this node" in pair.take(weights=b"o" * 16).error
    refused = call_node(rig, pair.taker, ReleaseMemory(("weights",))).error
    assert "cannot be read again" in refused
    put(rig, pair.lender, "old")
    answer = Pair(rig, pair.taker, pair.lender).take()
    assert "cannot be read again" in answer.error
    put(rig, pair.lender, "new")
    resumed(rig)
    rig.until_paired()
    assert ask(rig).tokens == greedy("new", PROMPT, 8)


def test_a_reader_of_fetched_weights_keeps_their_file_open(tmp_path):
    """Another file could get its descriptor. Seen failing if `close` does not wait."""
    received = ReceivedFile(tmp_path)
    path = received.directory / "model.safetensors"
    received.write(0, memoryview(b"weights"))
    closing = threading.Thread(target=received.close)
    with received:
        closing.start()
        closing.join(0.05)  # it would complete if it could
        assert path.read_bytes() == b"weights"
    closing.join(60.0)
    assert not closing.is_alive() and not path.exists()
    with pytest.raises(FileNotFoundError, match="no longer stored"), received:
        pass


def test_weights_that_were_applied_in_part_are_fetched_again(pair, shelf, greedy):
    """A node with a part of the weights reports it and computes nothing. Another node serves the
    weights."""
    rig = pair.rig
    shutil.copytree(shelf / "new", shelf / "vanishing", dirs_exist_ok=True)
    weights = call_node(rig, pair.taker, PrepareWeights("vanishing")).weights
    (shelf / "vanishing" / "model.safetensors").unlink()
    pause(rig, pair.taker)
    assert "incomplete" in call_node(rig, pair.taker, PutWeights(weights)).error
    assert call_node(rig, pair.taker, ContinueGeneration()).error == "its weights are incomplete"
    assert not pair.take().error
    resumed(rig, pair.taker)
    assert ask(rig).tokens == greedy("new", PROMPT, 8)
