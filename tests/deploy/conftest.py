"""Parameters of manifests: the renderings that each rule applies to."""

import functools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.deploy import manifests
from tests.deploy.manifests import KUBERNETES, Object, Program
from tests.support.processes.programs import ROOT

GUIDE = ROOT / "docs" / "kubernetes.md"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
COMPONENTS = sorted(path.parent.name for path in KUBERNETES.glob("components/*/kustomization.yaml"))
# Components on the base, and together those that need pods of others.
MADE_HERE = {f"base with {name}": (name,) for name in COMPONENTS} | {
    f"base with {name} and {other}": (name, other)
    for name, other in (
        *(("tls", "pairs"), ("tls", "nvlink"), ("encode", "tls")),
        ("monitoring", "data-parallel"),
    )
}
# Most rules apply to every rendering. "base" is read without kustomize.
RENDERINGS = ["base", *OVERLAYS, *MADE_HERE, "the guide's example"]


@pytest.fixture(scope="session")
def render(tmp_path_factory):
    """Return a function that renders by name."""

    @functools.cache
    def objects(name: str) -> list[Object]:
        return _rendered(name, tmp_path_factory.mktemp("deploy"))

    return objects


@pytest.fixture(scope="session")
def programs_of(render, tmp_path_factory):
    """Return the programs of a rendering by name."""

    @functools.cache
    def programs(name: str) -> list[Program]:
        return manifests.programs(render(name), tmp_path_factory.mktemp("settings"))

    return programs


@pytest.fixture(params=RENDERINGS)
def name(request):
    return request.param


@pytest.fixture
def objects(render, name):
    return render(name)


@pytest.fixture
def programs(programs_of, name):
    return programs_of(name)


def _rendered(name: str, workshop: Path) -> list[Object]:
    if name == "base":
        return manifests.base()
    if name in OVERLAYS:
        return manifests.rendered(KUBERNETES / "overlays" / name)
    manifests.needs_kustomize()  # before the files are copied
    kustomization = _guide_example() if name not in MADE_HERE else _overlay_with(MADE_HERE[name])
    copy = shutil.copytree(KUBERNETES, workshop / "kubernetes")
    directory = copy / "overlays" / "of-a-user"
    directory.mkdir()
    (directory / "kustomization.yaml").write_text(kustomization)
    return manifests.rendered(directory)


def _overlay_with(components: Sequence[str]) -> str:
    return yaml.safe_dump(
        {
            "kind": "Kustomization",
            "namespace": "baton",
            "resources": ["../../base"],
            "components": [f"../../components/{component}" for component in components],
        }
    )


def _guide_example() -> str:
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.S)
    (example,) = [block for block in blocks if "kind: Kustomization" in block]
    return example
