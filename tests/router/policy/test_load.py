"""The charge of a placed request is always released."""

from hypothesis import given
from hypothesis import strategies as st

from router.policy.load import NodeLoad, PlacementDecision


def test_a_charge_belongs_to_the_prefill_node_until_the_first_token():
    load = NodeLoad()
    charge = load.charge(PlacementDecision("d0", ("p0", "p1"), uncached_tokens=30), num_tokens=100)
    assert (load.prefill.tokens("p0"), load.prefill.requests("p0")) == (30, 1)
    assert (load.prefill.tokens("p1"), load.prefill.requests("p1")) == (0, 0)
    charge.first_token()
    assert (load.prefill.tokens("p0"), load.prefill.requests("p0")) == (0, 0)
    charge.close()
    assert load.empty


def test_pages_of_a_decode_node_are_reserved_until_a_status_includes_them():
    load = NodeLoad()
    early = load.charge(PlacementDecision("d0", ("p0",), 100), 100)
    late = load.charge(PlacementDecision("d0", ("p0",), 7), 7)
    early.first_token()
    assert load.decode.tokens("d0") == 107
    load.shown("d1")
    assert load.decode.tokens("d0") == 107
    load.shown("d0")
    # The other one has no pages yet that a Status could include.
    assert (load.decode.tokens("d0"), load.decode.requests("d0")) == (7, 2)
    early.close()
    assert (load.decode.tokens("d0"), load.decode.requests("d0")) == (7, 1)
    late.close()
    assert load.empty


def test_a_failed_request_releases_its_charge():
    load = NodeLoad()
    try:
        with load.charge(PlacementDecision("d0", ("p0",), 5), 5):
            assert not load.empty
            raise RuntimeError("the node is gone")
    except RuntimeError:
        pass
    assert load.empty


_placements = st.builds(
    PlacementDecision,
    decode=st.sampled_from(["d0", "d1"]),
    prefill=st.lists(st.sampled_from(["p0", "p1"]), unique=True).map(tuple),
    uncached_tokens=st.integers(0, 50),
)
_events = st.one_of(
    st.tuples(st.just("place"), _placements),
    st.tuples(st.sampled_from(["first_token", "close"]), st.integers(0, 20)),
    st.tuples(st.just("status"), st.sampled_from(["d0", "d1"])),
)


@given(st.lists(_events, max_size=60))
def test_load_is_the_sum_of_active_requests_and_returns_to_zero(events):
    load = NodeLoad()
    charges = []
    computing: dict[int, PlacementDecision] = {}
    live: dict[int, PlacementDecision] = {}
    for event, what in events:
        match event, what:
            case "place", PlacementDecision() as placement:
                computing[len(charges)] = live[len(charges)] = placement
                charges.append(load.charge(placement, placement.uncached_tokens + 1))
            case "status", str() as address:
                load.shown(address)
            case _, int() as number if number < len(charges):
                getattr(charges[number], event)()
                computing.pop(number, None)
                if event == "close":
                    live.pop(number, None)
        for node in ("p0", "p1"):
            there = [each for each in computing.values() if each.prefill[:1] == (node,)]
            assert load.prefill.requests(node) == len(there)
            assert load.prefill.tokens(node) == sum(each.uncached_tokens for each in there)
        for node in ("d0", "d1"):
            here = [each for each in live.values() if each.decode == node]
            assert load.decode.requests(node) == len(here)
            assert 0 <= load.decode.tokens(node) <= sum(each.uncached_tokens + 1 for each in here)
    for charge in charges:
        charge.close()
    assert load.empty
