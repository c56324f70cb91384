from collections.abc import AsyncIterator

import pytest

from tests.api.http.http_site import Site, site
from tests.support.network.http_client import Wire, connected


@pytest.fixture
async def served() -> AsyncIterator[Site]:
    async with site() as served:
        yield served


@pytest.fixture
async def wire(served: Site) -> AsyncIterator[Wire]:
    """A connection to `served`."""
    async with connected(served.port) as wire:
        yield wire
