"""Nodes that one request has lost, and the limit after which it fails.

A loss is not charged if the node was asked to end, or if the engine crashed while another request
was computed alone (common/requests/quarantine.py). Charges are dropped once the request has
progressed beyond the position of the loss.
"""

from enum import Enum

from common.errors import NodeUnavailable, RequestFailed
from common.requests.quarantine import GUILTY, TRIAL_TOKENS

MAX_REPLAYS = 2  # charged losses since its last progress
MAX_ENGINE_DEATHS = 4  # crashes that it was part of, with or without progress


class LossCause(Enum):
    """Possible cause of the loss of a request's node."""

    NOT_ITS_OWN = 0
    UNKNOWN = 1  # the node is gone and has given no reason
    ANYBODYS = 2  # its engine crashed
    ITS_OWN = 3  # its engine crashed while it computed only this request


class NodeLost(NodeUnavailable):
    """The node of a request is gone, or refused it because it is about to end."""

    def __init__(self, sentence: str, doing: LossCause) -> None:
        super().__init__(sentence)
        self.doing = doing


def died(error: NodeUnavailable) -> bool:
    """Return whether the request may have crashed the engine of its node."""
    return isinstance(error, NodeLost) and error.doing in (LossCause.ANYBODYS, LossCause.ITS_OWN)


class AttemptLosses:
    """Losses of one request.

    Attributes:
        addresses: of the nodes, in order.
        engine_deaths: crashes to report to its next node.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.engine_deaths = 0
        self._charged = 0
        self._all_engine_deaths = 0
        self._num_tokens = 0  # tokens that it had at the last loss

    def add(self, address: str, error: NodeUnavailable, num_tokens: int) -> None:
        """Record a loss.

        Args:
            num_tokens: tokens that the request has now.
        Raises:
            RequestFailed: the request crashes engines.
            NodeUnavailable: `error`, once the limit of lost nodes is reached.
        """
        self.addresses.append(address)
        if num_tokens >= self._num_tokens + TRIAL_TOKENS:
            self.engine_deaths = self._charged = 0
        self._num_tokens = num_tokens
        match error.doing if isinstance(error, NodeLost) else LossCause.UNKNOWN:
            case LossCause.ITS_OWN:
                raise RequestFailed(GUILTY)
            case LossCause.ANYBODYS if not self.engine_deaths:
                # A request that is quarantined already was queued for its trial and computed
                # nothing.
                self.engine_deaths = 1
                self._all_engine_deaths += 1
                if self._all_engine_deaths > MAX_ENGINE_DEATHS:
                    raise error
            case LossCause.UNKNOWN:
                self._charged += 1
                if self._charged > MAX_REPLAYS:
                    raise error
