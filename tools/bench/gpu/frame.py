"""Runs the parts of tools/bench/gpu, each in a process of its own, and keeps every row they give.

The process is forked before anything touches CUDA: a kernel that takes its context down takes its
own part down, memory is given back between parts, and a part that outstays its time is ended. A
row is with the parent before the next is measured. Knows nothing of what is measured.
"""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

from tools.bench.support.record import say, table

Row: TypeAlias = dict[str, Any]  # "table": which of its part's tables shows it
Tables: TypeAlias = Mapping[str, Mapping[str, str]]  # name: columns, as for record.table

NOTES = "notes"  # the table that every part has: "what" and "note"
_NOTE_LENGTH = 400
_PATIENCE_S = 8.0  # for a part to stop the programs it has started
_PR_SET_PDEATHSIG = 1


class PartModule(Protocol):
    """tools/bench/gpu/parts/NAME.py."""

    TABLES: Tables

    def measure(self, setting: Any) -> Iterator[Row]:
        """Yields each row as soon as it is known, the most wanted ones first."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """share: of the time for all parts. What a part leaves, the next may use."""

    name: str
    what: str
    share: float

    @property
    def module(self) -> str:
        return f"tools.bench.gpu.parts.{self.name}"


@dataclass(slots=True, eq=False)
class Report:
    """What became of a part. status: done | cut ... | skipped ... | failed ..."""

    part: Part
    status: str = ""
    wall_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    tables: Tables = field(default_factory=dict)

    def show(self) -> None:
        """Its tables, for people."""
        for name, columns in self.tables.items():
            if rows := [row for row in self.rows if row["table"] == name]:
                say(f"-- {name}")
                table(rows, columns)
        for row in self.rows:
            if row["table"] == NOTES:
                say(f"{row['what']}: {row['note']}")
        say(f"{self.part.name}: {self.status}, {self.wall_s:.0f} s, {len(self.rows)} rows")


def note(what: str, text: str) -> Row:
    """What could not be measured, and why."""
    return {"table": NOTES, "what": what, "note": text[:_NOTE_LENGTH]}


def guarded(what: str, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows; where one fails, a note instead of it and of all after it. Where it failed is told
    on stderr."""
    try:
        yield from rows
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, others go on
        traceback.print_exc()
        yield note(what, f"failed: {type(error).__name__}: {error}")


def run(
    part: Part, make_setting: Callable[[], Any], limit_s: float, keep: Callable[[Row], None]
) -> Report:
    """Runs a part to its end, or to its limit; each of its rows goes to `keep` at once.

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
        _listen(inlet, started + limit_s, report, keep)
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


def _listen(
    inlet: "Connection[Any, Any]", late: float, report: Report, keep: Callable[[Row], None]
) -> None:
    """Until the part says how it ended, or it is late."""
    while inlet.poll(max(0.0, late - time.monotonic())):
        kind, content = inlet.recv()
        match kind:
            case "tables":
                report.tables = content
            case "row":
                report.rows.append(content)
                keep(content)
            case "status":
                report.status = content
                return


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Its process first, which ends what it has started; then whatever is left of its group."""
    assert process.pid is not None
    if process.is_alive():
        process.terminate()
    process.join(_PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


# In the part's process --------------------------------------------------------------------------


class _Cut(BaseException):
    """The part's time is over. Nobody may catch this one and go on."""


def _measure(part: Part, make_setting: Callable[[], Any], outlet: "Connection[Any, Any]") -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, _leave)
    try:
        module: PartModule = importlib.import_module(part.module)
        outlet.send(("tables", module.TABLES))
        for row in module.measure(make_setting()):
            outlet.send(("row", _rounded(row)))
        status = "done"
    except _Cut:
        return
    except ModuleNotFoundError as error:
        status = f"skipped: {error.name} is not installed"
    except BaseException as error:  # noqa: BLE001  whatever it is, the other parts go on
        traceback.print_exc()
        status = f"failed: {type(error).__name__}: {error}"
    outlet.send(("status", status))


def _rounded(value: Any) -> Any:
    """Five digits of every float: no measurement here has more."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case _:
            return value


def _leave(number: int, frame: object) -> None:
    """Unwinds, so that contexts end the programs that they have started."""
    raise _Cut
