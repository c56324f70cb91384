"""Send load to an OpenAI-compatible server, and measure latency and throughput."""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.commands.command import CommandInfo, Findings, add_common_flags, check_common_flags
from bench.commands.load_report import findings
from bench.errors import InvalidInput
from bench.objectives import Objectives
from bench.session import Session
from bench.traffic.http_pool import Server
from bench.traffic.lengths import HELP, Lengths
from bench.traffic.load import LoadGenerator, poisson, until
from bench.traffic.openai_client import SENDS, OpenAiClient, ServedModelInfo
from bench.traffic.workload import Workload, WorkloadRequest, WorkloadTrace

DEFAULT_REQUESTS = 100
WARM_UP_STREAMS = 4
API_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Point:
    """One load: a rate, a number of streams, or a trace's own times."""

    name: str
    x: float
    rate: float | None = None
    streams: int | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server (%(default)s)"
    )
    parser.add_argument("--model", help="model name of the server (its first model)")
    parser.add_argument(
        "--send",
        choices=SENDS,
        default="ids",
        help="form of prompts: token ids of exact lengths, words or a chat message (%(default)s)",
    )
    parser.add_argument(
        "--extra",
        type=_fields,
        default={},
        metavar="JSON",
        help="additional fields of every request (none)",
    )
    when = parser.add_argument_group("arrivals", "One of --concurrency and --rate, or --trace.")
    when.add_argument(
        "--concurrency",
        type=_numbers(int),
        metavar="N,N,...",
        help="closed loop: concurrent requests. One run for each number",
    )
    when.add_argument(
        "--rate",
        type=_numbers(float),
        metavar="R,R,...",
        help="open loop: Poisson arrivals a second. One run for each rate",
    )
    when.add_argument(
        "--max-in-flight",
        type=int,
        default=1024,
        metavar="N",
        help="open loop: maximum concurrent requests. Later ones wait and count as late (1024)",
    )
    when.add_argument(
        "--requests", type=int, metavar="N", help=f"requests of each run ({DEFAULT_REQUESTS})"
    )
    when.add_argument(
        "--duration", type=float, metavar="S", help="seconds of each run, instead of --requests"
    )
    when.add_argument(
        "--warm-up", type=int, default=8, metavar="N", help="requests before each run (8)"
    )
    what = parser.add_argument_group("lengths", f"Lengths in tokens: {HELP}.")
    what.add_argument(
        "--prompt-tokens", type=Lengths.parse, metavar="LENGTH", help="prompt lengths (512)"
    )
    what.add_argument(
        "--output-tokens", type=Lengths.parse, metavar="LENGTH", help="output lengths (64)"
    )
    what.add_argument(
        "--prefix-groups",
        type=int,
        default=0,
        metavar="N",
        help="number of groups of prompts with a common prefix (0)",
    )
    what.add_argument(
        "--prefix-tokens", type=int, default=0, metavar="N", help="tokens of the common prefix (0)"
    )
    what.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="JSON lines: timestamp (ms), input_length, output_length, hash_ids (of 512 tokens)",
    )
    add_common_flags(parser, "load")
    parser.epilog = f"The environment variable {API_KEY} is sent as a bearer token."


class LoadCommand:
    name = "load"

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the options. Raises InvalidInput."""
        check_common_flags(options)
        self._server = Server.at(options.url)
        self._options = options
        self._work = _work(options)
        self._points = _points(options, self._work)
        self.objectives = options.goodput or Objectives()

    async def measure(self, session: Session) -> None:
        options = self._options
        client = OpenAiClient(
            self._server,
            send=options.send,
            timeout_s=options.timeout,
            extra=options.extra,
            api_key=os.environ.get(API_KEY),
        )
        try:
            model = await client.choose_model(options.model)
            _check_context(model, self._work)
            if options.warm_up:
                await self._warm_up(session, client)
            done = session.show.plan("load", len(self._points))
            for index, point in enumerate(self._points):
                await self._one(session, client, point, options.seed + index)
                done()
        finally:
            client.close()

    def findings(self, session: Session, about: CommandInfo) -> Findings:
        return findings(session, about, open_loop=self._points[0].streams is None)

    async def _warm_up(self, session: Session, client: OpenAiClient) -> None:
        """Send warm-up requests. Their prompts occur in no run."""
        with session.show.doing("warm-up", self._options.warm_up) as tick:
            load = LoadGenerator(client.ask, lambda _: tick())
            jobs = self._work.jobs(self._options.seed + len(self._points))
            async with load.measuring():
                await load.closed_loop(
                    jobs, concurrency=WARM_UP_STREAMS, requests=self._options.warm_up
                )

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
            due = poisson(point.rate, seed) if point.rate is not None else _own_times(self._work)
            await load.open_loop(
                jobs,
                until(due, count=count, duration_s=last),
                max_in_flight=options.max_in_flight,
            )

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
        if min(options.prefix_groups, options.prefix_tokens) < 0:
            raise InvalidInput("--prefix-groups and --prefix-tokens must not be negative")
        return Workload(prompt, output, options.prefix_groups, options.prefix_tokens)
    if options.prompt_tokens or options.output_tokens or options.prefix_groups:
        raise InvalidInput("--trace says how long prompts and answers are; no other flag can")
    return WorkloadTrace.read(options.trace)


def _points(options: argparse.Namespace, work: Workload | WorkloadTrace) -> list[Point]:
    for name in ("requests", "duration", "max_in_flight"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise InvalidInput(f"--{name.replace('_', '-')} must be above 0")
    if options.warm_up < 0:
        raise InvalidInput("--warm-up must not be negative")
    if options.rate and options.concurrency:
        raise InvalidInput("--rate is an open loop and --concurrency a closed one: choose")
    if options.rate:
        return [Point(f"{rate:g} requests/s", rate, rate=rate) for rate in options.rate]
    if options.concurrency:
        return [Point(f"{n} streams", float(n), streams=n) for n in options.concurrency]
    if isinstance(work, WorkloadTrace):
        return [Point(f"times of {work.name}", 1.0)]
    raise InvalidInput("say when requests are sent: --rate R or --concurrency N")


def _own_times(work: Workload | WorkloadTrace) -> Sequence[float]:
    assert isinstance(work, WorkloadTrace)  # checked by _points
    return work.times()


def _check_context(model: ServedModelInfo, work: Workload | WorkloadTrace) -> None:
    if model.max_model_len is not None and work.largest > model.max_model_len:
        raise InvalidInput(
            f"{model.id} takes {model.max_model_len} tokens of prompt and answer together; "
            f"this load would send up to {work.largest}"
        )


def _numbers(kind: type[int] | type[float]) -> Any:
    def read(text: str) -> list[int] | list[float]:
        numbers = [kind(part) for part in text.split(",")]
        if not all(0 < number < 1e6 for number in numbers):
            raise ValueError(text)
        return numbers

    read.__name__ = f"list of {kind.__name__}s above 0"  # argparse puts it into its message
    return read


def _fields(text: str) -> dict[str, Any]:
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise argparse.ArgumentTypeError("wants a JSON object")
    return fields
