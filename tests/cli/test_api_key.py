"""`baton api-key`, and the commands that show a key."""

import argparse
import sys

import pytest

from api.auth import api_keys
from cli import api_key, client
from common.errors import ConfigError
from tests.support.refusals import refusal


def options(file=None):
    return argparse.Namespace(api_key_file=file)


def test_the_output_can_be_appended_to_the_file(capsys, tmp_path):
    file = tmp_path / "keys.yaml"
    shown = []
    for arguments in (
        ["alice", "--requests-per-minute=60", "--expires=2030-01-02", "--weight", "2"],
        ["bob", "--operator", "--connections", "3"],
    ):
        assert api_key.main(arguments) == 0
        said = capsys.readouterr()
        with file.open("a") as appended:
            appended.write(said.out)
        shown.append(said.err.split()[-1])
        assert shown[-1] not in said.out
    alice, bob = api_keys.read(file)
    assert [alice.sha256, bob.sha256] == [api_keys.hashed(key) for key in shown]
    assert (alice.role, alice.weight, alice.limits.requests_per_minute) == ("client", 2.0, 60)
    assert f"{alice.expires:%F %T %Z}" == "2030-01-02 00:00:00 UTC"
    assert (bob.role, bob.limits) == ("operator", api_keys.KeyLimits(connections=3))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["a b"], "name"),
        (["alice", "--concurrent", "0"], "concurrent"),
        (["alice", "--expires", "soon"], "expires"),
        ([], "NAME"),
    ],
)
def test_an_invalid_value_prints_one_line_and_no_key(capsys, arguments, words):
    line = refusal(capsys, lambda: api_key.main(arguments))
    assert words in line
    assert api_keys.PREFIX not in line


def test_commands_read_a_key_from_a_file_before_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(client.KEY_VARIABLE, raising=False)
    assert client.credentials(options()) == ()
    monkeypatch.setenv(client.KEY_VARIABLE, "one")
    assert client.credentials(options()) == (("authorization", "Bearer one"),)
    file = tmp_path / "key"
    file.write_text("two\n")
    assert client.credentials(options(file)) == (("authorization", "Bearer two"),)


@pytest.mark.parametrize("content", ["", "two words", "zwölf", "a\x00b"])
def test_an_invalid_key_is_not_sent(tmp_path, content):
    file = tmp_path / "key"
    file.write_text(content)
    with pytest.raises(ConfigError, match="holds no API key"):
        client.credentials(options(file))
    with pytest.raises(ConfigError, match="No such file"):
        client.credentials(options(tmp_path / "none"))


def test_a_key_on_the_command_line_is_rejected(capsys):
    from cli import generate

    line = refusal(capsys, lambda: generate.parser().parse_args(["hello", "--api-key", "secret"]))
    assert "--help" in line
    assert "secret" not in sys.argv
