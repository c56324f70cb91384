"""Checkpoints that many tests share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a checkpoint, see `make_checkpoint`. Equal ones are made only
    once, so no test may change one."""
    made: dict[str, Path] = {}

    def of(architecture: str = "qwen3", **fields: object) -> Path:
        name = f"{architecture} {fields}"
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp("model"), architecture, **fields)
        return made[name]

    return of
