"""A request of a client: what nodes get of it, and what its answer is to look like."""

import msgspec

from api.text.stops import StopRules
from common.request import RequestSpec
from common.requests.namespace import Namespace
from common.requests.sampling import SamplingParams


class Job(msgspec.Struct, frozen=True):
    """A request in tokens, ready for a decode node.

    Attributes:
        shown: special tokens that are not left out of the text.
        echo: the prompt's text, which the answer begins with.
        silent: see Wanted.
    """

    spec: RequestSpec
    stops: StopRules
    session_id: str = ""
    shown: frozenset[int] = frozenset()
    echo: str | None = None
    silent: bool = False


class Terms(msgspec.Struct, frozen=True):
    """What the answers of one request have in common, whatever their prompt. Checked.

    sampling: its seed is that of one of them.
    """

    sampling: SamplingParams
    stops: StopRules
    namespace: Namespace
