"""`baton nodes drain` and `baton rollout` with real processes that serve requests."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import grpc.aio
import pytest

from cli.demo_model import write
from protos.router_pb2 import GenerateRequest
from protos.router_pb2_grpc import RouterStub
from protos.sampling_pb2 import Sampling
from tests.support.network import grpc_calls
from tests.support.network.http_client import get
from tests.support.processes import fork_server
from tests.support.processes.cluster import Cluster, slowed
from tests.support.processes.local_system import Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 300.0
NUM_CLIENTS = 4
NUM_TOKENS = 200
STEP_S = 0.01  # so that requests are running when their node restarts
MOVED = 'baton_migrations_total{outcome="completed"}'
REFUSED = ("tokens=0", "the node is draining")


@pytest.mark.long
async def test_draining_a_node_requires_the_secret_and_the_last_node_requires_force(
    make: Callable[..., Cluster], tmp_path: Path
):
    async with make() as cluster:
        (prefill,), (decode,) = cluster.prefill, cluster.decode
        stranger = tmp_path / "stranger"
        stranger.write_text("x" * 40)

        async def drain(address: str, *flags: str, secret: Path | None = None) -> tuple[int, str]:
            said = await cluster.baton("nodes drain", address, *flags, secret=secret)
            return said.returncode, said.stdout + said.stderr

        code, words = await drain(decode.address)
        assert code == 1 and "is the only one" in words and "--force" in words
        code, words = await drain("127.0.0.1:1", "--force")
        assert code == 1 and f"It knows prefill {prefill.address}, decode" in words
        code, words = await drain(decode.address, "--force", secret=stranger)
        assert code == 1 and "UNAUTHENTICATED" in words
        code, words = await drain(cluster.address, "--force", secret=stranger)
        assert code == 1 and "UNAUTHENTICATED" in words
        code, words = await drain(decode.address, "--force", "--dry-run")
        assert code == 0 and "0 requests to finish here" in words
        assert decode.child.code is None
        decode.killed = True
        code, words = await drain(decode.address, "--force")
        assert code == 0 and f"decode {decode.address} has ended after" in words
        assert await decode.child.ended() == 0


@asynccontextmanager
async def _up(tmp_path: Path, *flags: str) -> AsyncIterator[Up]:
    write(tmp_path / "model")
    with closing(Up(tmp_path, f"--model={tmp_path / 'model'}", *flags, num_pages=256)) as up:
        await asyncio.to_thread(up.line_with, "Ready.", START_S)
        yield up
        up.send(signal.SIGINT)
        assert await asyncio.to_thread(up.exit_code) == 0, up.output


@pytest.mark.long
async def test_every_process_is_restarted_under_load_without_an_effect_on_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Long: four nodes are restarted, and no token may be computed again, which requires a
    machine on which a migration takes less than two seconds."""
    for name, value in slowed(STEP_S).items():
        monkeypatch.setenv(name, value)
    how = ("--prefill=2", "--decode=2", "--router-flags=--processes 2 --policy round_robin")
    over = asyncio.Event()
    answers: list[tuple[int, str]] = []

    async def ask(stub: RouterStub, number: int) -> str:
        sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        request = GenerateRequest(text=f"Once upon {number}", sampling=sampling)
        return "".join([piece.text async for piece in stub.Generate(request)])

    async with _up(tmp_path, *how) as up:

        async def client(number: int) -> None:
            async with grpc.aio.insecure_channel(up.router, options=grpc_calls.OPTIONS) as channel:
                stub = RouterStub(channel)
                while not over.is_set():
                    answers.append((number, await ask(stub, number)))

        async with grpc.aio.insecure_channel(up.router) as channel:
            stub = RouterStub(channel)
            expected = [await ask(stub, number) for number in range(NUM_CLIENTS)]
        clients = [asyncio.create_task(client(number)) for number in range(NUM_CLIENTS)]

        async def roll(*roles: str) -> str:
            flags = (f"--router={up.router}", f"--secret-file={tmp_path / 'secret'}")
            only = (f"--only={role}" for role in roles)
            command = ("cli.main", "rollout", *flags, *only)
            said = await asyncio.to_thread(fork_server.run, *command, timeout_s=START_S * 2)
            assert said.returncode == 0, said.stdout + said.stderr
            return said.stdout

        assert (await roll("prefill", "decode")).count("is back after") == 4
        # Before the processes with these counters are replaced.
        metrics = (await get(up.http_port, "/metrics")).body.decode().splitlines()
        assert (await roll("router")).count("is back after") == 1
        over.set()
        await asyncio.gather(*clients)
    assert len(answers) >= NUM_CLIENTS
    assert [text for number, text in answers if text != expected[number]] == []
    moved = [float(line.split()[1]) for line in metrics if line.startswith(MOVED)]
    assert sum(moved) > 0
    log = (tmp_path / "log" / "router.log").read_text().splitlines()
    replayed = [line for line in log if "request replayed" in line]
    # These were rejected by a node that had just started to drain. No node computed any of them.
    assert [line for line in replayed if not all(words in line for words in REFUSED)] == []
