"""LoRA adapters through real processes, loaded at start and at run time, requested as models."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from common.identity.secret import operator_keys, parse
from tests.integration.oracle import Oracle, random_prompts
from tests.support.models.adapters import make_adapter, merge
from tests.support.models.checkpoints import greedy_tokens, reference_model
from tests.support.network.http_client import get, post
from tests.support.processes.cluster import Cluster

pytestmark = pytest.mark.long

NUM_TOKENS = 10


async def test_adapters_are_separate_models(
    make: Callable[..., Cluster], model: Path, known: Oracle, tmp_path: Path
) -> None:
    base = reference_model(model)
    directories = {
        name: make_adapter(tmp_path / "shelf" / name, base, seed=seed)
        for seed, name in enumerate(("sql", "poems"))
    }
    merged = {
        name: merge(reference_model(model), directory) for name, directory in directories.items()
    }
    prompts = random_prompts(5, 40, 130)
    expected = {
        name: greedy_tokens(model, prompts, NUM_TOKENS) for name, model in merged.items()
    } | {"": [list(known.tokens(prompt, NUM_TOKENS)) for prompt in prompts]}
    assert len({str(tokens) for tokens in expected.values()}) == 3, "adapters make no difference"
    flags = (f"--engine.lora.adapter-dir={tmp_path / 'shelf'}", "--engine.lora.preload=sql")
    async with make(node_flags=flags, num_prefill=2, num_decode=2) as cluster:

        async def asked(name: str, number: int) -> None:
            answer = await cluster.generate(
                prompts[number], adapter=name, max_tokens=NUM_TOKENS, temperature=0.0,
                ignore_eos=True,
            )  # fmt: skip
            assert list(answer.token_ids) == expected[name][number]

        async def all_asked(*names: str) -> None:
            async with asyncio.TaskGroup() as tasks:
                for name in names:
                    for number in range(len(prompts)):
                        tasks.create_task(asked(name, number))

        await all_asked("", "sql")
        (key, *_) = operator_keys(parse(cluster.secret_file.read_text(), "a test", "operator"))
        operator = {"authorization": f"Bearer {key}"}
        load = {"lora_name": "poems", "lora_path": "poems"}
        done = await post(cluster.http_port, "/v1/load_lora_adapter", load, **operator)
        assert done.status == 200, done.body
        await all_asked("", "sql", "poems")
        listed = (await get(cluster.http_port, "/v1/models")).json["data"]
        assert [each["id"] for each in listed][1:] == ["poems", "sql"]
        unload = {"lora_name": "sql"}
        done = await post(cluster.http_port, "/v1/unload_lora_adapter", unload, **operator)
        assert done.status == 200, done.body
        gone = await post(cluster.http_port, "/v1/completions", {"model": "sql", "prompt": "x"})
        assert gone.status == 404
        await all_asked("", "poems")
