"""Latency percentiles, rejections and errors of the last minute, over worker processes."""

import pytest

from api.admin.router_state import MergedState, ModelReport, together
from common.errors import InvalidRequest, NodeUnavailable, Overloaded, QueueFull
from protos.router_pb2 import ModelState
from router import record
from router.metrics import LATENCY_S, SAMPLE_S, WINDOW_S, RecentRequests, RouterMetrics
from router.record import RequestRecords
from router.workers import OtherProcesses


class Worker:
    """The metrics and the state of one worker process."""

    class Admission:
        leaving = False
        num_live = 0
        max_requests = 8

    def __init__(self):
        self.metrics = RouterMetrics()
        admission = self.Admission()
        model = ModelReport(ModelState(name="m"), admission, lambda: None, list)
        self._state = MergedState([model], self.metrics.request_counts, OtherProcesses({}), 0.0)

    def now(self):
        return self._state.own()


@pytest.mark.parametrize("latency_s", [0.0005, 0.012, 0.3, 7.0, 100.0])
def test_percentiles_are_estimated_within_ten_percent(latency_s):
    worker = Worker()
    values = [latency_s * (1 + number / 1000) for number in range(1000)]
    for value in values:
        worker.metrics.first_token(value)
    ttft = together([worker.now()]).recent.ttft
    assert ttft.count == 1000
    assert ttft.p50_s == pytest.approx(values[500], rel=0.1)
    assert ttft.p99_s == pytest.approx(values[990], rel=0.1)


def test_a_latency_above_all_buckets_is_the_highest_bound_and_without_latencies_it_is_zero():
    worker = Worker()
    worker.metrics.first_token(1e6)
    recent = together([worker.now()]).recent
    assert recent.ttft.p99_s == LATENCY_S[-1]
    assert (recent.itl.count, recent.itl.p50_s, recent.itl.p99_s) == (0, 0.0, 0.0)


def test_worker_processes_are_merged_by_value_not_by_percentile():
    busy, idle = Worker(), Worker()
    busy.metrics.next_token(0.01, 99)
    idle.metrics.next_token(1.0, 1)
    for worker in (busy, idle):
        worker.metrics.rejected("limited")
        worker.metrics.rejected("overloaded")
        worker.metrics.rejected("late")
        worker.metrics.rejected("invalid")  # 400 is neither overload nor an error of the cluster
        worker.metrics.rejected("no_node")
        worker.metrics.accepted(1)
        worker.metrics.ended("error", 1.0)
    whole = together([busy.now(), idle.now()])
    assert whole.recent.itl.count == 100
    assert whole.recent.itl.p50_s == pytest.approx(0.01, rel=0.1)
    assert whole.recent.itl.p99_s == pytest.approx(0.01, rel=0.1)
    assert (whole.rejected_requests, whole.failed_requests) == (6, 4)
    assert (whole.recent.rejected_requests, whole.recent.failed_requests) == (6, 4)


def test_only_the_last_minute_counts():
    metrics = RouterMetrics()
    moment_s = 0.0
    recent = RecentRequests(metrics.request_counts, lambda: moment_s)
    metrics.rejected("late")
    metrics.first_token(0.5)
    while (moment_s := moment_s + SAMPLE_S) < WINDOW_S:
        assert recent.now()[1].rejected == recent.now()[1].ttft.count == 1
        recent.sample()
    metrics.first_token(0.5)
    recent.sample()
    window_s, counts = recent.now()
    assert (counts.rejected, counts.ttft.count) == (0, 1)
    assert WINDOW_S - 2 * SAMPLE_S <= window_s <= WINDOW_S


def test_tokens_written_together_with_the_first_one_count_no_itl(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: clock[0])
    metrics = RouterMetrics()
    client = "10.0.0.1"
    with RequestRecords(metrics, None).begin("one", "", client, "") as one:
        one.accept(5, "a:1")
        clock[0] = 105.0
        one.write(3)
        clock[0] = 106.0
        one.write(2)
        one.finish("stop", 0)
    value = metrics.registry.get_sample_value
    assert value("baton_time_to_first_token_seconds_sum") == 5.0
    assert value("baton_inter_token_latency_seconds_sum") == 1.0  # from the first to the last
    assert value("baton_inter_token_latency_seconds_count") == 4.0


@pytest.mark.parametrize(
    "error, tokens, outcome, counts",
    [
        (InvalidRequest("response_format is invalid"), 0, "invalid", (0, 0)),
        (QueueFull("overloaded", 2.0), 0, "overloaded", (1, 0)),
        (Overloaded("no page is left"), 3, "error", (0, 1)),  # the client got a part
        (NodeUnavailable("no node is left"), 0, "error", (0, 1)),
    ],
)
def test_a_request_that_a_node_rejects_is_no_error(error, tokens, outcome, counts):
    metrics = RouterMetrics()
    one = RequestRecords(metrics, None).begin("one", "", "10.0.0.1", "")
    one.accept(5, "a:1")
    if tokens:
        one.write(tokens)
    one.__exit__(type(error), error, None)
    value = metrics.registry.get_sample_value
    assert value("baton_requests_total", {"outcome": outcome}) == 1.0
    recent = metrics.request_counts()
    assert (recent.rejected, recent.failed) == counts
