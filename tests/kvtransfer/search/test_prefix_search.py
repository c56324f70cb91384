"""All interleavings of prefixes that nodes read from each other's caches, over the product's
protocol ends, exports, fetches and trees. No tree ever has wrong KV, no page is released while
it may be read, and in a state without moves every prompt is computed. One node reads from
another or from two, or two nodes read from each other. docs/design/prefix-sharing.md has the
rules, and the faults found here without each."""

import pytest

from common.config import TransferConfig
from tests.kvtransfer.search.search import PATIENT, SILENT, case, search_in
from tests.kvtransfer.search.sides.prefix import PeersSimulation, PrefixPlan, PrefixSimulation

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_collector")]

ONE, OTHER = b"", b"another's prompts"[:16]
TWO_PRODUCERS = PrefixPlan((ONE, ONE), producers=("1", "2"))
# The second prompt continues where the first ends: both prefixes are read at the same time.
ONE_GOES_ON = TWO_PRODUCERS._replace(has=3, further=1, consumer_pages=6)
BESIDE = PrefixPlan((ONE, OTHER))
WIDE = PrefixPlan(windows=(None, 3), state_pages=1, consumer_pages=6)
WIDER = WIDE._replace(consumer_pages=12, own=1, hinted=3, has=3)
FEW_PAGES = BESIDE._replace(consumer_pages=2, loans=2)
EVICTED = TWO_PRODUCERS._replace(only_faults=("evict",))


@pytest.mark.parametrize(
    "plan, config, faults, states",
    [
        case("no-fault", PrefixPlan(), PATIENT, 0, 10),
        case("two-faults", PrefixPlan(), PATIENT, 2, 2_000),
        case("one-silence", PrefixPlan(), SILENT, 1, 200),
        case("less-than-was-told", PrefixPlan(hinted=4, own=1), PATIENT, 1, 250),
        case("nothing-more", PrefixPlan(has=1, own=1, hinted=3), PATIENT, 1, 150),
        case("two-want-the-same", PrefixPlan((ONE, ONE)), PATIENT, 1, 1_000),
        case("one-loan-at-once", BESIDE, PATIENT, 0, 75),
        case("pages-for-one", FEW_PAGES, PATIENT, 0, 40),
        case("windows-and-a-state", WIDE, PATIENT, 1, 200),
        case("one-of-two-producers", EVICTED, PATIENT, 1, 1_900),
        case("two-producers-any-fault", ONE_GOES_ON, PATIENT, 1, 95_000, long=True),
        case("windows-and-states-two-faults", WIDER, PATIENT, 2, 2_000, long=True),
        case("events-cross-commands", PrefixPlan(asynchronous=True), PATIENT, 1, 2_000, long=True),
        case("two-at-once-one-fault", BESIDE._replace(loans=2), PATIENT, 1, 3_000, long=True),
    ],
)
def test_no_interleaving_of_fetches_breaks_an_invariant(
    plan: PrefixPlan, config: TransferConfig, faults: int, states: int
) -> None:
    assert search_in(PrefixSimulation(plan, config), faults=faults).states > states


FORGETFUL = ("read is late", "forget", "link breaks")


@pytest.mark.parametrize(
    "only, free, states",
    [
        # Each needs the pages that it exports.
        pytest.param(("evict",), 2, 1_400, id="no-page-to-spare"),
        pytest.param(FORGETFUL, 4, 4_200, id="pages-for-both", marks=pytest.mark.long),
        pytest.param((), 2, 38_000, id="any-fault", marks=pytest.mark.long),
    ],
)
def test_no_interleaving_of_two_nodes_that_read_from_each_other_breaks_an_invariant(
    only: tuple[str, ...], free: int, states: int
) -> None:
    peers = PeersSimulation(PrefixPlan(only_faults=only), PATIENT, free=free)
    assert search_in(peers, faults=1).states > states
