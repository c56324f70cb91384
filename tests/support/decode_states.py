"""Records of requests on a decode node, for tests of its queues."""

from typing import Any

from common.tracing.context import UNTRACED
from decode_node.state import DecodeState
from engine.batch.request import Request
from node.messages import Placement
from node.request_state import Stage
from node.timings import RequestTimings


def make_decode_state(request: Request, **fields: Any) -> DecodeState:
    """Return the record of a request that is prepared on a decode node.

    Args:
        fields: of DecodeState.
    """
    timings = RequestTimings(request.spec.request_id, request.num_prompt, UNTRACED, 0.0, 0.0)
    own = {"timings": timings, "placement": Placement(), "on_end": lambda state, ending: None}
    state = DecodeState(request=request, **{**own, **fields})
    state.move(Stage.PREPARING, None)
    return state
