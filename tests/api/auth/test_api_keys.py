"""The file of API keys: its content, and one sentence for each error."""

from datetime import UTC, datetime

import pytest

from api.auth import api_keys
from common.errors import ConfigError

HASH = "ab" * 32


def read(tmp_path, text):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    return api_keys.read(file)


def test_a_key_without_limits_is_unlimited(tmp_path):
    (entry,) = read(tmp_path, f"- {{name: alice, sha256: {HASH}}}")
    assert (entry.role, entry.expires, entry.weight) == ("client", None, 1.0)
    assert entry.limits == api_keys.KeyLimits()


def test_an_entry_is_read_as_it_was_written(tmp_path):
    entry = api_keys.KeyEntry(
        name="alice",
        sha256=HASH,
        role="operator",
        expires=datetime(2030, 1, 2, tzinfo=UTC),
        weight=2.5,
        limits=api_keys.KeyLimits(requests_per_minute=3),
    )
    text = api_keys.entry_text(entry)
    other = entry.model_copy(update={"name": "bob", "sha256": "cd" * 32})
    assert read(tmp_path, text + api_keys.entry_text(other)) == (entry, other)


def test_a_date_means_its_first_moment_in_utc(tmp_path):
    (entry,) = read(tmp_path, f"- {{name: a, sha256: {HASH}, expires: 2030-01-02}}")
    assert entry.expires == datetime(2030, 1, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("", "is not a list of keys"),
        ("[]", "at least 1 item"),
        ("name: alice", "is not a list of keys"),
        ("- [", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("[" * 1_000_000, "is nested too deeply"),  # or the process ends
        ("- !!python/object/apply:os.system [true]", "is not YAML"),
        ('- !!int ""', "is not YAML: a value does not match its YAML tag"),
        ("- !!timestamp x", "is not YAML: a value does not match its YAML tag"),
        ("- alice", "key 1: Input should be a valid dictionary"),
        ("- {1: 2}", "key 1"),
        (f"- {{name: a b, sha256: {HASH}}}", "key 1 name: String should match pattern"),
        ("- {name: alice, sha256: baton-secret}", "key 1 sha256"),
        (f"- {{name: a, sha256: {HASH}, limits: {{concurrent: 0}}}}", "key 1 limits.concurrent"),
        (f"- {{name: a, sha256: {HASH}, wieght: 2}}", "key 1 wieght"),
        (f"- {{name: a, sha256: {HASH}, weight: 11}}", "key 1 weight"),
        (f"- {{name: a, sha256: {HASH}, expires: 2030-01-02 03:04}}", "key 1 expires"),
        (f"- {{name: a, sha256: {HASH}}}\n- {{name: a, sha256: {'cd' * 32}}}", "the name a"),
        (f"- {{name: a, sha256: {HASH}}}\n- {{name: b, sha256: {HASH}}}", "the sha256 abab"),
        ("#" * api_keys.MAX_FILE_BYTES + "\n", "bytes"),
    ],
)
def test_an_error_is_one_sentence(tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("[", r"\[")) as refused:
        read(tmp_path, text)
    assert "\n" not in str(refused.value)
    assert "baton-secret" not in str(refused.value)


def test_a_missing_file_is_reported_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        api_keys.read(tmp_path / "none.yaml")


def test_keys_are_unique_and_have_256_bits():
    keys = {api_keys.new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(api_keys.PREFIX) and len(key) == 6 + 43 for key in keys)
    assert all(len(api_keys.hashed(key)) == 64 for key in keys)
