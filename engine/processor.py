"""The processor of this machine: the cores that this process may use, and its number formats.

Two hyperthreads count as one core, because they share its multipliers and its memory access. This
module does not import torch.
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_ASKED = "OMP_NUM_THREADS"


def threads_at_hand(environment: Mapping[str, str]) -> int:
    """Return the number of compute threads: OMP_NUM_THREADS from `environment` if it is set, as in
    any OpenMP process. Otherwise one per usable core."""
    # Further numbers are for nested teams.
    first = environment.get(_ASKED, "").partition(",")[0].strip()
    if first.isascii() and first.isdigit() and int(first) > 0:
        return int(first)
    return usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process's affinity and cgroup limits allow."""
    own = physical_cores(os.sched_getaffinity(0))
    return max(1, int(min(own, cgroup_cpus())))


def physical_cores(cpus: Iterable[int], system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of cores of these CPUs. A CPU without topology information counts as one
    core."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (system / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)


def cgroup_cpus(
    mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float:
    """Return the lowest CPU limit (cgroup v2) of this process's cgroup and its ancestors, or
    infinity without a limit. In a container the mount is its cgroup, and `own` is ignored."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    groups = [mount / path, *(mount / path).parents]
    return min((_limit(group / "cpu.max") for group in groups), default=math.inf)


def _limit(file: Path) -> float:
    """Return the number of CPUs of a cpu.max file: microseconds of CPU time or `max`, then the
    period in microseconds."""
    try:
        quota, period = file.read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


# Flags in /proc/cpuinfo on x86 and ARM. i8mm multiplies int8.
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
INT8 = frozenset({"avx_vnni", "avx512_vnni", "amx_int8", "i8mm"})


def matrix_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the flags of BFLOAT16 and INT8 that the first core of `cpuinfo` has, sorted."""
    for line in cpuinfo.read_text().splitlines():
        name, _, features = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted((BFLOAT16 | INT8) & set(features.split())))
    return ()
