from pathlib import Path

import pytest

from common.config import ClientsConfig
from tests.api.auth.rig import entry, write
from tests.api.rig import model

__all__ = ["keys", "model"]


@pytest.fixture
def keys(tmp_path: Path) -> ClientsConfig:
    """alice is a client, bob one with two requests a minute, old has expired, op is an operator."""
    file = write(
        tmp_path / "keys.yaml",
        entry("alice"),
        entry("bob", limits={"requests_per_minute": 2}),
        entry("old", expires="2020-01-01T00:00:00Z"),
        entry("op", role="operator"),
    )
    return ClientsConfig(api_keys=file)
