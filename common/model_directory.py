"""Model files: a directory, or a hub id whose files are downloaded once."""

from pathlib import Path

from common.errors import ConfigError

TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",  # of sentence-transformers, which has a directory for each module
    "*_Pooling/config.json",
)
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")


def model_directory(model: str, *, weights: bool) -> Path:
    """Return the directory with the files of `model`.

    Args:
        model: path or hub id.
        weights: False: weights are not downloaded.
    Raises:
        ConfigError: the directory does not exist, or the hub lacks the model or is unreachable.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ConfigError(f"model: no such directory: {model}")
    # Imported here: no HTTP client is needed for a local directory.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model: {model} is not a directory and cannot be downloaded: {reason}"
        ) from error
