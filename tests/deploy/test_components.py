"""The purpose of each component."""

import re
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from cli.planner import __main__ as planner_main
from common.config import RouterConfig, SchedulerConfig, gpus_of
from node.messages import EngineStats
from node.metrics import NodeMetrics
from node.request_state import RequestStage
from tests.deploy.conftest import COMPONENTS, OVERLAYS
from tests.deploy.manifests import (
    KUBERNETES,
    environment,
    named,
    named_ports,
    num_bytes,
    of_kind,
    role_of,
    selects,
    settings,
    workloads,
)
from tests.support.processes.programs import ROOT

NODES = ("prefill", "decode")
GIB = 1 << 30
# A node sets the names of its queues here, except those named like a stage.
SCHEDULER = "engine/scheduler/scheduler.py"
QUEUE_SOURCES = {
    "prefill": ("prefill_node/engine.py", SCHEDULER),
    "decode": ("decode_node/engine.py", SCHEDULER),
}


def _nodes(programs):
    found = [program for program in programs if program.role in NODES]
    assert {program.role for program in found} == set(NODES)
    return found


def test_the_guide_documents_every_component_and_overlay():
    guide = (ROOT / "docs" / "kubernetes.md").read_text()
    for name in (*COMPONENTS, *OVERLAYS):
        assert f"| `{name}` |" in guide


def test_nodes_on_cpus_require_compiled_operations(programs_of):
    nodes = _nodes(programs_of("dev-cpu"))
    assert {node.config.engine.cpu_kernels for node in nodes} == {"required"}


def test_the_demo_model_is_written_where_every_program_reads_it(programs_of):
    for program in programs_of("dev-cpu"):
        (writer,) = program.workload.spec["initContainers"]
        assert writer["args"] == ["demo-model", *program.models]
        volume = program.volume("model")
        assert "emptyDir" in volume and not volume.get("persistentVolumeClaim")
        assert {"name": "model", "mountPath": "/model"} in writer["volumeMounts"]


@pytest.mark.parametrize("name", ["base with gpu", "multi-node-rdma", "multi-node-tls"])
def test_every_node_has_a_gpu_and_requires_it(programs_of, name):
    for program in _nodes(programs_of(name)):
        assert program.container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert program.config.engine.device == "cuda:0"
        # Part of the container's limit. A prefill node ignores it.
        assert (program.config.engine.cache.swap_pages > 0) == (program.role == "decode")


@pytest.mark.parametrize("name", ["base with tensor-parallel", "tp4-one-node"])
def test_every_rank_has_a_gpu_and_memory_to_exchange_tensors(programs_of, name):
    for program in _nodes(programs_of(name)):
        engine, limits = program.config.engine, program.container["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == engine.parallel.tp == len(gpus_of(engine.device)) == 4
        (mount,) = [m for m in program.container["volumeMounts"] if m["mountPath"] == "/dev/shm"]
        memory = program.volume(mount["name"])["emptyDir"]
        assert memory["medium"] == "Memory"
        assert GIB < num_bytes(memory["sizeLimit"]) < num_bytes(limits["memory"]) / 2


def test_a_node_on_two_hosts_is_a_group_that_restarts_as_a_whole(render, programs_of):
    groups = of_kind(render("tp8-two-hosts"), "LeaderWorkerSet")
    assert len(groups) == 2 and not of_kind(render("tp8-two-hosts"), "StatefulSet")
    services = {each["metadata"]["name"] for each in of_kind(render("tp8-two-hosts"), "Service")}
    leaders = {program.role: program for program in _nodes(programs_of("tp8-two-hosts"))}
    for group in groups:
        # The controller makes a Service of this name.
        assert group["metadata"]["name"] not in services
        template = group["spec"]["leaderWorkerTemplate"]
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
        (worker,) = template["workerTemplate"]["spec"]["containers"]
        program = leaders[worker["name"]]
        parallel = program.config.engine.parallel
        assert (parallel.hosts, parallel.ranks_per_host) == (template["size"], 4)
        assert worker["resources"] == program.container["resources"]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == parallel.ranks_per_host
        join, secret = worker["args"][1:]
        assert join == f"--leader=$(LWS_LEADER_ADDRESS):{parallel.listen_port}"
        assert secret == f"--secret-file={program.config.server.secret_file}"
        first = program.config.transfer.listen_port + parallel.ranks_per_host
        ports = [port for _, port in named_ports([worker])]
        assert ports == [*range(first, first + parallel.ranks_per_host)]
        # The router does not use a worker as a node.
        labels = template["workerTemplate"]["metadata"]["labels"]
        service = named(render("tp8-two-hosts"), "Service", program.role)["spec"]
        assert not selects(service["selector"], labels)
        assert selects(service["selector"], program.workload.labels)


@pytest.mark.parametrize("name", ["base with rdma", "multi-node-rdma"])
def test_every_node_has_an_rdma_port_and_uses_only_rdma(programs_of, name):
    for program in _nodes(programs_of(name)):
        assert program.container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
        assert program.container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert program.config.transfer.backend == "nixl"


def test_nodes_of_one_pod_share_two_gpus_and_their_processes(render, programs_of):
    name = "one-node-two-gpus"
    prefill, decode = _nodes(programs_of(name))
    assert prefill.workload == decode.workload
    spec = prefill.workload.spec
    assert spec["shareProcessNamespace"] is True
    (claim,) = spec["resourceClaims"]
    for program in (prefill, decode):
        assert program.container["resources"]["claims"] == [{"name": claim["name"]}]
        assert not [key for key in program.container["resources"]["limits"] if "gpu" in key]
        assert "runAsUser" not in program.container["securityContext"]
        assert program.config.transfer.backend == "auto"
    template = named(render(name), "ResourceClaimTemplate", claim["resourceClaimTemplateName"])
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    devices = {prefill.config.engine.device, decode.config.engine.device}
    assert devices == {f"cuda:{number}" for number in range(request["exactly"]["count"])}


def test_nodes_of_a_data_parallel_group_find_each_other_and_share_no_port(programs_of):
    programs = programs_of("dp2-one-pod")
    nodes = [program for program in _nodes(programs) if program.role == "decode"]
    assert {id(node.workload) for node in nodes} == {id(nodes[0].workload)}
    parallel = [node.config.engine.parallel for node in nodes]
    assert [each.dp_rank for each in parallel] == [*range(parallel[0].dp)] == [0, 1]
    assert len({each.dp_group for each in parallel}) == 1
    for node in nodes:
        assert "emptyDir" in node.volume_at(node.config.engine.parallel.dp_group.parent)
        assert node.container["readinessProbe"]["grpc"]["port"] == node.config.server.port
    ports = [
        port
        for node in nodes
        for port in (
            node.config.server.port,
            node.config.server.metrics_port,
            node.config.transfer.listen_port,
        )
    ]
    assert len({*ports}) == len(ports)
    assert nodes[0].workload.spec["shareProcessNamespace"] is True
    (router,) = [program for program in programs if program.role == "router"]
    assert router.config.decode == tuple(f"dns:decode:{node.config.server.port}" for node in nodes)


def test_a_group_is_one_prefill_node_and_decode_nodes(render, programs_of):
    (group,) = of_kind(render("multi-node-rdma"), "LeaderWorkerSet")
    assert not of_kind(render("multi-node-rdma"), "StatefulSet")
    count = {p.role: p.workload.num_pods for p in _nodes(programs_of("multi-node-rdma"))}
    replicas, size = group["spec"]["replicas"], group["spec"]["leaderWorkerTemplate"]["size"]
    assert count == {"prefill": replicas, "decode": replicas * (size - 1)}


def test_a_draining_pod_may_wait_as_long_as_a_request_may_take(programs_of):
    programs = programs_of("base with drain")
    (router,) = [program for program in programs if program.role == "router"]
    for program in programs:
        assert program.config.server.drain_timeout_s >= router.config.request_timeout_s
    assert router.container["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5


# TLS --------------------------------------------------------------------------------------------


TLS = [
    *("base with tls", "base with tls and pairs", "base with tls and nvlink"),
    *("base with encode and tls", "multi-node-tls"),
]


def _made(objects, program, path):
    """Return the Certificate whose Secret has the configured file of a program."""
    volume = program.volume_at(path.parent)
    assert path.name in ("tls.crt", "tls.key", "ca.crt")  # what cert-manager writes
    (certificate,) = [
        each["spec"]
        for each in of_kind(objects, "Certificate")
        if each["spec"]["secretName"] == volume["secret"]["secretName"]
    ]
    return certificate


@pytest.mark.parametrize("name", TLS)
def test_with_tls_both_ends_of_every_connection_are_verified(render, programs_of, name):
    objects = render(name)
    for program in programs_of(name):
        match program.config:
            case RouterConfig() as config:
                calls, shows, may = config.tls_to_nodes, config.server.tls, {"client auth"}
                service = named(objects, "Service", "router")["metadata"]
                of_router = _made(objects, program, shows.cert)
                assert {service["name"], f"{service['name']}.{service['namespace']}"} <= set(
                    of_router["dnsNames"]
                )
                assert shows.ca is None  # clients need no certificate
                # Nodes do not accept the certificate that the router shows to clients.
                assert "client auth" not in of_router["usages"]
            case config:
                calls, may = config.server.tls, {"server auth", "client auth"}
                assert calls.ca  # callers must show a certificate
        of_caller = _made(objects, program, calls.cert)
        assert _made(objects, program, calls.key) == of_caller
        assert set(of_caller["usages"]) == {"digital signature"} | may
        # Without a cluster secret, a process is identified only by this, and has only one role.
        role = "router" if program.role == "router" else "node"
        assert of_caller["uris"] == [f"urn:baton:{role}"]
        of_node = named(objects, "Certificate", "baton-node")["spec"]
        assert [calls.server_name] == of_node["dnsNames"]
        assert role == "node" or not of_caller.get("dnsNames")


@pytest.mark.parametrize("name", TLS)
def test_every_certificate_leads_to_one_authority_of_the_namespace(render, name):
    objects = render(name)
    issued = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Certificate")}
    for certificate in issued.values():
        issuer = named(objects, certificate["issuerRef"]["kind"], certificate["issuerRef"]["name"])
        match issuer["spec"]:
            case {"ca": {"secretName": secret}}:
                (authority,) = [c for c in issued.values() if c["secretName"] == secret]
                assert authority["isCA"] and not certificate.get("isCA")
            case {"selfSigned": {}}:
                assert certificate["isCA"]


@pytest.mark.parametrize("name", TLS)
def test_names_of_service_ports_say_that_they_use_tls(render, name):
    for service in of_kind(render(name), "Service"):
        for port in service["spec"]["ports"]:
            assert port.get("appProtocol") in (None, "https")


def test_with_tls_no_unencrypted_page_is_sent_between_hosts(programs_of):
    for program in _nodes(programs_of("multi-node-tls")):
        config = program.config
        assert config.server.tls.cert and config.transfer.encrypt in ("auto", "on")
        # RDMA traffic is not encrypted, so pods have no RDMA port.
        assert not [key for key in program.container["resources"]["limits"] if "rdma" in key]


# Clients ----------------------------------------------------------------------------------------


def test_a_router_reads_api_keys_from_a_secret_that_users_create(programs_of):
    (router,) = [p for p in programs_of("base with api-keys") if p.role == "router"]
    file = router.config.clients.api_keys
    volume = router.volume_at(file.parent)
    assert volume["secret"] == {"secretName": "baton-api-keys", "defaultMode": 0o440}
    command = (KUBERNETES / "components" / "api-keys" / "kustomization.yaml").read_text()
    assert f"secret generic baton-api-keys --from-file={file.name}\n" in command


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_except_the_trial_requires_api_keys(programs_of, name):
    for program in programs_of(name):
        match program.config:
            case RouterConfig(clients=clients):
                assert (clients.api_keys is None) == (name == "dev-cpu")


# Monitoring and autoscaling ---------------------------------------------------------------------


def test_every_program_is_scraped_under_its_role(render):
    """Seen failing without the second node of a pod, and with one instance for both nodes."""
    objects = render("base with monitoring and data-parallel")
    (monitor,) = of_kind(objects, "PodMonitor")
    labels = {
        endpoint["port"]: {
            each["targetLabel"]: each.get("replacement", "$1") for each in endpoint["relabelings"]
        }
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    }
    for workload in workloads(objects):
        assert selects(monitor["spec"]["selector"]["matchLabels"], workload.labels)
        instances = set()
        for container in workload.containers:
            (port,) = [n for n, _ in named_ports([container]) if n.endswith("metrics")]
            scraped = labels.pop(port)
            assert scraped["role"] == role_of(container)
            instances.add(scraped["instance"])
        assert len(instances) == len(workload.containers)
    assert labels.pop("encode-metrics")["role"] == "encode"  # of the component encode
    assert labels == {}


def test_the_planner_has_its_settings_and_may_call_the_router(render):
    objects = render("base with planner")
    (planner,) = [w for w in workloads(objects) if w.name == "planner"]
    (container,) = planner.containers
    program, *flags = container["args"]
    options = planner_main.parse(flags)
    assert program == "planner" and not options.act
    service, port = options.router.split(":")
    (port,) = [
        each
        for each in named(objects, "Service", service)["spec"]["ports"]
        if each["port"] == int(port)
    ]
    (router,) = [w for w in workloads(objects) if w.name == "router"]
    policy = named(objects, "NetworkPolicy", "planner")["spec"]
    assert selects(policy["podSelector"]["matchLabels"], planner.labels)
    (let_out,) = [rule for rule in policy["egress"] if rule["ports"] == [{"port": port["port"]}]]
    assert selects(let_out["to"][0]["podSelector"]["matchLabels"], router.labels)
    # callers that the component network-policy allows
    assert planner.labels["baton-client"] == "true"
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "cluster"]
    assert options.secret_file.parent == Path(mount["mountPath"])
    (reported,) = named_ports([container])
    assert reported == ("planner-metrics", options.metrics_port) and options.host == "0.0.0.0"
    monitor = named(objects, "PodMonitor", "planner")["spec"]
    assert selects(monitor["selector"]["matchLabels"], planner.labels)
    assert monitor["podMetricsEndpoints"][0]["port"] == reported[0]


def _metrics_of_a_node(queues):
    metrics = NodeMetrics("decode")
    gauges = {f"queue_{name}": 1.0 for name in queues}
    metrics.report = EngineStats(steps=1, gauges=gauges, state="ready", links=())
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize("role", NODES)
def test_nodes_are_scaled_by_metrics_that_they_export(render, role):
    objects = render("base with autoscaling")
    (namespace,) = of_kind(objects, "Namespace")
    scaled = named(objects, "ScaledObject", role)["spec"]
    assert named(objects, "StatefulSet", scaled["scaleTargetRef"]["name"])
    (trigger,) = scaled["triggers"]
    metric, labels = re.fullmatch(r"sum\((\w+)\{(.+)\}\)", trigger["metadata"]["query"]).groups()
    wanted = dict(re.findall(r'(\w+)=~?"([^"]+)"', labels))
    assert wanted.pop("namespace") == namespace["metadata"]["name"]
    assert wanted.pop("role") == role  # as the component monitoring sets it
    queues = wanted.pop("queue").split("|")
    assert wanted == {}
    sources = "".join((ROOT / name).read_text() for name in QUEUE_SOURCES[role])
    for queue in queues:
        assert f'{metric}{{queue="{queue}"}} 1.0' in _metrics_of_a_node(queues)
        assert f'"{queue}": ' in sources or queue in [stage.value for stage in RequestStage]
    # Another node starts before one is full.
    assert 0 < int(trigger["metadata"]["threshold"]) < SchedulerConfig().max_running_requests


def test_applying_the_manifests_again_keeps_the_current_scale(render):
    objects = render("base with autoscaling")
    for scaled in of_kind(objects, "ScaledObject"):
        target = named(objects, "StatefulSet", scaled["metadata"]["name"])
        assert "replicas" not in target["spec"]


# Tests of the tests -------------------------------------------------------------------------------


def test_an_unknown_variable_of_a_program_fails_a_test(render):
    (container,) = workloads(render("base"))[-1].containers
    wrong = container | {"env": [{"name": "BATON_FRONTT__PORT", "value": "1"}]}
    with pytest.raises(AssertionError, match="knows no BATON_FRONTT__PORT"):
        settings("decode", [], environment(render("base"), wrong))


def test_each_of_two_models_has_its_own_nodes(programs_of, render):
    name = "two-models"
    (router,) = [program for program in programs_of(name) if program.role == "router"]
    for model in router.config.each_model:
        for role in NODES:
            ((_, service, _),) = [entry.split(":") for entry in getattr(model, role)]
            selector = named(render(name), "Service", service)["spec"]["selector"]
            found = [p for p in programs_of(name) if selects(selector, p.workload.labels)]
            assert [(program.role, *program.models) for program in found] == [(role, model.model)]
