"""The interface, common options and outputs (report, raw data, JSON) of subcommands.

An interrupted or failed session reports the measurements so far.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.errors import InvalidInput, UnusableRun
from bench.facts import machine
from bench.report.page import ReportPage, write
from bench.session import ProgressView, Session
from bench.summary import Objectives
from cli.client import positive, ranged
from common.settings import add_options

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
_BUSY_SHARE = 0.5  # share of the cores that other processes use, above which a warning is shown
_OUTPUTS = ("html", "json")  # not part of the configuration: these do not affect measurements


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of a session: a page, without facts about the run, and a machine-readable summary."""

    page: ReportPage
    summary: Mapping[str, Any]


class BenchCommand(Protocol):
    name: str
    objectives: Objectives

    async def measure(self, session: Session) -> None:
        """Fill the session with measurements. May be cancelled, and leaves nothing running."""
        ...

    def findings(self, session: Session) -> Findings:
        """Return the findings of a session, which may have ended early."""
        ...


def numbers(kind: type[int] | type[float], below: float = 1e6) -> Callable[[str], Any]:
    """Return a parser of lists of numbers above 0 and below `below`, which sorts them."""

    def read(text: str) -> list[int] | list[float]:
        found = sorted({kind(part) for part in text.split(",")})
        if not 0 < found[0] <= found[-1] < below:
            raise InvalidInput(f"{text} is invalid: expected numbers above 0 and below {below:g}")
        return found

    read.__name__ = f"list of {kind.__name__}s"  # argparse puts it into its message
    return read


def output_file(text: str) -> Path:
    """Parse the name of a file to write, for argparse."""
    file = Path(text)
    if not file.parent.is_dir() or file.is_dir():
        raise InvalidInput(
            f"{file} cannot be written: it is a directory, or its directory does not exist"
        )
    return file


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    text = "directory or hub id of the model"
    parser.add_argument("--model", required=True, metavar="DIR", help=text)


def check_context(limit: int | None, tokens: int) -> None:
    """Check that `tokens` fit a model's context, if it is known. Raises InvalidInput."""
    if limit is not None and tokens > limit:
        raise InvalidInput(
            f"the model accepts {limit} tokens of prompt and response together, and this load "
            f"would send up to {tokens}"
        )


def add_common_options(parser: argparse.ArgumentParser, command: str) -> None:
    html, limits = f"baton-bench-{command}.html", "in seconds, such as ttft=0.5,itl=0.05"
    add_options(
        parser.add_argument_group("results"),
        ("--html", output_file, Path(html), "FILE", f"HTML file of the report ({html})"),
        ("--json", output_file, None, "FILE", "JSON file of all raw numbers (none)"),
        ("--goodput", Objectives.parse, None, "LIMITS", f"limits of ttft, itl, tpot, e2e {limits}"),
    )
    add_options(
        parser,
        ("--seed", ranged(int, 0), 1, "SEED", "random seed of prompts and arrivals (1)"),
        ("--timeout", positive, 300.0, "S", "seconds for a whole response (300)"),
    )


async def run(command: BenchCommand, options: argparse.Namespace) -> int:
    """Measure until done or interrupted (SIGINT, SIGTERM). Returns the exit code."""
    begun = time.strftime("%Y-%m-%d %H:%M")
    facts = await asyncio.to_thread(machine)
    with ProgressView() as show:
        session = Session(show, command.objectives, notes=_busy(facts))
        code = await _measure(command, session)
    if code in (EXIT_FAILED, EXIT_USAGE):
        show.say(f"baton bench {command.name}: {session.notes[0]}", style="red")
        if not session.measured:
            return code
    found = command.findings(session)
    page = dataclasses.replace(
        found.page,
        configuration={**_configuration(options), **found.page.configuration},
        warnings=session.warnings(),
        machine=facts,
        made=begun,
    )
    _report(command.name, session, options, Findings(page, found.summary), complete=code == 0)
    if code == 0 and not any(o.error == "" for one in session.measured for o in one.run.outcomes):
        return EXIT_FAILED
    return code


async def _measure(command: BenchCommand, session: Session) -> int:
    """Fill the session. Returns the exit code, and records why it ended early."""
    work = asyncio.ensure_future(command.measure(session))

    def interrupt() -> None:
        session.interrupted = True
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        await work
    except asyncio.CancelledError:
        if not session.interrupted:
            raise
        session.notes.insert(0, "Interrupted: this report has the measurements until then.")
        return EXIT_INTERRUPTED
    except (InvalidInput, UnusableRun) as error:
        session.notes.insert(0, str(error))
        return EXIT_USAGE if isinstance(error, InvalidInput) else EXIT_FAILED
    return 0


def _report(
    name: str, session: Session, options: argparse.Namespace, found: Findings, *, complete: bool
) -> None:
    page, show = found.page, session.show
    for text in [*page.lead, *(page.headline.lines() if page.headline else ())]:
        show.say(text)
    for warning in page.warnings:
        show.say(warning, style="yellow")
    write(page, options.html)
    show.say(f"report: {options.html}")
    line = {
        "bench": name,
        "complete": complete,
        "report": str(options.html),
        "summary": found.summary,
        "warnings": page.warnings,
    }
    if options.json is not None:
        facts = {
            "configuration": _configuration(options),
            "machine": page.machine,
            "made": page.made,
        }
        options.json.write_text(json.dumps({**line, **facts, "runs": list(session.records())}))
        show.say(f"raw numbers: {options.json}")
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(line), flush=True)


def _busy(facts: Mapping[str, Any]) -> list[str]:
    load, cores = facts["load_average"], facts["cores"]
    if load <= _BUSY_SHARE * cores:
        return []
    return [f"This machine was busy at the start: load average {load} on {cores} cores."]


def _configuration(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name, value in sorted(vars(options).items()):
        if name not in _OUTPUTS:
            value = getattr(value, "text", value)  # of Lengths
            value = getattr(value, "limits", value)  # of Objectives
            found[name] = str(value) if isinstance(value, Path) else value
    return found
