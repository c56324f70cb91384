"""Installation and commands of other routers from PyPI, for the comparison."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.bench.support.record import say

WHEELS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
ENVIRONMENT = Path.home() / ".cache" / "baton-bench" / "router-peers"
ADDRESSES = 4 * len(WHEELS)  # for two systems of each wheel: its address and its metrics
_INSTALL_S = 300.0


def installed() -> dict[str, Path]:
    """Install the wheels in an environment of their own. Returns their commands by wheel.

    Wheels that cannot be installed are left out, and the reason is printed.
    """
    pip = ENVIRONMENT / "bin" / "pip"
    found = {}
    if not pip.exists():
        _run(sys.executable, "-m", "venv", str(ENVIRONMENT))
    for name, version in WHEELS.items():
        command = ENVIRONMENT / "bin" / name
        if not command.exists():
            say(f"installing {name} {version} into {ENVIRONMENT} ...")
            _run(str(pip), "install", "--quiet", f"{name}=={version}")
        if command.exists():
            found[name] = command
        else:
            say(f"{name} {version} cannot be had and is left out")
    return found


def commands(
    wheels: Mapping[str, Path], addresses: Sequence[str], workers: Sequence[str]
) -> dict[str, tuple[list[str], str]]:
    """Return the command and the address of each system.

    Each wheel runs with one worker, and in its mode for prefill and decode servers.

    Args:
        wheels: as returned by `installed`.
        addresses: ADDRESSES unused addresses.
        workers: host:port of three HTTP servers: colocated, prefill, decode.
    """
    whole, prefill, decode = (f"http://{worker}" for worker in workers)
    pair = ["--prefill", prefill, "--decode", decode]
    free = iter(addresses)
    made = {}
    for name, wheel in wheels.items():
        sglang = name == "sglang-router"
        start = [str(wheel), *(["launch"] if sglang else [])]
        mode = "--pd-disaggregation" if sglang else "--vllm-pd-disaggregation"
        log = ["--log-level", "warn" if sglang else "warning", "--policy", "round_robin"]
        for system, nodes in ((name, ["--worker-urls", whole]), (f"{name} PD", [mode, *pair])):
            address = next(free)
            host, _, port = address.rpartition(":")
            listen = ["--host", host, "--port", port]
            listen += ["--prometheus-port", next(free).rpartition(":")[2]]
            made[system] = ([*start, *listen, *log, *nodes], address)
    return made


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"{' '.join(command)}: {error}")
        return
    if done.returncode:
        say(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
