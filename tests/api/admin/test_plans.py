"""Plans that a planner reports to a router: visible on all worker processes, and limited in
number."""

from collections.abc import Sequence

import pytest
from grpc import StatusCode

from api.admin.moves import MOST_EVENTS, NUM_KEPT, Plans, together
from common.errors import InvalidRequest
from protos.router_pb2 import GetClusterRequest, Plan, PlanEvent, ReportPlanRequest
from router.workers import OtherProcesses
from tests.api.rig import failure, router_for
from tests.support.fake_clock import FakeClock
from tests.support.network.http_client import get

ALONE = OtherProcesses({})
PRESSURES = {"prefill": 1.5, "decode": 0.25}


def plan(events: Sequence[tuple[str, float]] = (), *, acts: bool = False) -> Plan:
    """Return events with their decision and age, newest first."""
    reported = [PlanEvent(what=what, because="of figures", ago_s=ago_s) for what, ago_s in events]
    return Plan(acts=acts, pressures=PRESSURES, events=reported)


async def test_a_planners_report_is_part_of_the_cluster_state(model):
    async with router_for(model, decode=["127.0.0.1:1"]) as (client, router):
        assert not (await client.stub.GetCluster(GetClusterRequest())).plan.pressures
        await client.stub.ReportPlan(
            ReportPlanRequest(plan=plan([("second", 1.0), ("first", 2.0)], acts=True))
        )
        await client.stub.ReportPlan(ReportPlanRequest(plan=plan([("third", 0.0)])))
        reported = (await get(router.http_port, "/cluster")).json["plan"]
        error = await failure(client.stub.ReportPlan(ReportPlanRequest()))
    assert (reported["acts"], reported["pressures"]) == (False, PRESSURES)
    assert [event["what"] for event in reported["events"]] == ["third", "second", "first"]
    ages = [event["ago_s"] for event in reported["events"]]
    assert ages == sorted(ages) and ages[0] >= reported["ago_s"] >= 0
    assert {event["because"] for event in reported["events"]} == {"of figures"}
    assert error.code() is StatusCode.INVALID_ARGUMENT


def test_every_process_returns_the_newest_plan():
    clock = FakeClock()
    first, second, silent = (Plans(ALONE, clock) for _ in range(3))
    first.take(plan([("a", 3.0)], acts=True))
    clock.now += 1.0
    second.take(plan([("c", 0.0), ("b", 2.0)]))
    clock.now += 1.0
    whole = together([each.own() for each in (first, silent, second)])
    assert (whole.acts, whole.ago_s) == (False, 1.0)
    assert [(event.what, event.ago_s) for event in whole.events] == [("c", 1), ("b", 3), ("a", 5)]
    assert together([silent.own()]) == Plan()


def test_only_the_last_events_are_kept():
    clock = FakeClock()
    own = Plans(ALONE, clock)
    for number in range(NUM_KEPT + 3):
        clock.now += 1.0
        own.take(plan([(str(number), 0.0)]))
    newest = [str(NUM_KEPT + 2 - number) for number in range(NUM_KEPT)]
    assert [event.what for event in own.own().events] == newest
    of_two = [event.what for event in together([own.own(), own.own()]).events]
    assert of_two == [what for what in newest[: NUM_KEPT // 2] for _ in range(2)]


@pytest.mark.parametrize(
    "wrong",
    [
        Plan(),
        Plan(pressures={str(number): 1.0 for number in range(9)}),
        Plan(pressures={"prefill": float("nan")}),
        Plan(pressures={"x" * 513: 1.0}),
        plan([("x", 0.0)] * (MOST_EVENTS + 1)),
        plan([("x" * 513, 0.0)]),
        plan([("x", -1.0)]),
        plan([("x", float("inf"))]),
    ],
)
def test_an_invalid_plan_is_rejected_and_changes_nothing(wrong):
    own = Plans(ALONE)
    with pytest.raises(InvalidRequest):
        own.take(wrong)
    assert own.own() == Plan()
