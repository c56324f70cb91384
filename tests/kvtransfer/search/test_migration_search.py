"""All interleavings of a live migration, over the product's protocol ends and bookkeeping.
Source and target never both run the request, a request that joins is complete, and a state
without moves is at rest. The first test has one pair. The second has nodes with both ends: a
request migrates on, or back, or to one of two nodes, and two nodes exchange requests.
docs/design/live-migration.md has the rules, and the faults found here without each."""

import pytest

from tests.kvtransfer.search.search import PATIENT, SILENT, case, search_in
from tests.kvtransfer.search.sides.migration import LivePlan, LiveSimulation
from tests.kvtransfer.search.sides.roaming import RoamingSimulation, Stop

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_collector")]
NIGHTLY = [pytest.mark.long, pytest.mark.nightly]


COPIES = LivePlan(known=6, most=7, room=9, copies=True)
WIDE = LivePlan(windows=(None, 3), state_pages=1)
CROSSING = LivePlan(asynchronous=True, most=6)
END_OF_PAUSE = CROSSING._replace(only_faults=("pause is over", "end"))


@pytest.mark.parametrize(
    "plan, config, faults, states",
    [
        case("no-fault", LivePlan(), PATIENT, 0, 80),
        case("one-fault", LivePlan(), PATIENT, 1, 2_500),
        case("it-outgrows-its-room", LivePlan(room=5, most=8), PATIENT, 1, 3_000),
        case("two-movers", LivePlan(movers=2, most=6), PATIENT, 0, 500),
        case("windows-and-a-state", WIDE, PATIENT, 1, 2_500),
        case("it-is-copied-before", COPIES._replace(most=8), PATIENT, 1, 5_000, long=True),
        case("the-end-of-a-pause-crosses-events", END_OF_PAUSE, PATIENT, 1, 500),
        case("one-silence", LivePlan(), SILENT, 1, 2_000, long=True),
        case("events-cross-commands", CROSSING, PATIENT, 1, 20_000, long=True),
        case("two-faults", LivePlan(), PATIENT, 2, 25_000, long=True),
        case("two-movers-one-fault", LivePlan(movers=2), PATIENT, 1, 60_000, long=True),
        case("windows-and-a-state-two-faults", WIDE, PATIENT, 2, 25_000, long=True),
        case("it-is-copied-before-two-faults", COPIES, PATIENT, 2, 40_000, long=True),
        case(
            "two-movers-copy-one-fault",
            *(COPIES._replace(movers=2), PATIENT, 1, 300_000),
            nightly=True,
        ),
    ],
)
def test_no_interleaving_of_a_migration_breaks_an_invariant(plan, config, faults, states):
    assert search_in(LiveSimulation(plan, config), faults=faults).states > states


BOTH_ENDS = LivePlan(most=6)
CHAIN = Stop(runs=1), Stop(asks=(1, 0)), Stop(asks=(3, 1))
THERE_AND_BACK = Stop(runs=1, asks=(3, 1)), Stop(asks=(1, 0))
TWO_WANT_IT = Stop(runs=1), Stop(asks=(1, 0)), Stop(asks=(1, 0))
EACH_OTHER = Stop(runs=1, asks=(2, 1)), Stop(runs=2, asks=(1, 0))


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "way, rooms, only, faults, states",
    [
        pytest.param(THERE_AND_BACK, 1, ("cancel", "pause is over"), 1, 9_500, id="there-and-back"),
        pytest.param(EACH_OTHER, 1, ("end",), 1, 13_000, id="each-other-in-one-room", marks=LONG),
        pytest.param(EACH_OTHER, 2, (), 0, 14_500, id="each-other-in-two-rooms", marks=LONG),
        pytest.param(CHAIN, 1, (), 1, 190_000, id="chain-any-fault", marks=LONG),
        pytest.param(THERE_AND_BACK, 1, (), 1, 150_000, id="there-and-back-any-fault", marks=LONG),
        pytest.param(TWO_WANT_IT, 1, (), 1, 480_000, id="two-want-it-any-fault", marks=NIGHTLY),
        pytest.param(EACH_OTHER, 1, (), 1, 350_000, id="each-other-any-fault", marks=NIGHTLY),
    ],
)
def test_no_interleaving_of_migrations_among_nodes_breaks_an_invariant(
    way, rooms, only, faults, states
):
    """Each node has pages for this number of requests."""
    live = BOTH_ENDS._replace(only_faults=only)
    simulation = RoamingSimulation(live, PATIENT, way, rooms)
    assert search_in(simulation, faults=faults).states > states
    assert simulation.ran == {(n, t) for n, stop in enumerate(way) for t in stop.tickets()}
