"""The KV events of real nodes name the prompts that they have cached."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.processes.cluster import Cluster, wait_until

zmq = pytest.importorskip("zmq", reason="needs pyzmq")


def replayed(endpoint: str) -> dict[tuple[int, ...], int]:
    """Return the blocks that are stored by the events of a node: tokens, and number of blocks."""
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(endpoint)
        socket.send_multipart((b"", bytes(8)))
        stored = {}
        while (payload := socket.recv_multipart()[2]) != b"":
            _, events, rank = msgspec.msgpack.decode(payload)
            assert rank == 0
            for tag, *fields in events:
                if tag == "BlockStored":
                    hashes, _, tokens, size, *others = fields
                    assert others == [None, "GPU", None, None]
                    assert len(tokens) == size * len(hashes)
                    stored[tuple(tokens)] = len(hashes)
        return stored
    finally:
        context.destroy(linger=0)


async def test_both_roles_publish_the_blocks_of_a_prompt(make: Callable[..., Cluster], tmp_path):
    def flags(name: str) -> list[str]:
        return [
            "--kv-events.publisher=zmq",
            f"--kv-events.endpoint=ipc://{tmp_path}/{name}",
            f"--kv-events.replay-endpoint=ipc://{tmp_path}/{name}-replay",
        ]

    prompt = [n % 256 for n in range(70)]
    of_nodes = {name: flags(name) for name in ("prefill-0", "decode-0")}
    async with make(flags_of=of_nodes) as cluster:
        await cluster.generate(prompt, max_tokens=2)

        async def has_prompt(path: Path) -> bool:
            stored = await asyncio.to_thread(replayed, f"ipc://{path}")
            return any(tokens == tuple(prompt[: len(tokens)]) for tokens in stored)

        for name in of_nodes:
            at = tmp_path / f"{name}-replay"
            await wait_until(lambda at=at: has_prompt(at), f"{name} has published it")
