"""The Dockerfile, and the dependencies of a router's image, which has no torch."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from cli.own_names import DISTRIBUTION
from kernels.cpu import compiler
from tests.support.processes.programs import ROOT

DOCKERFILE = ROOT / "deploy" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _instructions():
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def _stages():
    """Return instructions by stage."""
    stages = {}
    for word, rest in _instructions():
        if word == "FROM":
            source, _, name = rest.split()
            stages[name] = [(word, source)]
        elif stages:
            stages[name].append((word, rest))
    return stages


def _lineage(name):
    """Return all instructions of the image of a stage, from the first one on."""
    stages = _stages()
    own = stages[name]
    source = own[0][1]
    return [*(_lineage(source) if source in stages else ()), *own]


def test_the_base_image_is_one_exact_version_of_a_supported_python():
    ((_, argument),) = [each for each in _instructions() if each[0] == "ARG" and "=" in each[1]][:1]
    match = re.fullmatch(
        r"PYTHON=docker\.io/library/python:(\d+\.\d+\.\d+)-slim-\w+(@sha256:[0-9a-f]{64})?",
        argument,
    )
    assert match[1] in SpecifierSet(PROJECT["project"]["requires-python"])
    stages = _stages()
    assert {stage[0][1] for stage in stages.values()} <= {"${PYTHON}", *stages}


def test_images_do_not_run_as_root():
    for name in ("router", "node", "node-cpu"):
        lineage = _lineage(name)
        users = [rest for word, rest in lineage if word == "USER"]
        assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[-1])
        assert ("ENTRYPOINT", '["baton"]') in lineage


def test_images_contain_the_whole_code_and_no_other_file_of_the_repository():
    copied = {
        source
        for word, rest in _instructions()
        if word == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    packages = {
        name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert copied == packages | {"pyproject.toml", "README.md", "LICENSE"}
    ignore = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split("\n")
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert "*" in ignore


def test_node_images_have_a_compiler_or_the_compiled_operations_of_a_cpu():
    installed = " ".join(rest for word, rest in _lineage("node") if word == "RUN").split()
    assert set(compiler.COMPILERS) & set(installed)
    prebuilds = " ".join(rest for word, rest in _lineage("node-cpu-packages") if word == "RUN")
    directory = Path("/opt/baton") / compiler.PREBUILT.relative_to(sys.prefix)
    assert f"python -m kernels.cpu.compiler {directory};" in prebuilds


def test_only_node_images_have_all_dependencies():
    def installs(stage):
        return [rest for word, rest in _lineage(stage) if word == "RUN" and " install " in rest]

    for stage in ("node-packages", "node-cpu-packages"):
        assert any(rest.endswith(" .") for rest in installs(stage))
    router = [rest for rest in installs("router-packages") if "--python" in rest]
    assert all("--group router" in rest or "--no-deps" in rest for rest in router)
    assert len(router) == 2


def test_the_group_of_the_router_is_part_of_the_dependencies():
    group = PROJECT["dependency-groups"]["router"]
    assert set(group) < set(PROJECT["project"]["dependencies"])
    names = {Requirement(line).name for line in group}
    assert not {"torch", "triton", "transformers", "nixl", "numpy"} & names


def _closure(requirements):
    """Return the names of all distributions that `requirements` install."""
    found, open_ends = set(), [Requirement(line) for line in requirements]
    while open_ends:
        requirement = open_ends.pop()
        name = canonicalize_name(requirement.name)
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system
        for need in map(Requirement, needs):
            extras = requirement.extras or {""}
            wanted = need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in extras
            )
            if wanted and canonicalize_name(need.name) not in found:
                open_ends.append(need)
    return found


def _loaded_by(statement):
    """Return the top-level modules in a process that runs `statement`."""
    code = f"{statement}; import sys; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_a_router_loads_only_modules_of_its_dependency_group():
    programs = "import router.__main__, cli.main, cli.top"
    loaded = _loaded_by(programs) - _loaded_by("pass")
    brought = _closure(PROJECT["dependency-groups"]["router"]) | {DISTRIBUTION}
    # Several distributions may share a name, such as google.
    makers = importlib.metadata.packages_distributions()
    foreign = {
        name: {canonicalize_name(maker) for maker in makers.get(name, ())} for name in loaded
    }
    assert foreign["grpc"] == {"grpcio"}
    missing = {name for name, by in foreign.items() if by and not by & brought}
    assert missing <= {"grpc_tools"}  # which grpc itself loads where it is installed
