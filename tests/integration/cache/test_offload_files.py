"""Files of a node survive any end of the node. No failure or modification of a disk ends a node
or changes a response."""

import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import numpy as np
import pytest

from tests.integration.oracle import Oracle
from tests.support.network.scrapes import scraped, total
from tests.support.processes.cluster import Answer, Cluster, free_ports, wait_until

pytestmark = [pytest.mark.long, pytest.mark.slow]

PROMPT = random.Random(5).choices(range(256), k=200)
ANSWER = 8
WHOLE = 192  # of its tokens, in whole pages


class Site:
    """A colocated node with files, behind a router."""

    def __init__(self, make: Callable[..., Cluster], directory: Path) -> None:
        (self._metrics_port,) = free_ports(1)
        flags = (
            "--mode=colocated",
            f"--metrics-port={self._metrics_port}",
            f"--engine.offload.cpu-bytes={16 << 20}",
            f"--engine.offload.disk-dir={directory}",
            f"--engine.offload.disk-bytes={16 << 20}",
        )
        self.cluster = make(num_prefill=0, decode_flags=flags)

    async def ask(self, prompt: list[int]) -> Answer:
        return await self.cluster.generate(prompt, max_tokens=ANSWER, ignore_eos=True)

    def counted(self, name: str, **labels: str) -> float:
        return total(scraped(self._metrics_port), name, **labels)

    async def until_written(self) -> None:
        await wait_until(
            lambda: self.counted("baton_offload_pages", tier="file") == WHOLE // 16,
            "all whole pages are in files",
        )

    async def start_again(self, *flags: str) -> None:
        (node,) = self.cluster.decode
        node.program = replace(node.program, flags=(*node.program.flags, *flags))
        await self.cluster.start_again(node)

        async def answers() -> bool:
            try:
                await self.cluster.generate([2, 3], max_tokens=1)
            except grpc.aio.AioRpcError:
                return False
            return True

        await wait_until(answers, "the node answers again")


async def test_a_node_that_was_killed_or_ended_finds_its_files(
    make: Callable[..., Cluster], known: Oracle, tmp_path: Path
) -> None:
    site = Site(make, tmp_path / "pages")
    right = known.tokens(PROMPT, ANSWER)
    async with site.cluster as cluster:
        assert (await site.ask(PROMPT)).token_ids == right
        for end in (cluster.kill, cluster.drain, cluster.terminate):
            await site.until_written()
            await end(cluster.decode[0])
            await site.start_again()
            answer = await site.ask(PROMPT)
            assert (answer.token_ids, answer.usage.cached_tokens) == (right, WHOLE)

        await site.until_written()
        await cluster.kill(cluster.decode[0])
        (pages,) = (tmp_path / "pages").glob("*/pages")
        np.bitwise_xor(content := np.fromfile(pages, np.uint8), 1).tofile(pages)
        assert content.any()
        await site.start_again()
        answer = await site.ask(PROMPT)
        assert (answer.token_ids, answer.usage.cached_tokens) == (right, 0)

        await wait_until(
            lambda: site.counted("baton_offload_errors_total", fault="damaged") > 0,
            "what is damaged is counted",
        )
        await site.until_written()
        await cluster.kill(cluster.decode[0])
        await site.start_again("--engine.cache.page-size=32")
        answer = await site.ask(PROMPT)
        assert (answer.token_ids, answer.usage.cached_tokens) == (right, 0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to be allowed to mount a file system")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


async def test_a_full_disk_ends_no_process(
    make: Callable[..., Cluster], known: Oracle, small_disk: Path
) -> None:
    site = Site(make, small_disk)
    draw = random.Random(6)
    async with site.cluster:

        async def full() -> bool:
            prompt = draw.choices(range(256), k=200)
            known.check(prompt, (await site.ask(prompt)).token_ids, ANSWER)
            return site.counted("baton_offload_errors_total", fault="full") > 0

        await wait_until(full, "the disk is full")
        known.check(PROMPT, (await site.ask(PROMPT)).token_ids, ANSWER)
