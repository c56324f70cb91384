"""Messages to a decode node that are not sent yet.

A write costs the same for any size, so everything that arrives during a write is sent in one
message.
"""

import asyncio
from collections.abc import Sequence

from common.limits import MAX_CANCELS, MAX_SUBMITS, MAX_TOKENS, VERSION
from common.requests.namespace import BYTES_PER_TOKEN
from protos.decode_pb2 import Peers, Submit, ToNode


class OutgoingBatch:
    """Unsent messages. For one event loop.

    Bounded by the active requests: at most one entry for each, and one number for each cancelled
    one.

    Args:
        address: of the node.
    """

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._peers: Peers | None = None
        self._submits: dict[int, Submit] = {}
        self._cancels: list[int] = []
        self._version = VERSION  # 0 once it is sent
        self._news = asyncio.Event()

    def clear(self) -> None:
        """Drop everything, because the stream is lost. The next stream starts with the version."""
        self._version = VERSION
        self._peers = None
        self._submits.clear()
        self._cancels.clear()

    def set_peers(self, prefill: Sequence[str], decode: Sequence[str] = ()) -> None:
        """Replace the lists of nodes."""
        self._peers = Peers(
            prefill_addresses=prefill, decode_addresses=decode, own_address=self._address
        )
        self._news.set()

    def submit(self, submit: Submit) -> None:
        self._submits[submit.number] = submit
        self._news.set()

    def cancel(self, number: int) -> bool:
        """Cancel a request.

        Returns False if its submission was not sent, and then sends nothing.
        """
        if self._submits.pop(number, None) is not None:
            return False
        self._cancels.append(number)
        self._news.set()
        return True

    async def message(self) -> ToNode:
        """Wait for something to send, and return as much of it as one message can hold.

        The lists of nodes come first, then the submissions in their order.
        """
        while self._peers is None and not self._submits and not self._cancels:
            self._news.clear()
            await self._news.wait()
        message = ToNode(
            peers=self._peers,
            submits=self._some_submits(),
            cancels=self._cancels[:MAX_CANCELS],
            protocol_version=self._version,
        )
        self._peers = None
        del self._cancels[:MAX_CANCELS]
        self._version = 0
        return message

    def _some_submits(self) -> list[Submit]:
        """Return the submissions for one message, at least one if there is one."""
        taken: list[Submit] = []
        num_tokens = 0
        for submit in self._submits.values():
            num_tokens += submit.request.ByteSize() // BYTES_PER_TOKEN
            if taken and (num_tokens > MAX_TOKENS or len(taken) == MAX_SUBMITS):
                break
            taken.append(submit)
        for submit in taken:
            del self._submits[submit.number]
        return taken
