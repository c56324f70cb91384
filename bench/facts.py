"""Facts about the measured machine, for reports: processor, memory, GPUs, versions."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import VERSION

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "grpcio",
    "nixl",
    "uvloop",
    "aiohttp",
)
_SMI_S = 20.0


def machine() -> dict[str, Any]:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page_bytes / 2**30, 1),
        "gpus": gpu_names(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "baton": VERSION,
        **versions(PACKAGES),
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def gpu_names() -> list[str]:
    """Return the GPU names that nvidia-smi prints. Empty without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return said.stdout.strip().splitlines() if said.returncode == 0 else []


def versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
