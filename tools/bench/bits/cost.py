"""Measure what `engine.batch_invariant` costs, as ratios to the same nodes without it.

    python -m tools.bench.bits.cost [--models DIR] [--rounds 5] [--only moe]

For each model two colocated systems run, with and without the setting. They take turns with the
same prompts, and only one of them works at a time. They run twice, and start in the other order
the second time. A value is the minimum of all rounds, in ms. CPU time changes less than the time on
the clock where the machine has other work.
"""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop

from tools.bench.support import record
from tools.bench.support.load import Client, make_jobs, summary
from tools.bench.support.models import kept
from tools.bench.support.systems import System, serving

_COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_INNER = {"intermediate_size": 2304}
_HEADS = {"num_key_value_heads": 4, "head_dim": 64}
_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 384}
# Attention of DeepSeek-V2-Lite, with 12 heads.
_LATENTS = {"num_key_value_heads": 12, "q_lora_rank": None, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
_DELTA_NET = {"linear_num_key_heads": 6, "linear_num_value_heads": 12,
              "linear_key_head_dim": 64, "linear_value_head_dim": 64}  # fmt: skip
MODELS: Mapping[str, dict[str, Any]] = {
    # 0.11 billion parameters.
    "dense": {"architecture": "qwen3", **_INNER, **_HEADS},
    # 0.20 billion parameters, of which a token uses 0.07.
    "moe": {
        "architecture": "qwen3_moe",
        **_HEADS,
        **_EXPERTS,
        "num_experts": 16,
        "norm_topk_prob": True,
    },
    "latents": {
        "architecture": "deepseek_v3",
        **_INNER,
        **_LATENTS,
        **_EXPERTS,
        "n_routed_experts": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    # Three of four layers are delta nets.
    "hybrid": {"architecture": "qwen3_5_text", **_INNER, **_HEADS, **_DELTA_NET},
}
_TOKENS = 48
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
            model = kept(options.models, name, torch.bfloat16, _COMMON | MODELS[name])
            runner.run(_compare(name, model, options.rounds))
    return 0


async def _compare(name: str, model: Path, rounds: int) -> None:
    """Print the ratios of one model."""
    least: dict[tuple[str, str], float] = {}
    for settings in ([*_SETTINGS], [*_SETTINGS][::-1]):
        await _run(model, settings, rounds, least)
    rows = [
        {"measure": measure, "off": off, "on": on, "ratio": on / off}
        for (measure, setting), off in least.items()
        if setting == "off"
        for on in [least[measure, "on"]]
    ]
    record.say(f"{name}, 2 x {rounds} rounds, load average {os.getloadavg()[0]:.1f}")
    record.show(rows)
    record.emit("bits-cost", {"model": name, "rounds": rounds}, rows)


async def _run(
    model: Path, settings: Sequence[str], rounds: int, least: dict[tuple[str, str], float]
) -> None:
    """Start systems with these settings, and update the minima in `least`."""
    async with contextlib.AsyncExitStack() as stack:
        systems = []
        for setting in settings:
            flags = (*_FLAGS, *_SETTINGS[setting])
            system = await stack.enter_async_context(serving("colocated", model, flags))
            client = await stack.enter_async_context(Client(system.target))
            systems.append((setting, system, client))
        for number in range(rounds + 1):  # the first one is the warm-up
            for setting, system, client in systems if number % 2 else systems[::-1]:
                async for measure, value in _measures(system, client, number):
                    if number:
                        key = measure, setting
                        least[key] = min(value, least.get(key, value))


async def _measures(system: System, client: Client, seed: int) -> AsyncIterator[tuple[str, float]]:
    """Yield the name and the value in ms of each measure of a round."""
    for streams in _STREAMS:
        figures, cpu_ms = await _asked(system, client, streams, _PROMPT_TOKENS, _TOKENS, seed)
        yield f"token, {streams} streams", figures["tpot_ms"]["p50"]
        yield f"p99 gap, {streams} streams", figures["itl_ms"]["p99"]
        yield f"CPU of a token, {streams} streams", cpu_ms / (streams * _TOKENS)
    for length in _LONG_PROMPTS:
        figures, cpu_ms = await _asked(system, client, 1, length, 1, seed)
        yield f"first token, prompt of {length}", figures["ttft_ms"]["p50"]
        yield f"CPU of a prompt of {length}", cpu_ms


async def _asked(
    system: System, client: Client, streams: int, prompt_tokens: int, tokens: int, seed: int
) -> tuple[Mapping[str, Any], float]:
    """Return the summary of one request per stream, and the CPU time of the servers in ms."""
    sizes = {"prompt_tokens": prompt_tokens, "output_tokens": tokens, "vocabulary": 8000}
    jobs = make_jobs(streams, **sizes, seed=seed)
    before = sum((await system.cpu_seconds()).values())
    answers = await client.closed_loop(jobs, streams)
    spent = sum((await system.cpu_seconds()).values()) - before
    return summary(answers), 1e3 * spent


if __name__ == "__main__":
    sys.exit(main())
