"""Every fault of every kind of process, one after the other, with fifty requests in flight, so
that they are in every queue and in migrations. `make chaos` has random faults."""

from pathlib import Path

import pytest

from tests.chaos.faults import STOPS_S, Fault, Round
from tests.chaos.storm import storm

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3000)]

NUM_CLIENTS = 50
ENDS = ("SIGKILL of the frontend", "SIGKILL of the engine", "SIGTERM", "drain")
STOPS = ("SIGSTOP of the frontend", "SIGSTOP of the engine")
_LEAVES = Fault("drain", "decode", 0)  # its requests migrate to the other one


def _alone(role: str) -> list[tuple[Fault, ...]]:
    ends = [(Fault(what, role),) for what in ENDS]
    stops = [(Fault(what, role, 1, seconds),) for what in STOPS for seconds in STOPS_S]
    return [*ends, *stops]


PLANS = {
    "prefill": _alone("prefill"),
    "decode": _alone("decode"),
    "router": [
        (Fault("SIGKILL of a process", "router"),),
        (Fault("renewal of the processes", "router"),),
    ],
    "moving": [
        *((_LEAVES, Fault(what, "decode", 1, STOPS_S[0])) for what in STOPS),
        *((_LEAVES, Fault(what, "prefill")) for what in ENDS[:2]),
    ],
}


@pytest.mark.parametrize("what", PLANS)
async def test_no_request_is_lost(tmp_path: Path, what: str) -> None:
    plan = [Round(2.0, faults) for faults in PLANS[what]]
    left = iter(range(len(plan)))
    report = await storm(
        1, plan, lambda: next(left, None) is not None, tmp_path, num_clients=NUM_CLIENTS
    )
    assert report.complaints == []
    assert len(report.rounds) == len(plan)
    assert report.num_right > NUM_CLIENTS
