"""Names of Baton's packages that other distributions in the environment also have."""

import base64
import hashlib
import os
import subprocess
import sys
import tomllib

import pytest

from cli.own_names import DISTRIBUTION, PACKAGES
from tests.support.processes.programs import ROOT


def _baton(*path):
    code = "import sys; from cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-S", "-P", "-c", code, "api-key", "--help"],
        env={**os.environ, "PYTHONPATH": ":".join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=60,
    )


def _record(site, name, packages):
    """Return the metadata that pip writes for a distribution with these packages."""
    about = site / f"{name.replace('-', '_')}-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "top_level.txt").write_text("\n".join(packages))
    lines = []
    for package in packages:
        content = (site / package / "__init__.py").read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{package}/__init__.py,sha256={digest},{len(content)}")
    (about / "RECORD").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path):
    """Baton as installed from a wheel, as far as its command checks it."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f'"""Ours: {package}."""\n')
    for module in ("main", "own_names", "program"):
        (tmp_path / "cli" / f"{module}.py").write_text((ROOT / "cli" / f"{module}.py").read_text())
    (tmp_path / "cli" / "api_key.py").write_text("print('the program')\n")
    _record(tmp_path, DISTRIBUTION, PACKAGES)
    return tmp_path


def test_an_installed_baton_starts(site):
    assert _baton(site).stdout == "the program\n"


def test_an_overwritten_package_is_reported_with_the_other_distribution(site):
    (site / "kernels" / "__init__.py").write_text("# somebody else's\n")
    _record(site, "kernels", ["kernels"])
    said = _baton(site)
    assert (said.returncode, said.stdout) == (2, "")
    assert len(said.stderr.splitlines()) == 1
    assert "'kernels'" in said.stderr and "but of kernels" in said.stderr
    assert "environment of its own" in said.stderr


def test_a_package_found_before_ours_is_reported_with_its_path(site, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "common").mkdir()
    (other / "common" / "__init__.py").write_text("")
    said = _baton(other, site)
    assert said.returncode == 2
    assert f"'common' in {other}/common is not Baton's" in said.stderr


def test_all_installed_distributions_are_checked():
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in found} == set(PACKAGES)
