"""Model files for routers of simulated nodes. Each byte of a text is a token.

`python -m simulation.node.tokenizer MODEL DIRECTORY` writes them.
"""

import hashlib
import json
import sys
from functools import cache
from pathlib import Path

from common.errors import ConfigError
from simulation.cost.models import model_shape

_SHIPPED = Path(__file__).parent.parent / "tokenizer"
_TOKENIZER = "tokenizer.json"


def has_model_files(model: str) -> bool:
    """Return whether the model is a checkpoint directory with files that routers can read."""
    return (Path(model) / _TOKENIZER).is_file()


@cache
def tokenizer_hash(model: str) -> str:
    """Return the hash by which a router recognises nodes with its tokenizer."""
    directory = Path(model) if has_model_files(model) else _SHIPPED
    return hashlib.sha256((directory / _TOKENIZER).read_bytes()).hexdigest()


def write_model_files(model: str, directory: Path) -> None:
    """Write the files of a simulated model. The directory is created if it is missing.

    Raises:
        ConfigError: the model is unknown, or the files cannot be written.
    """
    try:
        shape = model_shape(model)
        directory.mkdir(parents=True, exist_ok=True)
        for file in _SHIPPED.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        config = json.loads((_SHIPPED / "config.json").read_bytes())
        config["max_position_embeddings"] = shape.context_length
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python -m simulation.node.tokenizer MODEL DIRECTORY", file=sys.stderr)
        return 2
    try:
        write_model_files(sys.argv[1], Path(sys.argv[2]))
    except ConfigError as error:
        print(f"simulation: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
