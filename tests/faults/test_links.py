"""Failures of a node's link under load: all responses are complete and right, and the node is
used again once its link works."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from cli.demo import DIRECTORY
from tests.attack.load import Load
from tests.chaos.keeper import Keeper
from tests.chaos.site import NUM_PROCESSES, Site
from tests.support.network.island import Island
from tests.support.processes.cluster import Cluster

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_CLIENTS = 50
FAULT_S = 15.0  # longer than any heartbeat timeout


@pytest.mark.parametrize("fault", ["cut", "half open", "slow"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_response_is_lost_when_the_link_of_a_node_fails(
    tmp_path: Path, role: str, fault: str
) -> None:
    with Island() as island:
        async with Cluster(
            DIRECTORY,
            tmp_path,
            path="tcp",
            num_prefill=2,
            num_decode=2,
            patient=False,
            islands={f"{role}-0": island},
            router_flags=(f"--processes={NUM_PROCESSES}", "--policy=round_robin"),
        ) as cluster:
            site = Site(cluster, Keeper(cluster))
            await site.until_well({})
            load = Load(cluster.address, cluster.http_port, Random(1), "", num_tokens=(12, 120))
            async with load:
                await load.learn()
                over = False
                asking = asyncio.ensure_future(load.ask_while(lambda: not over, NUM_CLIENTS))
                try:
                    await cluster.until_all_have_had_requests()
                    with island.befallen(fault):
                        await asyncio.sleep(FAULT_S)  # part of the fault
                    await site.until_well({})
                finally:
                    over = True
                    served = await asking
            assert served.wrong == [] and served.failed == []
            assert served.num_right > NUM_CLIENTS
