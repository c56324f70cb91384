"""Every interleaving of two hand-offs, of one with more faults, or of one with two owners, over the
product's own ends: I1-I5 of docs/design/hand-off.md hold in every state, and what can move no more
is at rest.

A fault is a cut stream, a death and restart of either node, a broken link, a late read, a
deadline, a cancel, a local prefill or the owner letting go. Between them everything may come in
any order: half-open streams, torn reads, late answers, new streams, second attempts.

Each of these lines was taken out once; the search named fails then:
rule 1, the reads of a link count as ended as soon as it is told to close: the first, "I2: a read
    wrote into a page given away"; ReadsEndedEvent as soon as an attempt is given up: the first,
    too.
rule 2, no Cancel when a reader gives up, no Failed when an owner does: the first, "I3: something
    waits for ever".
rule 4, the entry stays when the owner lets go: the first, I3.
rule 5, a second Hello leaves the old stream be, and the end of a stream drops all of its reader:
    the first, I3.
rule 6, a resubmission under the same id: the first, an attempt granted twice.
rule 8, the grant of an attempt that is over is not answered: the asynchronous ones, I3.
rule 9, a redo that forgets the token it has emitted: the first, "I4: token 0 is not the next";
    going local without a Cancel: the first, I3.
rule 11, reads of a closed link are not posted again: the first, I3.
Done before the last read has ended: the first, "I1: joined with torn".
What windows reach before the prefix does not come with the first range: the ones with windows, I1.
The state comes with the first range, or not with an empty last one: those with states, I1.
A link that outlives its stream: the first, I3.
Rules 7 and 10 and the checks of violations have tests of their own. test_protocol_breaks.py has
rules 3, 5 and 8, with each break as a test.
"""

import pytest

from common.config import TransferConfig
from tests.kvtransfer.search import PATIENT, SILENT, search
from tests.kvtransfer.sides import Plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_collector")]

TWO = (0, 0)  # prefixes
# A restart among two requests has five times as many states as all other faults together: in the
# long ones.
NO_RESTART = ("cut", "cancel", "stop", "fail", "tick", "link breaks", "read is late")


@pytest.mark.parametrize(
    "plan, config, faults, states",
    [
        pytest.param(
            Plan((3, 3), TWO, only_faults=NO_RESTART), PATIENT, 1, 35_000, id="two-one-fault"
        ),
        pytest.param(
            Plan((3, 3), TWO, only_faults=("restart",)),
            PATIENT,
            1,
            180_000,
            id="two-one-restart",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan((7, 3), TWO),
            PATIENT,
            1,
            160_000,
            id="two-one-fault-in-two-chunks",
            marks=pytest.mark.long,
        ),
        pytest.param(Plan((3,), (0,)), SILENT, 1, 1_000, id="one-silence"),
        pytest.param(
            Plan((3,), (0,)), SILENT, 2, 44_000, id="one-two-silences", marks=pytest.mark.long
        ),
        pytest.param(
            Plan((7, 3), TWO), SILENT, 1, 130_000, id="two-one-silence", marks=pytest.mark.long
        ),
        pytest.param(
            Plan(
                (3, 3),
                (0, 3),
                reader_pages=2,
                owner_pages=1,
                admits=True,
                only_faults=NO_RESTART,
            ),
            PATIENT,
            1,
            20_000,
            id="full-prefix-hit-and-tiny-pools",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan(
                (3, 3),
                (0, 3),
                reader_pages=2,
                owner_pages=1,
                admits=True,
                only_faults=("restart",),
            ),
            PATIENT,
            1,
            135_000,
            id="full-prefix-hit-and-tiny-pools-one-restart",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan((7, 3), (0, 3), reader_pages=3, owner_pages=2, admits=True),
            PATIENT,
            1,
            100_000,
            id="full-prefix-hit-and-small-pools",
            marks=pytest.mark.long,
        ),
        pytest.param(Plan((7,), (4,), windows=(None, 2, 5)), PATIENT, 1, 1_000, id="windows"),
        pytest.param(
            Plan((7, 1), (4, 0), windows=(None, 2, 5)),
            PATIENT,
            1,
            150_000,
            id="windows-and-a-prompt-of-one-token",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan((9,), (9,), windows=(None, 5)), PATIENT, 1, 1_000, id="windows-of-a-full-hit"
        ),
        pytest.param(
            Plan((9,), (0,), windows=(3,)), PATIENT, 1, 1_000, id="windows-and-no-full-table"
        ),
        pytest.param(Plan((7,), (4,), state_pages=2), PATIENT, 1, 1_000, id="states"),
        pytest.param(Plan((9,), (9,), state_pages=1), PATIENT, 1, 1_000, id="state-of-a-full-hit"),
        pytest.param(
            Plan((1,), (0,), windows=(None, 5), state_pages=1),
            PATIENT,
            1,
            500,
            id="windows-and-state-of-one-token",
        ),
        pytest.param(
            Plan((3,), (0,)), PATIENT, 2, 50_000, id="one-two-faults", marks=pytest.mark.long
        ),
        pytest.param(
            Plan((7,), (0,), asynchronous=True),
            PATIENT,
            1,
            17_000,
            id="events-cross-commands",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan((7,), (0,), late_owner=True), PATIENT, 1, 13_000, id="commands-cross-events"
        ),
        pytest.param(
            Plan((3, 3), TWO, only_faults=("link breaks", "read is late")),
            PATIENT,
            2,
            20_000,
            id="two-link-faults",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan((3,), (0,), owners=2, attempts=3, only_faults=("read is late", "fail", "cut")),
            PATIENT,
            1,
            18_000,
            id="two-owners-one-fault",
        ),
        pytest.param(
            Plan(
                (1,),
                (0,),
                reader_pages=1,
                owners=2,
                attempts=3,
                only_faults=("read is late", "fail", "link breaks"),
            ),
            PATIENT,
            2,
            33_000,
            id="two-owners-and-a-page",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan((3,), (0,), owners=2, attempts=3),
            PATIENT,
            1,
            100_000,
            id="two-owners-any-fault",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan((3,), (0,), owners=2, attempts=3),
            SILENT,
            1,
            120_000,
            id="two-owners-one-silence",
            marks=pytest.mark.long,
        ),
        pytest.param(
            Plan(
                (3,),
                (0,),
                owners=2,
                attempts=3,
                only_faults=("read is late", "link breaks", "fail", "cancel"),
            ),
            PATIENT,
            2,
            140_000,
            id="two-owners-two-faults",
            marks=pytest.mark.long,
        ),
    ],
)
def test_no_interleaving_breaks_an_invariant(
    plan: Plan, config: TransferConfig, faults: int, states: int
) -> None:
    assert search(plan, config, faults=faults).states > states


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plan, faults, states",
    [
        pytest.param(Plan((3,), (0,)), 3, 1_400_000, id="one-three-faults"),
        pytest.param(Plan((7,), (0,)), 2, 170_000, id="one-in-two-chunks"),
        pytest.param(
            Plan((3, 3), TWO, only_faults=("link breaks", "read is late", "cancel")),
            2,
            130_000,
            id="links-and-cancels",
        ),
        pytest.param(
            Plan((3, 3), TWO, only_faults=("cut", "cancel")), 2, 440_000, id="cuts-and-cancels"
        ),
        pytest.param(
            Plan((3, 3), TWO, only_faults=("cut", "tick")), 2, 280_000, id="cuts-and-deadlines"
        ),
        pytest.param(
            Plan((3, 3), TWO, only_faults=("fail", "cancel", "stop")), 2, 210_000, id="both-let-go"
        ),
        pytest.param(
            Plan(
                (3,),
                (0,),
                asynchronous=True,
                only_faults=("cut", "fail", "cancel", "stop", "tick"),
            ),
            2,
            130_000,
            id="events-cross-commands",
        ),
    ],
)
def test_no_interleaving_with_more_faults_breaks_an_invariant(
    plan: Plan, faults: int, states: int
) -> None:
    assert search(plan, PATIENT, faults=faults).states > states
