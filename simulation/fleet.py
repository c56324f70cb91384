"""Runs all simulated nodes of a system in one process, for `baton up --device sim:GPU`.

The only argument is a JSON list of nodes, each with its role and the list of its flags.
"""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from functools import partial

from common import logs, settings
from common.config import NODE_CONFIGS
from common.errors import ConfigError
from common.logs import kv
from common.rpc import join_address
from node.frontend.engine_link import RoleProgram
from node.frontend.frontend import Node, run_loop, run_nodes
from node.roles import other, program_of
from simulation.node.engine import SimEngine
from simulation.node.options import check_config

NAME = "fleet"
_RESTART_S = 1.0
log = logging.getLogger(__name__)


def read(argument: str) -> list[RoleProgram]:
    """Parse the JSON list of nodes.

    Raises:
        ConfigError: simulated nodes do not support a configuration.
    """
    programs = []
    for role, flags in json.loads(argument):
        config = settings.read(NODE_CONFIGS[role], f"baton serve {role}", flags)
        check_config(config)
        programs.append(program_of(role, config))
    return programs


class KeptNode:
    """A node that is restarted when it ends, as by `baton up`, unless this process got a signal."""

    def __init__(self, program: RoleProgram) -> None:
        self._program = program
        self._signalled = asyncio.Event()
        self._node = self._made()

    def signalled(self, name: str) -> None:
        self._signalled.set()
        self._node.signalled(name)

    async def run(self) -> int:
        """Run the node, and restart it when it ends. Returns the exit code of the last one.

        Raises:
            ConfigError: the configuration is invalid. Its reason is on stderr.
        """
        while True:
            code = await self._node.run()
            if code == 2:
                raise ConfigError(f"the {self._program.role} nodes cannot start")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RESTART_S):
                    await self._signalled.wait()
            if self._signalled.is_set():
                return code
            address = join_address(
                self._program.config.server.host, self._program.config.server.port
            )
            log.warning("node restarted %s", kv(node=address, code=code))
            self._node = self._made()

    def _made(self) -> Node:
        return Node(self._program, SimEngine, partial(other, self._program))


async def run(programs: Sequence[RoleProgram]) -> int:
    """Run all nodes until a signal. Returns the highest of their exit codes."""
    return await run_nodes([KeptNode(each) for each in programs])


def main() -> int:
    try:
        programs = read(sys.argv[1])
        server = programs[0].config.server
        logs.setup(NAME, server.log_level, server.log_format)
        return run_loop(lambda: run(programs))
    except ConfigError as error:
        print(f"baton up: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
