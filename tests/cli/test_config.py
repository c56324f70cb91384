"""`baton config show` and `baton config validate`."""

import json

import pytest

from cli.config import main
from tests.support.refusals import refusal


def _shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert main("show", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_show_names_the_source_of_each_setting(capsys, monkeypatch, tmp_path):
    file = tmp_path / "b.yaml"
    file.write_text("engine: {threads: 3, cache: {page_size: 32}}\nhandoff_retries: 1\n")
    monkeypatch.setenv("BATON_ENGINE__CACHE__PAGE_SIZE", "64")
    monkeypatch.setenv("BATON_HANDOFF_RETRIES", "4")
    flags = (f"--config={file}", "--model=m", "--handoff-retries", "5", "--no-engine.cuda-graphs")
    shown = _shown(capsys, "decode", *flags)
    assert shown["engine.model"] == {"value": "m", "source": "--model"}
    assert shown["handoff_retries"] == {"value": 5, "source": "--handoff-retries"}
    assert shown["engine.cuda_graphs"] == {"value": False, "source": "--engine.cuda-graphs"}
    variable = "BATON_ENGINE__CACHE__PAGE_SIZE"
    assert shown["engine.cache.page_size"] == {"value": 64, "source": variable}
    assert shown["engine.threads"] == {"value": 3, "source": f"{file}: engine.threads"}
    assert shown["mode"] == {"value": "disaggregated", "source": "default"}


def test_show_prints_a_line_for_each_setting(capsys):
    assert main("show", "router", "--model=m", "--prefill=a:1,b:2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split("  #") == ['prefill: ["a:1", "b:2"]', " --prefill"] for line in lines)
    assert len(lines) > 40


def test_validate_accepts_a_valid_file(capsys, tmp_path):
    file = tmp_path / "b.yaml"
    file.write_text("model: m\nprefill: [a:1]\n")
    assert main("validate", "router", str(file)) == 0
    assert capsys.readouterr().out == f"{file} is valid for `baton serve router`\n"
    assert main("validate", "router", str(file), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(file), "valid": True}


@pytest.mark.parametrize(
    "content, words",
    [
        ("model: m\nserver: {prt: 1}\n", "server.prt"),
        ("model: m\nhttp_port: x\n", "http_port: input should be a valid integer"),
        ("model: [\n", "b.yaml"),
        ("{}", "--model is required"),
    ],
)
def test_validate_prints_the_exact_error(capsys, tmp_path, content, words):
    file = tmp_path / "b.yaml"
    file.write_text(content)
    line = refusal(capsys, lambda: main("validate", "router", str(file)))
    assert line.startswith("baton config validate: ") and words in line


@pytest.mark.parametrize(
    "arguments, words",
    [(["routr"], "did you mean router?"), (["router", "--modl=m"], "did you mean --model?")],
)
def test_similar_words_are_suggested(capsys, arguments, words):
    assert words in refusal(capsys, lambda: main("show", *arguments))
