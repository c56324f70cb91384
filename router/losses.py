"""The nodes that one request has lost, what of that may be its own doing, and when it is enough.

Nobody is charged for a node that was asked to end, nor for an engine that died while another
request computed alone in it (common/requests/quarantine.py). What is charged is forgotten once the
request has got past the place where it happened.
"""

from enum import Enum

from common.errors import NodeUnavailable, RequestFailed
from common.requests.quarantine import GUILTY, TRIAL_TOKENS

MAX_REPLAYS = 2  # that may be its own doing, since it last got on
MAX_ENGINE_DEATHS = 4  # with it among others, whether it got on or not


class Doing(Enum):
    """Whose doing it may be that a node no longer has a request."""

    NOT_ITS_OWN = 0
    UNKNOWN = 1  # the node is gone, and has not said why
    ANYBODYS = 2  # its engine has died
    ITS_OWN = 3  # its engine has died, and computed nothing else


class NodeLost(NodeUnavailable):
    """A request's node is gone, or has refused it because it is about to go."""

    def __init__(self, sentence: str, doing: Doing) -> None:
        super().__init__(sentence)
        self.doing = doing


def died(error: NodeUnavailable) -> bool:
    """Whether the request may have killed the engine of its node."""
    return isinstance(error, NodeLost) and error.doing in (Doing.ANYBODYS, Doing.ITS_OWN)


class Losses:
    """Of one request.

    Attributes:
        addresses: of the nodes, in order.
        engine_deaths: what its next node is to know.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.engine_deaths = 0
        self._charged = 0
        self._all_engine_deaths = 0
        self._num_tokens = 0  # that it had at the last loss

    def add(self, address: str, error: NodeUnavailable, num_tokens: int) -> None:
        """
        Args:
            num_tokens: that it has by now.
        Raises:
            RequestFailed: engines die of it.
            NodeUnavailable: `error`; it has had as many nodes as it may.
        """
        self.addresses.append(address)
        if num_tokens >= self._num_tokens + TRIAL_TOKENS:
            self.engine_deaths = self._charged = 0
        self._num_tokens = num_tokens
        match error.doing if isinstance(error, NodeLost) else Doing.UNKNOWN:
            case Doing.ITS_OWN:
                raise RequestFailed(GUILTY)
            case Doing.ANYBODYS if not self.engine_deaths:
                # One that was suspect already has waited for its turn, and computed nothing.
                self.engine_deaths = 1
                self._all_engine_deaths += 1
                if self._all_engine_deaths > MAX_ENGINE_DEATHS:
                    raise error
            case Doing.UNKNOWN:
                self._charged += 1
                if self._charged > MAX_REPLAYS:
                    raise error
