"""Every interleaving of weights that one node reads from another, over one pair of the product's
own ends: every piece that has come is that piece, no page is let go while it may be read, and what
can move no more is at rest.
"""

import pytest

from common.config import TransferConfig
from tests.kvtransfer.search import PATIENT, SILENT, search_in
from tests.kvtransfer.weight_sides import WeightPlan, WeightSimulation

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_collector")]


@pytest.mark.parametrize(
    "plan, config, faults, states",
    [
        pytest.param(WeightPlan(), PATIENT, 0, 10, id="no-fault"),
        pytest.param(WeightPlan(), PATIENT, 1, 450, id="one-fault"),
        pytest.param(WeightPlan(), SILENT, 1, 400, id="one-silence"),
        pytest.param(
            WeightPlan(((0, 3),), whole=3, lends=2), PATIENT, 1, 1_000, id="a-part-at-once"
        ),
        pytest.param(WeightPlan(((1, 4),), whole=2), PATIENT, 1, 800, id="fewer-than-asked-for"),
        pytest.param(WeightPlan(((2, 4),), whole=2), PATIENT, 1, 250, id="none-of-those"),
        pytest.param(
            WeightPlan(((0, 1), (1, 2)), lends=1), PATIENT, 0, 200, id="a-window-is-refused"
        ),
        pytest.param(
            WeightPlan(tables=(None, 2, 5), state_pages=2), PATIENT, 1, 450, id="of-any-model"
        ),
        pytest.param(WeightPlan(), PATIENT, 2, 10_000, id="two-faults", marks=pytest.mark.long),
        pytest.param(
            WeightPlan(((0, 1), (1, 2))),
            PATIENT,
            1,
            20_000,
            id="two-windows",
            marks=pytest.mark.long,
        ),
        pytest.param(
            WeightPlan(asynchronous=True),
            PATIENT,
            1,
            4_000,
            id="events-cross-commands",
            marks=pytest.mark.long,
        ),
    ],
)
def test_no_interleaving_of_windows_breaks_an_invariant(
    plan: WeightPlan, config: TransferConfig, faults: int, states: int
) -> None:
    assert search_in(WeightSimulation(plan, config), faults=faults).states > states
