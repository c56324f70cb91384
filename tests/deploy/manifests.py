"""The manifests under deploy/kubernetes as objects, and the programs in them with their settings.

`base` reads the base without kustomize, for machines without it. All others are rendered by kubectl
or kustomize, whichever is on PATH.
"""

import functools
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import DecodeConfig, EncodeConfig, NodeConfig, PrefillConfig, RouterConfig
from common.settings import ENV_PREFIX, read
from tests.support.processes.programs import ROOT
from tests.support.runner.isolation import CACHES

KUBERNETES = ROOT / "deploy" / "kubernetes"
RECORDS = {
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "encode": EncodeConfig,
}
POD_IP = "10.1.2.3"
_OLDEST_KUSTOMIZE = (5, 3)  # the first version with several patches in one file

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Identical pods, and their number."""

    name: str
    template: Object
    num_pods: int  # 0: not set by the manifest

    @property
    def labels(self) -> Mapping[str, str]:
        return self.template["metadata"]["labels"]

    @property
    def spec(self) -> Object:
        return self.template["spec"]

    @property
    def containers(self) -> list[Object]:
        return self.spec["containers"]

    @property
    def all_containers(self) -> list[Object]:
        """Return the containers and the init containers."""
        return [*self.containers, *self.spec.get("initContainers", ())]


@dataclass(frozen=True, slots=True)
class Program:
    """A program of Baton in a pod, with the settings that it would read there."""

    workload: Workload
    container: Object
    config: RouterConfig | NodeConfig

    @property
    def role(self) -> str:
        return role_of(self.container)

    @property
    def models(self) -> list[str]:
        match self.config:
            case RouterConfig(each_model=models):
                return [each.model for each in models]
            case config:
                return [config.engine.model]

    def volume_at(self, directory: Path) -> Object:
        """Return the volume that is mounted at this directory."""
        (mount,) = [m for m in self.container["volumeMounts"] if Path(m["mountPath"]) == directory]
        return self.volume(mount["name"])

    def volume(self, name: str) -> Object:
        (volume,) = [v for v in self.workload.spec["volumes"] if v["name"] == name]
        return volume


def role_of(container: Object) -> str:
    """Return the process that a container runs: a role, or another command."""
    first, *rest = container["args"]
    return str(rest[0] if first == "serve" else first)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def num_bytes(quantity: str) -> int:
    """Return the bytes of a quantity of memory, such as 64Mi."""
    match = re.fullmatch(r"([0-9]+)(Ki|Mi|Gi)", quantity)
    assert match, quantity
    return int(match[1]) << {"Ki": 10, "Mi": 20, "Gi": 30}[match[2]]


# YAML -------------------------------------------------------------------------------------------


def load(text: str) -> Any:
    """Return the only document of a YAML text. The loader in C is ten times faster."""
    return yaml.load(text, yaml.CSafeLoader)


def load_all(text: str) -> list[Any]:
    return list(yaml.load_all(text, yaml.CSafeLoader))


# Rendering --------------------------------------------------------------------------------------


def base() -> list[Object]:
    """Return the base, with the ConfigMaps that kustomize would generate, under their plain
    names."""
    directory = KUBERNETES / "base"
    kustomization = load((directory / "kustomization.yaml").read_text())
    objects = [
        each
        for name in kustomization["resources"]
        for each in load_all((directory / name).read_text())
    ]
    for generator in kustomization["configMapGenerator"]:
        files = [directory / name for name in generator.get("files", ())]
        data = {file.name: file.read_text() for file in files}
        for name in generator.get("envs", ()):
            lines = (directory / name).read_text().splitlines()
            data |= dict(line.split("=", 1) for line in lines if line)
        metadata = {"name": generator["name"]}
        objects.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    for each in objects:
        if each["kind"] != "Namespace":
            each["metadata"]["namespace"] = kustomization["namespace"]
    return objects


@functools.cache
def kustomize_command() -> tuple[tuple[str, ...], str]:
    """Return the command that renders a directory, or no command and the reason."""
    if shutil.which("kustomize"):
        return ("kustomize", "build"), ""
    if not shutil.which("kubectl"):
        return (), "neither kubectl nor kustomize is on PATH: only the base is checked"
    asked = ("kubectl", "version", "--client", "--output=json")
    reported = json.loads(
        subprocess.run(asked, capture_output=True, check=True, timeout=300).stdout
    )
    version = reported.get("kustomizeVersion", "v0.0.0")
    major, minor, _ = version.removeprefix("v").split(".", 2)
    if (int(major), int(minor)) < _OLDEST_KUSTOMIZE:
        return (), f"kubectl here has kustomize {version}: only the base is checked"
    return ("kubectl", "kustomize"), ""


def needs_kustomize() -> tuple[str, ...]:
    """Return the command that renders a directory. Skips the test where there is none."""
    command, reason = kustomize_command()
    if not command:
        pytest.skip(reason)
    return command


def rendered(directory: Path) -> list[Object]:
    """Return the objects that `kubectl apply -k` would apply.

    They are cached in CACHES, because several test files need them, in different processes.

    Args:
        directory: below a directory of a copy of KUBERNETES.
    """
    command = needs_kustomize()
    kept = CACHES / "manifests" / f"{_source_of(directory, command[0])}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = kept.with_suffix(f".{os.getpid()}")
        made.write_text(json.dumps(_render(command, directory)))
        made.replace(kept)
    objects: list[Object] = json.loads(kept.read_text())
    return objects


def _render(command: Sequence[str], directory: Path) -> list[Object]:
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return load_all(done.stdout)


def _source_of(directory: Path, program: str) -> str:
    """Return a name for what determines a rendering: the program, and the directory's files."""
    found = Path(shutil.which(program) or program).stat()
    digest = hashlib.sha256(f"{program} {found.st_size} {found.st_mtime_ns}".encode())
    root = next(parent for parent in directory.parents if (parent / "base").is_dir())
    digest.update(str(directory.relative_to(root)).encode())
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        for part in (str(file.relative_to(root)).encode(), file.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]


# Reading ----------------------------------------------------------------------------------------


def workloads(objects: list[Object]) -> list[Workload]:
    """Return every object that makes pods."""
    found = []
    for each in of_kind(objects, "Deployment", "StatefulSet", "LeaderWorkerSet"):
        name, spec = each["metadata"]["name"], each["spec"]
        match each["kind"]:
            case "Deployment" | "StatefulSet":
                found.append(Workload(name, spec["template"], spec.get("replicas", 0)))
            case "LeaderWorkerSet":
                groups, parts = spec["replicas"], spec["leaderWorkerTemplate"]
                workers = groups * (parts["size"] - 1)
                found.append(Workload(f"{name} leaders", parts["leaderTemplate"], groups))
                found.append(Workload(f"{name} workers", parts["workerTemplate"], workers))
    return found


def programs(objects: list[Object], tmp_path: Path) -> list[Program]:
    """Return every container of a router or a node, with the settings from its flags, variables and
    file.

    Fails the test if a program would reject them.
    """
    return [
        Program(workload, container, _settings(objects, workload, container, tmp_path))
        for workload in workloads(objects)
        for container in workload.containers
        if role_of(container) in RECORDS
    ]


def environment(objects: list[Object], container: Object) -> dict[str, str]:
    """Return the variables of a container. The pod's address is POD_IP. Resource requests are in
    whole units, as Kubernetes rounds them."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        variables |= named(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for variable in container.get("env", ()):
        variables[variable["name"]] = _value(container, variable)
    return variables


def _value(container: Object, variable: Object) -> str:
    match variable.get("valueFrom"):
        case None:
            value: str = variable["value"]
            return value
        case {"fieldRef": {"fieldPath": "status.podIP"}}:
            return POD_IP
        case {"resourceFieldRef": {"resource": "requests.cpu"}}:
            cpu = container["resources"]["requests"]["cpu"]
            return str(math.ceil(float(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)))
        case other:
            raise AssertionError(f"{variable['name']} is from {other}, which nothing here reads")


def settings(
    role: str, flags: list[str], variables: Mapping[str, str]
) -> RouterConfig | NodeConfig:
    """Return the configuration that the process of `role` would read. Fails on unknown
    variables."""
    known = RECORDS[role].model_fields
    for name in variables:
        field = name.removeprefix(ENV_PREFIX).lower().split("__")[0]
        assert name.startswith(ENV_PREFIX) and field in known, f"{role} knows no {name}"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        return read(RECORDS[role], role, flags)


def _settings(
    objects: list[Object], workload: Workload, container: Object, tmp_path: Path
) -> RouterConfig | NodeConfig:
    _, role, *flags = container["args"]
    (file,) = [flag.removeprefix("--config=") for flag in flags if flag.startswith("--config=")]
    (mount,) = [m for m in container["volumeMounts"] if Path(file).parent == Path(m["mountPath"])]
    (volume,) = [v for v in workload.spec["volumes"] if v["name"] == mount["name"]]
    content = named(objects, "ConfigMap", volume["configMap"]["name"])["data"][Path(file).name]
    copy = tmp_path / f"{role}.yaml"
    copy.write_text(content)
    others = [flag for flag in flags if not flag.startswith("--config=")]
    return settings(role, [f"--config={copy}", *others], environment(objects, container))


def named_ports(containers: list[Object]) -> Iterator[tuple[str, int]]:
    for container in containers:
        for port in container["ports"]:
            yield port["name"], port["containerPort"]
