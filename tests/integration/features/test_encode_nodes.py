"""Encode nodes as real processes: equal responses with one, and without one after its failure."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("PIL")


from tests.support.models.vision import make_vision_checkpoint, noise_url
from tests.support.network.http_client import post
from tests.support.processes.cluster import CPU, Cluster, wait_until

pytestmark = pytest.mark.long

NUM_TOKENS = 12
WEIGHTS = "model.safetensors"


class Asking:
    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def about(self, *seeds: int, question: str = "What is it? ") -> str:
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        content += [{"type": "image_url", "image_url": {"url": noise_url(seed)}} for seed in seeds]
        answer = await self._client.chat.completions.create(  # type: ignore[call-overload]
            model=self._model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=NUM_TOKENS,
            extra_body={"ignore_eos": True},
        )
        text: str = answer.choices[0].message.content
        return text


@asynccontextmanager
async def asked(cluster: Cluster, directory: Path) -> AsyncIterator[Asking]:
    base = f"http://127.0.0.1:{cluster.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="x", max_retries=0) as client:
        yield Asking(client, str(directory))


async def reads(cluster: Cluster, outcome: str) -> int:
    counters = (await cluster.prefill[0].describe()).counters
    return counters[f"embedding_reads/{outcome}"]


async def until_reading(cluster: Cluster, number: int = 1) -> None:
    await cluster.prefill[0].until(
        lambda now: now.queues["embeddings"] == number,
        f"{number} requests wait for the encode node",
    )


async def test_responses_equal_those_without_an_encode_node(tmp_path: Path) -> None:
    directory = make_vision_checkpoint(tmp_path / "model", model_type="qwen3_vl")
    without = Cluster(directory, tmp_path / "without", rig=CPU, path="tcp")
    async with without as cluster, asked(cluster, directory) as asking:
        expected = [await asking.about(seed) for seed in (1, 2, 3, 4)]
        both = await asking.about(1, 5)
    assert len(set(expected)) > 1
    beside = Cluster(directory, tmp_path / "with", path="tcp", num_encode=1)
    async with beside as cluster, asked(cluster, directory) as asking:
        (encoder,) = cluster.encode
        assert await asking.about(1) == expected[0]
        assert await reads(cluster, "completed") == 1
        # The other image is read. This one is cached on the prefill node.
        assert await asking.about(1, 5) == both
        assert await reads(cluster, "completed") == 2
        exports = (await encoder.describe()).counters["embedding_exports/completed"]
        assert exports == 2
        # A request that is cancelled while it waits releases everything.
        thaw = cluster.freeze(encoder)
        waiting = asyncio.create_task(asking.about(2))
        await until_reading(cluster)
        waiting.cancel()
        await until_reading(cluster, 0)
        thaw()
        await cluster.until_nothing_is_held()
        assert (await encoder.describe()).counters["embedding_exports/failed"] == 1
        assert await asking.about(2) == expected[1]
        # It fails in the middle of a request, and stays away.
        cluster.freeze(encoder)
        waiting = asyncio.create_task(asking.about(3))
        await until_reading(cluster)
        await cluster.kill(encoder)
        assert await waiting == expected[2]
        assert await reads(cluster, "failed") >= 1
        assert await asking.about(4) == expected[3]


async def test_a_late_encode_node_is_not_awaited(tmp_path: Path) -> None:
    directory = make_vision_checkpoint(tmp_path / "model")
    flags = ["--encode-timeout-s=0.5"]
    beside = Cluster(directory, tmp_path, path="nixl", num_encode=1, prefill_flags=flags)
    async with beside as cluster, asked(cluster, directory) as asking:
        first = await asking.about(1)
        assert await reads(cluster, "completed") == 1
        thaw = cluster.freeze(cluster.encode[0])
        assert await asking.about(2)
        assert await reads(cluster, "late") == 1
        thaw()
        assert await asking.about(1, question="What is it? ") == first


async def test_embeddings_of_old_weights_are_not_used_after_an_update(tmp_path: Path) -> None:
    """The encode node serves again after a restart with the new weights."""
    steps = tmp_path / "steps"
    old = make_vision_checkpoint(tmp_path / "model")
    new = make_vision_checkpoint(steps / "new", seed=1)
    without = Cluster(new, tmp_path / "without", rig=CPU, path="tcp")
    async with without as cluster, asked(cluster, new) as asking:
        expected = [await asking.about(seed) for seed in (1, 2)]
    beside = Cluster(
        old,
        tmp_path / "with",
        path="tcp",
        num_encode=1,
        node_flags=[f"--engine.weights-dir={steps}"],
        with_secret=False,  # every client may update weights
    )
    async with beside as cluster, asked(cluster, old) as asking:
        assert await asking.about(1) != expected[0]
        assert await reads(cluster, "completed") == 1
        updated = await post(cluster.http_port, "/update_weights_from_disk", {"model_path": "new"})
        assert updated.status == 200, updated.body
        assert await asking.about(1) == expected[0]
        assert await reads(cluster, "completed") == 1
        (encoder,) = cluster.encode
        await cluster.kill(encoder)
        shutil.copyfile(new / WEIGHTS, old / "next")
        (old / "next").replace(old / WEIGHTS)  # running nodes keep the old file
        await cluster.start_again(encoder)
        seeds = itertools.count(10)

        async def reads_again() -> bool:
            await asking.about(next(seeds))
            return await reads(cluster, "completed") > 1

        await wait_until(reads_again, "the restarted encode node is used")
        before = await reads(cluster, "completed")
        assert await asking.about(2) == expected[1]
        assert await reads(cluster, "completed") == before + 1


async def test_nodes_with_ranks_read_embeddings(tmp_path: Path) -> None:
    directory = make_vision_checkpoint(tmp_path / "model")
    ranks = ["--engine.parallel.tp=2"]
    rigs = {
        "without": Cluster(directory, tmp_path / "without", rig=CPU, path="tcp"),
        "with": Cluster(
            directory,
            tmp_path / "with",
            path="tcp",
            num_encode=1,
            prefill_flags=ranks,
            decode_flags=ranks,
        ),
    }
    answers = {}
    for name, rig in rigs.items():
        async with rig as cluster, asked(cluster, directory) as asking:
            answers[name] = [await asking.about(1), await asking.about(1, 2)]
            if name == "with":
                assert await reads(cluster, "completed") == 2
    assert answers["with"] == answers["without"]
