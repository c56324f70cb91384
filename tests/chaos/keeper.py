"""Restarts every node of a cluster that ends, as `baton up` or Kubernetes would."""

import asyncio
from pathlib import Path

from tests.support.processes.cluster import Cluster, Node, children_of
from tests.support.processes.programs import runs

_ENGINE_END_S = 60.0
_LOOK_S = 0.2


class Keeper:
    """For one event loop.

    Attributes:
        logs: of every process since the start.
        complaints: engines that outlived their frontends, and nodes that ended by themselves.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._doomed: set[Node] = set()
        self.logs: dict[str, Path] = dict(cluster.logs)
        self.complaints: list[str] = []

    def doom(self, node: Node) -> None:
        """Record that the node will end because of a fault."""
        self._doomed.add(node)

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for nodes in (self._cluster.prefill, self._cluster.decode):
                for number in range(len(nodes)):
                    tasks.create_task(self._keep(nodes, number))

    async def _keep(self, nodes: list[Node], number: int) -> None:
        for start in range(1, 1 << 30):
            node = nodes[number]
            ended = asyncio.ensure_future(node.child.ended())
            engines: list[int] = []
            while not ended.done():
                engines = children_of(node.child.pid) or engines
                await asyncio.wait({ended}, timeout=_LOOK_S)
            if node not in self._doomed:
                code = ended.result()
                self.complaints.append(f"{node.program.name} has ended by itself, with {code}")
            await self._see_end(node, engines)
            renewed = await self._cluster.start_again(node)
            if renewed.child.log is not None:
                self.logs[f"{node.program.name}, start {start + 1}"] = renewed.child.log

    async def _see_end(self, node: Node, engines: list[int]) -> None:
        try:
            async with asyncio.timeout(_ENGINE_END_S):
                while any(runs(engine) for engine in engines):  # noqa: ASYNC110  (no child of ours)
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            self.complaints.append(f"an engine of {node.program.name} outlives its frontend")
