"""How many cores this process may keep busy: by its affinity, its container and OMP_NUM_THREADS.

Two hyperthreads are one core: they share what multiplies, and what reads memory. Knows no torch.
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

_ASKED = "OMP_NUM_THREADS"


def threads_at_hand(environment: Mapping[str, str]) -> int:
    """Threads that a program may compute with: OMP_NUM_THREADS where `environment` has it, as for
    any program on OpenMP, else one for each usable core."""
    first = environment.get(_ASKED, "").partition(",")[0].strip()  # the rest is for nested teams
    if first.isascii() and first.isdigit() and int(first) > 0:
        return int(first)
    return usable_cores()


def usable_cores() -> int:
    """Cores that the affinity of this process and the limits of its cgroups let it keep busy."""
    own = physical_cores(os.sched_getaffinity(0))
    return max(1, int(min(own, cgroup_cpus())))


def physical_cores(cpus: Iterable[int], system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores that have these CPUs; one that the system tells nothing of is a core by itself."""
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
    """The least of the CPU limits (cgroup v2) of this process's cgroup and those that have it;
    infinite without any. In a container the mount is its cgroup, whatever `own` says."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    groups = [mount / path, *(mount / path).parents]
    return min((_limit(group / "cpu.max") for group in groups), default=math.inf)


def _limit(file: Path) -> float:
    """Format: microseconds of CPU time, or max, in a period of so many microseconds."""
    try:
        quota, period = file.read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
