"""Runs the parts of tools/bench/gpu, each in its own process, and keeps every row they yield.

The process is forked before any use of CUDA. So a kernel that breaks its context ends only its own
part, memory is released between parts, and a part that exceeds its time is killed. The parent has
received a row before the next one is measured.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

from tools.bench.support.record import say, show

Row: TypeAlias = dict[str, Any]  # "table": name of the table that shows the row

NOTES = "notes"  # the table that every part has: "what" and "note"
TRIED = "tried"  # a table for the record only
_NOTE_LENGTH = 400
_PATIENCE_S = 8.0  # seconds for a part to stop the processes that it has started
_PR_SET_PDEATHSIG = 1


class Part(NamedTuple):
    """A part of the measurements: the function `measure(setting)` of tools/bench/gpu/parts/NAME.py.

    `measure` yields each row as soon as it is known, the most important ones first.

    Attributes:
        share: share of the time of all parts. Later parts may use unused time.
    """

    name: str
    what: str
    share: float


@dataclass(slots=True, eq=False)
class Report:
    """The result of a part. status: done | cut ... | skipped ... | failed ..."""

    part: Part
    status: str = ""
    wall_s: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def show(self) -> None:
        tables: dict[str, list[Row]] = {}
        for row in self.rows:
            rest = {**row}
            tables.setdefault(rest.pop("table"), []).append(rest)
        notes, _ = tables.pop(NOTES, []), tables.pop(TRIED, [])
        for name, rows in tables.items():
            say(f"-- {name}")
            show(rows)
        for row in notes:
            say(f"{row['what']}: {row['note']}")
        say(f"{self.part.name}: {self.status}, {self.wall_s:.0f} s, {len(self.rows)} rows")


def note(what: str, text: str) -> Row:
    """Return a note on why a measurement is missing."""
    return {"table": NOTES, "what": what, "note": text[:_NOTE_LENGTH]}


def guarded(what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows. After a failure, yield a note instead of the remaining rows.

    The traceback goes to stderr.
    """
    try:
        yield from rows
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  other measurements continue
        traceback.print_exc()
        yield note(what, f"failed: {type(error).__name__}: {error}")


def run(
    part: Part, make_setting: Callable[[], Any], limit_s: float, keep: Callable[[Row], None]
) -> Report:
    """Run a part until its end or its limit. Each of its rows is passed to `keep` immediately.

    Args:
        make_setting: called in the part's process.
    """
    fork = multiprocessing.get_context("fork")
    inlet, outlet = fork.Pipe(duplex=False)
    process = fork.Process(target=_measure, args=(part, make_setting, outlet), name=part.name)
    report = Report(part)
    started = time.monotonic()
    process.start()
    outlet.close()
    try:
        while not report.status and inlet.poll(max(0.0, started + limit_s - time.monotonic())):
            row, report.status = inlet.recv()
            if not report.status:
                report.rows.append(row)
                keep(row)
    except EOFError:
        process.join()
        report.status = f"failed: its process ended with {process.exitcode}"
    finally:
        process.join(_PATIENCE_S if report.status else 0.0)
        _end(process)
        inlet.close()
    report.status = report.status or f"cut after its {limit_s:.0f} s"
    report.wall_s = round(time.monotonic() - started, 1)
    return report


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End the part's process, which ends its children, then the rest of its process group."""
    assert process.pid is not None
    if process.is_alive():
        process.terminate()
    process.join(_PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):  # no process is left in the group
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


# Runs in the part's process.


class _TimeExpired(BaseException):
    """The part's time has expired. Must not be caught and ignored."""


def _measure(part: Part, make_setting: Callable[[], Any], outlet: "Connection[Any, Any]") -> None:
    """Send each row with an empty status, and at last the status."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, _leave)
    try:
        module = importlib.import_module(f"tools.bench.gpu.parts.{part.name}")
        for row in module.measure(make_setting()):
            outlet.send((_rounded(row), ""))
        status = "done"
    except _TimeExpired:
        return
    except ModuleNotFoundError as error:
        status = f"skipped: {error.name} is not installed"
    except BaseException as error:  # noqa: BLE001  the other parts continue
        traceback.print_exc()
        status = f"failed: {type(error).__name__}: {error}"
    outlet.send((None, status))


def _rounded(value: Any) -> Any:
    """Round every float to five digits, the maximum precision of these measurements."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case _:
            return value


def _leave(number: int, frame: object) -> None:
    """Unwind the stack, so that contexts end the processes that they have started."""
    raise _TimeExpired
