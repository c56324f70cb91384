"""The `baton` command as a user calls it, without a running system."""

import filecmp
import json
import os
import re
import socket
import subprocess
import sys

import pytest

from cli import generate
from cli.demo_model import write
from common.version import VERSION
from tests.support import fork_server
from tests.support.cluster import free_ports

pytestmark = pytest.mark.slow


def _baton(*arguments, stdout=None):
    return fork_server.run("cli.main", *arguments, stdout=stdout)


def test_without_a_command_it_lists_them():
    said = _baton()
    assert (said.returncode, said.stdout) == (2, "")
    for command in ("up", "generate", "check", "demo-model", "keys", "router", "prefill", "decode"):
        assert f"  {command} " in said.stderr


def test_it_tells_its_version():
    said = _baton("--version")
    assert (said.returncode, said.stdout) == (0, f"baton {VERSION}\n")


def test_help_is_no_error():
    said = _baton("--help")
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["prefill", "--help"], ["bench", "--help"]])
def test_help_may_be_read_in_part(arguments):
    """Print help to a closed pipe, such as `head -1`. Seen failing, with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        said = _baton(*arguments, stdout=nobody)
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.parametrize("command", ["up", "check", "bench", "prefill", "decode"])
def test_an_installation_for_routers_says_what_a_command_lacks(command):
    code = (
        "import importlib.util as u, sys; find = u.find_spec; "
        "sys.modules['importlib.util'].find_spec = "
        "lambda name: None if name in ('torch', 'httptools') else find(name); "
        "from cli.main import main; sys.exit(main())"
    )
    command_line = [sys.executable, "-c", code, command, "--help"]
    said = subprocess.run(command_line, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout) == (2, "")
    assert len(said.stderr.splitlines()) == 1
    assert "pip install" in said.stderr and ("torch" in said.stderr or "httptools" in said.stderr)


def test_an_unknown_command_is_one_line():
    said = _baton("serve")
    assert said.returncode == 2
    assert len(said.stderr.splitlines()) == 1
    assert "'serve'" in said.stderr


def test_arguments_reach_the_program():
    said = _baton("router", "--model=m", "--port=x")
    assert said.returncode == 2
    assert "--port" in said.stderr
    assert len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--engine.cache.page-size=3"], "power of two"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--decode=-1"], "--decode"),
        (["--prefill=x"], "--prefill"),
        (["--port=65536"], "--port: a port is from 1 to 65535, got '65536'"),
        (["--router-flags=--policy=fastest"], "--policy"),
        (["--router-flags", "--policy=slowest"], "slowest"),
    ],
)
def test_up_refuses_wrong_flags_before_it_starts_anything(flags, words):
    said = _baton("up", *flags)
    assert (said.returncode, said.stdout) == (2, "")
    assert words in said.stderr
    assert len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "hello", "--router=nowhere"],
        ["generate", "hello", "--temperature=warm"],
        ["top", "--interval=0"],
        ["top", "--router=127.0.0.1"],
        ["bench", "load", "--rate=x"],
        ["demo-model"],
        ["check", "--role=driver"],
        ["sleep", "--only=disk"],
    ],
)
def test_every_command_says_what_is_wrong_in_one_line(arguments):
    said = _baton(*arguments)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith(f"baton {arguments[0]}") and len(said.stderr.splitlines()) == 1


def test_up_says_which_flag_chooses_another_port(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ("--port", "--http-port", "--prefill-port", "--decode-port")
        for flag in flags:
            # The others' defaults may be anybody's: they lie where outgoing connections begin.
            ports = dict(zip(flags, free_ports(len(flags)), strict=True))
            ports[flag] = taken.getsockname()[1]
            given = [f"{name}={port}" for name, port in ports.items()]
            said = _baton("up", *given, "--device=cpu", "--var", str(tmp_path))
            assert said.returncode == 2
            assert f"({flag} chooses another)" in said.stderr


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_up_starts_nothing_for_a_directory_that_is_no_checkpoint(missing, tmp_path):
    write(tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    said = _baton("up", "--model", str(tmp_path / "model"), "--var", str(tmp_path / "var"))
    assert (said.returncode, said.stdout) == (2, "")
    assert len(said.stderr.splitlines()) == 1
    assert str(tmp_path / "model") in said.stderr
    assert not (tmp_path / "var").exists()


def test_bench_says_which_server_does_not_answer():
    said = _baton("bench", "load", "--url=http://127.0.0.1:1/v1", "--rate=1")
    assert said.returncode == 1
    assert "http://127.0.0.1:1/v1/models: " in said.stderr


def test_every_flag_of_generate_says_what_it_does():
    said = _baton("generate", "--help")
    assert not re.search(r"^  --\S+( \w+)?\n(?! {4})", said.stdout, re.MULTILINE)


def test_generate_says_why_there_is_no_answer():
    said = _baton("generate", "hello", "--router=127.0.0.1:1")
    assert said.returncode == 1
    assert said.stderr.startswith("baton generate: UNAVAILABLE")


def test_generate_has_a_flag_for_every_field_of_sampling():
    flags = ["--max-tokens=3", "--temperature=0.5", "--top-k=7", "--seed=9", "--ignore-eos"]
    lists = ["--stop=a", "--stop=b", "--stop-token-ids=1", "--stop-token-ids=2"]
    request = generate.request_from(generate.parse(["hello", *flags, *lists]))
    sampling = request.sampling
    assert request.text == "hello"
    assert (sampling.max_tokens, sampling.temperature) == (3, 0.5)
    assert (sampling.top_k, sampling.seed, sampling.ignore_eos) == (7, 9, True)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["a", "b"], [1, 2])
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("guide")


def test_generate_takes_biases_and_the_form_of_the_answer(capsys):
    flags = ["--logit-bias=5=-2.5", "--logit-bias=7=1", "--regex=a+", "--min-tokens=2"]
    sampling = generate.request_from(generate.parse(["hello", *flags])).sampling
    assert dict(sampling.logit_bias) == {5: -2.5, 7: 1.0}
    assert (sampling.guide.regex, sampling.min_tokens) == ("a+", 2)
    for wrong in (["--logit-bias=5"], ["--regex=a", "--json-object"]):
        with pytest.raises(SystemExit):
            generate.parse(["hello", *wrong])
        assert wrong[0].partition("=")[0] in capsys.readouterr().err


def test_generate_can_send_a_chat_message():
    request = generate.request_from(generate.parse(["hello", "--chat"]))
    (message,) = request.messages.messages
    assert (message.role, message.content) == ("user", "hello")


def test_the_demo_model_is_the_same_every_time_and_never_half_written(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    names = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
    _, different, missing = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", names, shallow=False)
    assert (different, missing) == ([], [])
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "qwen3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_demo_model_may_be_there_already(tmp_path):
    write(tmp_path / "a")
    before = (tmp_path / "a" / "config.json").stat()
    write(tmp_path / "a")
    assert (tmp_path / "a" / "config.json").stat().st_ino == before.st_ino


def test_another_model_is_not_taken_for_the_demo_model(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="holds something else"):
        write(tmp_path / "a")
    assert (tmp_path / "a" / "config.json").read_text() == "{}"


def test_the_demo_model_overwrites_nothing(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(FileExistsError):
        write(tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"
