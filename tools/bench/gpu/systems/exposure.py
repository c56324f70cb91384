"""The share of a hand-off that prefill hides, measured by a separate consumer of a prefill node.

The first token is sent when the last chunk is computed. Transfer time after that is exposed. A
prompt of one page gives the fixed part of that time. A prompt of a single chunk, whose transfer
cannot be hidden, gives the time of a chunk's bytes. Without overlap, N chunks would take N times as
long.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import numpy as np

from common.config import EngineConfig, TransferConfig
from tools.bench.gpu.model.engine import PAGE_SIZE
from tools.bench.gpu.process import Row
from tools.bench.gpu.setting import Setting
from tools.bench.handoff.watcher import Watcher, watching

PROMPTS = 5


async def measure(
    setting: Setting, model: Path, address: str, vocabulary: int, chunk: int, prompt: int
) -> AsyncIterator[Row]:
    """Yield one row per kind of prompt, the long one last.

    Args:
        chunk: tokens of a chunk, as the prefill node divides prompts.
        prompt: tokens of a prompt of many chunks.
    """
    config = EngineConfig.model_validate(
        {
            "model": str(model),
            "device": str(setting.device),
            "dtype": str(setting.dtype).removeprefix("torch."),
            "cuda_graphs": False,
            "cache": {"num_pages": 3 * prompt // PAGE_SIZE, "swap_pages": 0},
        }
    )
    async with watching(address, config, TransferConfig()) as watcher:
        fixed_ms, chunk_ms = 0.0, 0.0
        for tokens in (PAGE_SIZE, chunk, prompt):
            prefill_ms, exposed_ms = await _take(watcher, vocabulary, tokens)
            chunks = -(-tokens // chunk)
            if tokens == PAGE_SIZE:
                fixed_ms = exposed_ms
            elif chunks == 1:
                chunk_ms = max(0.0, exposed_ms - fixed_ms)
            whole_ms = max(exposed_ms, fixed_ms + chunk_ms * tokens / chunk)
            yield {
                "table": "hand-off",
                "path": watcher.producer.path,
                "tokens": tokens,
                "chunks": chunks,
                "kv_mib": -(-tokens // PAGE_SIZE) * watcher.page_bytes / 2**20,
                "prefill_ms": prefill_ms,
                "exposed_ms": exposed_ms,
                "whole_ms": whole_ms,
                "hidden": 1.0 - exposed_ms / whole_ms,
                "bound": 1.0 - 1.0 / chunks,
            }


async def _take(watcher: Watcher, vocabulary: int, tokens: int) -> tuple[float, float]:
    """Return medians in ms: from admission to the first token, and from there to the end."""
    rng = np.random.default_rng(tokens)
    prompts = rng.integers(1, vocabulary, (PROMPTS, tokens), dtype=np.int32)
    taken = [await watcher.take(prompt) for prompt in prompts][1:]
    return 1e3 * median(t.first_token for t in taken), 1e3 * median(t.exposed for t in taken)
