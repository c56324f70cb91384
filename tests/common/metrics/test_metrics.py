"""Exported metrics of the processes, compared with docs/metrics.md."""

from itertools import chain

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.distribution import HistogramCounts, LiveHistogram
from common.metrics.program import TRUST
from docs.generate import metrics as docs
from kvtransfer.ports import LinkMember, ProducerUp
from node import metrics as node
from node.messages import EngineStats
from node.metrics import NodeMetrics
from router import metrics as router
from router.cluster.cluster_state import NodeReport
from router.metrics import RouterMetrics
from tests.support.network.scrapes import check_declared

ROLES = ("prefill", "decode", "encode")


def moving(gauges=None, distributions=None, links=()):
    return EngineStats(
        steps=1, gauges=gauges or {}, state="ready", links=links, distributions=distributions or {}
    )


def families(metrics):
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(name, labels)


def test_the_page_lists_the_exported_metrics():
    # `python -m docs.generate.metrics` writes it.
    assert docs.FILE.read_text() == docs.page()
    for declared in (*router.DECLARED, *chain.from_iterable(node.DECLARED.values())):
        assert f"| `{declared.name}" in docs.FILE.read_text()


@pytest.mark.parametrize("role", ROLES)
def test_a_node_has_every_series_from_the_start(role):
    check_declared(families(NodeMetrics(role)), node.DECLARED[role])


def test_a_router_has_every_series_from_the_start():
    check_declared(families(RouterMetrics()), router.DECLARED)


def test_names_have_base_units_and_belong_to_one_process():
    routers = {each.name for each in router.DECLARED}
    nodes = {each.name for each in node.DECLARED["decode"]}
    own = {name for name in routers | nodes if name.startswith("baton_")}
    others = (routers | nodes) - own
    assert others and all(name.startswith("process_") for name in others)
    assert routers & nodes == {"baton_info", *others, *(each.name for each in TRUST)}
    for name in own:
        assert not {"ms", "us", "ns", "millis", "kib", "mib", "gib", "percent"} & {*name.split("_")}
        assert not name.endswith("_total")  # defined by the library


def test_a_distribution_is_a_histogram_with_cumulative_buckets():
    seconds = LiveHistogram((0.1, 1.0))
    for each, times in ((0.05, 2), (0.1, 1), (0.5, 1), (7.0, 3)):
        seconds.add(each, times)
    assert seconds.counted() == HistogramCounts((0.1, 1.0), (3, 1, 3), pytest.approx(21.7))
    metrics = NodeMetrics("decode")
    metrics.report = moving(distributions={"step_seconds/decode": seconds.counted()})
    bucket = "baton_step_seconds_bucket"
    assert value(metrics, bucket, mode="decode", le="0.1") == 3
    assert value(metrics, bucket, mode="decode", le="1.0") == 4
    assert value(metrics, bucket, mode="decode", le="+Inf") == 7
    assert value(metrics, "baton_step_seconds_count", mode="decode") == 7
    assert value(metrics, "baton_step_seconds_sum", mode="decode") == pytest.approx(21.7)


def test_tokens_that_arrive_together_are_as_many_values():
    metrics = RouterMetrics()
    metrics.next_token(0.02, times=3)
    metrics.next_token(0.5)
    name = "baton_inter_token_latency_seconds"
    assert value(metrics, f"{name}_count") == 4
    assert value(metrics, f"{name}_sum") == pytest.approx(0.56)


def test_rejections_of_frontend_and_engine_add_up():
    metrics = NodeMetrics("decode")
    metrics.refused("invalid")
    metrics.report = moving({"total_refused/invalid": 2.0, "total_refused/deadline": 1.0})
    metrics.refused("draining")
    name = "baton_node_requests_rejected_total"
    assert value(metrics, name, reason="invalid") == 3
    assert value(metrics, name, reason="deadline") == 1
    assert value(metrics, name, reason="draining") == 1
    assert value(metrics, name, reason="overloaded") == 0


def of_rank(rank, gib_per_s):
    return LinkMember(rank, 0, "tcp", gib_per_s)


def test_links_are_reported_by_path_and_rank():
    metrics = NodeMetrics("decode")
    metrics.report = moving(
        links=(
            ProducerUp(1, "a:1", "tcp", 2.0, 64, (of_rank(0, 1.5), of_rank(1, 1.0))),
            ProducerUp(2, "b:1", "tcp", 1.0, 64, (of_rank(0, 0.5),)),
            ProducerUp(3, "c:1", "rdma", 20.0, 64),
        )
    )
    assert value(metrics, "baton_links", path="tcp") == 2
    assert value(metrics, "baton_links", path="cma") == 0
    assert value(metrics, "baton_link_min_bytes_per_second", path="tcp") == 2**30
    assert value(metrics, "baton_link_min_bytes_per_second", path="cma") is None
    assert value(metrics, "baton_rank_link_min_bytes_per_second", rank="0") == 2**29
    assert value(metrics, "baton_rank_link_min_bytes_per_second", rank="1") == 2**30
    assert value(metrics, "baton_rank_link_min_bytes_per_second", rank="2") is None
    check_declared(families(metrics), node.DECLARED["decode"])


def test_ranks_are_reported_separately_if_there_are_several():
    metrics = NodeMetrics("decode")
    assert not families(metrics)["baton_rank_memory_bytes"].samples
    metrics.report = moving({"rank_memory/0": 5.0, "rank_memory/1": 7.0, "rank_behind/0": 0.0})
    assert value(metrics, "baton_rank_memory_bytes", rank="1") == 7
    assert value(metrics, "baton_rank_steps_behind", rank="0") == 0
    assert value(metrics, "baton_rank_steps_behind", rank="1") is None  # not reported yet
    check_declared(families(metrics), node.DECLARED["decode"])


def test_the_state_of_a_node_has_exactly_one_value():
    metrics = NodeMetrics("prefill")
    metrics.liveness = lambda: ("unhealthy", 4.5)
    assert value(metrics, "baton_node_state", state="unhealthy") == 1
    assert value(metrics, "baton_node_state", state="ready") == 0
    assert value(metrics, "baton_engine_heartbeat_age_seconds") == 4.5


def test_a_state_without_nodes_is_zero():
    metrics = RouterMetrics()
    metrics.nodes([NodeReport("decode", f"node:{port}", "ready", None) for port in (1, 2)])
    assert value(metrics, "baton_nodes", kind="decode", state="ready") == 2
    metrics.nodes([NodeReport("decode", "node:1", "unreachable", None)])
    assert value(metrics, "baton_nodes", kind="decode", state="ready") == 0
    assert value(metrics, "baton_nodes", kind="decode", state="unreachable") == 1


def test_an_undeclared_status_is_reported_as_other():
    metrics = RouterMetrics()
    metrics.http_answered(418)
    assert value(metrics, "baton_http_responses_total", status="other") == 1
