"""The interface of a subcommand, the common flags, and the output of measurements: a report, a file
of raw numbers, one line of JSON. An interrupted or failed session reports the measurements so far.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.errors import InvalidInput, UnusableRun
from bench.facts import machine
from bench.objectives import Objectives
from bench.progress import ProgressView
from bench.report.page import ReportPage, write
from bench.session import Session

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
_BUSY_SHARE = 0.5  # of the cores, in use by other processes
_WHERE = ("html", "json")  # not part of the configuration: output paths do not affect measurements


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of a session, as a page and as a machine-readable summary."""

    page: ReportPage
    summary: Mapping[str, Any]


class BenchCommand(Protocol):
    name: str
    objectives: Objectives

    async def measure(self, session: Session) -> None:
        """Fill the session. May be cancelled at any moment, and leaves nothing behind."""
        ...

    def findings(self, session: Session, about: "CommandInfo") -> Findings:
        """Return the findings of a session that may have ended early."""
        ...


@dataclass(frozen=True, slots=True)
class CommandInfo:
    """The facts at the end of every page."""

    configuration: Mapping[str, Any]
    machine: Mapping[str, Any]
    made: str


def add_common_flags(parser: argparse.ArgumentParser, program: str) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--html",
        type=Path,
        default=Path(f"baton-bench-{program}.html"),
        metavar="FILE",
        help="HTML file of the report (%(default)s)",
    )
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="JSON file of all raw numbers (none)"
    )
    group.add_argument(
        "--goodput",
        type=Objectives.parse,
        metavar="LIMITS",
        help="objectives in seconds for ttft, itl, tpot or e2e, such as ttft=0.5,itl=0.05",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="random seed of prompts and arrivals (1)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds for a whole response (300)",
    )


def check_common_flags(options: argparse.Namespace) -> None:
    """Check the common flags. Raises InvalidInput."""
    for file in (options.html, options.json):
        if file is not None and (not file.parent.is_dir() or file.is_dir()):
            raise InvalidInput(f"{file} cannot be written: no such directory, or it is one")
    if not options.timeout > 0:
        raise InvalidInput("--timeout must be above 0")
    if options.seed < 0:
        raise InvalidInput("--seed must not be negative")


async def run(command: BenchCommand, options: argparse.Namespace) -> int:
    """Measure until done or interrupted (SIGINT, SIGTERM). Returns the exit code."""
    begun = time.strftime("%Y-%m-%d %H:%M")
    facts = await asyncio.to_thread(machine)
    code = 0
    with ProgressView() as show:
        session = Session(show, command.objectives)
        session.notes += _busy(facts)
        work = asyncio.ensure_future(command.measure(session))

        def interrupt() -> None:
            session.interrupted = True
            work.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            await work
        except asyncio.CancelledError:
            if not session.interrupted:
                raise
            code = EXIT_INTERRUPTED
            session.notes.insert(0, "Interrupted: this is what had been measured by then.")
        except InvalidInput as error:
            session.notes.insert(0, str(error))
            code = EXIT_USAGE
        except UnusableRun as error:
            session.notes.insert(0, str(error))
            code = EXIT_FAILED
    if code in (EXIT_FAILED, EXIT_USAGE):
        show.say(f"baton bench {command.name}: {session.notes[0]}", style="red")
        if not session.measured:
            return code
    return _report(
        command, session, options, CommandInfo(_configuration(options), facts, begun), code
    )


def _report(
    command: BenchCommand,
    session: Session,
    options: argparse.Namespace,
    about: CommandInfo,
    code: int,
) -> int:
    findings = command.findings(session, about)
    for sentence in findings.page.lead:
        session.show.say(sentence)
    if findings.page.headline is not None:
        for row in findings.page.headline.lines():
            session.show.say(row)
    for warning in session.warnings():
        session.show.say(warning, style="yellow")
    write(findings.page, options.html)
    session.show.say(f"report: {options.html}")
    line = {
        "bench": command.name,
        "complete": code == 0,
        "report": str(options.html),
        "summary": findings.summary,
        "warnings": session.warnings(),
    }
    if options.json is not None:
        raw = {
            **line,
            "configuration": about.configuration,
            "machine": about.machine,
            "made": about.made,
            "runs": list(session.records()),
        }
        options.json.write_text(json.dumps(raw))
        session.show.say(f"raw numbers: {options.json}")
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(line), flush=True)
    if code == 0 and not any(o.error == "" for one in session.measured for o in one.run.outcomes):
        return EXIT_FAILED
    return code


def _busy(facts: Mapping[str, Any]) -> list[str]:
    load, cores = facts["load_average"], facts["cores"]
    if load <= _BUSY_SHARE * cores:
        return []
    return [f"This machine was busy when the bench began: load average {load} on {cores} cores."]


def _configuration(options: argparse.Namespace) -> dict[str, Any]:
    """Return every flag as parsed."""
    found = {}
    for name, value in sorted(vars(options).items()):
        if name in _WHERE or callable(value):
            continue
        text = getattr(value, "text", value)  # of lengths
        text = getattr(value, "limits", text)  # of objectives
        found[name] = str(text) if isinstance(text, Path) else text
    return found
