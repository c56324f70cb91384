"""The model files that the router reads: tokenizer and configuration, never weights."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.errors import ConfigError
from common.model_directory import VisionFiles, model_directory, vision_files

Way = Literal["last", "mean", "cls"]

_MODES: dict[str, Way] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


# Read from the model's configuration and the files of sentence-transformers beside it.
@dataclass(frozen=True, slots=True)
class PoolingFiles:
    """Configuration of embeddings and scores.

    Attributes:
        way: pooling of hidden states to a vector.
        normalize: vectors have length 1.
        dimensions: lengths to which a vector may be cut. Empty: any.
        classifies: the model has a classification head and no language model head.
        unsupported: reason why its vectors would be wrong, or "".
    """

    way: Way = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    classifies: bool = False
    unsupported: str = ""


def pooling_files(read: Callable[[str], Any], config: dict[str, Any]) -> PoolingFiles:
    """Return a checkpoint's pooling configuration. `read` returns a file's JSON, or None."""
    modules = read("modules.json")
    kinds, unsupported = [], ""
    path = "1_Pooling"
    for module in modules if isinstance(modules, list) else ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        kinds.append(kind)
        if kind == "Pooling":
            path = str(module.get("path", path))
        elif kind not in _KNOWN_MODULES:
            unsupported = f"modules.json names {kind[:80]!r}, which is not supported"
    pooling = read(f"{path}/config.json") if ".." not in path else None
    way: Way = "last"
    if isinstance(pooling, dict):
        modes = [mode for mode, on in pooling.items() if mode.startswith("pooling_mode") and on]
        if len(modes) == 1 and modes[0] in _MODES:
            way = _MODES[modes[0]]
        elif modes:
            unsupported = f"{path}/config.json pools by {', '.join(sorted(modes))[:200]}"
    saved_by = config.get("architectures") or ()
    sizes = config.get("matryoshka_dimensions") or ()
    return PoolingFiles(
        way=way,
        normalize="Normalize" in kinds if kinds else True,
        dimensions=tuple(size for size in sizes if type(size) is int),
        classifies=any(str(name).endswith("ForSequenceClassification") for name in saved_by),
        unsupported=unsupported,
    )


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a Hugging Face checkpoint that the router needs."""

    name: str
    tokenizer_json: bytes
    context_length: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    special_tokens: dict[str, str]  # "bos_token": "<s>", as chat templates name them
    pooling: PoolingFiles = field(default_factory=PoolingFiles)
    vision: VisionFiles | None = None  # of a model with image input


def load(model: str) -> ModelFiles:
    """Read `model`, a directory or a hub id, which is downloaded unless it is cached.

    Raises:
        ConfigError: a file is missing or has unusable values. The message names it.
    """
    directory = model_directory(model, weights=False)
    config = _json(directory / "config.json")
    text_config = {**config, **config.get("text_config", {})}
    tokenizer_config = _json(directory / "tokenizer_config.json", required=False)
    special_tokens = {
        **_special_tokens(_json(directory / "special_tokens_map.json", required=False)),
        **_special_tokens(tokenizer_config),
    }
    generation_config = _json(directory / "generation_config.json", required=False)

    def optional_json(name: str) -> Any:
        path = directory / name
        return _any_json(path) if path.exists() else None

    eos = generation_config.get("eos_token_id", text_config.get("eos_token_id"))
    return ModelFiles(
        name=model,
        tokenizer_json=_bytes(directory / "tokenizer.json"),
        context_length=_positive(text_config, "max_position_embeddings", directory),
        vocabulary_size=_positive(text_config, "vocab_size", directory),
        eos_token_ids=_ids(eos, directory),
        chat_template=_chat_template(directory, tokenizer_config),
        special_tokens=special_tokens,
        pooling=pooling_files(optional_json, config),
        vision=vision_files(directory),
    )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"model: cannot read {path}: {error.strerror}") from error


def _json(path: Path, *, required: bool = True) -> dict[str, Any]:
    content = _any_json(path) if required or path.exists() else {}
    if not isinstance(content, dict):
        raise ConfigError(f"model: {path} is not a JSON object")
    return content


def _any_json(path: Path) -> Any:
    try:
        return json.loads(_bytes(path))
    except ValueError as error:
        raise ConfigError(f"model: {path} is not JSON: {error}") from error


def _positive(config: dict[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"model: {directory / 'config.json'}: {key} must be a positive integer")
    return value


def _ids(value: object, directory: Path) -> tuple[int, ...]:
    ids = () if value is None else (value,) if type(value) is int else value
    if not isinstance(ids, list | tuple) or not all(type(token) is int for token in ids):
        raise ConfigError(f"model: {directory}: eos_token_id must be an integer or a list of them")
    return tuple(ids)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens in a configuration.

    Entries look like "bos_token": "<s>" or "bos_token": {"content": "<s>", ...}.
    """
    found = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return _bytes(file).decode("utf-8", errors="replace")
    older = _json(directory / "chat_template.json", required=False)  # of transformers 4.48
    match older.get("chat_template") or tokenizer_config.get("chat_template"):
        case str(template):
            return template
        case list(named):
            templates = {entry.get("name"): entry.get("template") for entry in named}
            default = templates.get("default")
            return default if isinstance(default, str) else None
        case _:
            return None
