"""Runs transformers' continuous batching in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from bench._record import ROOT


def transformers_peer(spec: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What bench._transformers_peer says of `spec`.

    Raises:
        RuntimeError: with the end of what it said, if it fails.
        subprocess.TimeoutExpired: it takes longer than `limit_s`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "bench._transformers_peer"],
        cwd=ROOT,
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    if done.returncode:
        raise RuntimeError(f"the peer failed:\n{done.stderr[-4000:]}")
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply
