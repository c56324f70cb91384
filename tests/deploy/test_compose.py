"""deploy/compose.yaml: the programs of each profile, with the settings that they would read."""

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from common.config import NodeConfig, RouterConfig
from tests.deploy.manifests import load, settings
from tests.support.processes.programs import ROOT

FILE = ROOT / "deploy" / "compose.yaml"
PUBLIC = FILE.with_name("compose.public.yaml")
PROFILES = ("cpu", "gpu")
ENDING_S = 10
# Every key in use. A misspelt key is not among them.
TOP = {"name", "services", "volumes"}
KEYS = {
    *("image", "build", "command", "entrypoint", "environment", "profiles", "restart", "init"),
    *("depends_on", "healthcheck", "volumes", "tmpfs", "ports", "networks", "pid", "ipc", "deploy"),
    *("read_only", "cap_drop", "security_opt", "mem_limit", "stop_grace_period"),
}


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    service: dict
    config: RouterConfig | NodeConfig

    @property
    def role(self):
        return self.service["command"][1]

    @property
    def model(self):
        config = self.config
        return config.model if isinstance(config, RouterConfig) else config.engine.model

    @property
    def hosts(self):
        """Return the names by which other containers reach it."""
        return {self.name, *self.service.get("networks", {}).get("default", {}).get("aliases", ())}


@functools.cache
def _compose(**variables):
    """Return the file with `${NAME:-default}` filled in."""

    def value(match):
        return variables.get(match[1], match[2])

    text = re.sub(r"\$\{(\w+):-([^}]*)\}", value, FILE.read_text())
    assert "${" not in text
    return load(text)


def _services(profile, **variables):
    return {
        name: service
        for name, service in _compose(**variables)["services"].items()
        if profile in service.get("profiles", (profile,))
    }


@functools.cache
def _programs(profile, **variables):
    found = []
    for name, service in _services(profile, **variables).items():
        if "command" in service:
            _, role, *flags = service["command"]
            environment = {key: str(value) for key, value in service["environment"].items()}
            found.append(Program(name, service, settings(role, flags, environment)))
    return found


@pytest.fixture(params=PROFILES)
def programs(request):
    return _programs(request.param)


def _seconds(duration):
    return int(duration.removesuffix("s"))


def test_the_file_has_only_keys_that_compose_knows():
    compose = _compose()
    assert {key for key in compose if not key.startswith("x-")} == TOP
    for service in compose["services"].values():
        assert service.keys() <= KEYS


def test_each_profile_is_a_router_and_a_node_of_each_kind(programs):
    assert sorted(program.role for program in programs) == ["decode", "prefill", "router"]


def test_the_router_finds_the_nodes(programs):
    (router,) = [program for program in programs if program.role == "router"]
    for program in programs:
        if program is not router:
            (address,) = getattr(router.config, program.role)
            host, port = address.split(":")
            assert host in program.hosts
            assert int(port) == program.config.server.port
            # A node binds its data path to this name, so it must be its own.
            assert program.config.transfer.listen_host in program.hosts


def test_programs_listen_for_others_and_export_metrics(programs):
    for program in programs:
        assert program.config.server.host == "0.0.0.0"
        assert program.config.server.metrics_port


def test_only_this_machine_reaches_the_router(programs):
    for program in programs:
        ports = program.service.get("ports", ())
        if isinstance(program.config, RouterConfig):
            wanted = {program.config.http_port, program.config.server.port}
            assert {f"127.0.0.1:{port}:{port}" for port in wanted} == set(ports)
        else:
            assert not ports


class _Loader(yaml.CSafeLoader):
    """Supports compose's tag for a list that replaces another one instead of extending it."""


_Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def _public(**variables):
    """Return the router's part of the second file, with its variables filled in. A variable may
    have no default: compose then stops."""

    def value(match):
        name, kind, text = match.groups()
        if name not in variables and kind == ":?":
            raise KeyError(name)
        return variables.get(name, text)

    text = re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", value, PUBLIC.read_text())
    compose = yaml.load(text, _Loader)
    assert compose.keys() == {"services"} and compose["services"].keys() == {"router"}
    return compose["services"]["router"]


def test_other_machines_need_api_keys_to_reach_the_router(programs):
    (router,) = [program for program in programs if isinstance(program.config, RouterConfig)]
    assert "!override" in PUBLIC.read_text()
    with pytest.raises(KeyError, match="API_KEYS"):
        _public(PUBLISH="192.0.2.7")
    added = _public(API_KEYS="/srv/keys")
    assert added.keys() == {"environment", "volumes", "ports"}
    config = settings("router", [], router.service["environment"] | added["environment"])
    assert added["volumes"] == [f"/srv/keys:{config.clients.api_keys.parent}:ro"]
    ports = {config.http_port, config.server.port}
    assert set(added["ports"]) == {f"0.0.0.0:{port}:{port}" for port in ports}
    elsewhere = _public(API_KEYS="/srv/keys", PUBLISH="192.0.2.7")
    assert set(elsewhere["ports"]) == {f"192.0.2.7:{port}:{port}" for port in ports}


def test_the_health_check_asks_whether_the_router_is_ready(programs):
    (router,) = [program for program in programs if program.role == "router"]
    (*_, code) = router.service["healthcheck"]["test"]
    compile(code, "healthcheck", "exec")
    assert f'"http://127.0.0.1:{router.config.http_port}/ready"' in code


@pytest.mark.parametrize("profile", PROFILES)
def test_containers_are_confined(profile):
    for service in _services(profile).values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        # The images' own user, which is not root.
        assert "user" not in service and "privileged" not in service


def test_a_container_has_more_time_than_its_drain(programs):
    for program in programs:
        grace = _seconds(program.service["stop_grace_period"])
        assert grace >= program.config.server.drain_timeout_s + ENDING_S


@pytest.mark.parametrize("profile", PROFILES)
def test_images_are_built_from_the_dockerfile_in_one_version(profile):
    stages = re.findall(r"^FROM \S+ AS (\S+)$", (FILE.parent / "Dockerfile").read_text(), re.M)
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    for name, service in _services(profile).items():
        target = service["build"]["target"]
        node = "node-cpu" if profile == "cpu" else "node"
        assert target in stages
        assert target == (node if name.startswith(("prefill", "decode")) else "router")
        assert service["image"] == f"baton-{target}:{version}"
        assert (FILE.parent / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("profile", PROFILES)
def test_without_a_model_the_demo_model_is_written_before_any_program_starts(profile):
    services = _services(profile)
    assert services["demo-model"]["volumes"] == ["models:/models"]
    assert "models" in _compose()["volumes"]
    for program in _programs(profile):
        assert services["demo-model"]["entrypoint"] == ["baton", "demo-model", program.model]
        assert "models:/models:ro" in program.service["volumes"]
        done = {"condition": "service_completed_successfully"}
        assert program.service["depends_on"] == {"demo-model": done, "cluster-secret": done}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_secret_is_made_before_any_program_starts_and_read_by_all(profile):
    maker = _services(profile)["cluster-secret"]
    assert maker["volumes"] == ["cluster:/etc/baton-cluster"]
    assert "cluster" in _compose()["volumes"]
    for program in _programs(profile):
        file = str(program.config.server.secret_file)
        assert (
            f"f={file}; test -s $$f || (umask 077; baton cluster-secret > $$f)"
            == maker["entrypoint"][-1]
        )
        assert "cluster:/etc/baton-cluster:ro" in program.service["volumes"]
        assert not program.config.server.insecure


def test_init_commands_can_run_again(tmp_path):
    """A sandbox that is created again runs every init command a second time."""
    services = _services("cpu")
    model, secret = tmp_path / "demo", tmp_path / "secret"
    for _ in range(2):
        for name in ("demo-model", "cluster-secret"):
            command = [
                part.replace("/models/demo", str(model))
                .replace("/etc/baton-cluster/secret", str(secret))
                .replace("$$", "$")
                for part in services[name]["entrypoint"]
            ]
            environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.defpath}"}
            subprocess.run(command, env=environment, check=True)
        made = secret.read_text()
    assert secret.read_text() == made and (model / "config.json").is_file()


def test_nodes_are_healthy_when_their_engine_answers(programs):
    for program in programs:
        if program.role != "router":
            *command, address = program.service["healthcheck"]["test"]
            assert command == ["CMD", "python", "-m", "common.rpc.probe"]
            assert address == f"127.0.0.1:{program.config.server.port}"


def test_nodes_keep_their_compiled_operations(programs):
    for program in programs:
        if program.role != "router":
            assert "home:/var/lib/baton" in program.service["volumes"]
    for node in _programs("cpu")[1:]:
        assert node.config.engine.cpu_kernels == "required"


@pytest.mark.parametrize("profile", PROFILES)
def test_all_programs_serve_the_users_own_model(profile):
    for program in _programs(profile, MODELS="/srv/models", MODEL="some-model"):
        assert "/srv/models:/models:ro" in program.service["volumes"]
        assert program.model == "/models/some-model"


def test_nodes_on_gpus_share_their_processes_and_see_all_devices():
    prefill, decode = [p for p in _programs("gpu") if p.role != "router"]
    assert (prefill.config.engine.device, decode.config.engine.device) == ("cuda:0", "cuda:1")
    assert prefill.service["ipc"] == "shareable"
    assert decode.service["pid"] == decode.service["ipc"] == f"service:{prefill.name}"
    for program in (prefill, decode):
        (devices,) = program.service["deploy"]["resources"]["reservations"]["devices"]
        assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_nodes_can_share_one_gpu():
    variables = {"DECODE_DEVICE": "cuda:0", "MEMORY_FRACTION": "0.45"}
    nodes = [p.config.engine for p in _programs("gpu", **variables) if p.role != "router"]
    assert {node.device for node in nodes} == {"cuda:0"}
    assert sum(node.cache.memory_fraction for node in nodes) < 1.0
