"""The canary checks a prefill node when it is paired. A node that computes wrong KV serves no
request."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from decode_node import canary
from tests.pair.conftest import Known
from tests.pair.operations.test_pauses import computes_nothing, paused, resumed
from tests.pair.rig import PATIENT, Node, PairRig, Size

CANARY = PATIENT.model_copy(update={"canary_tokens": 6})
PROMPT = tuple(range(5, 45))


@contextmanager
def _spoiled(node: Node) -> Iterator[None]:
    """Let the node publish wrong pages with correct checksums."""
    finish = node.role.finish

    def spoil(*step: object) -> None:
        node.engine.pool.tensor.zero_()
        finish(*step)

    node.role.finish = spoil
    yield
    node.role.finish = finish


def _pair_again(rig: PairRig, producer: int = 0) -> None:
    prefill, decode = rig.prefill[producer], rig.decode[0]
    rig.wires.cut(prefill.front, decode.front)
    rig.until(lambda: prefill.front.address not in decode.control.sources.links, "the pair is over")
    rig.wires.heal()


def test_a_node_with_correct_kv_is_used(known: Known) -> None:
    with PairRig(known.loaded, transfer=CANARY) as rig:
        decode = rig.decode[0]
        asked = rig.serve(PROMPT)
        assert asked.tokens == known.greedy(PROMPT, 8)
        assert decode.count("canaries/passed") == 1 and decode.count("canaries/failed") == 0
        assert decode.count("handoffs_completed") == 2 and decode.count("local_prefills") == 0


def test_a_node_with_wrong_kv_is_used_only_after_a_correct_canary(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "AGAIN_S", 0.5)
    with PairRig(known.loaded, prefill=[Size(), Size()], transfer=CANARY) as rig:
        decode, wrong = rig.decode[0], rig.prefill[0]
        with _spoiled(wrong):
            _pair_again(rig)
            rig.until(lambda: decode.count("canaries/failed"), "it is found")
            asked = [rig.ask(PROMPT, prefill=producers) for producers in ([0, 1], [0])]
            rig.run()
            for each in asked:
                assert each.tokens == known.greedy(PROMPT, 8)
            assert list(decode.control.sources.links) == [rig.prefill[1].front.address]
            assert decode.count("local_prefills/no_prefill_node") == 1
            assert decode.count("canaries/passed") == 2

        rig.until_paired()
        assert decode.count("canaries/passed") == 3


def test_a_node_with_wrong_kv_stays_out_while_no_canary_can_run(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "AGAIN_S", 0.1)
    with PairRig(known.loaded, prefill=[Size(), Size()], transfer=CANARY) as rig:
        decode, wrong = rig.decode[0], rig.prefill[0]
        with _spoiled(wrong):
            _pair_again(rig)
            rig.until(lambda: decode.count("canaries/failed"), "it is found")
        with monkeypatch.context() as no_time:
            no_time.setattr(canary, "BUDGET_S", 1e-9)
            rig.until(lambda: decode.count("canaries/unknown") >= 2, "it is tried twice")
            assert list(decode.control.sources.links) == [rig.prefill[1].front.address]
        rig.until_paired()
        assert decode.count("canaries/passed") == 3


def _pair_again_while_busy(rig: PairRig) -> None:
    """Pair again. The node is used before its canary has run."""
    decode = rig.decode[0]
    paused(rig, "retract", decode)
    _pair_again(rig)
    rig.until_paired()
    assert decode.count("canaries/unknown") == 1


def test_a_node_paired_while_requests_wait_is_checked_once_afterwards(known: Known) -> None:
    with PairRig(known.loaded, transfer=CANARY) as rig:
        decode = rig.decode[0]
        _pair_again_while_busy(rig)
        assert decode.count("canaries/passed") == 1
        resumed(rig, decode)
        rig.until(lambda: decode.count("canaries/passed") == 2, "it is tried")
        assert decode.control.sources.links
        rig.until_free()
        handed = decode.count("handoffs_completed")
        assert computes_nothing(rig) and decode.count("handoffs_completed") == handed


def test_a_node_in_use_is_removed_when_its_canary_fails(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "AGAIN_S", 0.5)
    with PairRig(known.loaded, prefill=[Size(), Size()], transfer=CANARY) as rig:
        decode, wrong = rig.decode[0], rig.prefill[0]
        with _spoiled(wrong):
            _pair_again_while_busy(rig)
            resumed(rig, decode)
            rig.until(lambda: decode.count("canaries/failed"), "it is found")
            assert list(decode.control.sources.links) == [rig.prefill[1].front.address]
            asked = rig.serve(PROMPT, prefill=[0, 1])
            assert asked.tokens == known.greedy(PROMPT, 8)
        rig.until_paired()
        assert decode.count("canaries/passed") == 3


def test_a_node_in_use_that_fails_during_its_canary_is_removed(known: Known) -> None:
    with PairRig(known.loaded, transfer=CANARY) as rig:
        decode, gone = rig.decode[0], rig.prefill[0]
        _pair_again_while_busy(rig)
        resumed(rig, decode)
        rig.until(lambda: decode.queue("prealloc") or decode.queue("transfer"), "it is on trial")
        rig.wires.cut(gone.front, decode.front)
        rig.until(lambda: not decode.control.sources.links, "it is gone")
        rig.wires.heal()
        rig.until_paired()
        assert decode.count("canaries/passed") == 2


def test_a_node_that_fails_during_its_canary_is_removed(known: Known) -> None:
    with PairRig(known.loaded, prefill=[Size(), Size()], transfer=CANARY) as rig:
        decode, gone = rig.decode[0], rig.prefill[0]
        _pair_again(rig)
        rig.until(lambda: decode.queue("prealloc") or decode.queue("transfer"), "it is on trial")
        rig.wires.cut(gone.front, decode.front)
        rig.until_free()
        asked = rig.serve(PROMPT, prefill=[0, 1])
        assert asked.tokens == known.greedy(PROMPT, 8)
        assert list(decode.control.sources.links) == [rig.prefill[1].front.address]
        assert decode.count("canaries/passed") == 2 and decode.count("canaries/unknown") == 0
        rig.wires.heal()
        rig.until_paired()
        assert decode.count("canaries/passed") == 3
