"""Images built from deploy/Dockerfile, and containers of them on one network.

Needs root, buildah, podman, runc and a local base image with Python, named by CONTAINER_TEST_BASE
(tools/container_base.sh makes one). Nothing is pulled. CONTAINER_TEST_BUILD_FLAGS has further flags
of `buildah bud`, such as --volume for pip's configuration.
"""

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Sequence

import pytest

from tests.support.processes.programs import ROOT

TAG = "baton-test"
TARGETS = ("router", "node-cpu")
_BUILD_S = 3000
_COMMAND_S = 300


def environment() -> dict[str, str]:
    """Return the environment of buildah and podman, which need a writable home."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("XDG_")}
    return {**kept, "HOME": tempfile.gettempdir()}


def run(*command: str, timeout_s: float = _COMMAND_S, check: bool = True) -> str:
    """Return the standard output of a command, or fail with its whole output."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=environment()
    )
    if check and done.returncode:
        pytest.fail(f"{shlex.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout.strip()


@pytest.fixture(scope="session")
def base() -> str:
    """Return the base image. Skip with the reason if something is missing."""
    missing = [name for name in ("buildah", "podman", "runc") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    image = os.environ.get("CONTAINER_TEST_BASE")
    if not image:
        pytest.skip("CONTAINER_TEST_BASE names no local base image; see tools/container_base.sh")
    if subprocess.run(
        ["buildah", "inspect", "--type", "image", image], capture_output=True, env=environment()
    ).returncode:
        pytest.skip(f"CONTAINER_TEST_BASE: there is no local image {image}")
    return image


@pytest.fixture(scope="session")
def images(base: str) -> dict[str, str]:
    """The images by target."""
    flags = shlex.split(os.environ.get("CONTAINER_TEST_BUILD_FLAGS", ""))
    for target in TARGETS:
        run(
            *("buildah", "bud", "--isolation", "chroot", "--network", "host", "--pull=never"),
            *("--layers", "--build-arg", f"PYTHON={base}", *flags),
            *("--tag", f"localhost/{TAG}-{target}", "--target", target),
            *("--file", str(ROOT / "deploy" / "Dockerfile"), str(ROOT)),
            timeout_s=_BUILD_S,
        )
    return {target: f"localhost/{TAG}-{target}" for target in TARGETS}


class Containers:
    """Containers of one test, confined as the shipped deployments confine them."""

    def __init__(self, name: str) -> None:
        self.network = self.prefix = name
        self._names: list[str] = []
        run("podman", "network", "create", name)

    def start(
        self, name: str, image: str, arguments: Sequence[str], *, flags: Sequence[str] = ()
    ) -> str:
        """Start a container whose host name is `name`. Returns the name that podman knows."""
        full = f"{self.prefix}-{name}"
        self._names.append(full)
        run(
            *("podman", "run", "--detach", "--name", full, "--pull=never", "--init"),
            *("--network", self.network, "--network-alias", name, "--hostname", name),
            *("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
            *("--tmpfs", "/tmp:size=1g", *flags, image, *arguments),
        )
        return full

    def logs(self, name: str) -> str:
        done = subprocess.run(
            ["podman", "logs", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        return done.stdout

    def state(self, name: str) -> dict:
        return json.loads(run("podman", "inspect", name))[0]["State"]

    def close(self) -> None:
        for name in self._names:
            run("podman", "rm", "--force", "--time", "0", name, check=False)
        run("podman", "network", "rm", "--force", self.network, check=False)


@pytest.fixture
def containers() -> "Callable[[], Containers]":
    made = Containers(f"baton-{uuid.uuid4().hex[:8]}")
    yield made
    made.close()


@pytest.fixture
def volume() -> "Callable[[str], str]":
    """Make volumes that are removed after the test."""
    names = []

    def make(purpose: str) -> str:
        name = f"baton-{purpose}-{uuid.uuid4().hex[:8]}"
        run("podman", "volume", "create", name)
        names.append(name)
        return name

    yield make
    for name in names:
        run("podman", "volume", "rm", "--force", name, check=False)
