from pathlib import Path

import pytest

from common.config import ClientsConfig
from tests.api.auth.rig import clients_of, entry


@pytest.fixture
def keys(tmp_path: Path) -> ClientsConfig:
    """alice is a client, bob is one with two requests a minute, old has expired, op is an
    operator."""
    return clients_of(
        tmp_path,
        entry("alice"),
        entry("bob", limits={"requests_per_minute": 2}),
        entry("old", expires="2020-01-01T00:00:00Z"),
        entry("op", role="operator"),
    )
