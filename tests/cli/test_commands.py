"""The `baton` command as a user calls it, without a running system.

The commands run in this process. Only tests of the process itself start one.
"""

import argparse
import filecmp
import json
import os
import runpy
import socket
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from cli import completion, generate, main
from cli.demo_model import write
from cli.local import plan
from cli.main import COMMANDS, RENAMED, CliGroup, commands
from common import VERSION, settings
from common.config import DecodeConfig, PrefillConfig, RankHostConfig, RouterConfig
from tests.support.processes.cluster import free_ports

NAMES = [name for name, _ in commands()]
# Commands that call a router, with their arguments.
CALLERS = {
    "status": (),
    "nodes list": (),
    "nodes drain": ("a:1",),
    "nodes pause": (),
    "nodes resume": (),
    "nodes sleep": (),
    "nodes wake": (),
    "nodes set-role": ("a:1", "decode"),
    "nodes update-weights": ("step",),
    "nodes profile": (),
    "requests list": (),
    "requests show": ("r1",),
    "requests migrate": ("r1",),
    "rollout": (),
    "models list": (),
    "adapters list": (),
    "adapters load": ("a", "a"),
    "adapters unload": ("a",),
    "weights list": (),
    "top": ("--once",),
    "generate": ("hello",),
}
LOCAL = (
    *("up", "serve", "rank-host", "bench", "check", "config", "plan", "sim"),
    *("api-key", "cluster-secret", "demo-model"),
)


class _Replaced(BaseException):
    """The process would be replaced by another command."""


@pytest.fixture
def baton(capsys, monkeypatch):
    """Run `baton` with arguments in this process, and return its exit code and output."""

    def replace(path, command):
        raise _Replaced(command)

    def run(*arguments):
        monkeypatch.setattr(os, "execv", replace)
        monkeypatch.setattr(sys, "argv", ["baton", *arguments])
        try:
            code = main.main()
        except _Replaced as replaced:
            _, _, _, program, _, module, *rest = replaced.args[0]
            assert program == "cli.program"
            code = _run_module(monkeypatch, module, rest)
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err)

    return run


def _run_module(monkeypatch, module, arguments):
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # runpy: the module may be loaded already
            runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    return 0


def _one_line(done, words):
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_without_a_command_the_commands_are_listed(baton):
    done = baton()
    assert (done.returncode, done.stdout) == (2, "")
    assert all(f"  {name} " in done.stderr for name in COMMANDS)


def test_version(baton):
    done = baton("--version")
    assert (done.returncode, done.stdout) == (0, f"baton {VERSION}\n")


@pytest.mark.parametrize(
    "group", ["", *(n for n, e in COMMANDS.items() if isinstance(e, CliGroup))]
)
def test_help_of_a_group_lists_its_commands(baton, group):
    done = baton(*filter(None, [group]), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    below = COMMANDS[group].commands if group else COMMANDS
    assert all(f"  {name} " in done.stdout for name in below)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "router", "--help"]])
def test_help_may_be_read_partly(arguments):
    """Print help to a closed pipe, such as `head -1`. Seen failing with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "cli.main", *arguments],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("name", NAMES)
def test_every_option_has_a_help_text_and_help_all_shows_it(name):
    parser = completion.command_parser(name, dict(commands())[name])
    basic, everything = parser.format_help(), parser.help_text(everything=True)
    assert set(basic.split()) <= set(everything.split()) | {"--help-all", "shows", "more"} | {
        word for word in basic.split() if word.isdigit() or word == "options."
    }
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction)
        assert all(flag in everything for flag in action.option_strings)


def test_basic_help_leaves_advanced_options_out(baton):
    basic, everything = baton("nodes", "pause", "--help"), baton("nodes", "pause", "--help-all")
    assert "--mode" in basic.stdout and "--help-all shows" in basic.stdout
    assert "--tls-ca" not in basic.stdout and "--tls-ca" in everything.stdout
    router = settings.parser_of(RouterConfig, "baton serve router")
    assert (
        "--policy" in router.format_help() and "--slow-client-timeout-s" not in router.format_help()
    )
    assert "--slow-client-timeout-s" in router.help_text(everything=True)


def test_every_common_flag_exists():
    known = {
        flag
        for record in (RouterConfig, PrefillConfig, DecodeConfig, RankHostConfig)
        for flag in settings.parser_of(record, "").flags
    }
    assert known >= settings.COMMON_FLAGS


@pytest.mark.parametrize("command", ["up", "check", "bench", "serve prefill", "serve decode"])
def test_an_installation_for_routers_reports_missing_packages_of_a_command(
    baton, monkeypatch, command
):
    lacking = ("torch", "numpy")
    monkeypatch.setattr(main, "find_spec", lambda name: None if name in lacking else name)
    done = baton(*command.split(), "--help")
    _one_line(done, "pip install")
    assert "torch" in done.stderr or "numpy" in done.stderr


@pytest.mark.parametrize("old, new", RENAMED.items())
def test_an_old_command_prints_the_new_one(baton, old, new):
    assert new in NAMES
    _one_line(baton(old, "10.0.0.7:50200"), f"baton: `baton {old}` is now `baton {new}`\n")


@pytest.mark.parametrize(
    "arguments, meant",
    [
        (["staus"], "did you mean `baton status`?"),
        (["nodes", "lst"], "did you mean `baton nodes list`?"),
        (["serve", "decod"], "did you mean `baton serve decode`?"),
        (["migrate"], "did you mean `baton requests migrate`?"),
        (["qqq"], "`baton qqq` (`baton --help` lists all)"),
        (["nodes", "qqq"], "`baton nodes qqq` (`baton nodes --help` lists all)"),
    ],
)
def test_an_unknown_command_is_one_line_with_the_most_similar_one(baton, arguments, meant):
    _one_line(baton(*arguments), meant)


@pytest.mark.parametrize(
    "arguments, meant",
    [
        (["nodes", "pause", "--modes=abort"], "did you mean --mode?"),
        (["nodes", "pause", "--mode=abrt"], "did you mean abort?"),
        (["serve", "router", "--polcy=random"], "did you mean --policy?"),
        (["bench", "compar"], "did you mean compare?"),
        (
            ["serve", "router", "--model=m", "--prefill", "a:1", "b:2", "--decode=c:3"],
            "separate several values by commas: --prefill a:1,b:2",
        ),
    ],
)
def test_a_similar_flag_or_value_is_suggested(baton, arguments, meant):
    _one_line(baton(*arguments), meant)


def test_arguments_reach_the_process_that_replaces_the_command():
    command = [sys.executable, "-m", "cli.main", "serve", "router", "--model=m", "--port=x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    _one_line(done, "baton serve router: --port: ")


@pytest.mark.parametrize("given, level", [(None, "ERROR"), ("INFO", "INFO")])
def test_the_log_has_no_lines_of_the_grpc_core_unless_requested(baton, monkeypatch, given, level):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if given:
        monkeypatch.setenv("GRPC_VERBOSITY", given)
    baton("cluster-secret")
    assert os.environ["GRPC_VERBOSITY"] == level


def test_commands_that_call_a_router_are_covered_here():
    assert {*CALLERS, "planner", "completion"} == {n for n in NAMES if n.split()[0] not in LOCAL}


@pytest.mark.parametrize("name", CALLERS)
def test_a_stopped_router_is_one_sentence_with_the_fix(baton, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--router=127.0.0.1:1", "--url=http://127.0.0.1:1"]
    parser = completion.command_parser(name, dict(commands())[name])
    (flag,) = [flag for flag in flags if flag.partition("=")[0] in parser.flags]
    done = baton(*name.split(), *CALLERS[name], flag)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"baton {name}: no router responds at ")
    assert "`baton up`" in line and flag.partition("=")[0] in line


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--engine.cache.page-size=3"], "power of two"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--decode=-1"], "--decode"),
        (["--prefill=x"], "--prefill"),
        (["--port=65536"], "--port: must be from 1 to 65535, got '65536'"),
        (["--router-flags=--policy=fastest"], "--policy"),
        (["--router-flags", "--policy=slowest"], "slowest"),
    ],
)
def test_up_rejects_wrong_flags_before_it_starts_a_process(baton, flags, words):
    _one_line(baton("up", *flags), words)


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
        ["nodes", "sleep", "--only=disk"],
        ["planner", "--spare=1"],
    ],
)
def test_every_command_reports_an_error_in_one_line(baton, arguments):
    _one_line(baton(*arguments), f"baton {arguments[0]}")


def test_up_names_the_flag_that_selects_another_port(baton, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = ("--port", "--http-port", "--prefill-port", "--decode-port")
        for flag in flags:
            # The default ports of others may be in use: they are in the range of outgoing
            # connections.
            ports = dict(zip(flags, free_ports(len(flags)), strict=True))
            ports[flag] = taken.getsockname()[1]
            given = [f"{name}={port}" for name, port in ports.items()]
            done = baton("up", *given, "--device=cpu", "--var", str(tmp_path))
            assert done.returncode == 2
            assert f"({flag} chooses another)" in done.stderr


# Seen failing with an IPv4 socket, which cannot be bound to this address.
def test_a_port_of_an_ipv6_address_is_free_or_busy():
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert plan.busy("::1", port) == "Address already in use"
    assert plan.busy("::1", port) is None


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_up_starts_no_process_for_a_directory_without_a_checkpoint(baton, missing, tmp_path):
    write(tmp_path / "model")
    (tmp_path / "model" / missing).unlink()
    done = baton("up", "--model", str(tmp_path / "model"), "--var", str(tmp_path / "var"))
    _one_line(done, str(tmp_path / "model"))
    assert not (tmp_path / "var").exists()


def test_bench_names_the_server_that_does_not_respond(baton):
    done = baton("bench", "load", "--url=http://127.0.0.1:1/v1", "--rate=1")
    assert done.returncode == 1
    assert "http://127.0.0.1:1/v1/models: " in done.stderr


def _generate(*arguments):
    return generate.request_from(generate.parser().parse_args(["hello", *arguments]))


def test_generate_has_a_flag_for_every_field_of_sampling():
    flags = ["--max-tokens=3", "--temperature=0.5", "--top-k=7", "--seed=9", "--ignore-eos"]
    lists = ["--stop=a", "--stop=b", "--stop-token-ids=1", "--stop-token-ids=2"]
    request = _generate(*flags, *lists)
    sampling = request.sampling
    assert request.text == "hello"
    assert (sampling.max_tokens, sampling.temperature) == (3, 0.5)
    assert (sampling.top_k, sampling.seed, sampling.ignore_eos) == (7, 9, True)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["a", "b"], [1, 2])
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("guide")


def test_generate_accepts_biases_and_output_constraints(capsys):
    flags = ["--logit-bias=5=-2.5", "--logit-bias=7=1", "--regex=a+", "--min-tokens=2"]
    sampling = _generate(*flags).sampling
    assert dict(sampling.logit_bias) == {5: -2.5, 7: 1.0}
    assert (sampling.guide.regex, sampling.min_tokens) == ("a+", 2)
    for wrong in (["--logit-bias=5"], ["--regex=a", "--json-object"]):
        with pytest.raises(SystemExit):
            _generate(*wrong)
        assert wrong[0].partition("=")[0] in capsys.readouterr().err


def test_generate_can_send_a_chat_message():
    (message,) = _generate("--chat").messages.messages
    assert (message.role, message.content) == ("user", "hello")


def test_created_objects_are_printed_as_json_on_request(baton, tmp_path):
    key = json.loads(baton("api-key", "alice", "--json").stdout)
    assert key["key"].startswith("baton-") and "alice" in key["entry"]
    assert len(json.loads(baton("cluster-secret", "--json").stdout)["secret"]) >= 43
    directory = tmp_path / "model"
    written = baton("demo-model", str(directory), "--json")
    assert json.loads(written.stdout) == {"directory": str(directory)}


def test_the_demo_model_is_always_the_same_and_never_half_written(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    names = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]
    _, different, missing = filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", names, shallow=False)
    assert (different, missing) == ([], [])
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "qwen3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    before = (tmp_path / "a" / "config.json").stat()
    write(tmp_path / "a")  # it exists already
    assert (tmp_path / "a" / "config.json").stat().st_ino == before.st_ino


@pytest.mark.parametrize("has_model", [True, False])
def test_the_demo_model_overwrites_no_file(tmp_path, has_model):
    mine = tmp_path / ("config.json" if has_model else "mine")
    if has_model:
        write(tmp_path)
    mine.write_text("{}")
    with pytest.raises(FileExistsError, match="holds something else"):
        write(tmp_path)
    assert mine.read_text() == "{}"
