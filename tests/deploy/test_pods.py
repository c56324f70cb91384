"""Invariants of every pod: its configuration, its lifecycle and its privileges.

They apply to overlays, and to every component alone on the base.
"""

import re
from itertools import chain
from pathlib import Path

import pytest

from common.config import NodeConfig, RouterConfig
from protos import node_pb2, router_pb2
from tests.deploy import manifests
from tests.deploy.manifests import POD_IP, named, num_bytes, of_kind, role_of, selects, workloads
from tests.support.processes.programs import ROOT

# Time of a program after its drain, in which streams and the engine end.
ENDING_S = 10
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
_NODE = node_pb2.DESCRIPTOR.services_by_name["Node"].full_name
_ROUTER = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
SERVICES = {"router": _ROUTER, "prefill": _NODE, "decode": _NODE, "encode": _NODE}


# Configuration ----------------------------------------------------------------------------------


def test_every_program_listens_for_others_on_the_ports_of_its_container(programs):
    for program in programs:
        front = program.config.server
        assert front.host == "0.0.0.0"
        ports = dict(manifests.named_ports([program.container]))
        name = _name_of(program)
        expected = {f"{name}-metrics": front.metrics_port}
        if front.health_port is not None:
            expected[f"{name}-health"] = front.health_port
        match program.config:
            case RouterConfig(http_port=http_port):
                expected |= {"http": http_port, "grpc": front.port}
            case NodeConfig(transfer=transfer):
                expected |= {name: front.port}
                if transfer.backend != "nixl":  # which does not serve pages over tcp
                    parallel = program.config.engine.parallel
                    if parallel.hosts > 1:
                        expected[f"{name}-ranks"] = parallel.listen_port
                    for rank in range(parallel.ranks_per_host):
                        suffix = ("", "-b", "-c", "-d")[rank]
                        expected[f"{name}-data{suffix}"] = transfer.listen_port + rank
        assert 0 not in expected.values()
        assert ports == expected


def _name_of(program):
    """Return the prefix of the names of a program's ports."""
    if program.role == "router" or not program.config.engine.parallel.dp_rank:
        return program.role
    return f"group-{'abcd'[program.config.engine.parallel.dp_rank]}"


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_pods_of_a_role_are_placed_on_different_hosts_if_possible(role):
    (workload,) = (each for each in workloads(manifests.base()) if each.name == role)
    (spread,) = workload.spec["topologySpreadConstraints"]
    assert spread["whenUnsatisfiable"] == "ScheduleAnyway"  # one host suffices
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert selects(spread["labelSelector"]["matchLabels"], workload.labels)


def test_ports_of_a_pod_are_different(objects):
    for workload in workloads(objects):
        ports = list(manifests.named_ports(workload.containers))
        for column in zip(*ports, strict=True):
            assert len(set(column)) == len(column)


def test_every_program_has_the_cluster_secret_in_a_file_that_others_cannot_read(programs):
    for program in programs:
        front = program.config.server
        assert not front.insecure
        assert front.secret_file.name == "secret"
        volume = program.volume_at(front.secret_file.parent)
        assert volume["secret"] == {"secretName": "baton-cluster", "defaultMode": 0o440}


def test_the_data_path_has_the_address_of_the_pod(programs):
    for program in programs:
        match program.config:
            case NodeConfig(transfer=transfer):
                assert transfer.listen_host == POD_IP


def test_a_node_computes_with_the_cores_that_its_pod_requests(programs):
    # Seen failing without the variable: 0, every core of the machine.
    for program in programs:
        match program.config:
            case NodeConfig(engine=engine):
                assert engine.threads == int(program.container["resources"]["requests"]["cpu"])


def test_every_program_finds_its_model_in_a_volume(programs):
    for program in programs:
        for model in program.models:
            assert program.volume_at(Path("/", model.split("/")[1]))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_router_finds_every_node_by_the_name_of_its_headless_service(objects, programs, role):
    (router,) = [program for program in programs if program.role == "router"]
    found = []
    for entry in chain.from_iterable(getattr(each, role) for each in router.config.each_model):
        kind, name, port = entry.split(":")
        assert kind == "dns"
        service = named(objects, "Service", name)["spec"]
        found += [
            program.workload.name
            for program in programs
            if program.role == role
            and program.config.server.port == int(port)
            and selects(service["selector"], program.workload.labels)
        ]
    assert sorted(found) == sorted(p.workload.name for p in programs if p.role == role) != []


def test_only_the_router_has_a_virtual_address(objects):
    for service in of_kind(objects, "Service"):
        (workload,) = [
            w for w in workloads(objects) if selects(service["spec"]["selector"], w.labels)
        ]
        roles = {role_of(container) for container in workload.containers}
        headless = service["spec"].get("clusterIP") == "None"
        assert headless == (roles != {"router"})
        # The name of a draining node must remain, because its requests continue.
        assert service["spec"].get("publishNotReadyAddresses", False) == headless


# Lifecycle ----------------------------------------------------------------------------------------


def test_probes_call_an_existing_program(programs):
    for program in programs:
        container, front = program.container, program.config.server
        # Probes of gRPC cannot do TLS, those of HTTP can.
        port = front.health_port if front.tls.cert else front.port
        asked = {"port": port, "service": SERVICES[program.role]}
        assert container["readinessProbe"]["grpc"] == asked
        for name in ("startupProbe", "livenessProbe"):
            match program.config:
                case RouterConfig():
                    # Its gRPC health reports whether there are nodes, which is no reason to restart
                    # it.
                    scheme = {"scheme": "HTTPS"} if front.tls.cert else {}
                    health = {"path": "/health", "port": "http"}
                    assert container[name]["httpGet"] == health | scheme
                case _:
                    assert container[name]["grpc"] == asked


def test_a_large_model_has_time_to_load(programs):
    for program in programs:
        if program.role != "router":
            probe = program.container["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_a_pod_has_more_time_than_its_drain(programs):
    for program in programs:
        stop = program.container.get("lifecycle", {}).get("preStop", {})
        before = stop.get("sleep", {}).get("seconds", 0)
        drain = program.config.server.drain_timeout_s
        assert before < drain
        grace = program.workload.spec["terminationGracePeriodSeconds"]
        assert grace >= before + drain + ENDING_S


def test_disruption_budgets_allow_one_pod_of_each_kind_at_a_time(objects):
    budgets = [budget["spec"] for budget in of_kind(objects, "PodDisruptionBudget")]
    for workload in workloads(objects):
        mine = [b for b in budgets if selects(b["selector"]["matchLabels"], workload.labels)]
        assert [budget["maxUnavailable"] for budget in mine] == [1]
    for budget in budgets:
        assert any(selects(budget["selector"]["matchLabels"], w.labels) for w in workloads(objects))


# Privileges ---------------------------------------------------------------------------------------


def test_pods_follow_the_restricted_profile(objects):
    user = int(re.findall(r"^USER ([0-9]+):[0-9]+$", DOCKERFILE, re.M)[-1])
    (namespace,) = of_kind(objects, "Namespace")
    level = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    added = set()
    for workload in workloads(objects):
        spec, pod = workload.spec, workload.spec["securityContext"]
        assert pod["runAsNonRoot"] and pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert {pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]} == {user} != {0}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for container in workload.all_containers:
            own = container["securityContext"]
            added |= set(own["capabilities"].get("add", ()))
            assert own["capabilities"]["drop"] == ["ALL"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            allowed = {"allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"}
            assert own.keys() == allowed
    # RDMA requires more than that profile, and nothing else may.
    assert (level, added) in [("restricted", set()), ("privileged", {"IPC_LOCK"})]


def test_only_volumes_for_writing_are_writable(objects):
    for workload in workloads(objects):
        empty = {v["name"] for v in workload.spec["volumes"] if "emptyDir" in v}
        for container in workload.all_containers:
            for mount in container["volumeMounts"]:
                assert mount.get("readOnly") or mount["name"] in empty


def test_pods_get_no_unrequested_data_of_the_cluster(objects):
    for workload in workloads(objects):
        assert workload.spec["automountServiceAccountToken"] is False
        # A Service called baton-http would set BATON_HTTP_PORT=tcp://...
        assert workload.spec["enableServiceLinks"] is False


def test_every_container_has_requests_and_limits(objects):
    for workload in workloads(objects):
        for container in workload.all_containers:
            requests, limits = (container["resources"][key] for key in ("requests", "limits"))
            assert requests["cpu"]
            assert num_bytes(requests["memory"]) <= num_bytes(limits["memory"])


def test_images_are_ours_in_this_version(objects, name):
    node = "node-cpu" if name == "dev-cpu" else "node"
    for workload in workloads(objects):
        for container in workload.all_containers:
            image = (
                node
                if role_of(container) in ("prefill", "decode", "encode", "rank-host")
                else "router"
            )
            repository, _, tag = container["image"].rpartition(":")
            assert repository.removeprefix("registry.example/") == f"baton-{image}"
            assert tag == VERSION
