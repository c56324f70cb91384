"""baton up: a router, prefill nodes and decode nodes on this machine, until Ctrl-C.

Starts them, waits until all are ready, shows that they answer, and ends them in order. One that
dies from then on is started again. One that dies before, or with --exit-on-death, ends all: it says
so with the end of its log, and exits with 1.
"""

import argparse
import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from cli import client, demo, generate, plan, restarts
from cli.screen import Screen
from common import settings, tls
from common.children import Child
from common.config import DecodeConfig, PrefillConfig, Record, RouterConfig
from common.errors import ConfigError
from common.identity.secret import VARIABLE, new_secret
from common.model_directory import model_directory
from common.rpc import join_address
from protos.router_pb2 import GenerateRequest
from protos.sampling_pb2 import Sampling
from router.text import model_files

PROGRAM = "baton up"
SAMPLE = "Once upon a time"
DEMO_NAME = "baton-demo"
DEMO_SAMPLE = "add 27 15 ="  # of what the demo model has learned
# Whoever asks stops before whoever answers: nothing is left waiting for a node that has gone.
_BESIDE_PYTHON = Path(sys.executable).with_name("baton")  # where no shell looks for it
STOP_ORDER = ("router", "decode_node", "prefill_node")


class StartFailed(Exception):
    """The system is not what it should be; the message says why."""


class System:
    """The programs of one machine, as children of this process."""

    def __init__(
        self,
        programs: Sequence[plan.Program],
        logs: Path,
        certificates: tls.Certificates | None,
    ) -> None:
        """Starts all of them at once.

        Args:
            certificates: to ask them with.
        """
        self._programs = programs
        self._logs = logs
        self.certificates = certificates
        self._children = {program: self._child(program) for program in programs}

    async def until_ready(self, tell: Callable[[str, str], None]) -> None:
        """Returns once every program is healthy; the router is when it can serve a request."""

        async def wait(program: plan.Program) -> None:
            await self._until_serving(program)
            tell(program.name, program.address)

        await asyncio.gather(*(wait(program) for program in self._programs))

    async def first_death(self) -> str:
        """Waits until a program has ended on its own; returns what there is to say about it."""
        ends = {asyncio.ensure_future(c.ended()): c for c in self._children.values()}
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        child = ends[done.pop()]
        return (
            f"{child.name} has ended with code {child.code}. The end of {child.log}:\n\n"
            f"{child.last_lines()}\n"
        )

    async def keep_running(self, say: Callable[[str], None]) -> None:
        """Starts every program again that ends on its own, until cancelled."""

        async def keep(program: plan.Program) -> None:
            def start_again() -> Child:
                self._children[program] = child = self._child(program, replaces_log=False)
                return child

            serving = partial(self._until_serving, program)
            await restarts.keep_running(self._children[program], start_again, serving, say)

        await asyncio.gather(*(keep(program) for program in self._programs))

    async def stop(self, patience_s: float) -> list[str]:
        """Ends all programs. Returns what went wrong."""
        wrong = []
        for module in STOP_ORDER:
            group = [c for program, c in self._children.items() if program.module == module]
            alive = [child for child in group if child.code is None]
            await asyncio.gather(*(child.stop(patience_s) for child in alive))
            wrong += [
                f"{child.name} ended with code {child.code}"
                for child in alive
                if child.code not in (0, -signal.SIGTERM)  # the latter: it had hardly begun
            ]
        return wrong

    def kill(self) -> None:
        for child in self._children.values():
            child.send(signal.SIGKILL)

    def _child(self, program: plan.Program, *, replaces_log: bool = True) -> Child:
        log = self._logs / f"{program.name}.log"
        return Child(program.name, program.command, log, replaces_log=replaces_log)

    async def _until_serving(self, program: plan.Program) -> None:
        await client.until_serving(program.address, program.service, self.certificates)


async def serve(
    programs: Sequence[plan.Program],
    options: argparse.Namespace,
    certificates: tls.Certificates | None,
) -> int:
    """Runs the programs until SIGINT or SIGTERM. Returns the exit code."""
    screen = Screen()
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    scheme = "http" if certificates is None else "https"
    http = f"{scheme}://{join_address(options.host, options.http_port)}"
    logs = options.var / "log"
    sample = SAMPLE if options.model else DEMO_SAMPLE
    system = System(programs, logs, certificates)
    screen.say(f"starting {len(programs)} programs; their logs are in {logs}/")
    work = asyncio.ensure_future(_run(system, programs, http, sample, options, screen))
    stop = asyncio.ensure_future(interrupted.wait())
    tasks: tuple[asyncio.Future[Any], ...] = (work, stop)
    failure = None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            failure = str(work.exception())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failure is not None:
            screen.say(f"\n{failure}", style="red")
        screen.say("\nstopping (once more Ctrl-C kills)")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, system.kill)
        wrong = await system.stop(options.stop_timeout)
        if failure is None:
            for sentence in wrong:
                screen.say(sentence, style="red")
    return 0 if failure is None and not wrong else 1


async def _run(
    system: System,
    programs: Sequence[plan.Program],
    http: str,
    sample: str,
    options: argparse.Namespace,
    screen: Screen,
) -> None:
    """Arguments as of `_start`. Never returns.

    Raises:
        StartFailed: as `_start`, or a program has died.
    """
    start = _start(system, programs, http, sample, options.start_timeout, screen)
    starting, death = asyncio.ensure_future(start), asyncio.ensure_future(system.first_death())
    tasks: tuple[asyncio.Future[Any], ...] = (starting, death)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not death.done():
            starting.result()
            if not options.exit_on_death:
                await system.keep_running(screen.warn)
        raise StartFailed(await death)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(
    system: System,
    programs: Sequence[plan.Program],
    http: str,
    sample: str,
    start_s: float,
    screen: Screen,
) -> None:
    """
    Args:
        http: URL of the router's HTTP port.
        sample: a prompt, for the first answer and for what to try.
    Raises:
        StartFailed: not all ready in time, or the sample was not answered.
    """
    try:
        with screen.waiting_for([program.name for program in programs]) as tell:
            async with asyncio.timeout(start_s):
                await system.until_ready(tell)
    except TimeoutError:
        raise StartFailed(f"not everything was ready within {start_s:.0f} s") from None
    router = programs[0].address
    request = GenerateRequest(text=sample, sampling=Sampling(max_tokens=32, temperature=0))
    screen.say(f"\n> {sample}", style="bold")
    try:
        await generate.print_answer(router, request, system.certificates)
    except grpc.aio.AioRpcError as error:
        raise StartFailed(f"the sample failed: {error.code().name} {error.details()}") from None
    screen.say(f"\nReady. Look at {http}/ or try these; Ctrl-C ends all programs.\n", style="bold")
    for command in _to_try(router, http, sample, system.certificates):
        screen.say(f"  {command}")
    screen.say("")


def _to_try(
    router: str, http: str, sample: str, certificates: tls.Certificates | None
) -> list[str]:
    """Commands to paste."""
    ca = "" if certificates is None else certificates.config.ca
    baton = "baton" if shutil.which("baton") else shlex.quote(str(_BESIDE_PYTHON))
    ask = f'{{"text":"{sample}","sampling":{{"max_tokens":8}}}}'
    body = f'{{"prompt":"{sample}","max_tokens":8}}'
    json = "-H 'Content-Type: application/json'"
    return [
        f"grpcurl {f'-cacert {ca}' if ca else '-plaintext'} -d '{ask}' {router} "
        "baton.v1.Router/Generate",
        f'{baton} generate "{sample}" --max-tokens 8 --router {router}'
        + (f" --tls-ca {ca}" if ca else ""),
        f"curl {f'--cacert {ca} ' if ca else ''}{http}/v1/completions {json} -d '{body}'",
    ]


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the flags left over for the nodes."""
    parser = settings.Parser(
        prog=PROGRAM,
        description="Starts a router and nodes on this machine, waits until all are ready, and "
        "serves until Ctrl-C.",
        epilog="Any other flag goes to every node, such as --engine.cache.page-size 32; "
        "`baton prefill --help` lists them.",
    )
    parser.add_argument("--model", help="directory or hub id (unset: the demo model)")
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill nodes (1)")
    parser.add_argument("--decode", type=int, default=1, metavar="N", help="decode nodes (1)")
    parser.add_argument("--host", default=plan.HOST, help="where all listen (%(default)s)")
    parser.add_argument(
        "--port", type=_port, default=plan.ROUTER_PORT, help="router's, for gRPC (%(default)s)"
    )
    parser.add_argument(
        "--http-port",
        type=_port,
        default=plan.HTTP_PORT,
        metavar="PORT",
        help="router's for the OpenAI API (%(default)s)",
    )
    for role, port in (("prefill", plan.PREFILL_PORT), ("decode", plan.DECODE_PORT)):
        first = f"first {role} node's ({port})"
        parser.add_argument(f"--{role}-port", type=_port, default=port, metavar="PORT", help=first)
    parser.add_argument(
        "--metrics-port", type=_port, metavar="PORT", help="router's; nodes take the next ones"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA devices if there are any",
    )
    parser.add_argument(
        "--router-flags",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="for the router: '--policy least_tokens --processes 2'",
    )
    parser.add_argument(
        "--var", type=Path, default=Path("var"), metavar="DIR", help="logs go to DIR/log (var)"
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"cluster secret of all programs (unset: that of {VARIABLE}, else a new one, which is "
        "written to DIR/secret)",
    )
    client.add_tls_flags(parser)
    parser.add_argument(
        "--start-timeout", type=float, default=900.0, metavar="S", help="until all are ready (900)"
    )
    parser.add_argument(
        "--exit-on-death",
        action="store_true",
        help="end all programs when one dies (unset: it is started again)",
    )
    parser.add_argument(
        "--stop-timeout", type=float, default=60.0, metavar="S", help="for each to end (60)"
    )
    options, node_flags = parser.parse_known_args(arguments)
    if options.prefill < 0 or options.decode < 1:
        settings.wrong(PROGRAM, "--decode must be at least 1 and --prefill at least 0")
    return options, node_flags


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"a port is from 1 to 65535, got {text!r}")
    return int(text)


def _check_flags(model: str, node_flags: list[str], router_flags: list[str]) -> None:
    """Ends this process where a program would refuse them."""
    records: tuple[tuple[type[Record], list[str]], ...] = (
        (PrefillConfig, node_flags),
        (DecodeConfig, node_flags),
        (RouterConfig, router_flags),
    )
    for record, flags in records:
        settings.read(record, PROGRAM, [f"--model={model}", *flags])


def _have_model(model: str | None, screen: Screen) -> str:
    """The model to serve, fetched if it is not on this machine yet.

    Raises:
        ConfigError: it is neither a directory nor to be had from the hub, or no such checkpoint.
    """
    if model is None:
        return str(demo.DIRECTORY)
    if not Path(model).is_dir():
        screen.say(f"fetching {model}, unless it is here already")
    directory = model_directory(model, weights=True)
    model_files.load(str(directory))
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"model: there are no weights (*.safetensors) in {directory}")
    return model


def _new_secret_file(var: Path) -> Path | None:
    """A file with a new secret, for nobody but this user; None where the environment has one.

    Raises:
        ConfigError: it cannot be written.
    """
    if VARIABLE in os.environ:
        return None
    file, new = var / "secret", var / "secret.new"
    try:
        var.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write(f"{new_secret()}\n")
        new.replace(file)
    except OSError as error:
        raise ConfigError(f"--var: cannot write {file}: {error.strerror}") from error
    return file


def main() -> int:
    options, node_flags = parse(sys.argv[1:])
    try:
        _check_flags(options.model or "demo", node_flags, options.router_flags)
        model = _have_model(options.model, Screen())
        wish = plan.Wish(
            model=model,
            prefill=options.prefill,
            decode=options.decode,
            host=options.host,
            port=options.port,
            http_port=options.http_port,
            prefill_port=options.prefill_port,
            decode_port=options.decode_port,
            metrics_port=options.metrics_port,
            device=options.device,
            node_flags=tuple(node_flags),
            router_flags=tuple(options.router_flags),
            tls=client.tls_config(options),
            secret_file=options.secret_file or _new_secret_file(options.var),
            served_model_name="" if options.model else DEMO_NAME,
        )
        if wish.tls.ca and not wish.tls.cert:
            raise ConfigError("--tls-ca, --tls-cert and --tls-key go together: for every program")
        certificates = tls.certificates(wish.tls, "--tls")
        programs = plan.programs(wish)
        plan.refuse_busy_ports(programs)
        http = (options.host, options.http_port)
        plan.refuse_busy_port(*http, "the router's HTTP", "--http-port")
    except ConfigError as error:
        settings.wrong(PROGRAM, str(error))
    return asyncio.run(serve(programs, options, certificates))


if __name__ == "__main__":
    sys.exit(main())
