"""Operators' commands in a scenario: changes of role, drains, migrations and pauses."""

import asyncio
from typing import Literal, Protocol, runtime_checkable

import grpc
import grpc.aio

from common.errors import ConfigError
from simulation.virtual.faults import At, Record, Seconds, target

Role = Literal["prefill", "decode"]
PauseMode = Literal["abort", "retract", "in_place"]
# A cluster may refuse a command with these. Others are errors of the cluster.
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class OperatedCluster(Protocol):
    """A cluster that carries out commands, each on a node by its name. All raise AioRpcError if it
    refuses."""

    async def set_role(self, node: str, role: str) -> None: ...

    async def drain(self, node: str) -> None: ...

    async def migrate(self, node: str) -> None: ...

    async def pause(self, node: str, mode: str) -> None: ...

    async def resume(self, node: str) -> None: ...


@runtime_checkable  # a scenario is checked when it is read
class Operation(Protocol):
    """A command. The key of its kind names a node.

    Attributes:
        at: seconds after the begin of the load.
        optional: the cluster may refuse it.
    """

    @property
    def at(self) -> float: ...

    @property
    def optional(self) -> bool: ...

    async def command(self, cluster: OperatedCluster) -> None:
        """Give the command, and wait for its end. Raises AioRpcError if the cluster refuses."""
        ...


class SetRole(Record, frozen=True):
    """A node changes to another role."""

    set_role: str
    role: Role
    at: At
    optional: bool = False

    async def command(self, cluster: OperatedCluster) -> None:
        await cluster.set_role(self.set_role, self.role)


class Drain(Record, frozen=True):
    """The requests of a node continue elsewhere, and it ends."""

    drain: str
    at: At
    optional: bool = False

    async def command(self, cluster: OperatedCluster) -> None:
        await cluster.drain(self.drain)


class Migrate(Record, frozen=True):
    """One request of a decode node continues at another one."""

    migrate: str
    at: At
    optional: bool = False

    async def command(self, cluster: OperatedCluster) -> None:
        await cluster.migrate(self.migrate)


class Pause(Record, frozen=True):
    """A node launches no steps for a time."""

    pause: str
    mode: PauseMode
    at: At
    seconds: Seconds
    optional: bool = False

    async def command(self, cluster: OperatedCluster) -> None:
        try:
            await cluster.pause(self.pause, self.mode)
            await asyncio.sleep(self.seconds)
        finally:
            await cluster.resume(self.pause)


# By the key that names the node.
COMMANDS: dict[str, type[Record]] = {
    "set_role": SetRole,
    "drain": Drain,
    "migrate": Migrate,
    "pause": Pause,
}


def node_of(operation: Operation) -> str:
    """Return the name of the node."""
    name: str = target(operation, COMMANDS)
    return name


async def carry_out(operation: Operation, cluster: OperatedCluster) -> None:
    """Carry out a command, and wait for its end.

    Raises:
        ConfigError: the cluster refuses it, and it is not optional.
    """
    try:
        await operation.command(cluster)
    except grpc.aio.AioRpcError as error:
        if operation.optional and error.code() in _REFUSALS:
            return
        where = f"operations: {node_of(operation)} at {operation.at:g} s"
        raise ConfigError(f"{where}: {error.details()}") from error
