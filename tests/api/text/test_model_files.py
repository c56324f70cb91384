"""A model directory is read without network access, and missing files are reported by name."""

import json
from pathlib import Path

import pytest

from api.text.model_files import load
from common.errors import ConfigError
from tests.api.models import CONTEXT_LENGTH, VOCABULARY_SIZE, write_model


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_directory_gives_limits_and_special_tokens(tmp_path):
    files = load(str(write_model(tmp_path)))
    assert (files.context_length, files.vocabulary_size) == (CONTEXT_LENGTH, VOCABULARY_SIZE)
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (files.eos_token_ids, files.chat_template) == ((1,), None)


def test_generation_config_gives_the_end_tokens(tmp_path):
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert load(str(tmp_path)).eos_token_ids == (1, 7)


@pytest.mark.parametrize(
    "config, file, expected",
    [
        ("a", None, "a"),
        ("a", "b", "b"),
        ([{"name": "tool", "template": "c"}, {"name": "default", "template": "d"}], None, "d"),
        ([{"name": "tool", "template": "c"}], None, None),
    ],
)
def test_the_chat_template_is_found_in_all_usual_places(tmp_path, config, file, expected):
    write_model(tmp_path, chat_template=config)
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    assert load(str(tmp_path)).chat_template == expected


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_reported_by_name(tmp_path, missing):
    write_model(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        load(str(tmp_path))


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_a_wrong_value_is_reported_by_name(tmp_path, fields, named):
    edit(write_model(tmp_path) / "config.json", **fields)
    with pytest.raises(ConfigError, match=named):
        load(str(tmp_path))


def test_invalid_json_is_reported_by_name(tmp_path):
    (write_model(tmp_path) / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        load(str(tmp_path))


def test_a_directory_that_does_not_exist_is_no_hub_id(tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        load(str(tmp_path / "absent"))


def test_a_hub_id_that_is_not_available_is_reported_by_name(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match="nobody/nothing is not a directory and cannot be downloaded"
    ):
        load("nobody/nothing")
