"""Shared parts of `compare` and `break-even`: the systems of one machine, their flags, their
order."""

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.errors import InvalidInput, UnusableRun
from bench.session import Session
from bench.systems import ComparedSystem, Machine, abba
from bench.traffic.http_pool import Server
from bench.traffic.load import LoadGenerator
from bench.traffic.openai_client import OpenAiClient
from bench.traffic.workload import Workload
from cli.local import plan
from common import settings
from common.config import ConfigRecord, DecodeConfig, PrefillConfig
from common.errors import ConfigError
from common.model_directory import model_directory

COLOCATED, DISAGGREGATED = "colocated", "disaggregated"
WARM_UP_SEED = 1 << 40  # far from the seeds of runs, so that warm-up caches no prompt of a run
MAX_IN_FLIGHT = 1024


@dataclass(frozen=True, slots=True)
class SystemsReady:
    """A running system with a client of it."""

    arm: ComparedSystem
    client: OpenAiClient
    context_tokens: int | None  # of the model, if the server reports it


Block = Callable[
    [SystemsReady, list[int]], Awaitable[None]
]  # a system, and the repeats to run on it


def add_pair_flags(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="directory or hub id of the model"
    )
    parser.add_argument(
        "--prefill",
        type=int,
        default=1,
        metavar="P",
        help="prefill nodes of the disaggregated system (1)",
    )
    parser.add_argument(
        "--decode",
        type=int,
        default=1,
        metavar="D",
        help="decode nodes of the disaggregated system (1). The colocated one has P + D nodes",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        metavar="N",
        help="repetitions, with alternating systems: A B, B A, A B ... (%(default)s)",
    )
    parser.add_argument(
        "--colocated-flags",
        default="",
        metavar="'FLAGS'",
        help="flags of the nodes of the colocated system",
    )
    parser.add_argument(
        "--disaggregated-flags",
        default="",
        metavar="'FLAGS'",
        help="flags of the decode nodes of the disaggregated system",
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=900.0,
        metavar="S",
        help="seconds until a system is ready (900)",
    )
    parser.epilog = (
        "Other flags are passed to every node, such as --engine.cache.page-size 32. "
        "`baton serve decode --help-all` lists them. Use the machine for nothing else meanwhile."
    )


class ComparedPair:
    """The systems to compare for one model on this machine, started one at a time."""

    def __init__(self, program: str, options: argparse.Namespace, node_flags: list[str]) -> None:
        """Check the options and the nodes' flags.

        Args:
            node_flags: for every node of every system.
        Raises:
            InvalidInput: an option is wrong. Exits if a node would reject its flags.
        """
        for name in ("prefill", "decode", "repeats", "start_timeout"):
            if not getattr(options, name) > 0:
                raise InvalidInput(f"--{name.replace('_', '-')} must be above 0")
        self._options = options
        self._model = _directory(options.model)
        own = {
            name: _split(name, getattr(options, f"{name}_flags"))
            for name in (COLOCATED, DISAGGREGATED)
        }
        checked: tuple[tuple[type[ConfigRecord], list[str]], ...] = (
            (PrefillConfig, node_flags),
            (DecodeConfig, [*node_flags, *own[COLOCATED]]),
            (DecodeConfig, [*node_flags, *own[DISAGGREGATED]]),
        )
        for record, flags in checked:
            settings.read(record, program, [f"--model={self._model}", *flags])
        everywhere = tuple(node_flags)
        self.num_nodes = options.prefill + options.decode
        self.colocated = ComparedSystem(
            COLOCATED, 0, self.num_nodes, everywhere, tuple(own[COLOCATED])
        )
        self.disaggregated = ComparedSystem(
            DISAGGREGATED, options.prefill, options.decode, everywhere, tuple(own[DISAGGREGATED])
        )

    @property
    def shared_cores(self) -> int | None:
        """Return the number of cores that all nodes of a system share, or None with CUDA
        devices."""
        if self._options.device != "cpu" and plan.cuda_devices():
            return None
        return len(os.sched_getaffinity(0))

    async def each(self, session: Session, arms: tuple[ComparedSystem, ...], block: Block) -> None:
        """Run `block` on every arm for every repeat, in turns.

        If a process of a system dies in a block, the death is noted and the next block starts a new
        system.
        """
        blocks = abba(arms, self._options.repeats)
        done = session.show.plan("systems", len(blocks))
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
            machine = Machine(
                self._model, self._options.device, Path(logs), self._options.start_timeout
            )
            for arm, repeats in blocks:
                async with self._ready(session, machine, arm) as ready:
                    await block(ready, repeats)
                done()

    @asynccontextmanager
    async def _ready(
        self, session: Session, machine: Machine, arm: ComparedSystem
    ) -> AsyncIterator[SystemsReady]:
        session.show.say(f"starting {arm.name}: {arm.shape}")
        begun = len(session.measured)
        async with machine.serving(arm) as serving:
            client = OpenAiClient(
                Server.at(serving.url), send="ids", timeout_s=self._options.timeout
            )
            try:
                model = await client.choose_model()
                yield SystemsReady(arm, client, model.max_model_len)
            finally:
                client.close()
                if serving.death is not None:
                    note = "Runs on that start of the system are left out of every comparison."
                    session.notes.append(f"{arm.name}: {serving.death}\n{note}")
                    for one in session.measured[begun:]:
                        one.run.ended = None


async def warm_up(session: Session, ready: SystemsReady, work: Workload, requests: int) -> None:
    """Send warm-up requests. Raises UnusableRun if all of them failed."""
    with session.show.doing(f"{ready.arm.name}, warm-up", requests) as tick:
        load = LoadGenerator(ready.client.ask, lambda _: tick())
        async with load.measuring():
            await load.closed_loop(work.jobs(WARM_UP_SEED), concurrency=4, requests=requests)
    if all(outcome.error for outcome in load.run.outcomes):
        first = load.run.outcomes[0]
        raise UnusableRun(f"{ready.arm.name} answers nothing: {first.error}: {first.detail}")


def check_context(ready: SystemsReady, tokens: int) -> None:
    """Check that `tokens` fit the model's context. Raises InvalidInput."""
    if ready.context_tokens is not None and tokens > ready.context_tokens:
        raise InvalidInput(
            f"the model takes {ready.context_tokens} tokens of prompt and answer together; "
            f"this load would send up to {tokens}"
        )


def seed_of(seed: int, repeat: int, point: int) -> int:
    """Return the seed of one run's prompts and arrivals.

    It is the same for every system and differs between repeats, so that no run finds its prompts
    cached.
    """
    return seed * 1_000_000 + repeat * 1000 + point


def _directory(model: str) -> Path:
    try:
        found = model_directory(model, weights=True)
        json.loads((found / "config.json").read_text())
    except ConfigError as error:
        raise InvalidInput(f"--model: {error}") from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--model {model}: no readable config.json: {error}") from None
    return found


def _split(name: str, flags: str) -> list[str]:
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise InvalidInput(f"--{name}-flags: {error}") from None
