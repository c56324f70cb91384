"""Where a model's files are: a directory, or a hub id whose files are fetched once."""

from pathlib import Path

from common.errors import ConfigError

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",  # of sentence-transformers, and a directory for each module
    "*_Pooling/config.json",
)
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")


def model_directory(model: str, *, weights: bool) -> Path:
    """The directory with the files of `model`.

    Args:
        weights: False leaves the weights out of what is fetched.
    Raises:
        ConfigError: there is no such directory, and the hub has no such model or is out of reach.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"model: no such directory: {model}")
    # Imported here: a program that serves a directory needs no HTTP client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model: {model} is no directory and not to be had: {reason}") from error
