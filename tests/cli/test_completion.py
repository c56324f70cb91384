"""`baton completion`: scripts with all commands and flags, and bash that runs one."""

import shutil
import subprocess
from pathlib import Path

import pytest
import shtab

from cli import completion
from cli.main import commands

BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "baton.bash"
    file.write_text(shtab.complete(completion.whole_parser(), shell="bash"))
    return file


def _completed(script: Path, *lines: str) -> list[set[str]]:
    """Return the completions of the last word of each line."""
    program = [
        f"source {script}",
        "complete -p baton >/dev/null || exit 1",
        'completions() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; '
        'COMPREPLY=(); _shtab_baton; echo "${COMPREPLY[@]}"; }',
        *(f"completions {line}" for line in lines),
    ]
    assert BASH is not None
    done = subprocess.run(
        [BASH, "--norc", "-c", "\n".join(program)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_bash_completes_commands_flags_and_choices(script):
    found = _completed(
        script,
        "baton no",
        "baton nodes s",
        "baton nodes pause --mo",
        "baton nodes pause --mode ''",
        "baton serve decode --engine.cache.page",
        "baton serve router --policy p",
        "baton bench comp",
        "baton config show ''",
    )
    assert found == [
        {"nodes"},
        {"sleep", "set-role"},
        {"--mode", "--model"},
        {"abort", "retract", "in_place"},
        {"--engine.cache.page-size"},
        {"power_of_two", "prefix_aware"},
        {"compare"},
        {"router", "prefill", "decode", "encode"},
    ]


def test_every_command_is_completed(script):
    text = script.read_text()
    for name, _ in commands():
        variable = f"_shtab_baton_{name.replace(' ', '_').replace('-', '_')}_option_strings="
        assert variable in text


def test_commands_without_their_packages_have_no_flags(monkeypatch):
    """An installation for routers has no torch, and still completes the names of all commands."""
    monkeypatch.setattr(completion, "missing", lambda command: list(command.needs))
    text = shtab.complete(completion.whole_parser(), shell="bash")
    assert "_shtab_baton_serve_prefill_option_strings=(-h --help)" in text
    assert "_shtab_baton_serve_router_option_strings=(-h --help --help-all" in text
