"""Some of `make attack`: whatever strangers, clients and stolen nodes send, the system serves
its other clients rightly, and nothing of it dies, leaks or is held."""

import secrets
from pathlib import Path

import pytest

from tests.attack.siege import siege

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]


# The longer one measures delays. Another test beside it would delay the same clients.
@pytest.mark.parametrize("seconds", [6.0, pytest.param(120.0, marks=pytest.mark.nightly)])
async def test_a_system_under_attack_serves_its_other_clients_rightly(
    tmp_path: Path, seconds: float
):
    seed = secrets.randbits(32)
    report = await siege(seed, seconds, tmp_path)
    assert report.complaints == [], f"seed {seed}"
    assert report.num_right > 0
