"""All interleavings of a producer's end with its engine, and with a malicious consumer.

The consumer follows no protocol: it opens, grants, ends and cancels an id in any order and
repeatedly, and reuses an abandoned id at once. Its messages end at most its own stream. Messages of
this node's engine about a hand-off that has ended, or is about to end, never affect another one.
"""

from common.config import TransferConfig
from common.request import Remaining
from kvtransfer.messages import (
    AnyMessage,
    CancelHandoff,
    GrantHandoff,
    HandoffId,
    Heartbeat,
    OpenHandoff,
    PagesReleased,
    Prompt,
    ReadsDone,
)
from tests.kvtransfer.search.sides.hand_off import Broken, Input, Plan, SimulatedProducer, require
from tests.support.specs import make_spec

CONSUMER = 101
STREAM = 1
ID = HandoffId(CONSUMER, 1, 1)
MOST_UNDER_WAY = 3  # events and commands between the engine and its transfer thread
NUM_TOKENS = 5  # two chunks


SAYINGS: tuple[AnyMessage, ...] = (
    OpenHandoff(ID, b"", Remaining(100.0), Prompt(make_spec(range(NUM_TOKENS), request_id="0"))),
    GrantHandoff(ID, 0),
    GrantHandoff(ID, 4),
    ReadsDone(ID),
    CancelHandoff(ID, ""),
    Heartbeat(1, 0),
    PagesReleased(ID, held=True),
)


def inputs(side: SimulatedProducer) -> list[Input]:
    moves = [*side.moves(), *(("fail", serial) for serial in side.prompts)]
    if len(side.inbox) + len(side.posts) >= MOST_UNDER_WAY:
        return [move for move in moves if move[0] in ("take", "post")]
    if STREAM not in side.streams():
        return [*moves, ("up", STREAM, CONSUMER)]
    return [*moves, *(("message", STREAM, message) for message in SAYINGS)]


# Seen failing with the id's own number as the serial of its hand-off, and if commands are looked up
# by id: "cannot publish".
def test_no_message_of_a_consumer_ends_its_producer():
    plan = Plan((NUM_TOKENS,), (0,), producer_pages=4, admits=True, late_producer=True)
    config = TransferConfig(heartbeat_s=1e6, max_missed_heartbeats=1)
    first = SimulatedProducer(plan, config, instance=11)
    seen = {hash(first.key())}
    pending = [first]
    while pending:
        side = pending.pop()
        for given in inputs(side):
            after = side.fork()
            try:
                after.react(given)
            except Exception as error:
                raise Broken(f"{error!r} after {given} in {side.key()}") from error
            key = hash(after.key())
            if key not in seen:
                seen.add(key)
                pending.append(after)
    require(len(seen) > 9_000, f"{len(seen)} states only")
