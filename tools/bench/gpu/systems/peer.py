"""transformers' continuous batching on the same checkpoint and prompts, in its own process."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.traffic.workload import WorkloadRequest
from tools.bench.gpu.setting import Setting
from tools.bench.support.peer import transformers_peer

LIMIT_S = 150.0
WARM_UP_TOKENS = 8


def full_streams(
    setting: Setting, model: Path, jobs: Sequence[WorkloadRequest], streams: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the summary of its responses, as in tools.bench.support.load, and their tokens by job.

    Raises:
        RuntimeError: it failed. Contains the end of its output.
    """
    warm_up = [dataclasses.replace(job, max_tokens=WARM_UP_TOKENS) for job in jobs[:streams]]
    spec = {
        "model": str(model),
        "device": str(setting.device),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "threads": [1],
        "warm_up": [dataclasses.astuple(job) for job in warm_up],
        "loads": [(streams, [dataclasses.astuple(job) for job in jobs])],
    }
    reply = transformers_peer(spec, LIMIT_S)
    return reply["rows"][0], reply["tokens"]
