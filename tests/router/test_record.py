"""Figures recorded for one request."""

import pytest

from router import record
from router.metrics import RouterMetrics
from router.record import RequestRecords
from router.timelines import TimelineRecorder


def test_tokens_written_together_with_the_first_one_have_not_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: clock[0])
    metrics = RouterMetrics()
    client = "10.0.0.1"
    with RequestRecords(metrics, TimelineRecorder(metrics, None)).begin(
        "one", "", client, ""
    ) as one:
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
