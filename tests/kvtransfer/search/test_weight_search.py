"""All interleavings of weights that one node reads from another, over one pair of the product's
own ends. Every piece that arrives is correct, no page is released while it may be read, and a
state without moves is at rest."""

import pytest

from tests.kvtransfer.search.search import PATIENT, SILENT, case, search_in
from tests.kvtransfer.search.sides.weights import WeightPlan, WeightSimulation

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_collector")]


@pytest.mark.parametrize(
    "plan, config, faults, states",
    [
        case("no-fault", WeightPlan(), PATIENT, 0, 10),
        case("one-fault", WeightPlan(), PATIENT, 1, 450),
        case("one-silence", WeightPlan(), SILENT, 1, 400),
        case("a-part-at-once", WeightPlan(((0, 3),), whole=3, exports=2), PATIENT, 1, 1_000),
        case("fewer-than-asked-for", WeightPlan(((1, 4),), whole=2), PATIENT, 1, 800),
        case("none-of-those", WeightPlan(((2, 4),), whole=2), PATIENT, 1, 250),
        case("a-window-is-refused", WeightPlan(((0, 1), (1, 2)), exports=1), PATIENT, 0, 200),
        case("of-any-model", WeightPlan(tables=(None, 2, 5), state_pages=2), PATIENT, 1, 450),
        case("two-faults", WeightPlan(), PATIENT, 2, 10_000, long=True),
        case("two-windows", WeightPlan(((0, 1), (1, 2))), PATIENT, 1, 20_000, long=True),
        case("events-cross-commands", WeightPlan(asynchronous=True), PATIENT, 1, 4_000, long=True),
    ],
)
def test_no_interleaving_of_windows_breaks_an_invariant(plan, config, faults, states):
    assert search_in(WeightSimulation(plan, config), faults=faults).states > states
