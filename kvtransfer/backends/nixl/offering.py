"""One path that an owner offers: a passive agent with the pool registered, and its proof."""

from kvtransfer.backends.nixl.agent import Agent
from kvtransfer.backends.nixl.connection import Offer
from kvtransfer.backends.nixl.memory import Memory
from kvtransfer.backends.nixl.paths import Evidence, PathKind


class Offering:
    """A passive agent of the owner. For one thread at a time, which has called `memory.use`."""

    def __init__(self, kind: PathKind, memory: Memory) -> None:
        """Make the agent. Takes about 5 ms and a registration of the pool, which over RDMA pins
        every page of it.

        Raises:
            TransferError: this machine cannot offer the path.
        """
        self._evidence: Evidence = kind.evidence(memory.pool, memory.scratch)
        self._polled = kind.transports.polled
        self._agent = Agent(kind.transports)
        try:
            self._agent.register(memory.pool)
            self._agent.register(memory.scratch)
            metadata = self._agent.metadata()
            self.offer = Offer(kind.name, self._evidence.tell(metadata), metadata)
        except BaseException:
            self._agent.destroy()
            raise

    def poll(self) -> None:
        if self._polled:
            self._agent.poll()

    def close(self) -> None:
        """End the agent. No reader can read over it afterwards. Idempotent."""
        self._agent.destroy()
