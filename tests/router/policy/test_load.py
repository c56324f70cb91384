"""The charge of a placed request is always released."""

from hypothesis import given
from hypothesis import strategies as st

from router.policy.load import NodeLoad, PlacementDecision


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
    unshown: dict[int, PlacementDecision] = {}  # whose pages no Status of the decode node includes
    for event, what in events:
        match event, what:
            case "place", PlacementDecision() as placement:
                for placed in (computing, live, unshown):
                    placed[len(charges)] = placement
                charges.append(load.charge(placement, placement.uncached_tokens + 1))
            case "status", str() as address:
                load.shown(address)
                for number, placement in tuple(unshown.items()):
                    if placement.decode == address and number not in computing:
                        del unshown[number]
            case _, int() as number if number < len(charges):
                getattr(charges[number], event)()
                computing.pop(number, None)
                if event == "close":
                    live.pop(number, None)
                    unshown.pop(number, None)
        for node in ("p0", "p1"):
            there = [each for each in computing.values() if each.prefill[:1] == (node,)]
            assert load.prefill.requests(node) == len(there)
            assert load.prefill.tokens(node) == sum(each.uncached_tokens for each in there)
        for node in ("d0", "d1"):
            assert load.decode.requests(node) == sum(each.decode == node for each in live.values())
            here = [each for each in unshown.values() if each.decode == node]
            assert load.decode.tokens(node) == sum(each.uncached_tokens + 1 for each in here)
    for charge in charges:
        charge.close()
    assert load.empty
