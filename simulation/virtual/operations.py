"""Operators' commands in a scenario: roles that change, nodes that drain, requests that migrate."""

from typing import Literal, Protocol

import grpc.aio

from common.errors import ConfigError
from simulation.virtual.faults import At, Record


class OperatedCluster(Protocol):
    """A cluster that carries out commands, each on a node by its name."""

    async def set_role(self, node: str, role: str) -> None: ...

    async def drain(self, node: str) -> None: ...

    async def migrate(self, node: str) -> None: ...


class Operation(Record, frozen=True):
    """A command. One of `set_role`, `drain` and `migrate` names a node.

    Attributes:
        at: seconds after the begin of the load.
        set_role: node that changes to `role`.
        drain: node whose requests continue elsewhere and which ends.
        migrate: decode node, one request of which continues at another one.
    """

    at: At
    set_role: str | None = None
    role: Literal["prefill", "decode"] | None = None
    drain: str | None = None
    migrate: str | None = None

    @property
    def nodes(self) -> list[str]:
        """Return the nodes that it names."""
        return [name for name in (self.set_role, self.drain, self.migrate) if name is not None]

    async def carry_out(self, cluster: OperatedCluster) -> None:
        """Carry it out, and wait for its end.

        Raises:
            ConfigError: the cluster refuses.
        """
        try:
            if self.set_role is not None and self.role is not None:
                await cluster.set_role(self.set_role, self.role)
            elif self.drain is not None:
                await cluster.drain(self.drain)
            elif self.migrate is not None:
                await cluster.migrate(self.migrate)
        except grpc.aio.AioRpcError as error:
            reason = error.details()
            raise ConfigError(f"operations: {self.nodes[0]} at {self.at:g} s: {reason}") from error
