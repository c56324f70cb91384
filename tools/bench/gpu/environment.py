"""The environment of the measurements: GPU properties from nvidia-smi, and package versions.

Loads no library that would initialise the GPU, because the calling process forks others.
"""

import subprocess
from typing import Any

from bench.facts import versions

_PACKAGES = ("torch", "triton", "transformers", "nixl", "nixl-cu12", "nixl-cu13", "grpcio", "numpy")
_FACTS = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem")
_STATE = (
    "clocks.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "memory.used",
    "clocks_event_reasons.active",
)


def facts() -> dict[str, Any]:
    """Return the static properties of all GPUs, and the versions of the relevant packages."""
    return {"gpus": _ask(_FACTS), "packages": versions(_PACKAGES)}


def state() -> list[dict[str, str]]:
    """Return the current clocks, temperature and power of each GPU."""
    return _ask(_STATE)


def _ask(fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Query nvidia-smi. Empty if it is missing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    lines = [line.split(", ") for line in done.stdout.splitlines()]
    return [dict(zip(fields, line, strict=True)) for line in lines if len(line) == len(fields)]
