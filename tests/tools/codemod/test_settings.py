"""The codemod that renames settings, flags and metrics, on texts and on a small tree."""

import subprocess
from pathlib import Path

import pytest

from tests.support.isolation import ROOT
from tools.codemod import renames, settings
from tools.codemod.settings import Words

WORDS = Words(
    {"front": "server", "front.drain_s": "server.drain_timeout_s", "engine.tiers": "engine.offload"}
    | {"engine.tiers.host_bytes": "engine.offload.cpu_bytes", "retries": "handoff_retries"},
    {"--exit-on-death": "--exit-on-failure"},
    {"baton_moves": "baton_migrations"},
    frozenset({"engine.tiers"}),
)


@pytest.mark.parametrize(
    "before, after",
    [
        ("--front.drain-s 3", "--server.drain-timeout-s 3"),
        ("--front.{name}", "--server.{name}"),
        ("--no-engine.tiers.host-bytes", "--no-engine.offload.cpu-bytes"),
        ("--exit-on-death, --retries=2", "--exit-on-failure, --handoff-retries=2"),
        ("BATON_FRONT__DRAIN_S: 1", "BATON_SERVER__DRAIN_TIMEOUT_S: 1"),
        ("set `front.tls.cert`", "set `server.tls.cert`"),
        ("see tiers.host_bytes", "see offload.cpu_bytes"),
        (r"engine\.tiers\.host_bytes: 3", r"engine\.offload\.cpu_bytes: 3"),
        ("engine.tiers.meter", "engine.tiers.meter"),  # a module
        ("rate(baton_moves_total[5m])", "rate(baton_migrations_total[5m])"),
        ("baton_moves_here, baton up --front", "baton_moves_here, baton up --server"),
    ],
)
def test_names_in_text(before: str, after: str) -> None:
    assert WORDS.in_text(before) == after
    assert before == after or "." in before or WORDS.old_names(before)
    assert not WORDS.old_names(after)


def test_fields_and_their_uses_in_code(tmp_path: Path) -> None:
    files = {
        "common/__init__.py": "",
        "common/config/__init__.py": "",
        "common/config/front.py": "class ServerConfig:\n    drain_s: float = 1.0\n",
        "use.py": "from common.config.front import ServerConfig\n\n\n"
        "class Other:\n    drain_s = 2.0\n\n\n"
        'def use(front: ServerConfig, other: Other) -> str:\n    return f"{front.drain_s}"\n'
        "\n\ndef both(front: ServerConfig, other: Other) -> float:\n"
        "    return front.drain_s + other.drain_s\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert settings.rewrite(tmp_path) == ["common/config/front.py", "use.py"]
    after = (tmp_path / "use.py").read_text()
    assert "{front.drain_timeout_s}" in after
    assert "front.drain_timeout_s + other.drain_s" in after


def test_the_generated_tables_are_those_of_the_csv() -> None:
    assert (ROOT / renames.PAGE).read_text() == renames.page()
    assert (ROOT / renames.SETTINGS).read_text() == renames.settings()
