"""The share of a transfer that prefill hides, and the TTFT that disaggregation adds.

Two measurements use the same prompts, which consist of many chunks.

Hidden share: a consumer without an engine (watcher.py) reads prompts from a real prefill node. The
first token is sent when the last chunk is computed. The time from then until all pages have landed
and are confirmed is exposed. It is measured for prompts in many chunks, for the same prompts in one
chunk, whose whole transfer is exposed, and for prompts as long as one chunk. The latter give the
bound, because no computation follows the last chunk.

TTFT: clients of a colocated and of a disaggregated system send one prompt at a time.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.traffic.workload import WorkloadRequest
from common.config import CacheConfig, EngineConfig, TransferConfig
from tests.support.checkpoints import VOCABULARY_SIZE, make_checkpoint
from tools.bench.handoff.watcher import Watched, watching
from tools.bench.support.load import Answer, Client, make_jobs
from tools.bench.support.record import percentiles, say, table
from tools.bench.support.systems import Mode, prefilling, serving

# 64 KiB of KV per token and little compute, so that the transfer takes long.
LAYERS, KV_HEADS, HEAD_DIM = 8, 8, 128
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
}
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
PAGE_SIZE = 16
PROMPT_TOKENS, CHUNK_TOKENS, OUTPUT_TOKENS = 2048, 256, 4
POOL_PROMPTS = 3  # prompts that fit a pool. As many tokens of warm-up prompts use all pages
CACHE = CacheConfig(
    page_size=PAGE_SIZE, num_pages=POOL_PROMPTS * (PROMPT_TOKENS // PAGE_SIZE + 2), swap_pages=0
)
# Tokens of a prompt and of its chunks.
CHUNKED, WHOLE, ONE_CHUNK = (PROMPT_TOKENS, CHUNK_TOKENS), (PROMPT_TOKENS, -1), (CHUNK_TOKENS, -1)
ADDED = ("ttft_ms", "one_page_ttft_ms", "second_token_ms")


def measure(prompts: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows and their summary. `prompts`: of each measurement."""
    return uvloop.run(_measure(prompts))


async def _measure(prompts: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    modes: tuple[Mode, ...] = ("colocated", "disaggregated")
    with tempfile.TemporaryDirectory(prefix="baton-bench-model-") as directory:
        model = make_checkpoint(Path(directory), **MODEL)
        watched = {
            kind: await _watch(model, *kind, prompts) for kind in (CHUNKED, WHOLE, ONE_CHUNK)
        }
        seen = {mode: await _ask(model, mode, prompts) for mode in modes}
    answers = [[answer.token_ids for answer in long] for long, _ in seen.values()]
    first = [[handoff.token for handoff in watched[kind][1]] for kind in (CHUNKED, WHOLE)]
    if answers[0] != answers[1] or any(one != [ids[0] for ids in answers[0]] for one in first):
        raise SystemExit("the answers differ: no speed without proof")
    by_consumer = [_watched_row(*kind, *found) for kind, found in watched.items()]
    by_clients = [_seen_row(mode, long, short) for mode, (long, short) in seen.items()]
    table(by_consumer)
    table(by_clients)
    together = _together(by_consumer, by_clients)
    say(f"{together}")
    return [*by_consumer, *by_clients], together


def _jobs(prompts: int, prompt_tokens: int) -> list[WorkloadRequest]:
    """Return the jobs, the same for every system. The last `prompts` count, others are warm-up."""
    return make_jobs(
        prompts + POOL_PROMPTS * PROMPT_TOKENS // max(prompt_tokens, CHUNK_TOKENS),
        prompt_tokens=prompt_tokens,
        output_tokens=OUTPUT_TOKENS,
        vocabulary=VOCABULARY_SIZE,
        seed=prompt_tokens,
    )


def _flags(chunk_tokens: int) -> list[str]:
    return [
        "--device=cpu",
        "--dtype=float32",
        f"--engine.cache.page-size={CACHE.page_size}",
        f"--engine.cache.num-pages={CACHE.num_pages}",
        f"--engine.cache.swap-pages={CACHE.swap_pages}",
        f"--engine.scheduler.chunked-prefill-tokens={chunk_tokens}",
    ]


async def _watch(
    model: Path, prompt_tokens: int, chunk_tokens: int, prompts: int
) -> tuple[str, list[Watched]]:
    """Return the data path, and the times of each hand-off."""
    say(f"hand-offs of {prompt_tokens} tokens in chunks of {chunk_tokens} ...")
    engine = EngineConfig(model=str(model), device="cpu", dtype="float32", cache=CACHE)
    async with prefilling(model, _flags(chunk_tokens)) as address:
        async with watching(address, engine, TransferConfig()) as watcher:
            handoffs = [
                await watcher.take(np.array(job.prompt, np.int32))
                for job in _jobs(prompts, prompt_tokens)
            ]
            return watcher.producer.path, handoffs[-prompts:]


async def _ask(model: Path, mode: Mode, prompts: int) -> tuple[list[Answer], list[Answer]]:
    """Return the responses to the long prompts, and to prompts of one page."""
    say(f"{mode} ...")
    async with (
        serving(mode, model, _flags(CHUNK_TOKENS)) as system,
        Client(system.target) as client,
    ):
        long, short = [
            await client.closed_loop(_jobs(prompts, tokens), streams=1)
            for tokens in (PROMPT_TOKENS, PAGE_SIZE)
        ]
    for answer in (*long, *short):
        if answer.error or len(answer.chunks) < 2:
            raise SystemExit(f"an answer is not what was asked for: {answer}")
    return long[-prompts:], short[-prompts:]


def _watched_row(
    tokens: int, chunk_tokens: int, path: str, handoffs: Sequence[Watched]
) -> dict[str, Any]:
    return {
        "who": "a consumer without an engine",
        "path": path,
        "tokens": tokens,
        "chunks": 1 if chunk_tokens < 0 else -(-tokens // chunk_tokens),
        "kv_mib": round(tokens * KV_BYTES_PER_TOKEN / 2**20, 1),
        "admitted_to_first_token_ms": percentiles((h.first_token for h in handoffs), 1e3),
        "exposed_ms": percentiles((h.exposed for h in handoffs), 1e3),
    }


def _seen_row(mode: str, long: Sequence[Answer], short: Sequence[Answer]) -> dict[str, Any]:
    return {
        "who": f"clients, {mode}",
        "ttft_ms": percentiles((a.chunks[0] - a.due for a in long), 1e3),
        "one_page_ttft_ms": percentiles((a.chunks[0] - a.due for a in short), 1e3),
        "second_token_ms": percentiles((a.gaps[0] for a in long), 1e3),
    }


def _together(
    by_consumer: Sequence[dict[str, Any]], by_clients: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Summarise the rows.

    hidden_share: share of the transfer of a whole prompt. Its bound is the same share if only the
    last chunk is exposed. added: disaggregated minus colocated, medians.
    """
    chunked, whole, last = (row["exposed_ms"]["p50"] for row in by_consumer)
    colocated, disaggregated = by_clients
    added = {name: disaggregated[name]["p50"] - colocated[name]["p50"] for name in ADDED}
    num_gib = PROMPT_TOKENS * KV_BYTES_PER_TOKEN / 2**30
    return {
        "hidden_share": round(1.0 - chunked / whole, 3),
        "hidden_share_bound": round(1.0 - last / whole, 3),
        "whole_read_gib_per_s": round(num_gib / (whole / 1e3), 2),
        **{name.replace("_ms", "_added_ms"): round(more, 1) for name, more in added.items()},
    }
