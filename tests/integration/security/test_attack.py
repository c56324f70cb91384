"""A part of `make attack`: during attacks by unauthenticated callers, clients and stolen nodes,
the system serves other clients correctly, and no process fails or leaks."""

import secrets
from pathlib import Path

import pytest

from tests.attack.siege import siege

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1200)]


# The longer one measures delays. A test at the same time would delay the same clients.
@pytest.mark.parametrize("seconds", [6.0, pytest.param(120.0, marks=pytest.mark.nightly)])
async def test_a_system_under_attack_serves_other_clients_correctly(tmp_path: Path, seconds: float):
    seed = secrets.randbits(32)
    report = await siege(seed, seconds, tmp_path)
    assert report.complaints == [], f"seed {seed}"
    assert report.num_right > 0
