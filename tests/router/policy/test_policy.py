"""Properties of each policy, from outside."""

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import RouterConfig
from common.request import RequestSpec
from common.requests.images import Image
from common.requests.namespace import SHARED, Namespace, namespace_of, page_names
from router.policy.load import (
    DecodeChoice,
    LoadReservation,
    NodeBacklogs,
    NodeLoad,
    PlacementDecision,
    PlacementKey,
    PrefillChoice,
)
from router.policy.policies import (
    MAX_MORE_IMAGE_TOKENS,
    NAMES,
    NEAR_TOKENS,
    RoutingPolicy,
    encode_nodes,
    make_policy,
)
from router.policy.prefix_index import PrefixIndex
from tests.support.fake_clock import FakeClock
from tests.support.specs import make_spec

PAGE_SIZE = 16


class Rig:
    """A policy, its inputs, and nodes with equally good links."""

    def __init__(self, name: str, num_prefill: int = 4, num_decode: int = 2) -> None:
        self.load, self.index, self.clock = NodeLoad(), PrefixIndex(), FakeClock()
        self.backlogs = NodeBacklogs(self.load, self.clock)
        self.policy = make_policy(name, self.load, self.backlogs, self.index, random.Random(7))
        self.prefill = [f"p{number}" for number in range(num_prefill)]
        self.choices = [choice(f"d{number}", *self.prefill) for number in range(num_decode)]

    def pick(
        self, tokens: list[int], session: str = "", namespace: Namespace = SHARED
    ) -> PlacementDecision:
        return self.policy.pick(PlacementKey(tokens, session, namespace), self.choices)

    def place(self, tokens: list[int], session: str = "") -> PlacementDecision:
        """Pick and charge. The request never ends."""
        placement = self.pick(tokens, session)
        self.load.charge(placement, len(tokens))
        return placement

    def store(self, address: str, tokens: list[int]) -> None:
        """Let the node report that it has cached this prompt."""
        pages = page_names(tokens, PAGE_SIZE)
        self.index.changed(address, PAGE_SIZE, cleared=False, stored=pages)


def choice(address: str, *prefill: str, **fields: int) -> DecodeChoice:
    return DecodeChoice(address, tuple(map(PrefillChoice, prefill)), **fields)


def linked(address: str, *links: tuple[str, float]) -> DecodeChoice:
    prefill = tuple(PrefillChoice(f"p{i}", *link) for i, link in enumerate(links))
    return DecodeChoice(address, prefill, pages_total=1000, pages_free=1000)


_prefill = st.lists(
    st.builds(
        PrefillChoice,
        st.sampled_from([f"p{number}" for number in range(6)]),
        st.sampled_from(["", "tcp", "nvlink", "what"]),
        st.floats(),
    ),
    max_size=6,
    unique_by=lambda node: node.address,
).map(tuple)
_choices = st.lists(
    st.builds(
        DecodeChoice,
        st.sampled_from([f"d{number}" for number in range(6)]),
        _prefill,
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda choice: choice.address,
)
_prompts = st.builds(
    PlacementKey,
    st.lists(st.integers(0, 3), min_size=1, max_size=80),
    st.sampled_from(["", "a", "é"]),
)


@settings(max_examples=60)
@given(requests=st.lists(st.tuples(_prompts, _choices), min_size=1, max_size=8))
def test_every_pick_is_usable_for_any_reports_and_any_changes_of_nodes(requests):
    for name in NAMES:
        load = NodeLoad()
        policy: RoutingPolicy = make_policy(name, load, NodeBacklogs(load), PrefixIndex())
        for prompt, choices in requests:
            placement = policy.pick(prompt, choices)
            (chosen,) = [each for each in choices if each.address == placement.decode]
            # In any order, all nodes that the decode node can read from. The later ones are for
            # retries.
            assert sorted(placement.prefill) == sorted(node.address for node in chosen.prefill)
            assert 1 <= placement.uncached_tokens <= len(prompt.token_ids)
            load.charge(placement, len(prompt.token_ids))


def test_the_configuration_offers_exactly_the_existing_policies():
    for name in NAMES:
        assert RouterConfig(model="m", policy=name).policy == name  # type: ignore[arg-type]
    schema = RouterConfig.model_json_schema()["properties"]["policy"]
    assert sorted(schema["enum"]) == sorted(NAMES)


@pytest.mark.parametrize("num_prefill, num_decode", [(1, 1), (2, 2), (3, 2), (2, 3), (4, 2)])
def test_round_robin_picks_every_pair_equally_often(num_prefill, num_decode):
    rig = Rig("round_robin", num_prefill, num_decode)
    num_pairs = num_prefill * num_decode
    picked = [rig.pick([1]) for _ in range(3 * num_pairs)]
    assert set(Counter((p.decode, p.prefill[0]) for p in picked).values()) == {3}
    assert len({p.decode for p in picked[:num_decode]}) == num_decode


def test_random_picks_every_pair_about_equally_often():
    rig = Rig("random")
    picked = Counter((p.decode, p.prefill[0]) for p in (rig.pick([1]) for _ in range(4000)))
    assert len(picked) == 8
    assert max(picked.values()) < 1.3 * min(picked.values())


@pytest.mark.parametrize(
    "name", ["least_tokens", "least_requests", "shortest_queue", "power_of_two", "prefix_aware"]
)
def test_a_long_queue_is_avoided(name):
    rig = Rig(name)
    for address in rig.prefill[1:]:
        rig.load.charge(PlacementDecision("d0", (address,), 5000), 5000)
    firsts = Counter(rig.pick([5] * 100).prefill[0] for _ in range(600))
    # Of two random picks, one is the idle node in half of the cases.
    assert firsts["p0"] == 600 or (name == "power_of_two" and 240 < firsts["p0"] < 360)


@pytest.mark.parametrize("name", ["least_tokens", "prefix_aware"])
def test_different_prompts_are_distributed_by_their_tokens(name):
    rig = Rig(name)
    rng = random.Random(3)
    for number in range(200):
        rig.place([number + 10] * rng.randrange(1, 2000))
    queued = [rig.load.prefill.tokens(address) for address in rig.prefill]
    assert max(queued) - min(queued) <= 2000 + NEAR_TOKENS


@pytest.mark.parametrize("name, first", [("least_requests", "p1"), ("least_tokens", "p0")])
def test_least_requests_counts_prompts_and_least_tokens_their_tokens(name, first):
    rig = Rig(name, 2)
    for _ in range(3):
        rig.load.charge(PlacementDecision("d0", ("p0",), 10), 10)
    rig.load.charge(PlacementDecision("d0", ("p1",), 5000), 5000)
    assert {rig.pick([5]).prefill[0] for _ in range(4)} == {first}


def test_least_requests_stops_counting_a_prompt_at_its_first_token():
    rig = Rig("least_requests", 2)
    rig.load.charge(PlacementDecision("d0", ("p0",), 10), 10).first_token()
    rig.load.charge(PlacementDecision("d0", ("p1",), 10), 10)
    assert {rig.pick([5]).prefill[0] for _ in range(4)} == {"p0"}


def test_least_requests_picks_the_decode_node_with_fewer_requests_at_any_fill_level():
    rig = Rig("least_requests")
    rig.choices = [
        choice("d0", "p0", pages_total=100, pages_free=90),
        choice("d1", "p0", pages_total=100, pages_free=10),
    ]
    rig.load.charge(PlacementDecision("d0", (), 5), 5).first_token()
    assert {rig.pick([1]).decode for _ in range(4)} == {"d1"}


def test_shortest_queue_counts_requests_of_other_routers_until_they_are_computed():
    rig = Rig("shortest_queue", 2)
    rig.backlogs.record("p0", queued_s=4.0, token_s=0.01)
    rig.backlogs.record("p1", queued_s=0.0, token_s=0.01)
    rig.load.charge(PlacementDecision("d0", ("p1",), 200), 200)
    assert {rig.pick([5]).prefill for _ in range(4)} == {("p1", "p0")}
    rig.clock.now += 3.0
    assert {rig.pick([5]).prefill for _ in range(4)} == {("p0", "p1")}


def test_shortest_queue_considers_the_speed_of_a_node():
    rig = Rig("shortest_queue", 2)
    rig.backlogs.record("p0", queued_s=0.0, token_s=0.01)
    rig.backlogs.record("p1", queued_s=0.0, token_s=0.001)
    rig.load.charge(PlacementDecision("d0", ("p0",), 100), 100)
    rig.load.charge(PlacementDecision("d0", ("p1",), 500), 500)
    assert {rig.pick([5]).prefill[0] for _ in range(4)} == {"p1"}


def test_shortest_queue_prefers_a_decode_node_with_pages_for_the_request():
    rig = Rig("shortest_queue")
    rig.choices = [
        choice("d0", "p0", pages_total=100, pages_free=90),
        choice("d1", "p0", pages_total=100, pages_free=10),
    ]
    rig.backlogs.record("d0", queued_s=0.0, token_s=0.0, pages_s=2.0)
    assert {rig.pick([1]).decode for _ in range(4)} == {"d1"}
    rig.clock.now += 2.0
    assert {rig.pick([1]).decode for _ in range(4)} == {"d0"}


def test_shortest_queue_picks_the_colocated_node_with_the_shorter_queue():
    rig = Rig("shortest_queue", 0)
    rig.backlogs.record("d0", queued_s=0.0, token_s=0.01)
    rig.backlogs.record("d1", queued_s=1.0, token_s=0.01)
    rig.load.charge(PlacementDecision("d0", (), 300), 300)
    assert {rig.pick([1]).decode for _ in range(4)} == {"d1"}


def test_the_node_with_the_longest_prefix_is_preferred():
    rig = Rig("prefix_aware")
    tokens = list(range(100, 1124))
    rig.store("p1", tokens[:512])
    rig.store("p3", tokens[:256])
    placement = rig.pick(tokens)
    assert placement.prefill[:2] == ("p1", "p3")
    assert placement.uncached_tokens == 512


def test_a_fully_cached_prompt_still_computes_its_last_token():
    rig = Rig("prefix_aware")
    tokens = list(range(100, 1124))
    rig.store("p2", tokens)
    placement = rig.pick(tokens)
    assert (placement.prefill[0], placement.uncached_tokens) == ("p2", 1)


def test_a_prompt_waits_for_its_prefix_no_longer_than_its_computation_takes():
    rig = Rig("prefix_aware")
    tokens = list(range(100, 3172))
    rig.store("p1", tokens)
    queued = 0
    while rig.pick([*tokens, 5]).prefill[0] == "p1":
        rig.load.charge(PlacementDecision("d0", ("p1",), 100), 100)
        queued += 100
    assert len(tokens) <= queued <= len(tokens) + NEAR_TOKENS + 100


def test_simultaneous_prompts_with_a_new_prefix_go_to_one_node():
    rig = Rig("prefix_aware")
    prefix = list(range(2000))
    firsts = {rig.place([*prefix, number]).prefill[0] for number in range(5)}
    assert len(firsts) == 1


def test_a_dominating_prefix_makes_no_hot_spot():
    rig = Rig("prefix_aware")
    prefix = list(range(1024))
    for number in range(400):
        rig.place([*prefix, *[number] * 64])
    queued = [rig.load.prefill.tokens(address) for address in rig.prefill]
    assert max(queued) < 1.2 * min(queued) + len(prefix)


def test_sessions_are_distributed_among_nodes_with_equal_prefixes_and_queues():
    """Routers agree on the node of a session. A node with a longer prefix or a shorter queue is
    preferred."""
    rig, other_router = Rig("prefix_aware"), Rig("prefix_aware")
    tokens = list(range(40))
    homes = {}
    for number in range(40):
        session = f"s{number}"
        picked = [one.pick(tokens, session).prefill for one in (rig, other_router, rig)]
        assert len({*picked}) == 1
        homes[session] = picked[0]
    assert {home[0] for home in homes.values()} == {*rig.prefill}
    first, second = homes["s0"][:2]
    rig.load.charge(PlacementDecision("d0", (first,), 100), 100)
    assert rig.pick(tokens, "s0").prefill[0] == second
    rig.store(first, tokens)
    assert rig.pick(tokens, "s0").prefill[0] == first


def test_a_session_keeps_its_node_until_the_node_leaves():
    rig = Rig("session_affinity")
    homes = {}
    for number in range(20):
        placement = rig.place([number] * 50, f"s{number}")
        homes[f"s{number}"] = placement.decode, placement.prefill[0]
    assert {prefill for _, prefill in homes.values()} == set(rig.prefill)
    rng = random.Random(5)
    for _ in range(100):
        session = rng.choice(list(homes))
        placement = rig.place([1] * rng.randrange(1, 400), session)
        assert (placement.decode, placement.prefill[0]) == homes[session]
    gone = rig.prefill.pop(0)
    rig.choices = [choice(each.address, *rig.prefill) for each in rig.choices]
    for session, (decode, prefill) in homes.items():
        first = rig.place([1], session).prefill[0]
        assert first == prefill if prefill != gone else first in rig.prefill
        assert rig.place([1], session).prefill[0] == first
        assert rig.place([1], session).decode == decode


def test_consistent_hash_moves_only_the_keys_of_a_node_that_leaves():
    keys = [f"user {number}" for number in range(2000)]
    ten = Rig("consistent_hash", 10)
    nine = Rig("consistent_hash", 10)
    nine.choices = [choice("d0", *(node for node in nine.prefill if node != "p4"))]
    before = {key: ten.pick([1], key).prefill[0] for key in keys}
    after = {key: nine.pick([1], key).prefill[0] for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert {before[key] for key in moved} == {"p4"}
    assert 0.07 * len(keys) < len(moved) < 0.13 * len(keys)
    # The moved keys are distributed evenly among the others.
    assert len({after[key] for key in moved}) == 9


def test_consistent_hash_uses_the_beginning_of_the_prompt_without_a_session():
    rig, other_router = Rig("consistent_hash", 10), Rig("consistent_hash", 10)
    for number in range(50):
        prefix = [number] * 300
        first = rig.pick([*prefix, 1]).prefill
        assert rig.pick([*prefix, 2, 3]).prefill == first
        assert other_router.pick([*prefix, 4]).prefill == first
    assert len({rig.pick([number] * 300).prefill[0] for number in range(100)}) == 10


def test_namespaces_with_one_prefix_are_distributed_and_each_keeps_its_node():
    """A node could reuse nothing of one namespace for another."""
    rig = Rig("consistent_hash", 10)
    homes = {}
    for number in range(100):
        namespace = namespace_of(str(number))
        homes[number] = rig.pick([1] * 300, namespace=namespace).prefill[0]
        assert rig.pick([*[1] * 300, 2], namespace=namespace).prefill[0] == homes[number]
    assert len(set(homes.values())) == 10


def test_consistent_hash_limits_the_queue_of_one_key():
    rig = Rig("consistent_hash", 10)
    for _ in range(300):
        rig.place([1] * 100, "everybody")
    queued = [rig.load.prefill.tokens(address) for address in rig.prefill]
    assert max(queued) <= 1.25 * sum(queued) / len(queued) + 2 * 100


_SHARED_DECODE = [name for name in NAMES if name not in ("round_robin", "random")]


@pytest.fixture(params=_SHARED_DECODE)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


def test_the_decode_node_with_the_most_free_pages_is_picked(rig):
    full = choice("d0", "p0", pages_total=1000, pages_free=500)
    rig.choices = [full, choice("d1", "p0", pages_total=100, pages_free=80)]
    assert {rig.pick([1]).decode for _ in range(5)} == {"d1"}


def test_placed_requests_count_before_a_status_includes_them(rig):
    rig.choices = [choice(d, "p0", pages_total=1000, pages_free=900) for d in ("d0", "d1")]
    picked = Counter(rig.place([number] * 160).decode for number in range(40))
    assert picked == {"d0": 20, "d1": 20}


def test_of_equally_full_decode_nodes_the_one_with_fewer_requests_is_picked(rig):
    for each in rig.choices:  # a Status has included their pages since, so only their number counts
        num_live = 2 if each.address == "d0" else 3
        for _ in range(num_live):
            rig.load.charge(PlacementDecision(each.address, (), 5), 5).first_token()
        rig.load.shown(each.address)
    assert {rig.pick([1]).decode for _ in range(5)} == {"d0"}


def test_equal_decode_nodes_take_turns(rig):
    picked = Counter(rig.pick([1]).decode for _ in range(100))
    assert picked["d0"] > 35 and picked["d1"] > 35


@pytest.mark.parametrize(
    "slow, fast", [((("tcp", 2.0),), (("rdma", 20.0),)), ((("tcp", 0.0),), (("nvlink", 0.0),))]
)
def test_of_almost_equally_full_decode_nodes_the_one_with_the_faster_link_is_picked(
    rig, slow, fast
):
    rig.choices = [linked("d0", *slow), linked("d1", *fast)]
    assert {rig.pick([1]).decode for _ in range(5)} == {"d1"}


def test_links_that_differ_within_their_measurement_error_are_equal(rig):
    rig.choices = [linked("d0", ("cma", 6.0)), linked("d1", ("cma", 8.0))]
    picked = Counter(rig.pick([1]).decode for _ in range(100))
    assert picked["d0"] > 35 and picked["d1"] > 35


ENCODERS = [f"e{i}:1" for i in range(4)]


def image(number: int, num_tokens: int, at: int = 0) -> Image:
    return Image(at, 1, num_tokens, bytes([number]) * 4 * num_tokens)


def with_images(*images: Image) -> RequestSpec:
    """Return a request with these images one after the other, each after one token of text."""
    placed, tokens = [], list[int]()
    for each in images:
        tokens.append(7)
        placed.append(msgspec.structs.replace(each, at=len(tokens)))
        tokens += placed[-1].token_ids
    return msgspec.structs.replace(make_spec(tokens), images=tuple(placed))


def charged(load: NodeLoad) -> LoadReservation:
    return load.charge(PlacementDecision("d0", ("p0",), 0), 0)


def test_an_image_goes_to_the_same_encode_node_and_few_images_move_when_one_leaves() -> None:
    spec = with_images(*(image(number, 3) for number in range(64)))

    def placed(nodes: Sequence[str], of: RequestSpec = spec) -> tuple[str, ...]:
        return encode_nodes(of, nodes, charged(NodeLoad()))

    found = placed(ENCODERS)
    assert len(found) == 64 and set(found) == set(ENCODERS)
    assert placed(ENCODERS[::-1]) == found  # in any order
    left = placed(ENCODERS[:-1])
    assert all(a == b for a, b in zip(found, left, strict=True) if a != ENCODERS[-1])
    assert placed(()) == ()
    # The same image at another place in another prompt.
    other = msgspec.structs.replace(
        make_spec([1, 2, 3, *spec.images[9].token_ids]),
        images=(msgspec.structs.replace(spec.images[9], at=3),),
    )
    assert placed(ENCODERS, other) == (found[9],)


def test_images_avoid_an_encode_node_with_far_more_load_than_others() -> None:
    """Seen failing without charges, and with charges that are not returned."""
    load, spec = NodeLoad(), with_images(image(1, MAX_MORE_IMAGE_TOKENS))
    charges = [charged(load) for _ in range(3)]
    first, second, third = (encode_nodes(spec, ENCODERS, charge)[0] for charge in charges)
    assert first == second  # the limit is reached, and not exceeded
    assert third != first
    charges[0].first_token()
    assert encode_nodes(spec, ENCODERS, charged(load))[0] == first
    for charge in charges:
        charge.close()


def test_encode_nodes_are_not_charged_after_the_first_token() -> None:
    """A migration computes no prompt."""
    load = NodeLoad()
    charge = charged(load)
    charge.first_token()
    encode_nodes(with_images(image(1, 8)), ENCODERS, charge)
    charge.close()
    assert load.empty


def test_many_images_of_one_request_are_distributed_among_encode_nodes() -> None:
    spec = with_images(*(image(1, 1280) for _ in range(24)))
    counts = Counter(encode_nodes(spec, ENCODERS, charged(NodeLoad())))
    assert set(counts) == set(ENCODERS) and max(counts.values()) - min(counts.values()) <= 3
