"""All interleavings of two hand-offs, of one with more faults, of one with two producers, and of
weights that one node reads from another, over the product's own ends. I1-I5 of
docs/design/hand-off.md hold in every state, and a state without moves is at rest.

A fault is a cut stream, a failure and restart of either node, a broken link, a late read, a
deadline, a cancel, a local prefill or a hand-off dropped by the producer. Between them, everything
may arrive in any order: half-open streams, torn reads, late answers, new streams, second attempts.

Each of these lines was removed once. The named search fails then:
    rule 1, the reads of a link count as ended as soon as the link is closing: the first, "I2: a
        read wrote into a page given away". ReadsEndedEvent as soon as an attempt is abandoned: the
        first, too.
    rule 2, no Cancel when a consumer abandons an attempt, no Failed when a producer does: the
        first, "I3: something waits for ever".
    rule 4, the entry stays when the producer drops the hand-off: the first, I3.
    rule 5, a second Hello keeps the old stream, and the end of a stream drops all of its consumer:
        the first, I3.
    rule 6, a resubmission under the same id: the first, an attempt granted twice.
    rule 8, the grant of an ended attempt is not answered: the asynchronous ones, I3.
    rule 9, a new attempt that forgets the token it has sent: the first, "I4: token 0 is not the
        next". A local prefill without a Cancel: the first, I3.
    rule 11, reads of a closed link are not posted again: the first, I3.
    Done before the last read has ended: the first, "I1: joined with torn".
    Pages before the prefix that a window reaches do not come with the first range: the ones with
        windows, I1.
    The state comes with the first range, or not with an empty last one: those with states, I1.
    A link that outlives its stream: the first, I3.

Rules 7 and 10 and the checks of violations have their own tests. test_broken_rules.py has rules
3, 5 and 8, with each break as a test.
"""

from dataclasses import replace

import pytest

from tests.kvtransfer.search.search import PATIENT, SILENT, case, search
from tests.kvtransfer.search.sides.hand_off import Plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_collector")]

TWO = (0, 0)  # prefixes
# With two requests, a restart has five times as many states as all other faults together. The long
# searches include it.
NO_RESTART = ("cut", "cancel", "stop", "fail", "tick", "link breaks", "read is late")
TINY = Plan((3, 3), (0, 3), consumer_pages=2, producer_pages=1, admits=True, only_faults=NO_RESTART)
SMALL = Plan((7, 3), (0, 3), consumer_pages=3, producer_pages=2, admits=True)
WINDOWS = (None, 2, 5)
MORE = Plan((7,), (4,), windows=(None, 5), state_pages=1, producer_state_pages=3)
FEWER = Plan((7,), (4,), windows=(None, 5), state_pages=3, producer_state_pages=2)
PRODUCERS = Plan((3,), (0,), producers=2, attempts=3)
A_PAGE = replace(PRODUCERS, prompts=(1,), consumer_pages=1)
ONE, BOTH = Plan((3,), (0,)), Plan((3, 3), TWO)
PIECES, PIECE_EACH = Plan((2,), (0,), pieces=2), Plan((1, 1), TWO, pieces=1)
ANY_MODEL = replace(PIECES, windows=WINDOWS, state_pages=2)


def only(plan: Plan, *faults: str) -> Plan:
    return replace(plan, only_faults=faults)


@pytest.mark.parametrize(
    "plan, config, faults, states",
    [
        case("two-one-fault", only(BOTH, *NO_RESTART), PATIENT, 1, 35_000),
        case("two-one-fault-in-two-chunks", Plan((7, 3), TWO), PATIENT, 1, 160_000, long=True),
        case("one-silence", ONE, SILENT, 1, 1_000),
        case("one-two-silences", ONE, SILENT, 2, 44_000, long=True),
        case("two-one-silence", Plan((7, 3), TWO), SILENT, 1, 130_000, long=True),
        case("full-prefix-hit-and-tiny-pools", TINY, PATIENT, 1, 20_000, long=True),
        case("full-prefix-hit-and-small-pools", SMALL, PATIENT, 1, 100_000, long=True),
        case("windows", Plan((7,), (4,), windows=WINDOWS), PATIENT, 1, 1_000),
        case(
            "windows-and-a-prompt-of-one-token",
            *(only(Plan((7, 1), (4, 0), windows=WINDOWS), *NO_RESTART), PATIENT, 1, 35_000),
            long=True,
        ),
        case("windows-of-a-full-hit", Plan((9,), (9,), windows=(None, 5)), PATIENT, 1, 1_000),
        case("windows-and-no-full-table", Plan((9,), (0,), windows=(3,)), PATIENT, 1, 1_000),
        case("states", Plan((7,), (4,), state_pages=2), PATIENT, 1, 1_000),
        case("more-pages-of-a-state-at-the-producer", MORE, PATIENT, 1, 1_000),
        case("fewer-pages-of-a-state-at-the-producer", FEWER, PATIENT, 1, 900),
        case("state-of-a-full-hit", Plan((9,), (9,), state_pages=1), PATIENT, 1, 1_000),
        case(
            "windows-and-state-of-one-token",
            *(Plan((1,), (0,), windows=(None, 5), state_pages=1), PATIENT, 1, 500),
        ),
        case(
            "events-cross-commands",
            *(Plan((7,), (0,), asynchronous=True), PATIENT, 1, 17_000),
            long=True,
        ),
        case("commands-cross-events", Plan((7,), (0,), late_producer=True), PATIENT, 1, 13_000),
        case(
            "two-producers-one-fault",
            *(only(PRODUCERS, "read is late", "fail", "cut"), PATIENT, 1, 18_000),
        ),
        case(
            "two-producers-and-a-page",
            *(only(A_PAGE, "read is late", "fail", "link breaks"), PATIENT, 2, 33_000),
            long=True,
        ),
        case("two-producers-any-fault", PRODUCERS, PATIENT, 1, 100_000, long=True),
        case("two-producers-one-silence", PRODUCERS, SILENT, 1, 120_000, long=True),
        case(
            "two-producers-two-faults",
            only(PRODUCERS, "read is late", "link breaks", "fail", "cancel"),
            *(PATIENT, 2, 140_000),
            long=True,
        ),
        case("weights", PIECES, PATIENT, 1, 900),
        case("weights-one-silence", PIECES, SILENT, 1, 800),
        case("fewer-weights-than-asked-for", replace(PIECES, prompts=(3,)), PATIENT, 1, 900),
        case("no-weights", replace(PIECES, pieces=0), PATIENT, 1, 550),
        case("weights-of-any-model", ANY_MODEL, PATIENT, 1, 900),
        case("weights-with-a-page", replace(PIECE_EACH, producer_pages=1), PATIENT, 0, 150),
        case("weights-two-faults", PIECES, PATIENT, 2, 30_000, long=True),
        case("weights-in-two-windows", PIECE_EACH, PATIENT, 1, 20_000, long=True),
        case(
            "weights-whose-events-cross-commands",
            *(replace(PIECES, asynchronous=True, late_producer=True), PATIENT, 1, 8_000),
            long=True,
        ),
        case("one-three-faults", only(ONE, *NO_RESTART), PATIENT, 3, 110_000, long=True),
        case("one-in-two-chunks", Plan((7,), (0,)), PATIENT, 2, 170_000, nightly=True),
        case(
            "links-and-cancels",
            *(only(BOTH, "link breaks", "read is late", "cancel"), PATIENT, 2, 130_000),
            long=True,
        ),
        case("cuts-and-cancels", only(BOTH, "cut", "cancel"), PATIENT, 2, 440_000, nightly=True),
        case("cuts-and-deadlines", only(BOTH, "cut", "tick"), PATIENT, 2, 280_000, nightly=True),
        case(
            "both-let-go",
            *(only(BOTH, "fail", "cancel", "stop"), PATIENT, 2, 210_000),
            nightly=True,
        ),
        case(
            "events-cross-commands-two-faults",
            only(replace(ONE, asynchronous=True), "cut", "fail", "cancel", "stop", "tick"),
            *(PATIENT, 2, 130_000),
            long=True,
        ),
    ],
)
def test_no_interleaving_breaks_an_invariant(plan, config, faults, states):
    assert search(plan, config, faults=faults).states > states
