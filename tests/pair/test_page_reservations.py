"""The pages that a hand-off lands in: reserved all or nothing, and held until no read can land."""

import numpy as np

from common.requests.namespace import SHARED
from engine.kv_cache.pages import PageHolder
from kvtransfer.messages import HandoffId
from tests.support.engine_rig import Rig, ints

ID = HandoffId(1, 1, 1)
PROMPT = ints([n % 90 for n in range(50)])  # three pages and a part


# Rule 1 of the hand-off. Seen failing without the hold for reads.
def test_pages_are_held_for_reads_after_the_request_has_dropped_them():
    rig = Rig(num_pages=8)
    destinations = rig.reservations
    destination = destinations.reserve(ID, PROMPT, SHARED)
    assert destination is not None and len(destination.fresh) == 4
    destinations.drop(destination)
    assert rig.scheduler.allocate(5, PageHolder.REQUEST) is None
    assert np.flatnonzero(rig.pages.holds(PageHolder.READ)).tolist() == sorted(destination.fresh)
    destinations.reads_ended(ID)
    assert rig.pages.num_free == 8


# Rule 8. Seen failing with the cached prefix still held: no request could have its pages again.
def test_a_reservation_that_finds_too_few_pages_holds_nothing():
    rig = Rig(num_pages=8, vandal=False)
    rig.add(PROMPT.tolist()[:33], max_tokens=1)
    rig.run()
    lent = rig.scheduler.allocate(6, PageHolder.PUBLICATION)
    assert rig.reservations.reserve(ID, PROMPT, SHARED) is None
    held = rig.pages.by_holder()
    assert (held["request"], held["read"], held["cache"]) == (0, 0, 2)
    rig.pages.drop(lent, PageHolder.PUBLICATION)
