"""Measure what `engine.batch_invariant` costs, as ratios to the same nodes without it.

    python -m tools.bench.bits.cost [--models DIR] [--rounds 5] [--only moe]

For each model two colocated systems run, with and without the setting. They take turns with the
same prompts, and only one of them works at a time. A value is the minimum of the rounds.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import uvloop

from tools.bench.support import record
from tools.bench.support.load import Client, make_jobs, summary
from tools.bench.support.models import kept
from tools.bench.support.systems import serving

_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 384}
MODELS: Mapping[str, dict[str, Any]] = {
    # 0.11 billion parameters.
    "dense": {
        **_COMMON,
        "architecture": "qwen3",
        "intermediate_size": 2304,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    # 0.20 billion parameters, of which a token uses 0.07.
    "moe": {
        **_COMMON,
        **_EXPERTS,
        "architecture": "qwen3_moe",
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 16,
        "norm_topk_prob": True,
    },
    # The attention of DeepSeek-V2-Lite, with 12 heads.
    "latents": {
        **_COMMON,
        **_EXPERTS,
        "architecture": "deepseek_v3",
        "intermediate_size": 2304,
        "num_key_value_heads": 12,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
_DECODE_TOKENS = 48
_PROMPT_TOKENS = 64
_STREAMS = (1, 8)
_LONG_PROMPTS = (128, 512, 2048)
_FLAGS = ("--dtype=bfloat16", "--no-engine.cache.prefix-cache", "--engine.context-length=4096")
_SETTINGS = {"off": (), "on": ("--engine.batch-invariant",)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.bits.cost")
    parser.add_argument("--models", type=Path, default=Path("/tmp/baton-bits-cost"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=MODELS, default=None)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for name in [options.only] if options.only else MODELS:
            model = kept(options.models, name, torch.bfloat16, MODELS[name])
            runner.run(_compare(name, model, options.rounds))
    return 0


async def _compare(name: str, model: Path, rounds: int) -> None:
    """Print the ratios of one model."""
    least: dict[tuple[str, str], float] = {}
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for setting, flags in _SETTINGS.items():
            system = await stack.enter_async_context(serving("colocated", model, (*_FLAGS, *flags)))
            clients[setting] = await stack.enter_async_context(Client(system.target))
        for number in range(rounds + 1):  # the first one warms up
            order = [*clients] if number % 2 else [*clients][::-1]
            for setting in order:
                async for measure, value in _measures(clients[setting], number):
                    if number:
                        key = measure, setting
                        least[key] = min(value, least.get(key, value))
    rows = [
        {"measure": measure, "off": off, "on": on, "ratio": on / off}
        for (measure, setting), off in least.items()
        if setting == "off"
        for on in [least[measure, "on"]]
    ]
    record.say(f"{name}, {rounds} rounds, load average {os.getloadavg()[0]:.1f}")
    record.table(
        rows, {"measure": "{measure}", "off": "{off:.2f}", "on": "{on:.2f}", "ratio": "{ratio:.3f}"}
    )
    record.emit("bits-cost", {"model": name, "rounds": rounds}, rows)


async def _measures(client: Client, seed: int) -> Any:
    """Yield the name and the value of each measure of a round, in ms."""
    for streams in _STREAMS:
        jobs = make_jobs(
            streams,
            prompt_tokens=_PROMPT_TOKENS,
            output_tokens=_DECODE_TOKENS,
            vocabulary=8000,
            seed=seed,
        )
        figures = summary(await client.closed_loop(jobs, streams))
        yield f"ms of a token, {streams} streams", figures["tpot_ms"]["p50"]
        yield f"p99 gap in ms, {streams} streams", figures["itl_ms"]["p99"]
        per_token = 1e3 * figures["wall_s"] / (streams * _DECODE_TOKENS)
        yield f"ms of the run per token, {streams} streams", per_token
    for length in _LONG_PROMPTS:
        jobs = make_jobs(1, prompt_tokens=length, output_tokens=1, vocabulary=8000, seed=seed)
        figures = summary(await client.closed_loop(jobs, 1))
        yield f"ms to the first token, {length} tokens", figures["ttft_ms"]["p50"]


if __name__ == "__main__":
    sys.exit(main())
