"""Conditions for two nodes to pair, and the sentences for nodes that may not."""

from typing import Any

import msgspec
import pytest

from common.config import CacheConfig, EngineConfig, Quantize
from common.errors import LayoutMismatch
from common.limits import MAX_RANKS
from engine.build import build
from engine.models.linear import onednn
from kvtransfer.backends.base import PoolRegion
from kvtransfer.pairing import PROTOCOL_VERSION, DataPath, PairHello, compare, lasts
from kvtransfer.pairs.dialer import MAX_PRODUCERS, REMEMBERED_S, NamedProducers
from tests.support.models.checkpoints import make_checkpoint

OURS = PairHello(
    instance=1,
    protocol_version=PROTOCOL_VERSION,
    fingerprint={"model": "abc", "page_size": "16"},
    paths=(),
    regions=(PoolRegion(4096, 1 << 16, 10),),
    address="here:1",
)


RANKS = {"tp": 2, "regions": (PoolRegion(4096, 1 << 15, 10), PoolRegion(1 << 30, 1 << 15, 10))}


def theirs(**changes: Any) -> PairHello:
    return msgspec.structs.replace(OURS, **{"instance": 2, "address": "there:1", **changes})


def test_nodes_of_one_model_and_layout_pair_with_any_pools_and_addresses():
    compare(OURS, theirs(regions=(PoolRegion(1 << 30, 1 << 16, 99),)))


def test_nodes_with_different_numbers_of_ranks_pair():
    peer = theirs(**RANKS, state_pages=1)
    ours = msgspec.structs.replace(OURS, state_pages=3)
    compare(ours, peer)
    compare(peer, ours)
    assert not ours.same_layout(peer)


def test_an_older_node_is_rejected_because_of_its_version_alone():
    with pytest.raises(LayoutMismatch) as refusal:
        compare(OURS, theirs(protocol_version=9, tp=0, pp=0))
    text = f"there:1 cannot pair: protocol_version is {PROTOCOL_VERSION} here and 9 there."
    assert str(refusal.value) == text


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"instance": 1}, "It is this node itself."),
        ({"protocol_version": 99}, f"protocol_version is {PROTOCOL_VERSION} here and 99 there."),
        (
            {"fingerprint": {"model": "xyz", "page_size": "16"}},
            "model is 'abc' here and 'xyz' there.",
        ),
        ({"fingerprint": {"page_size": "16"}}, "model is 'abc' here and unset there."),
        ({"fingerprint": {**OURS.fingerprint, "extra": "1"}}, "extra is unset here and '1' there."),
        ({"state_pages": 2}, "state_pages is 0 here and 2 there."),
        ({**RANKS, "state_pages": 2}, "state_pages is 0 here and 2 there."),
        ({"pp": 2}, "tp is 1 and pp is 2, with pages of 1 ranks"),
        ({"regions": OURS.regions * 2}, "tp is 1 and pp is 1, with pages of 2 ranks"),
        ({"tp": 0}, "tp is 0 and pp is 1, with pages of 1 ranks"),
        ({"tp": 2**32 - 1, "pp": 2**32 - 1}, f"A node has 1 to {MAX_RANKS} ranks."),
        (
            {"tp": MAX_RANKS + 1, "regions": OURS.regions * (MAX_RANKS + 1)},
            f"A node has 1 to {MAX_RANKS} ranks.",
        ),
        (
            {"tp": 2, "regions": (*OURS.regions, PoolRegion(4096, 1 << 16, 11))},
            "its ranks have different numbers of pages",
        ),
        ({"state_pages": 11}, "a state of 11 pages exceeds its pool"),
        ({**RANKS, "paths": (DataPath("tcp", b"", 2),)}, "a rank outside [0, 2)"),
        ({**RANKS, "paths": (DataPath("tcp", b"", -1),)}, "a rank outside [0, 2)"),
        (
            {"regions": (PoolRegion(4096, 4096, 10),)},
            "page_bytes of rank 0 is 65536 here and 4096 there.",
        ),
    ],
)
def test_a_difference_is_reported_in_a_sentence(changes, sentence):
    with pytest.raises(LayoutMismatch) as refusal:
        compare(OURS, theirs(**changes))
    assert sentence in str(refusal.value)


def test_nodes_on_different_processors_are_reported_with_the_flag_to_set():
    # Seen failing with all consequences of the dtype, and no flag, in the sentence.
    ours, other = ({"dtype": d, "kv_token_bytes": b} for d, b in (("float32", "8"), ("half", "4")))
    peer = theirs(fingerprint=other, regions=(PoolRegion(4096, 4096, 10),))
    with pytest.raises(LayoutMismatch) as refusal:
        compare(msgspec.structs.replace(OURS, fingerprint=ours), peer)
    assert str(refusal.value) == (
        "there:1 cannot pair: dtype is 'float32' here and 'half' there. "
        "Start both with the same --dtype."
    )


def test_a_consequence_of_a_flag_is_reported_if_no_flag_explains_it():
    with pytest.raises(LayoutMismatch, match="kv_token_bytes is unset here"):
        compare(OURS, theirs(fingerprint={**OURS.fingerprint, "kv_token_bytes": "4"}))


def test_every_difference_is_reported():
    with pytest.raises(LayoutMismatch) as refusal:
        compare(OURS, theirs(fingerprint={"model": "x", "page_size": "32"}, protocol_version=99))
    text = str(refusal.value)
    assert text.startswith("there:1 cannot pair: ")
    assert all(f"{field} is" in text for field in ("model", "page_size", "protocol_version"))


def test_only_weights_may_become_equal_later():
    ours = OURS.with_weights(b"a" * 16)
    changed = theirs(fingerprint=OURS.with_weights(b"b" * 16).fingerprint)
    with pytest.raises(LayoutMismatch, match=f"weights is '{'61' * 16}' here and '{'62' * 16}'"):
        compare(ours, changed)
    assert not lasts(ours, changed)
    compare(ours.with_weights(b"b" * 16), changed)
    assert lasts(ours, theirs(fingerprint={**changed.fingerprint, "page_size": "32"}))
    assert lasts(ours, msgspec.structs.replace(changed, protocol_version=99))


@pytest.mark.skipif(not onednn.multiplies_int8(), reason="no int8 here")
def test_nodes_of_one_model_in_different_bits_do_not_pair(tmp_path):
    directory = make_checkpoint(tmp_path)

    def fingerprint(quantize: Quantize) -> dict[str, str]:
        config = EngineConfig(
            model=str(directory), device="cpu", quantize=quantize, cache=CacheConfig(num_pages=8)
        )
        engine = build(config)
        engine.backend.stream.close()
        return engine.fingerprint

    plain = msgspec.structs.replace(OURS, fingerprint=fingerprint("none"))
    compare(plain, theirs(fingerprint=fingerprint("none")))
    with pytest.raises(LayoutMismatch, match=r"quantize is 'none' here and 'int8' there\."):
        compare(plain, theirs(fingerprint=fingerprint("int8")))


class Dialled:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[frozenset[str]] = []
        self.producers = NamedProducers("me:1", self.calls.append, lambda: self.now)


def test_a_named_node_is_dialled_once_and_the_node_itself_never():
    dialled = Dialled()
    dialled.producers.name(["me:1"])
    assert dialled.calls == []
    dialled.producers.name(["a:1", "me:1"])
    dialled.producers.name(["a:1"])
    dialled.producers.name(["b:1", "a:1"])
    assert dialled.calls == [{"a:1"}, {"a:1", "b:1"}]


def test_a_node_named_long_ago_is_no_longer_dialled():
    dialled = Dialled()
    dialled.producers.name(["a:1", "b:1"])
    dialled.now = REMEMBERED_S
    dialled.producers.name(["b:1"])
    dialled.now += 1.0
    dialled.producers.name(["c:1"])
    assert dialled.calls[-1] == {"b:1", "c:1"}


def test_of_too_many_named_nodes_the_last_are_kept():
    dialled = Dialled()
    dialled.producers.name([f"{n}:1" for n in range(1, MAX_PRODUCERS + 1)])
    dialled.producers.name(["1:1", "new:1"])
    assert len(dialled.calls[-1]) == MAX_PRODUCERS
    assert {"1:1", "new:1"} <= dialled.calls[-1] and "2:1" not in dialled.calls[-1]


def test_listed_nodes_are_dialled_while_listed_in_addition_to_named_ones():
    dialled = Dialled()
    dialled.producers.listed(frozenset({"a:1", "b:1"}))
    dialled.producers.name(["b:1", "c:1"])
    assert dialled.calls == [{"a:1", "b:1"}, {"a:1", "b:1", "c:1"}]
    dialled.producers.listed(frozenset({"a:1"}))
    assert len(dialled.calls) == 2
    dialled.now = REMEMBERED_S + 1.0
    dialled.producers.listed(frozenset({"d:1"}))
    assert dialled.calls[-1] == {"d:1"}
