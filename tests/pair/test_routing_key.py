"""Requests of one routing key are computed together, on whichever node computes prompts."""

import pytest

from tests.pair.conftest import Known
from tests.pair.rig import PairRig, Size

ROOMY = Size(num_pages=256)  # a decode node grants all three at once


# Seen failing with the key left out of Submit, and of Open.
@pytest.mark.parametrize("where", ["prefill node", "decode node"])
def test_who_has_the_key_of_what_is_computed_goes_first(known: Known, where: str) -> None:
    producers = [0] if where == "prefill node" else []
    with PairRig(known.loaded, decode=[ROOMY], policy="routing-key") as rig:
        under_way = rig.ask([3] * 400, 2, prefill=producers, routing_key=7)
        other = rig.ask([4] * 200, 2, prefill=producers, routing_key=2)
        alike = rig.ask([5] * 60, 2, prefill=producers, routing_key=7)
        rig.until(lambda: alike.tokens, "it has its first token")
        assert under_way.tokens and not other.tokens
        rig.run()
        assert alike.tokens == known.greedy([5] * 60, 2)
