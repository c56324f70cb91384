"""A client request: the part for nodes, and the format of its response."""

import msgspec

from api.text.stops import StopRules
from common.request import RequestSpec
from common.requests.namespace import Namespace
from common.requests.sampling import SamplingParams


class TokenizedRequest(msgspec.Struct, frozen=True):
    """A tokenised request, ready for a decode node.

    Attributes:
        shown: special tokens that the text keeps.
        echo: text of the prompt, with which the response begins.
        silent: see Wanted.
    """

    spec: RequestSpec
    stops: StopRules
    session_id: str = ""
    shown: frozenset[int] = frozenset()
    echo: str | None = None
    silent: bool = False


class Terms(msgspec.Struct, frozen=True):
    """Checked parameters that all responses of a request share, independent of their prompts.

    Attributes:
        sampling: its seed belongs to one of the responses.
    """

    sampling: SamplingParams
    stops: StopRules
    namespace: Namespace
