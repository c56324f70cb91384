"""A system of real processes that serves a checked load, while every arm attacks it at once."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import grpc.aio
import msgspec

from api.auth import api_keys
from api.auth.api_keys import KeyEntry
from cli.demo import DIRECTORY
from tests.attack.arm import ARMS, COSTLY_ARMS
from tests.attack.bound import WINDOW_S, Bound, Delay, ShortAnswers
from tests.attack.load import Load, Served
from tests.attack.target import Target
from tests.attack.verdict import (
    Arm,
    Process,
    complaints,
    of_answers,
    of_delays,
    resident_bytes,
)
from tests.support.network.sockets import sockets_of
from tests.support.processes.cluster import Cluster, free_ports

_CALM_LOAD_S = 4.0
_FIRST_PART = 0.25
_LONGEST_FIRST_S = 60.0
_NUM_CLIENTS = 2
_ARM_END_S = 300.0  # beyond its time: arms have a low priority, and starve on a busy machine
# duration of a whole siege: a shorter one is for the test suite, and measures no arm alone
_BOUND_FROM_S = 30.0
_CALM_S = 60.0  # longest time until memory is judged


class Report(msgspec.Struct, frozen=True):
    """The results of one siege."""

    seed: int
    seconds: float
    num_right: int
    p50_s: float
    p99_s: float
    calm_p99_s: float  # of the same load without attacks
    processes: list[Process]
    delays: list[Delay]  # of another client's short answers, by arm
    moves: dict[str, Counter[str]]  # by arm
    complaints: list[str]


async def siege(seed: int, seconds: float, directory: Path, arms: Sequence[str] = ARMS) -> Report:
    """Start a system, attack it for this duration, and judge it.

    Args:
        directory: for logs.
    """
    siege = _Siege(seed, seconds, directory, arms)
    end = ""
    try:
        async with _cluster(directory, siege.metrics, siege.keys) as cluster:
            await siege.hold(cluster)
    except* (AssertionError, grpc.aio.AioRpcError, TimeoutError) as errors:
        end = "; ".join(f"{type(error).__name__}: {error}" for error in errors.exceptions)
    return siege.report(end)


class _Keys:
    """The API keys of two clients of the router: one is served, the other attacks."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.innocent, self.hostile = api_keys.new_key(), api_keys.new_key()
        entries = [
            KeyEntry(name=name, sha256=api_keys.hashed(key))
            for name, key in (("innocent", self.innocent), ("hostile", self.hostile))
        ]
        file.write_text("".join(map(api_keys.entry_text, entries)))


class _Siege:
    """One siege, from its plan to its report."""

    def __init__(self, seed: int, seconds: float, directory: Path, arms: Sequence[str]) -> None:
        self.metrics = list(free_ports(3))
        self.keys = _Keys(directory / "keys.yaml")
        self._seed = seed
        self._seconds = seconds
        self._directory = directory
        self._arms = arms
        self._calm, self._served, self._short = Served(), Served(), Served()
        self._ended: list[Arm] = []
        self._processes: list[Process] = []
        self._delays: list[Delay] = []
        self._began = time.monotonic()
        self._logs: dict[str, Path] = {}

    async def hold(self, cluster: Cluster) -> None:
        """Raises errors of the system that end the siege."""
        self._logs = cluster.logs
        async with Load(
            cluster.address, cluster.http_port, Random(self._seed), self.keys.innocent
        ) as load:
            await load.learn()
            await self._under_load(cluster, load)

    async def _under_load(self, cluster: Cluster, load: Load) -> None:
        self._calm = await load.ask_for(_CALM_LOAD_S, _NUM_CLIENTS)
        first_s = min(_FIRST_PART * self._seconds, _LONGEST_FIRST_S)
        # A process may keep memory that it has needed once, so memory is compared from here on.
        await self._attack(cluster, load, "first", first_s)
        pids = _pids(cluster)
        before = {name: resident_bytes(pid) for name, pid in pids.items()}
        await self._attack(cluster, load, "then", self._seconds - first_s)
        if self._seconds >= _BOUND_FROM_S:
            await self._measure(cluster)
        self._processes = [Process(name, before[name], resident_bytes(pids[name])) for name in pids]
        await cluster.until_nothing_is_held(_CALM_S)
        self._served.also(await load.ask_for(_CALM_LOAD_S, _NUM_CLIENTS))
        self._processes = await _settled(pids, before)

    async def _measure(self, cluster: Cluster) -> None:
        """Let each arm of a client's costly requests attack alone."""
        target = _target(cluster, self.metrics, self.keys.hostile, f"{self._seed}/alone", WINDOW_S)

        async def attack(name: str) -> None:
            self._ended.append(await _run(name, target, self._directory))

        async def settle(name: str) -> None:
            try:
                await cluster.until_nothing_is_held(_CALM_S)
            except AssertionError as error:
                raise AssertionError(f"after the arm {name} alone: {error}") from error

        await cluster.until_nothing_is_held(_CALM_S)
        answers = ShortAnswers(cluster.http_port, self.keys.innocent)
        arms = [name for name in self._arms if name in COSTLY_ARMS]
        self._delays = await Bound(answers, attack, settle).delays(arms)
        self._short = answers.served

    async def _attack(self, cluster: Cluster, load: Load, part: str, seconds: float) -> None:
        seed = f"{self._seed}/{part}"
        target = _target(cluster, self.metrics, self.keys.hostile, seed, seconds)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(load.ask_for(seconds, _NUM_CLIENTS))
            attacks = [
                tasks.create_task(_run(name, target, self._directory)) for name in self._arms
            ]
        self._ended += [attack.result() for attack in attacks]
        self._served.also(serving.result())

    def report(self, end: str) -> Report:
        """Args:
        end: an error that ended the siege early, or occurred at the end of the system.
        """
        took_s = time.monotonic() - self._began
        wrong = [
            *complaints(self._processes, self._ended, self._served, self._logs, took_s),
            *of_answers(self._short),
            *of_delays(self._delays),
        ]
        return Report(
            seed=self._seed,
            seconds=self._seconds,
            num_right=self._served.num_right,
            p50_s=self._served.percentile(50),
            p99_s=self._served.percentile(99),
            calm_p99_s=self._calm.percentile(99),
            processes=self._processes,
            delays=self._delays,
            moves=_moves(self._ended),
            complaints=[*wrong, *([end] if end else [])],
        )


@asynccontextmanager
async def _cluster(directory: Path, metrics: Sequence[int], keys: _Keys) -> AsyncIterator[Cluster]:
    router, prefill, decode = (f"--metrics-port={port}" for port in metrics)
    async with Cluster(
        DIRECTORY,
        directory,
        path="tcp",
        forked=False,
        router_flags=(router, f"--api-keys={keys.file}", "--max-concurrent-requests=64"),
        prefill_flags=(prefill,),
        decode_flags=(decode,),
    ) as cluster:
        yield cluster


def _target(
    cluster: Cluster, metrics: Sequence[int], api_key: str, seed: str, seconds: float
) -> Target:
    sockets = sockets_of(cluster.prefill[0].engine_pid)
    (data,) = [f"{each.host}:{each.port}" for each in sockets if each.kind == "tcp"]
    return Target(
        http=f"127.0.0.1:{cluster.http_port}",
        router=cluster.address,
        prefill=cluster.prefill[0].address,
        decode=cluster.decode[0].address,
        data=data,
        metrics=tuple(f"127.0.0.1:{port}" for port in metrics),
        secret_file=cluster.secret_file,
        api_key=api_key,
        seed=seed,
        seconds=seconds,
    )


def _pids(cluster: Cluster) -> dict[str, int]:
    pids = {"router": cluster.router_pid}
    for node in cluster.nodes:
        pids[node.program.name] = node.child.pid
        pids[f"{node.program.name} engine"] = node.engine_pid
    return pids


async def _run(name: str, target: Target, directory: Path) -> Arm:
    file = directory / f"{name}.target.json"
    target.write(file)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-X", "faulthandler", "-m", "tests.attack.arm", name, str(file)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    ending = asyncio.ensure_future(process.communicate())
    try:
        late_s = target.seconds + _ARM_END_S
        await asyncio.wait({ending}, timeout=late_s)
        words = ""
        if not ending.done():
            process.send_signal(signal.SIGABRT)  # faulthandler prints where it hangs
            words = f"\nit was aborted here, as it had not ended after {late_s:g} s"
        output, _ = await ending
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return Arm(name, process.returncode, output.decode(errors="replace") + words)


async def _settled(pids: dict[str, int], before: dict[str, int]) -> list[Process]:
    """Wait until no process has grown, or until the time is over: processes release memory with
    a delay."""
    end = time.monotonic() + _CALM_S
    while True:
        found = [Process(name, before[name], resident_bytes(pid)) for name, pid in pids.items()]
        none_grown = not list(complaints(found, [], Served(), {}, 1.0))
        if none_grown or time.monotonic() > end:
            return found
        await asyncio.sleep(1.0)


def _moves(ended: Sequence[Arm]) -> dict[str, Counter[str]]:
    moves: dict[str, Counter[str]] = {}
    for arm in ended:
        # it has failed, and printed something else
        with contextlib.suppress(ValueError, IndexError):
            moves.setdefault(arm.name, Counter()).update(json.loads(arm.output.splitlines()[-1]))
    return moves
