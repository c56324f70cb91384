"""The share of a transfer that prefill hides, and the TTFT that disaggregation adds.

Two measurements use the same prompts, which consist of many chunks.

Hidden share: consumers without an engine (watcher.py) read prompts from two real prefill nodes. The
first token is sent when the last chunk is computed. The time from then until all pages have landed
and are confirmed is exposed. In turn, one node computes a prompt in chunks, the other one computes
it in one chunk, whose whole transfer is exposed, and then a prompt as long as one chunk. The last
one gives the bound, because no computation follows the last chunk.

TTFT: clients of a colocated and of a disaggregated system send one prompt at a time.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.traffic.workload import WorkloadRequest
from common.config import CacheConfig, EngineConfig, TransferConfig
from tests.support.models.checkpoints import VOCABULARY_SIZE, make_checkpoint
from tools.bench.handoff.watcher import Watched, watching
from tools.bench.support.load import Answer, Client, make_jobs
from tools.bench.support.record import percentiles, say, show
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
POOL_PROMPTS = 3  # prompts that fit a pool, and warm-up prompts, which use all pages
# A busy machine may delay a prompt in one chunk by several seconds.
PATIENT = TransferConfig(max_missed_heartbeats=60)
CACHE = CacheConfig(
    page_size=PAGE_SIZE, num_pages=POOL_PROMPTS * (PROMPT_TOKENS // PAGE_SIZE + 2), swap_pages=0
)


def measure(prompts: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows and their summary. `prompts`: of each measurement."""
    return uvloop.run(_measure(prompts))


async def _measure(prompts: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    modes: tuple[Mode, ...] = ("colocated", "disaggregated")
    with tempfile.TemporaryDirectory(prefix="baton-bench-model-") as directory:
        model = make_checkpoint(Path(directory), **MODEL)
        path, watched = await _watch(model, prompts)
        seen = {mode: await _ask(model, mode, prompts) for mode in modes}
    answers = [[answer.token_ids for answer in long] for long, _ in seen.values()]
    first = [(chunked.token, whole.token) for chunked, whole, _ in watched]
    if answers[0] != answers[1] or first != [(ids[0], ids[0]) for ids in answers[0]]:
        raise SystemExit("the answers differ: no speed without proof")
    kinds = ((PROMPT_TOKENS, CHUNK_TOKENS), (PROMPT_TOKENS, PROMPT_TOKENS), (CHUNK_TOKENS,) * 2)
    by_consumer = [
        _watched_row(path, *sizes, handoffs)
        for sizes, handoffs in zip(kinds, zip(*watched, strict=True), strict=True)
    ]
    by_clients = [_seen_row(mode, long, short) for mode, (long, short) in seen.items()]
    show(by_consumer)
    show(by_clients)
    together = _shares(watched) | _added(*by_clients)
    say(f"{together}")
    return [*by_consumer, *by_clients], together


def _jobs(prompts: int, prompt_tokens: int) -> list[WorkloadRequest]:
    """Return the jobs, the same for every system. The first POOL_PROMPTS are warm-up."""
    return make_jobs(
        prompts + POOL_PROMPTS,
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
        "--engine.scheduler.step-timeout-s=60",
        f"--transfer.max-missed-heartbeats={PATIENT.max_missed_heartbeats}",
    ]


async def _watch(model: Path, prompts: int) -> tuple[str, list[tuple[Watched, Watched, Watched]]]:
    """Return the data path, and the times of the hand-offs of each turn: in chunks, in one chunk,
    and as long as one chunk.
    """
    say("hand-offs ...")
    engine = EngineConfig(model=str(model), device="cpu", dtype="float32", cache=CACHE)
    turns = []
    async with (
        prefilling(model, _flags(CHUNK_TOKENS)) as in_chunks,
        prefilling(model, _flags(-1)) as in_one_chunk,
        watching(in_chunks, engine, PATIENT) as chunked,
        watching(in_one_chunk, engine, PATIENT) as whole,
    ):
        for long, short in zip(
            _jobs(prompts, PROMPT_TOKENS), _jobs(prompts, CHUNK_TOKENS), strict=True
        ):
            prompt, chunk = (np.array(job.prompt, np.int32) for job in (long, short))
            turns.append(
                (await chunked.take(prompt), await whole.take(prompt), await whole.take(chunk))
            )
        return whole.producer.path, turns[POOL_PROMPTS:]


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
    return long[POOL_PROMPTS:], short[POOL_PROMPTS:]


def _watched_row(
    path: str, tokens: int, chunk_tokens: int, handoffs: Sequence[Watched]
) -> dict[str, Any]:
    return {
        "who": "a consumer without an engine",
        "path": path,
        "tokens": tokens,
        "chunks": tokens // chunk_tokens,
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


def _shares(turns: Sequence[tuple[Watched, Watched, Watched]]) -> dict[str, float]:
    """Return medians over the turns.

    hidden_share: share of the transfer of a whole prompt. Its bound is the same share if only the
    transfer of the last chunk is exposed.
    """
    hidden = statistics.median(1 - chunked.exposed / whole.exposed for chunked, whole, _ in turns)
    bound = statistics.median(1 - last.exposed / whole.exposed for _, whole, last in turns)
    whole_s = statistics.median(whole.exposed for _, whole, _ in turns)
    return {
        "hidden_share": round(hidden, 3),
        "hidden_share_bound": round(bound, 3),
        "whole_read_gib_per_s": round(PROMPT_TOKENS * KV_BYTES_PER_TOKEN / 2**30 / whole_s, 2),
    }


def _added(colocated: dict[str, Any], disaggregated: dict[str, Any]) -> dict[str, float]:
    """Return the medians of disaggregated minus those of colocated."""
    return {
        name.replace("_ms", "_added_ms"): round(
            disaggregated[name]["p50"] - colocated[name]["p50"], 1
        )
        for name in ("ttft_ms", "one_page_ttft_ms", "second_token_ms")
    }
