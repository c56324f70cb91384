"""Send load to an OpenAI-compatible server, and measure latency and throughput."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.commands.command import (
    Findings,
    add_common_options,
    check_context,
    numbers,
)
from bench.commands.load_report import findings
from bench.errors import InvalidInput
from bench.session import Session
from bench.summary import Objectives
from bench.traffic.load import LoadGenerator, poisson, until
from bench.traffic.openai_client import SENDS, OpenAiClient, base_url
from bench.traffic.workload import HELP, Lengths, Workload, WorkloadRequest, WorkloadTrace
from cli.client import positive, ranged
from common.settings import add_options

DEFAULT_REQUESTS = 100
WARM_UP_STREAMS = 4
API_KEY = "OPENAI_API_KEY"
_TRACE = "JSON lines: timestamp (ms), input_length, output_length, hash_ids (of 512 tokens)"


@dataclass(frozen=True, slots=True)
class Point:
    """One load level: a rate, a number of streams, or the times of a trace."""

    name: str
    x: float
    rate: float | None = None
    streams: int | None = None
    times: Sequence[float] = ()


def add_flags(parser: argparse.ArgumentParser) -> None:
    url = "http://127.0.0.1:8000"
    add_options(
        parser,
        ("--url", base_url, url, "URL", f"server, with or without /v1 ({url})"),
        ("--model", str, None, "NAME", "model name of the server (its first model)"),
        ("--extra", _fields, {}, "JSON", "additional fields of every request (none)"),
    )
    send = "form of prompts: token ids of exact lengths, words or a chat message (%(default)s)"
    parser.add_argument("--send", choices=SENDS, default="ids", help=send)
    add_options(
        parser.add_argument_group("arrivals", "One of --concurrency and --rate, or --trace."),
        ("--concurrency", numbers(int), None, "N,N,...", "callers of a closed loop. One run each"),
        ("--rate", numbers(float), None, "R,R,...", "Poisson arrivals a second. One run each"),
        ("--max-in-flight", ranged(int, 1), 1024, "N", "concurrent requests of --rate (1024)"),
        ("--requests", ranged(int, 1), None, "N", f"requests of each run ({DEFAULT_REQUESTS})"),
        ("--duration", positive, None, "S", "seconds of each run, instead of --requests"),
        ("--warm-up", ranged(int, 0), 8, "N", "requests before the first run (8)"),
    )
    add_options(
        parser.add_argument_group("lengths", f"Lengths in tokens: {HELP}"),
        ("--prompt-tokens", Lengths.parse, None, "LENGTH", "prompt lengths (512)"),
        ("--output-tokens", Lengths.parse, None, "LENGTH", "output lengths (64)"),
        ("--prefix-groups", ranged(int, 0), 0, "N", "groups of prompts with a common prefix (0)"),
        ("--prefix-tokens", ranged(int, 0), 0, "N", "tokens of the common prefix (0)"),
        ("--trace", Path, None, "FILE", _TRACE),
    )
    add_common_options(parser, "load")
    parser.epilog = f"The environment variable {API_KEY} is sent as a bearer token."


class LoadCommand:
    name = "load"

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the options. Raises InvalidInput."""
        self._options = options
        self._work = _work(options)
        self._points = _points(options, self._work)
        self.objectives = options.goodput or Objectives()

    async def measure(self, session: Session) -> None:
        options = self._options
        client = OpenAiClient(
            options.url,
            send=options.send,
            timeout_s=options.timeout,
            extra=options.extra,
            api_key=os.environ.get(API_KEY),
        )
        try:
            model = await client.choose_model(options.model)
            check_context(model.max_model_len, self._work.largest)
            if requests := options.warm_up:  # with prompts that do not occur in any run
                jobs = self._work.jobs(options.seed + len(self._points))
                await session.rehearse(
                    "warm-up", client.ask, jobs, concurrency=WARM_UP_STREAMS, requests=requests
                )
            done = session.show.plan("load", len(self._points))
            for index, point in enumerate(self._points):
                await self._one(session, client, point, options.seed + index)
                done()
        finally:
            await client.close()

    def findings(self, session: Session) -> Findings:
        return findings(session, open_loop=self._points[0].streams is None)

    async def _one(self, session: Session, client: OpenAiClient, point: Point, seed: int) -> None:
        options, count = self._options, self._num_requests()
        jobs: Iterator[WorkloadRequest] = self._work.jobs(seed)
        last = options.duration

        async def drive(load: LoadGenerator) -> None:
            if point.streams is not None:
                await load.closed_loop(
                    jobs, concurrency=point.streams, requests=count, duration_s=last
                )
                return
            due = poisson(point.rate, seed) if point.rate is not None else point.times
            times = until(due, count=count, duration_s=last)
            await load.open_loop(jobs, times, max_in_flight=options.max_in_flight)

        await session.measure(
            client.ask, drive, system="server", point=point.name, x=point.x, total=count
        )

    def _num_requests(self) -> int | None:
        """Return the number of requests in each run. None: only the duration ends a run."""
        if self._options.requests is not None or self._options.duration is not None:
            requests: int | None = self._options.requests
            return requests
        return len(self._work.lines) if isinstance(self._work, WorkloadTrace) else DEFAULT_REQUESTS


def _work(options: argparse.Namespace) -> Workload | WorkloadTrace:
    if options.trace is None:
        prompt = options.prompt_tokens or Lengths.fixed(512)
        output = options.output_tokens or Lengths.fixed(64)
        return Workload(prompt, output, options.prefix_groups, options.prefix_tokens)
    if options.prompt_tokens or options.output_tokens or options.prefix_groups:
        raise InvalidInput(
            "--trace sets all lengths: remove --prompt-tokens, --output-tokens and --prefix-groups"
        )
    return WorkloadTrace.read(options.trace)


def _points(options: argparse.Namespace, work: Workload | WorkloadTrace) -> list[Point]:
    if options.rate and options.concurrency:
        raise InvalidInput("--rate is an open loop and --concurrency a closed one: choose one")
    if options.rate:
        return [Point(f"{rate:g} requests/s", rate, rate=rate) for rate in options.rate]
    if options.concurrency:
        return [Point(f"{n} streams", float(n), streams=n) for n in options.concurrency]
    if isinstance(work, WorkloadTrace):
        return [Point(f"times of {work.name}", 1.0, times=work.times())]
    raise InvalidInput("the arrivals are missing: set --rate R or --concurrency N")


def _fields(text: str) -> dict[str, Any]:
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise InvalidInput(f"{text} is invalid: expected a JSON object")
    return fields
