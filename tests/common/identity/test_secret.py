"""The cluster secret: its sources, invalid values, and no message that contains it."""

from pathlib import Path

import pytest

from api.auth.guard import AUDIENCE, proves_operator
from common.errors import ConfigError
from common.identity import program, secret, tokens
from common.identity.guard import ROLES
from common.identity.secret import new_secret, operator_keys


@pytest.fixture(autouse=True)
def _no_secret_around(monkeypatch):
    monkeypatch.delenv(secret.VARIABLE, raising=False)


def keyring(text, role="node"):
    return secret.parse(text, "the test", role)


def test_a_new_secret_is_long_enough_and_unique():
    words = {new_secret() for _ in range(100)}
    assert len(words) == 100
    for word in words:
        assert len(word) >= 43 and keyring(word)
        assert word.replace("-", "").replace("_", "").isalnum()


def test_each_role_has_its_own_key_for_each_secret():
    one, other = keyring(new_secret()), keyring(new_secret())
    keys = {ring.keys[role] for ring in (one, other) for role in ROLES}
    assert len(keys) == 6


def test_a_file_overrides_the_environment_and_without_both_there_is_no_secret(
    monkeypatch, tmp_path
):
    file, text, other = tmp_path / "secret", new_secret(), new_secret()
    assert secret.keyrings(None, "node") is None
    monkeypatch.setenv(secret.VARIABLE, other)
    assert secret.keyrings(None, "node").current() == keyring(other)
    file.write_text(f"{text}\n")
    assert secret.keyrings(file, "node").current() == keyring(text)


def test_a_changed_file_is_read_again_and_invalid_content_is_not_used(tmp_path, caplog):
    file, old, new = tmp_path / "secret", new_secret(), new_secret()
    file.write_text(old)
    found = secret.keyrings(file, "node")
    assert found.current() is found.current()
    file.write_text(f"{new}\n{old}\n")
    assert found.current() == keyring(f"{new} {old}")
    file.write_text("short")
    assert found.current() == keyring(f"{new} {old}")
    assert "reload of cluster secrets failed" in caplog.text
    assert "short" not in caplog.text.replace("a short", "")
    file.unlink()
    assert found.current() == keyring(f"{new} {old}")


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "has 0 secrets"),
        (
            b"hunter2",
            "secret 1 has 7 characters, expected 32 or more; `baton cluster-secret` prints",
        ),
        (b"x" * 40 + b"\n" + b"y" * 31, "secret 2 has 31 characters"),
        (b"x" * 5000, "is longer than 4096 bytes"),
        (b"\xff" * 40, "is not ASCII text"),
        (b"\n".join([b"x" * 40] * 9), "has 9 secrets"),
        (b"baton-operator-AAAA", "operator's key 1 is incomplete"),
        (b"baton-operator-" + b"\x80" * 40, "is not ASCII text"),
    ],
)
def test_an_invalid_secret_is_rejected_with_a_sentence_that_does_not_contain_it(
    tmp_path, content, sentence
):
    file = tmp_path / "secret"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        secret.keyrings(file, "node")
    said = str(caught.value)
    assert said.startswith("--secret-file: ") and sentence in said and "\n" not in said
    for word in content.decode("latin-1").split():
        assert word not in said


@pytest.mark.parametrize(
    "path, reason",
    [
        ("secret", "secret: No such file"),
        ("run/secrets/of-a-cluster-that-was-not-mounted", "not-mounted: No such file"),
        ("/proc", "/proc: Is a directory"),
        # Seen failing if every unreadable path is printed.
        ("s" * 43, "--secret-file: the path of 43 characters is not a file"),
        ("s" * 300, "--secret-file: the path of 300 characters is not a file"),
    ],
)
def test_an_unreadable_file_is_reported_by_name_unless_it_may_be_the_secret(path, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        secret.keyrings(Path(path), "node")
    assert ("s" * 43) not in str(caught.value)


def test_the_representation_of_a_keyring_contains_no_secret():
    text = new_secret()
    ring = keyring(text)
    assert text not in repr(ring) and repr(ring.keys["node"][0]) not in repr(ring)


# Operators over HTTP -----------------------------------------------------------------------------


class Fixed:
    def __init__(self, ring):
        self.ring = ring

    def current(self):
        return self.ring


def test_only_an_operators_key_or_token_gives_access_over_http():
    old, new, stranger = new_secret(), new_secret(), keyring(new_secret())
    ring = keyring(f"{new} {old}")
    token = tokens.sign(ring, "operator", "me", AUDIENCE).text
    for key in (*operator_keys(ring), token, token):
        assert proves_operator(Fixed(ring), key)
    for key in (
        "",
        new,  # the secret itself must not be sent
        operator_keys(stranger)[0],
        "\u20ac",
        tokens.sign(stranger, "operator", "me", AUDIENCE).text,
        tokens.sign(ring, "node", "me", AUDIENCE).text,
        tokens.sign(ring, "operator", "me", "/baton.v1.Node/Drain").text,
    ):
        assert not proves_operator(Fixed(ring), key), key


# Listening ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_on_loopback_no_authentication_is_required(host):
    program.check_exposure(host, authenticated=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "no.such.host.invalid"])
def test_beyond_loopback_authentication_is_required_unless_disabled(host):
    with pytest.raises(
        ConfigError, match=f"--host {host} is reachable from other hosts.*--insecure"
    ):
        program.check_exposure(host, authenticated=False, insecure=False)
    program.check_exposure(host, authenticated=True, insecure=False)
    program.check_exposure(host, authenticated=False, insecure=True)
