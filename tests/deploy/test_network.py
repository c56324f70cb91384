"""Network policies: the ports of pods are open only to the callers in the guide.

The table "Port access" of the guide is the rule with which policies are compared.
"""

import copy
import re
from urllib.parse import urlsplit

import pytest

from tests.deploy import manifests
from tests.deploy.conftest import GUIDE, OVERLAYS
from tests.deploy.manifests import KUBERNETES, named_ports, of_kind, selects, workloads

# Users start with the guide's example, so it is checked, too.
GUARDED = [*OVERLAYS, "the guide's example"]


def _namespace(**labels):
    return {"namespaceSelector": {"matchLabels": labels}}


def _pods(label):
    return {"podSelector": {"matchLabels": {label: "true"}}}


MONITORING = _namespace(**{"kubernetes.io/metadata.name": "monitoring"})
DNS = _namespace(**{"kubernetes.io/metadata.name": "kube-system"})
# Ranks exchange tensors over ports that the system chooses.
TENSORS = {"port": 32768, "endPort": 60999}
# The guide's names, as policies write them.
WHO = {
    "clients": [_pods("baton-client"), _namespace(**{"baton-client": "true"})],
    "routers": [_pods("baton-router")],
    "prefill nodes": [_pods("baton-prefill")],
    "decode nodes": [_pods("baton-decode")],
    "Prometheus": [MONITORING],
    "ranks of prefill nodes": [_pods("baton-prefill-ranks")],
    "ranks of decode nodes": [_pods("baton-decode-ranks")],
    "only its own host": [],  # allowed by policies without a rule
}


def _documented():
    """Return by the name of a port: its number, and the peers that may connect."""
    table = GUIDE.read_text().split("### Port access\n")[1].split("\n### ")[0]
    found = {}
    for ports, who in re.findall(r"^\| (`.+?) \|.*\| (.+) \|$", table, re.M):
        peers = [peer for word in who.split(", ") for peer in WHO[word]]
        for name, number in re.findall(r"`([a-z-]+)` ([0-9]+)", ports):
            assert name not in found
            found[name] = int(number), peers
    return found


def _rules(objects, workload, direction):
    """Return the peers and port numbers of every rule for these pods: "ingress" or "egress"."""
    for policy in of_kind(objects, "NetworkPolicy"):
        if selects(policy["spec"]["podSelector"]["matchLabels"], workload.labels):
            for rule in policy["spec"].get(direction, ()):
                peers = rule["from" if direction == "ingress" else "to"]
                ports = rule.get("ports")
                assert peers and ports, f"{policy['metadata']['name']}: a rule without a port"
                if ports == [TENSORS]:  # of pods that are one node, see below
                    assert peers == [{"podSelector": policy["spec"]["podSelector"]}]
                    continue
                assert all(port.keys() <= {"port", "protocol"} for port in ports)  # without ranges
                numbers = [port["port"] for port in ports]
                assert all(type(number) is int for number in numbers)  # no name means all ports
                yield peers, numbers


def _check(objects):
    """Fail if any port of a pod is open to other callers than the guide says."""
    documented = _documented()
    for workload in workloads(objects):
        policies = [
            policy["spec"]
            for policy in of_kind(objects, "NetworkPolicy")
            if selects(policy["spec"]["podSelector"]["matchLabels"], workload.labels)
        ]
        types = {kind for policy in policies for kind in policy["policyTypes"]}
        assert types == {"Ingress", "Egress"}, f"{workload.name}: not all is refused by default"
        rules = list(_rules(objects, workload, "ingress"))
        for _, ports in rules:
            assert {number for number, _ in documented.values()} >= set(ports)
        for name, number in named_ports(workload.containers):
            assert name in documented, f"the guide says of port {name} nothing"
            let_in = [peer for peers, ports in rules if number in ports for peer in peers]
            assert (number, _sorted(let_in)) == (documented[name][0], _sorted(documented[name][1]))


def _sorted(peers):
    return sorted(peers, key=repr)


# Seen failing with a rule without ports, with routers allowed to read pages, and without the
# component in an overlay.
@pytest.mark.parametrize("name", GUARDED)
def test_each_port_is_open_exactly_to_the_callers_in_the_guide(render, name):
    _check(render(name))


@pytest.mark.parametrize("name", GUARDED)
def test_an_undocumented_port_of_a_pod_is_found(render, name):
    for i, workload in enumerate(workloads(render(name))):
        objects = copy.deepcopy(render(name))
        container = workloads(objects)[i].containers[-1]
        container["ports"].append({"name": "debug", "containerPort": 6000})
        with pytest.raises(AssertionError, match="of port debug nothing"):
            _check(objects)
        assert workload.containers[-1]["ports"] != container["ports"]


def test_every_port_in_the_guide_exists(render):
    names = {
        name
        for rendering in (*GUARDED, "base with tls")
        for workload in workloads(render(rendering))
        for name, _ in named_ports(workload.containers)
    }
    assert names == _documented().keys()


def _ports_between(rules, labels):
    """Return the ports that the rules open for pods of this namespace with these labels."""
    return {
        port
        for peers, ports in rules
        for peer in peers
        if "podSelector" in peer and selects(peer["podSelector"]["matchLabels"], labels)
        for port in ports
    }


@pytest.mark.parametrize("name", GUARDED)
def test_a_pod_may_call_only_the_pods_that_accept_it(render, name):
    objects = render(name)
    for caller in workloads(objects):
        for callee in workloads(objects):
            numbers = {number for _, number in named_ports(callee.containers)}
            may_call = _ports_between(_rules(objects, caller, "egress"), callee.labels)
            is_heard = _ports_between(_rules(objects, callee, "ingress"), caller.labels)
            assert may_call & numbers == is_heard & numbers


@pytest.mark.parametrize("name", GUARDED)
def test_a_pod_reaches_only_dns_and_the_trace_collector_outside(render, programs_of, name):
    (endpoint,) = {p.config.server.otlp_endpoint for p in programs_of("base with tracing")}
    collector = urlsplit(endpoint)
    assert collector.hostname.split(".")[1:] == ["monitoring"]
    for workload in workloads(render(name)):
        reached = [
            (peer, ports)
            for peers, ports in _rules(render(name), workload, "egress")
            for peer in peers
            if peer.keys() != {"podSelector"}
        ]
        assert _sorted(reached) == _sorted([(DNS, [53, 53]), (MONITORING, [collector.port])])


def test_only_the_ranks_of_one_node_reach_its_tensor_ports(render):
    """There is one group in a set, because policies cannot distinguish groups."""
    objects = render("tp8-two-hosts")
    for role in ("prefill", "decode"):
        label = {f"baton-{role}-ranks": "true"}
        inside = [w.name for w in workloads(objects) if selects(label, w.labels)]
        assert inside == [f"{role}-hosts leaders", f"{role}-hosts workers"]
        assert [w.num_pods for w in workloads(objects) if w.name in inside] == [1, 1]
        (policy,) = [
            each["spec"]
            for each in of_kind(objects, "NetworkPolicy")
            if each["spec"]["podSelector"]["matchLabels"] == label
        ]
        for direction in ("ingress", "egress"):
            assert [TENSORS] in [rule["ports"] for rule in policy[direction]]


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_has_network_policies(name):
    """Read without kustomize."""
    file = KUBERNETES / "overlays" / name / "kustomization.yaml"
    assert "../../components/network-policy" in manifests.load(file.read_text())["components"]
