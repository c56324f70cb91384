"""Open hand-offs of either node in its watchdog report: every hand-off, in any queue."""

import pytest

from tests.pair.rig import PairRig, Size
from tests.pair.states import (
    being_read,
    between_chunks,
    in_prealloc,
    waiting_at_the_producer,
    with_its_grant_under_way,
)

STATES = [
    (in_prealloc, "prealloc", "bootstrap", {"decode": [Size(num_pages=8)]}),
    (with_its_grant_under_way, "transfer", "bootstrap", {}),
    (waiting_at_the_producer, "transfer", "prefilling", {"prefill": [Size(num_pages=8)]}),
    (between_chunks, "transfer", "prefilling", {"chunked_prefill_tokens": 32}),
    (being_read, "transfer", "inflight", {}),
]


@pytest.mark.parametrize("reach, here, there, sizes", STATES)
def test_every_open_handoff_is_named_with_its_queue_on_both_nodes(known, reach, here, there, sizes):
    """Seen failing with each of the five queues left out of what its node tells."""
    with PairRig(known.loaded, **sizes) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        name = f"request {reach(rig, rig.ask).number}"
        for node, queue in ((decode, here), (prefill, there)):
            told = {fields["request_id"]: fields["queue"] for fields in node.role.handoffs()}
            assert told[name] == queue
        rig.faults[0].release()
        rig.wires.let_go()
        rig.run()
        assert not decode.role.handoffs() and not prefill.role.handoffs()


# Seen failing with that queue left out.
def test_who_waits_for_a_producer_is_named_too(known):
    with PairRig(known.loaded, reconnect_wait_s=300.0) as rig:
        (prefill,), (decode,) = rig.prefill, rig.decode
        rig.wires.cut(prefill.front, decode.front)
        rig.until(lambda: not decode.control.links, "it is paired with none")
        rig.ask(range(50), request_id="mine")
        rig.until(lambda: decode.queue("unpaired"), "it waits")
        assert decode.role.handoffs() == [{"queue": "unpaired", "request_id": "mine"}]
        rig.wires.heal()
