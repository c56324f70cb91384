"""The form of all rendered objects, and the references between them."""

import copy
import json
import re

import pytest
from jsonschema import ValidationError

from tests.deploy import manifests, schemas
from tests.deploy.conftest import OVERLAYS
from tests.deploy.manifests import KUBERNETES, named, num_bytes, of_kind, selects, workloads
from tests.support.processes.programs import ROOT


def test_every_object_is_valid_for_kubernetes(objects):
    claims = any("resourceClaims" in w.spec for w in workloads(objects))
    version = schemas.OLDEST_WITH_CLAIMS if claims else schemas.OLDEST_KUBERNETES
    for each in objects:
        schemas.check(each, version)


def test_no_two_objects_have_one_name(objects):
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert sorted(set(names)) == sorted(names)


def test_everything_is_in_one_namespace(objects):
    (namespace,) = [each["metadata"]["name"] for each in of_kind(objects, "Namespace")]
    others = {e["metadata"].get("namespace") for e in objects if e["kind"] != "Namespace"}
    assert others == {namespace}


def test_a_misspelt_field_is_found():
    for kind, path, field in (
        ("StatefulSet", ("spec", "template", "spec"), "terminationGracePeriod"),
        ("Service", ("spec",), "clusterIp"),
        ("PodDisruptionBudget", ("spec",), "minAvailabel"),
    ):
        wrong = of_kind(manifests.base(), kind)[0]
        part = wrong
        for name in path:
            part = part[name]
        part[field] = 1
        with pytest.raises(ValidationError, match=field):
            schemas.check(wrong, schemas.OLDEST_KUBERNETES)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("multi-node-rdma", "LeaderWorkerSet"),
        ("multi-node-rdma", "PodMonitor"),
        ("base with tls", "Issuer"),
        ("base with tls", "Certificate"),
    ],
)
def test_a_misspelt_field_of_a_custom_resource_is_found(render, name, kind):
    manifest = of_kind(render(name), kind)[0]
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["replica"] = 1
    with pytest.raises(ValidationError, match="replica"):
        schemas.check(wrong, schemas.OLDEST_KUBERNETES)


def test_a_misspelt_field_of_a_leader_is_found(render):
    (manifest,) = of_kind(render("multi-node-rdma"), "LeaderWorkerSet")
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["hostname_"] = "x"
    with pytest.raises(ValidationError, match="hostname_"):
        schemas.check(wrong, schemas.OLDEST_KUBERNETES)


def test_the_base_read_here_equals_the_one_that_kubectl_renders():
    def plain(objects):
        """Remove the suffixes of names, which depend on the content of a ConfigMap."""
        text = re.sub(r"\b(baton-(?:config|nodes))-[a-z0-9]{10}\b", r"\1", json.dumps(objects))
        return sorted(json.loads(text), key=lambda o: (o["kind"], o["metadata"]["name"]))

    assert plain(manifests.base()) == plain(manifests.rendered(KUBERNETES / "base"))


def test_every_file_is_yaml_and_part_of_a_kustomization():
    used = set()
    for file in KUBERNETES.glob("**/kustomization.yaml"):
        kustomization = manifests.load(file.read_text())
        used.add(file)
        names = [*kustomization.get("resources", ()), *kustomization.get("components", ())]
        names += kustomization.get("configurations", ())
        names += [patch["path"] for patch in kustomization.get("patches", ()) if "path" in patch]
        for generator in kustomization.get("configMapGenerator", ()):
            names += [*generator.get("files", ()), *generator.get("envs", ())]
        for name in names:
            path = (file.parent / name).resolve()
            assert path.exists(), f"{file} names {name}"
            used.add(path / "kustomization.yaml" if path.is_dir() else path)
    files = {path for path in KUBERNETES.glob("**/*") if path.is_file()}
    # No file names an overlay. Components are named.
    assert files - used == set()
    for file in files:
        if file.suffix == ".yaml":
            assert all(manifests.load_all(file.read_text()))


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_has_a_router_and_nodes_of_both_kinds(programs_of, name):
    assert {program.role for program in programs_of(name)} == {"router", "prefill", "decode"}


def test_no_object_is_a_secret(objects):
    assert not of_kind(objects, "Secret")


def test_no_file_has_the_content_of_a_secret():
    for file in KUBERNETES.glob("**/kustomization.yaml"):
        assert "secretGenerator" not in manifests.load(file.read_text())


@pytest.mark.parametrize("file", ["README.md", "docs/kubernetes.md"])
def test_a_trial_takes_two_commands(file):
    apply, secret = (
        "kubectl apply -k deploy/kubernetes/overlays/dev-cpu\n",
        "baton cluster-secret | kubectl -n baton create secret generic baton-cluster"
        " --from-file=secret=/dev/stdin\n",
    )
    assert secret in (KUBERNETES / "base" / "kustomization.yaml").read_text()
    # The namespace is among the applied objects, and pods wait for the Secret.
    assert apply + secret in (ROOT / file).read_text()


# References -------------------------------------------------------------------------------------


def test_selectors_find_their_pods(objects):
    for each in of_kind(objects, "Deployment", "StatefulSet"):
        spec = each["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert selects(spec["selector"]["matchLabels"], labels)
        found = [
            w.name for w in workloads(objects) if selects(spec["selector"]["matchLabels"], w.labels)
        ]
        assert found == [each["metadata"]["name"]]
        if each["kind"] == "StatefulSet":
            service = named(objects, "Service", spec["serviceName"])["spec"]
            assert selects(service["selector"], labels)


def test_ports_of_services_are_ports_of_their_pods(objects):
    for service in of_kind(objects, "Service"):
        containers = [
            container
            for workload in workloads(objects)
            if selects(service["spec"]["selector"], workload.labels)
            for container in workload.containers
        ]
        ports = dict(manifests.named_ports(containers))
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


def test_mounts_and_volumes_belong_together(objects):
    configs = {each["metadata"]["name"] for each in of_kind(objects, "ConfigMap")}
    secrets = {each["spec"]["secretName"] for each in of_kind(objects, "Certificate")}
    secrets |= {"baton-cluster", "baton-api-keys"}  # created by users
    for workload in workloads(objects):
        volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
        mounts = [m for container in workload.all_containers for m in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes.keys()
        for volume in volumes.values():
            match volume:
                case {"configMap": {"name": name}}:
                    assert name in configs
                case {"persistentVolumeClaim": claim}:  # created by users
                    assert claim == {"claimName": "model", "readOnly": True}
                case {"secret": {"secretName": name}}:
                    assert name in secrets
                case {"emptyDir": empty}:
                    assert num_bytes(empty["sizeLimit"]) > 0
                case _:
                    pytest.fail(f"{volume['name']} is a volume of another kind")
