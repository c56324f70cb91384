from pathlib import Path

import pytest

from tests.router.rig import CHAT_TEMPLATE, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE)
