"""`baton up`: a router, prefill nodes and decode nodes on this machine, until Ctrl-C.

Starts them, waits until all are ready, sends a sample request, and ends them in order. A process
that ends later is restarted. If one ends earlier, or with --exit-on-failure, the others are ended,
the end of its log is printed, and the exit code is 1.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence

import grpc.aio

from cli.local import plan
from cli.local.system import LocalSystem
from cli.up import options as up_options
from cli.up.first_answer import Key, Sample, VectorSample
from cli.up.screen import Screen
from common import settings, tls
from common.errors import ConfigError
from common.process.waiting import first_of
from common.rpc import join_address

PROMPT = "Once upon a time"
DEMO_PROMPT = "add 27 15 ="  # a task of the demo model's training
SETTLE_S = 30.0  # longest time in seconds until each worker process of the router knows the nodes
RETRY_S = 0.2


parser = up_options.parser


class StartFailed(Exception):
    """The system did not start as requested. The message says why."""


async def serve(
    programs: Sequence[plan.Program],
    options: argparse.Namespace,
    certificates: tls.Certificates | None,
    key: Key,
    screen: Screen,
) -> int:
    """Run the processes until SIGINT or SIGTERM. Returns the exit code."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    scheme = "http" if certificates is None else "https"
    http = f"{scheme}://{join_address(options.host, options.http_port)}"
    prompt = PROMPT if options.model else DEMO_PROMPT
    several = len(options.models) > 1
    samples = [
        (Sample if model.decode.total else VectorSample)(
            prompt,
            programs[0].address,
            http,
            certificates,
            key,
            model=model.name if several else "",
        )
        for model in options.models
    ]
    logs = options.var / "log"
    system = LocalSystem(programs, logs, certificates)
    screen.say(f"starting {len(programs)} processes, with logs in {logs}/")
    failure = None
    try:
        ended, _ = await first_of(_run(system, samples, options, screen), interrupted.wait())
        if ended is not None:
            failure = str(ended.exception())
    finally:
        if failure is not None:
            screen.say(f"\n{failure}", style="red")
        screen.say("\nstopping (press Ctrl-C again to kill)")
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, system.kill)
        wrong = await system.stop(options.stop_timeout)
        if failure is None:
            for sentence in wrong:
                screen.say(sentence, style="red")
    return 0 if failure is None and not wrong else 1


async def _run(
    system: LocalSystem, samples: Sequence[Sample], options: argparse.Namespace, screen: Screen
) -> None:
    """Start the system and keep it running. Never returns.

    Raises:
        StartFailed: see `_start`. Or a process has ended.
    """
    start = _start(system, samples, options.start_timeout, screen)
    started, exited = await first_of(start, system.first_exit())
    if exited is not None:
        raise StartFailed(exited.result())
    if started is not None:
        started.result()
    if not options.exit_on_failure:
        await system.keep_running(screen.warn)
    raise StartFailed(await system.first_exit())


async def _start(
    system: LocalSystem, samples: Sequence[Sample], start_s: float, screen: Screen
) -> None:
    """Start the system. Raises StartFailed if it is not ready in time or a sample request fails."""
    try:
        with screen.waiting_for(system.names) as (report, progress):
            async with asyncio.timeout(start_s):
                await system.until_ready(report, progress)
    except TimeoutError:
        raise StartFailed(f"not all processes were ready within {start_s:.0f} s") from None
    for sample in samples:
        to = f"{sample.model} " if sample.model else ""
        screen.say(f"\n{to}> {sample.prompt}", style="bold")
        await ask(sample)
    ready = f"\nReady. Open {samples[0].http}/ or try these commands. Ctrl-C stops all processes.\n"
    screen.say(ready, style="bold")
    for command in samples[0].commands():
        screen.say(f"  {command}")
    screen.say("")


async def ask(sample: Sample, settle_s: float = SETTLE_S) -> None:
    """Send a sample request. Raises StartFailed.

    UNAVAILABLE is retried for `settle_s` seconds, because a worker process of the router may not
    know all nodes yet.
    """
    until = time.monotonic() + settle_s
    while True:
        try:
            return await sample.ask()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() >= until:
                raise StartFailed(
                    f"the sample request failed: {error.code().name} {error.details()}"
                ) from None
        await asyncio.sleep(RETRY_S)


def main() -> int:
    options, node_flags = up_options.parse(sys.argv[1:])
    screen = Screen()
    try:
        wish = up_options.wish(options, node_flags, screen)
        certificates = tls.certificates(wish.tls, "--tls")
        key = up_options.key(options, wish.secret_file)
        programs = plan.programs(wish)
        plan.refuse_busy_ports(programs)
        http = (options.host, options.http_port)
        plan.refuse_busy_port(*http, "the router's HTTP", "--http-port")
    except ConfigError as error:
        settings.wrong(up_options.PROGRAM, str(error))
    return asyncio.run(serve(programs, options, certificates, key, screen))


if __name__ == "__main__":
    sys.exit(main())
