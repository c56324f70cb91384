"""Shared parts of `compare` and `break-even`: one machine's systems, their flags and order."""

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.commands.command import add_model_flag
from bench.errors import InvalidInput, UnusableRun
from bench.session import Session
from bench.systems import ComparedSystem, Machine, abba
from bench.traffic.openai_client import OpenAiClient
from bench.traffic.workload import Workload
from cli.client import positive, ranged
from cli.local import plan
from common import settings
from common.config import DecodeConfig, PrefillConfig
from common.errors import ConfigError
from common.model_directory import model_directory
from common.settings import add_options

COLOCATED, DISAGGREGATED = "colocated", "disaggregated"
WARM_UP_SEED = 1 << 40  # far from the seeds of runs, so that warm-up caches no prompt of a run
MAX_IN_FLIGHT = 1024


@dataclass(frozen=True, slots=True)
class SystemsReady:
    """A running system with its client."""

    system: ComparedSystem
    client: OpenAiClient
    context_tokens: int | None  # context length of the model, if the server reports it


# Called with a system and the repeats to run on it.
Block = Callable[[SystemsReady, list[int]], Awaitable[None]]


def add_pair_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    count = ranged(int, 1)
    add_options(
        parser,
        ("--prefill", count, 1, "P", "prefill nodes of the disaggregated system (1)"),
        ("--decode", count, 1, "D", "its decode nodes (1); the colocated system has P + D nodes"),
        ("--repeats", count, 4, "N", "repeats, systems in turns: A B B A ... (4)"),
        ("--colocated-flags", str, "", "'FLAGS'", "flags for nodes of the colocated system"),
        ("--disaggregated-flags", str, "", "'FLAGS'", "flags for decode nodes of the other system"),
        ("--start-timeout", positive, 900.0, "S", "seconds to start a system (900)"),
    )
    parser.epilog = (
        "Other flags are passed to every node, such as --engine.cache.page-size 32. "
        "`baton serve decode --help-all` lists them. Use the machine for nothing else meanwhile."
    )


class ComparedPair:
    """The systems to compare for one model on this machine, started one at a time."""

    def __init__(self, program: str, options: argparse.Namespace) -> None:
        """Check the options and the nodes' flags.

        Raises:
            InvalidInput: an option is invalid. Exits if a node would reject its flags.
        """
        self._options = options
        self._model = _directory(options.model)
        own = {
            name: tuple(_split(name, getattr(options, f"{name}_flags")))
            for name in (COLOCATED, DISAGGREGATED)
        }
        for_all = tuple(options.node_flags)  # flags for every node of every system
        settings.read(PrefillConfig, program, [f"--model={self._model}", *for_all])
        for flags in own.values():
            settings.read(DecodeConfig, program, [f"--model={self._model}", *for_all, *flags])
        self.num_nodes = options.prefill + options.decode
        self.colocated = ComparedSystem(COLOCATED, 0, self.num_nodes, for_all, own[COLOCATED])
        self.disaggregated = ComparedSystem(
            DISAGGREGATED, options.prefill, options.decode, for_all, own[DISAGGREGATED]
        )

    @property
    def shared_cores(self) -> int | None:
        """Return the number of cores that all nodes of a system share. None with CUDA devices."""
        if self._options.device != "cpu" and plan.cuda_devices():
            return None
        return len(os.sched_getaffinity(0))

    async def each(
        self, session: Session, systems: tuple[ComparedSystem, ...], block: Block
    ) -> None:
        """Run `block` on every system for every repeat, in alternating order.

        If a process of a system ends during a block, this is recorded and the next block starts a
        new system.
        """
        blocks = abba(systems, self._options.repeats)
        done = session.show.plan("systems", len(blocks))
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
            machine = Machine(
                self._model, self._options.device, Path(logs), self._options.start_timeout
            )
            for system, repeats in blocks:
                async with self._ready(session, machine, system) as ready:
                    await block(ready, repeats)
                done()

    async def warm_up(
        self, session: Session, ready: SystemsReady, work: Workload, requests: int
    ) -> None:
        """Send warm-up requests. Raises UnusableRun if all of them failed."""
        name, jobs = ready.system.name, work.jobs(WARM_UP_SEED)
        run = await session.rehearse(
            f"{name}, warm-up", ready.client.ask, jobs, concurrency=4, requests=requests
        )
        if all(outcome.error for outcome in run.outcomes):
            first = run.outcomes[0]
            raise UnusableRun(f"{name}: every request failed: {first.error}: {first.detail}")

    @asynccontextmanager
    async def _ready(
        self, session: Session, machine: Machine, system: ComparedSystem
    ) -> AsyncIterator[SystemsReady]:
        session.show.say(f"starting {system.name}: {system.shape}")
        begun = len(session.measured)
        async with machine.serving(system) as serving:
            client = OpenAiClient(serving.url, send="ids", timeout_s=self._options.timeout)
            try:
                model = await client.choose_model()
                yield SystemsReady(system, client, model.max_model_len)
            finally:
                await client.close()
                if serving.failure is not None:
                    note = "Comparisons leave out the runs on that start of the system."
                    session.notes.append(f"{system.name}: {serving.failure}\n{note}")
                    for one in session.measured[begun:]:
                        one.run.ended = None


def seed_of(seed: int, repeat: int, point: int) -> int:
    """Return the seed of one run's prompts and arrivals.

    It is the same for every system. It differs between repeats, so that no run finds its prompts
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
