"""Alert rules and dashboards, compared with the exported metrics and the runbook."""

import json
import re
from dataclasses import dataclass, field
from itertools import chain, pairwise

import promql_parser
import pytest
from prometheus_client.utils import floatToGoString

from common.metrics.declared import MetricDeclaration
from common.metrics.program import ROLES
from docs.generate import dashboards
from docs.generate import rules as generated
from node import metrics as node
from router import metrics as router
from tests.deploy.manifests import KUBERNETES, load, load_all, named, of_kind
from tests.support.processes.programs import ROOT

MONITORING = KUBERNETES / "components" / "monitoring"
DASHBOARDS = sorted(dashboards.DASHBOARDS.glob("*.json"))
RUNBOOK = ROOT / "docs" / "runbook.md"
# Labels that Prometheus adds to each series that it scrapes, by our PodMonitor or by
# prometheus.yml.
OF_THE_SCRAPE = {"namespace", "instance", "role"}
VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m"}  # Grafana's own, as an example

DECLARED: dict[str, MetricDeclaration] = {
    name: each
    for each in (*router.DECLARED, *chain.from_iterable(node.DECLARED.values()))
    for name in each.sample_names
}


@dataclass
class Parsed:
    """The metrics and labels of an expression."""

    metrics: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)  # labels in by, on and the like
    grouped: bool = False


def _values(metric: str, label: str) -> set[str] | None:
    """Return the possible values of a sample's label, or None if they are names of the cluster."""
    declared = DECLARED[metric]
    if label in declared.labels:
        return set(declared.labels[label])
    if label == "le" and metric.endswith("_bucket"):
        return {*map(floatToGoString, declared.bounds), "+Inf"}
    if label == "role":
        return set(ROLES)
    assert label in OF_THE_SCRAPE, f"{metric} has no label {label}"
    return None


def _check_selector(selector: promql_parser.VectorSelector, variables: set[str]) -> None:
    assert selector.name in DECLARED, f"no program exports {selector.name}"
    for matcher in selector.matchers.matchers:
        allowed = _values(selector.name, matcher.name)
        if matcher.value.startswith("$"):
            assert matcher.value.removeprefix("$") in variables
            continue
        assert allowed is not None, f"{selector}: names of clusters are none of ours"
        for value in matcher.value.split("|"):
            assert value in allowed, f"{selector}: {matcher.name} is never {value!r}"


def parsed(expression: str, variables: frozenset[str] = frozenset()) -> Parsed:
    """Parse an expression and check every name in it.

    Args:
        variables: of its dashboard.
    """
    for name, example in VARIABLES.items():
        expression = expression.replace(name, example)
    found = Parsed()

    def visit(part: promql_parser.Expr) -> bool:
        match part:
            case promql_parser.VectorSelector():
                _check_selector(part, set(variables))
                found.metrics.add(part.name)
            case promql_parser.MatrixSelector():
                _check_selector(part.vector_selector, set(variables))
                found.metrics.add(part.vector_selector.name)
            case promql_parser.AggregateExpr() if part.modifier is not None:
                found.grouped = True
                found.labels |= set(part.modifier.labels)
            case promql_parser.AggregateExpr():
                found.grouped = True
            case promql_parser.BinaryExpr() if part.modifier and part.modifier.matching:
                found.labels |= set(part.modifier.matching.labels)
        return True

    assert promql_parser.walk(promql_parser.parse(expression), visit)
    assert found.metrics, expression
    for label in found.labels:
        assert label in OF_THE_SCRAPE or any(
            label == "le" or label in DECLARED[metric].labels for metric in found.metrics
        ), f"{expression}: nothing has a label {label}"
    return found


# Alerts -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rules() -> list[dict]:
    (manifest,) = load_all((MONITORING / "alerts.yaml").read_text())
    return [rule for group in manifest["spec"]["groups"] for rule in group["rules"]]


def _anchors() -> dict[str, str]:
    """Sections of the runbook, as GitHub and MkDocs name them."""
    titles = re.findall(r"^## (.+)$", RUNBOOK.read_text(), re.M)
    return {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-"): title for title in titles
    }


def test_alerts_use_existing_metrics(rules):
    for rule in rules:
        found = parsed(rule["expr"])
        said = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert said <= found.labels, f"{rule['alert']} has no {said - found.labels}"


def test_an_alert_has_a_severity_and_a_link_to_the_runbook(rules):
    names = [rule["alert"] for rule in rules]
    assert len(set(names)) == len(names)
    for rule in rules:
        assert rule["alert"].startswith("Baton")
        assert rule["labels"] == {"severity": rule["labels"]["severity"]}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "runbook_url"}
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page.startswith("https://") and page.endswith(f"/{RUNBOOK.stem}.html")
        assert _anchors()[anchor] == rule["alert"]


def test_a_prometheus_without_the_operator_has_the_same_rules(rules):
    # `python -m docs.generate.rules` writes them.
    assert generated.FILE.read_text() == generated.rules(generated.MANIFEST.read_text())
    groups = load(generated.FILE.read_text())["groups"]
    assert [rule for group in groups for rule in group["rules"]] == rules


def test_links_to_the_runbook_can_lead_to_another_site():
    moved = generated.with_site(generated.MANIFEST.read_text(), "http://wiki:80/baton/")
    urls = re.findall(r"runbook_url: (\S+)", moved)
    assert urls and all(url.startswith("http://wiki:80/baton/runbook.html#baton") for url in urls)


def test_every_scraped_program_has_the_labels_of_rules_and_dashboards():
    scrape = load((generated.FILE.parent / "prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    # A planner and encode nodes are optional, and a missing target causes an alert.
    reported = {target["labels"]["role"] for target in job["static_configs"]}
    assert reported == set(ROLES) - {"planner", "encode"}
    assert all(target["labels"].keys() == {"namespace", "role"} for target in job["static_configs"])
    # one port for each program
    assert all(len(target["targets"]) == 1 for target in job["static_configs"])
    assert scrape["rule_files"] == [generated.FILE.name]
    (monitor,) = load_all((MONITORING / "pod-monitor.yaml").read_text())
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        assert {each["targetLabel"] for each in endpoint["relabelings"]} == {"role", "instance"}


def test_the_runbook_has_no_section_of_a_removed_alert(rules):
    alerts = {rule["alert"] for rule in rules}
    assert {title for title in _anchors().values() if title.startswith("Baton")} == alerts


def test_every_section_of_the_runbook_has_instructions(rules):
    text = RUNBOOK.read_text()
    for rule in rules:
        section = text.split(f"\n## {rule['alert']}\n")[1].split("\n## ")[0]
        for part in ("Meaning", "Causes", "Check", "Remedy"):
            assert f"**{part}.**" in section, f"{rule['alert']} has no {part}"


def test_metrics_in_the_runbook_exist():
    for name in set(re.findall(r"\bbaton_[a-z0-9_]+", RUNBOOK.read_text())):
        assert name in DECLARED, name


def test_an_expression_with_a_mistake_is_found():
    for wrong, why in (
        ("rate(baton_requests[5m])", "no program exports"),
        ('baton_requests_total{outcome="stopp"}', "never 'stopp'"),
        ('baton_requests_total{result="stop"}', "no label result"),
        ('baton_inter_token_latency_seconds_bucket{le="5"}', "never '5'"),
        ("sum by (path) (baton_requests_total)", "nothing has a label path"),
    ):
        with pytest.raises(AssertionError, match=why):
            parsed(wrong)
    with pytest.raises(ValueError, match="vector"):
        parsed("rate(baton_requests_total)")


# Dashboards -------------------------------------------------------------------------------------


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request):
    return json.loads(request.param.read_text())


def _queries(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel, target


def test_dashboards_are_what_their_short_forms_generate():
    # `python -m docs.generate.dashboards` writes them.
    assert {file.name: file.read_text() for file in DASHBOARDS} == {
        f"baton-{file.stem}.json": dashboards.dashboard(
            file.stem, dashboards.ShortDashboard.read(file)
        )
        for file in dashboards.SHORT_FORMS
    }


def test_dashboards_use_existing_metrics(dashboard):
    variables = frozenset(each["name"] for each in dashboard["templating"]["list"])
    for panel, target in _queries(dashboard):
        found = parsed(target["expr"], variables)
        said = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        available = found.labels if found.grouped else found.labels | OF_THE_SCRAPE
        assert said <= available, f"{panel['title']}: {said - available}"
        assert 'namespace=~"$namespace"' in target["expr"]


def test_variables_of_a_dashboard_use_existing_series(dashboard):
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            selector, label = re.fullmatch(
                r"label_values\((.+), (\w+)\)", variable["definition"]
            ).groups()
            parsed(selector, frozenset({"namespace"}))
            assert label in OF_THE_SCRAPE


def test_a_dashboard_is_valid_for_grafana(dashboard):
    assert dashboard["uid"] and dashboard["title"].startswith("Baton: ")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"]
            assert target["datasource"]["uid"] == "${datasource}"
        for before, after in pairwise(panel.get("targets", ())):
            assert before["refId"] < after["refId"]


def test_every_metric_is_on_a_dashboard():
    shown = {
        metric
        for file in DASHBOARDS
        for _, target in _queries(json.loads(file.read_text()))
        for metric in parsed(target["expr"], frozenset({"namespace", "instance"})).metrics
    }
    for each in (*router.DECLARED, *node.BOTH, *node.DECODE, *node.ENCODE):
        if each.name.startswith("baton_") and each.name != "baton_info":
            assert shown & each.sample_names, f"{each.name} is on no dashboard"


# In a cluster -----------------------------------------------------------------------------------


def test_dashboards_and_rules_are_rendered(render):
    objects = render("base with monitoring")
    dashboards = named(objects, "ConfigMap", "baton-dashboards")
    assert dashboards["data"].keys() == {file.name for file in DASHBOARDS}
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    (rules,) = of_kind(objects, "PrometheusRule")
    assert rules["spec"]["groups"]
