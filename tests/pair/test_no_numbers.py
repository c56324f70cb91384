"""KV that is no numbers, as a device at fault leaves it: its request ends with an error, and nobody
else in the batch, nor whoever has its pages afterwards, sees any of it. Who asks the same again has
it computed anew."""

import numpy as np
from grpc import StatusCode

from common.engine.memory.pages import Holder
from common.engine.rows.request import FinishReason
from tests.pair.conftest import Known
from tests.support.pair_rig import PairRig

MANY = 60  # tokens


def test_a_request_whose_logits_are_no_numbers_ends_alone(known: Known) -> None:
    with PairRig(known.loaded, prefill=(), mode="colocated") as rig:
        (node,) = rig.decode
        spoiled = rig.ask(range(5, 45), MANY)
        rig.until(lambda: node.queue("on_device") == 1, "one runs")
        pages = np.flatnonzero(node.engine.pages.holds(Holder.REQUEST))
        other = rig.ask(range(60, 110), MANY)
        rig.until(lambda: node.queue("on_device") == 2, "both run")
        node.engine.pool.tensor[pages] = 0xFF
        rig.run()
        assert spoiled.ended is not None
        assert spoiled.ended.error_code == StatusCode.INTERNAL.value[0]
        assert spoiled.reason == FinishReason.ERROR
        assert other.tokens == known.greedy(other.prompt, MANY)
        again = rig.ask(spoiled.prompt, MANY)
        rig.run()
        assert again.tokens == known.greedy(again.prompt, MANY)


def test_a_prefill_node_computes_anew_what_made_no_numbers(known: Known) -> None:
    with PairRig(known.loaded) as rig:
        (owner,), (reader,) = rig.prefill, rig.decode
        rig.ask(range(5, 75), 1)
        rig.run()
        rig.flush(reader)  # else it needs little of the other's
        owner.engine.pool.tensor[np.flatnonzero(owner.engine.pages.holds(Holder.CACHE))] = 0xFF
        spoiled = rig.ask(range(5, 90), MANY)
        rig.run()  # to an error, or by what the decode node computes: whichever it hears of first
        computed_here = reader.count("local_prefills")
        again = rig.ask(spoiled.prompt, MANY)
        rig.run()
        assert again.tokens == known.greedy(again.prompt, MANY)
        assert reader.count("local_prefills") == computed_here
