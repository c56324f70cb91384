"""The shipped images: their content, and a cluster of three containers that serves, drains and
restarts."""

import json
import subprocess

import pytest

from tests.containers.conftest import environment, run

pytestmark = [pytest.mark.containers, pytest.mark.timeout(3600)]

UID = "10001"
MOST_BYTES = {"router": 450e6, "node-cpu": 1.6e9}
SECRET = "/etc/baton-cluster/secret"
MODEL = "/models/demo"

# Runs in a container: waits for the router, then requests a streamed completion of argv[1] tokens.
CLIENT = """
import json, sys, time, urllib.request
base, count = "http://router:8000", int(sys.argv[1])
deadline = time.monotonic() + 300
while True:
    try:
        urllib.request.urlopen(base + "/ready", timeout=5)
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.5)
body = {"model": "baton", "prompt": "add 27 15 =", "max_tokens": count, "temperature": 0,
        "ignore_eos": count > 16, "stream": True, "stream_options": {"include_usage": True}}
request = urllib.request.Request(base + "/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
text, usage = "", None
for line in urllib.request.urlopen(request, timeout=300):
    if line.startswith(b"data: {"):
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        text += "".join(choice["text"] for choice in chunk["choices"])
        print("piece", file=sys.stderr, flush=True)
print(json.dumps({"text": text, "tokens": usage["completion_tokens"]}))
"""


@pytest.mark.parametrize("target", MOST_BYTES)
def test_an_image_is_small_and_runs_as_an_unprivileged_user(images, target):
    image = images[target]
    assert (
        int(run("podman", "image", "inspect", "--format", "{{.Size}}", image)) < MOST_BYTES[target]
    )
    who = run("podman", "run", "--rm", "--pull=never", "--entrypoint", "id", image, "-u")
    assert who == UID


def test_the_router_image_has_no_torch(images):
    code = "import importlib.util as u; print(u.find_spec('torch') is None)"
    command = ("podman", "run", "--rm", "--pull=never", "--entrypoint", "python")
    assert run(*command, images["router"], "-c", code) == "True"


@pytest.fixture
def cluster(containers, volume, images):
    """Start a router, a prefill node and a decode node, with their volumes prepared."""
    models, secrets, home = (volume(each) for each in ("models", "cluster", "home"))
    shared = ("--volume", f"{models}:/models:ro", "--volume", f"{secrets}:/etc/baton-cluster:ro")

    def prepare():
        """Run every init command of the deployments."""
        prepared = ("podman", "run", "--rm", "--pull=never", "--read-only")
        write_models = ("--volume", f"{models}:/models", images["router"], "demo-model", MODEL)
        run(*prepared, *write_models)
        script = f"test -s {SECRET} || (umask 077; baton cluster-secret > {SECRET})"
        write_secret = ("--volume", f"{secrets}:/etc/baton-cluster", "--entrypoint", "sh")
        run(*prepared, *write_secret, images["router"], "-c", script)

    def node(role, port):
        flags = (
            *shared,
            *("--volume", f"{home}:/var/lib/baton"),
            *(
                "--env",
                f"BATON_ENGINE__MODEL={MODEL}",
                "--env",
                f"BATON_TRANSFER__LISTEN_HOST={role}",
            ),
            *("--env", "BATON_ENGINE__CPU_KERNELS=required"),
        )
        arguments = ("serve", role, "--host=0.0.0.0", f"--port={port}", f"--secret-file={SECRET}")
        return containers.start(role, images["node-cpu"], arguments, flags=flags)

    def router():
        arguments = (
            *("serve", "router", "--host=0.0.0.0", f"--secret-file={SECRET}", f"--model={MODEL}"),
            *("--served-model-name=baton", "--prefill=prefill:50100", "--decode=decode:50200"),
        )
        return containers.start("router", images["router"], arguments, flags=shared)

    prepare()
    prepare()  # a recreated sandbox runs them a second time
    started = {"prefill": node("prefill", 50100), "decode": node("decode", 50200)}
    started["router"] = router()
    return started, containers


def _client(container, count):
    command = ["podman", "exec", container, "python", "-c", CLIENT, str(count)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def _answer(client):
    out, errors = client.communicate(timeout=600)
    assert client.returncode == 0, errors
    return json.loads(out)


def test_three_containers_serve_drain_and_restart(cluster):
    started, containers = cluster
    try:
        assert _answer(_client(started["decode"], 8))["text"].strip().startswith("42")
    except BaseException:
        print(*(f"{name}:\n{containers.logs(full)}" for name, full in started.items()), sep="\n")
        raise
    for role, port in (("prefill", 50100), ("decode", 50200)):
        probe = ("python", "-m", "common.rpc.probe", f"127.0.0.1:{port}")
        run("podman", "exec", started[role], *probe)
        log = containers.logs(started[role])
        assert "peer=0.0.0.0" not in log and "compiling kernels" not in log
    assert "peer=decode:50200" in containers.logs(started["prefill"])

    # SIGTERM during a stream: the stream completes, and every process ends with 0.
    client = _client(started["prefill"], 1500)
    assert "piece" in client.stderr.readline()
    stopping = [
        subprocess.Popen(["podman", "stop", "--time", "120", started[name]], env=environment())
        for name in ("decode", "router")
    ]
    assert _answer(client)["tokens"] == 1500
    for each in stopping:
        assert each.wait(timeout=150) == 0
    for name in ("decode", "router"):
        assert containers.state(started[name])["ExitCode"] == 0

    # The stopped processes restart with the content of their volumes.
    for name in ("decode", "router"):
        run("podman", "start", started[name])
    assert _answer(_client(started["prefill"], 8))["text"].strip().startswith("42")
