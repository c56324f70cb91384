"""One path that an owner offers: a passive agent with the pool registered, and its proof."""

from kvtransfer.backends.nixl.agent import NixlAgent
from kvtransfer.backends.nixl.connection import NixlOffer
from kvtransfer.backends.nixl.memory import NixlMemory
from kvtransfer.backends.nixl.paths import PathEvidence, PathKind


class NixlListener:
    """A passive agent of the owner. For one thread at a time, which has called `memory.use`."""

    def __init__(self, kind: PathKind, memory: NixlMemory) -> None:
        """Make the agent. Takes about 5 ms and a registration of the pool, which over RDMA pins
        every page of it.

        Raises:
            TransferError: this machine cannot offer the path.
        """
        self._evidence: PathEvidence = kind.evidence(memory.pool, memory.scratch)
        self._polled = kind.transports.polled
        self._agent = NixlAgent(kind.transports)
        try:
            self._agent.register(memory.pool)
            self._agent.register(memory.scratch)
            metadata = self._agent.metadata()
            self.offer = NixlOffer(kind.name, self._evidence.tell(metadata), metadata)
        except BaseException:
            self._agent.destroy()
            raise

    def poll(self) -> None:
        if self._polled:
            self._agent.poll()

    def close(self) -> None:
        """End the agent. No reader can read over it afterwards. Idempotent."""
        self._agent.destroy()
