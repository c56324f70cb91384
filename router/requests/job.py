"""A request as it is sent to decode nodes."""

from collections.abc import Sequence

import msgspec
from xxhash import xxh3_64_intdigest

from common.requests.adapter import NO_ADAPTER, AdapterId
from common.requests.images import Image
from common.requests.namespace import SHARED, Namespace
from common.requests.sampling import SamplingParams
from router.text.stops import StopRules


class Job(msgspec.Struct, frozen=True):
    """A request in tokens, ready for a decode node."""

    request_id: str
    token_ids: Sequence[int]  # the prompt, then tokens already generated
    sampling: SamplingParams
    stops: StopRules
    num_generated: int = 0  # of token_ids
    engine_deaths: int = 0  # of nodes that had it, see common/requests/trial.py
    session_id: str = ""
    namespace: Namespace = SHARED  # of prefix caches
    adapter: AdapterId = NO_ADAPTER
    shown: frozenset[int] = frozenset()  # special tokens that are not left out of the text
    echo: str | None = None  # the prompt's text, which the answer begins with
    silent: bool = False  # see Wanted
    priority: int = 0
    client: int = 0  # the number by which nodes know its client; 0: not known
    client_weight: float = 1.0  # the client's share beside others
    prediction: Sequence[int] = ()  # what is expected of the answer
    images: Sequence[Image] = ()  # of the prompt

    @property
    def routing_key(self) -> int:
        """Return the key by which nodes know its session, 0 without one."""
        return (xxh3_64_intdigest(self.session_id.encode()) or 1) if self.session_id else 0


class Terms(msgspec.Struct, frozen=True):
    """What the answers of one request have in common, whatever their prompt. Checked.

    sampling: its seed is that of one of them.
    """

    sampling: SamplingParams
    stops: StopRules
    namespace: Namespace
