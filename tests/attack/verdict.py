"""Invariants of an attacked system, judged from outside: processes, logs, memory, and the
responses to another client."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from tests.attack.bound import MAX_FACTOR, Delay
from tests.attack.load import Served

MAX_GROWTH = 0.10  # of a process's memory, from the first part of the attack to its end
# Not counted as growth: an engine's cache of grammars (128 MiB), pages of its two pools that were
# unused before (32 MiB with the demo model), and free memory of an allocator.
MIN_GROWTH_BYTES = 208 << 20
MAX_P99_S = 120.0  # of another client's responses, with all processes on two cores
MAX_LOG_BYTES_PER_S = 20_000  # of one process
_FAULT = re.compile(r"Traceback|uncaught exception|internal error|by an internal error")


class Process(msgspec.Struct, frozen=True):
    """One process of the system, before and after."""

    name: str
    before_bytes: int
    after_bytes: int  # 0: it has ended

    @property
    def growth(self) -> float:
        return self.after_bytes / self.before_bytes - 1.0


class Arm(msgspec.Struct, frozen=True):
    """The outcome of one attack arm."""

    name: str
    exit_code: int
    output: str


def resident_bytes(pid: int) -> int:
    """Return the process's private memory in bytes, or 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(":") for line in lines[1:])
    return sum(
        int(sizes[name].split()[0]) * 1024
        for name in ("Private_Clean", "Private_Dirty")
        if name in sizes
    )


def complaints(
    processes: list[Process],
    arms: list[Arm],
    served: Served,
    logs: Mapping[str, Path],
    seconds: float,
) -> Iterator[str]:
    """Yield a sentence for each broken invariant."""
    for process in processes:
        if not process.after_bytes:
            yield f"{process.name} has died"
        elif process.after_bytes - process.before_bytes > max(
            MIN_GROWTH_BYTES, MAX_GROWTH * process.before_bytes
        ):
            yield (
                f"{process.name} has grown from {process.before_bytes >> 20} "
                f"to {process.after_bytes >> 20} MiB"
            )
    for arm in arms:
        if arm.exit_code:
            yield f"the arm {arm.name} itself has failed:\n{arm.output[-3000:]}"
    yield from of_answers(served)
    if served.percentile(99) > MAX_P99_S:
        yield f"the 99th percentile of answers is {served.percentile(99):.1f} s"
    for name, log in logs.items():
        yield from of_log(name, log, seconds)


def of_delays(delays: Iterable[Delay]) -> Iterator[str]:
    for delay in delays:
        if delay.factor > MAX_FACTOR:
            yield (
                f"the arm {delay.arm} has delayed short answers to another client: their 99th "
                f"percentile was {delay.p99_s:.2f} s ({delay.calm_p99_s:.2f} s undisturbed)"
            )


def of_answers(served: Served) -> Iterator[str]:
    for answer in served.wrong:
        yield f"a wrong answer: {answer}"
    for failure in served.failed:
        yield f"a question was not answered: {failure}"


def of_log(name: str, log: Path, seconds: float) -> Iterator[str]:
    text = log.read_text(errors="replace")
    faults = [line for line in text.splitlines() if _FAULT.search(line)]
    if faults:
        at = text.index(faults[0])
        yield f"the log of {name} has {len(faults)} faults, the first one:\n{text[at : at + 3000]}"
    if len(text) > MAX_LOG_BYTES_PER_S * seconds:
        yield f"{name} has logged {len(text) / seconds / 1e3:.0f} kB a second"
