"""The share of a transfer that prefill hides, and the TTFT that disaggregation adds.

Two measurements use the same prompts, which consist of many chunks.

Hidden share: a consumer without an engine (watcher.py) reads them from a real prefill node, once in
chunks and once whole. The first token is sent when the last chunk is computed. The time from then
until all pages have landed and are confirmed is exposed. In one chunk, the whole transfer is
exposed.

TTFT: clients of a colocated and of a disaggregated system send one prompt at a time.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.traffic.workload import WorkloadRequest
from common.config import EngineConfig, TransferConfig
from tests.support.checkpoints import VOCABULARY_SIZE, make_checkpoint
from tools.bench.handoff.watcher import Watched, Watcher, watching
from tools.bench.support.load import Answer, Client, make_jobs
from tools.bench.support.record import percentiles, say
from tools.bench.support.systems import Mode, System, prefilling, serving

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
SHORT_TOKENS = PAGE_SIZE
OUTPUT_TOKENS = 4
POOL_PROMPTS = 3  # prompts that fit a pool, and warm-up prompts, which use all pages


@dataclass(frozen=True, slots=True)
class Plan:
    prompt_tokens: int
    chunk_tokens: int
    prompts: int
    path: str  # auto | nixl | tcp

    @property
    def num_chunks(self) -> int:
        return -(-self.prompt_tokens // self.chunk_tokens)

    @property
    def num_bytes(self) -> int:
        return self.prompt_tokens * KV_BYTES_PER_TOKEN

    def jobs(self, prompt_tokens: int) -> list[WorkloadRequest]:
        """Return the jobs, the same for every system. The first POOL_PROMPTS are warm-up."""
        return make_jobs(
            self.prompts + POOL_PROMPTS,
            prompt_tokens=prompt_tokens,
            output_tokens=OUTPUT_TOKENS,
            vocabulary=VOCABULARY_SIZE,
            seed=prompt_tokens,
        )

    def engine(self, model: Path) -> EngineConfig:
        num_pages = POOL_PROMPTS * (self.prompt_tokens // PAGE_SIZE + 2)
        cache = {"page_size": PAGE_SIZE, "num_pages": num_pages, "swap_pages": 0}
        fields = {"model": str(model), "device": "cpu", "dtype": "float32", "cache": cache}
        return EngineConfig.model_validate(fields)

    def flags(self, model: Path, chunk_tokens: int) -> list[str]:
        cache = self.engine(model).cache
        return [
            "--device=cpu",
            "--dtype=float32",
            f"--engine.cache.page-size={cache.page_size}",
            f"--engine.cache.num-pages={cache.num_pages}",
            f"--engine.cache.swap-pages={cache.swap_pages}",
            f"--engine.scheduler.chunked-prefill-tokens={chunk_tokens}",
            f"--transfer.backend={self.path}",
        ]


async def measure(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the rows and their summary."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-model-") as directory:
        model = make_checkpoint(Path(directory), **MODEL)
        watched = {
            num_chunks: await _watch(model, plan, chunk_tokens)
            for num_chunks, chunk_tokens in ((plan.num_chunks, plan.chunk_tokens), (1, -1))
        }
        modes: tuple[Mode, ...] = ("colocated", "disaggregated")
        seen = {mode: await _ask(model, plan, mode) for mode in modes}
    rows = [
        *(
            _watched_row(chunks, path, handoffs, plan)
            for chunks, (path, handoffs) in watched.items()
        ),
        *(_seen_row(mode, long, short, plan) for mode, (long, short) in seen.items()),
    ]
    tokens = [answer.token_ids for answer in seen["colocated"][0]]
    if tokens != [answer.token_ids for answer in seen["disaggregated"][0]] or any(
        [handoff.token for handoff in handoffs] != [ids[0] for ids in tokens]
        for _, handoffs in watched.values()
    ):
        raise SystemExit("the answers differ: no speed without proof")
    return rows, _together(rows, plan)


async def _watch(model: Path, plan: Plan, chunk_tokens: int) -> tuple[str, list[Watched]]:
    say(f"hand-offs in chunks of {chunk_tokens} ...")
    transfer = TransferConfig.model_validate({"path": plan.path})
    async with prefilling(model, plan.flags(model, chunk_tokens)) as address:
        async with watching(address, plan.engine(model), transfer) as watcher:
            handoffs = [await _take(watcher, job) for job in plan.jobs(plan.prompt_tokens)]
            return watcher.producer.path, handoffs[POOL_PROMPTS:]


async def _take(watcher: Watcher, job: WorkloadRequest) -> Watched:
    return await watcher.take(np.array(job.prompt, np.int32))


async def _ask(model: Path, plan: Plan, mode: Mode) -> tuple[list[Answer], list[Answer]]:
    """Return the responses to the long prompts, and to prompts of one page."""
    say(f"{mode} ...")
    async with serving(mode, model, plan.flags(model, plan.chunk_tokens)) as system:
        return await _answers(system, plan, plan.prompt_tokens), await _answers(
            system, plan, SHORT_TOKENS
        )


async def _answers(system: System, plan: Plan, prompt_tokens: int) -> list[Answer]:
    async with Client(system.target) as client:
        answers = await client.closed_loop(plan.jobs(prompt_tokens), streams=1)
    for answer in answers:
        if answer.error or len(answer.chunks) < 2:
            raise SystemExit(f"an answer is not what was asked for: {answer}")
    return answers[POOL_PROMPTS:]


def _watched_row(
    num_chunks: int, path: str, handoffs: Sequence[Watched], plan: Plan
) -> dict[str, Any]:
    return {
        "who": "a consumer without an engine",
        "path": path,
        "chunks": num_chunks,
        "kv_mib": round(plan.num_bytes / 2**20, 1),
        "admitted_to_first_token_ms": percentiles((h.first_token for h in handoffs), 1e3),
        "exposed_ms": percentiles((h.exposed for h in handoffs), 1e3),
    }


def _seen_row(
    mode: str, long: Sequence[Answer], short: Sequence[Answer], plan: Plan
) -> dict[str, Any]:
    return {
        "who": f"clients, {mode}",
        "chunks": plan.num_chunks,
        "ttft_ms": percentiles((a.chunks[0] - a.due for a in long), 1e3),
        "one_page_ttft_ms": percentiles((a.chunks[0] - a.due for a in short), 1e3),
        "second_token_ms": percentiles((a.gaps[0] for a in long), 1e3),
    }


def _together(rows: Sequence[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """Summarise the rows.

    hidden_share: share of the reads of a whole prompt. Its upper limit is hidden_share_bound,
    because no computation follows the last chunk. added: disaggregated minus colocated, medians.
    """
    chunked, whole, colocated, disaggregated = rows
    exposed, everything = chunked["exposed_ms"]["p50"], whole["exposed_ms"]["p50"]
    added = {
        name.replace("_ms", "_added_ms"): round(
            disaggregated[name]["p50"] - colocated[name]["p50"], 1
        )
        for name in ("ttft_ms", "one_page_ttft_ms", "second_token_ms")
    }
    return {
        "hidden_share": round(1.0 - exposed / everything, 3),
        "hidden_share_bound": round(1.0 - 1.0 / plan.num_chunks, 3),
        "whole_read_gib_per_s": round(plan.num_bytes / 2**30 / (everything / 1e3), 2),
        **added,
    }
