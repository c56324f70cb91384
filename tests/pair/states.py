"""The states of a request. Each has a function that brings a request there and keeps it there."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.tracing.context import UNTRACED
from decode_node.state import DecodeState
from engine.batch.request import Request
from kvtransfer.messages import GrantHandoff, PagesReady, PagesReleased
from node.messages import Placement
from node.request_state import RequestStage
from node.timings import RequestTimings
from tests.pair.rig import Asked, Loaded, PairRig, Size

LONG = [n * 7 % 300 for n in range(100)]  # 7 pages, 4 chunks of 32 tokens
OTHER = LONG[::-1]


def in_prealloc(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    """Another request holds the decode node's pages. The request is in the prefill node's
    bootstrap queue."""
    rig.faults[0].freeze()
    other = rig.ask(OTHER)
    rig.until(lambda: other.tokens, "the other one is being read")
    asked = ask(LONG)
    prefill, decode = rig.prefill[0], rig.decode[0]
    _reach(rig, asked, lambda: decode.queue("prealloc") and prefill.queue("bootstrap"))
    return asked


def with_its_grant_under_way(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    rig.wires.hold_back(GrantHandoff)
    asked = ask(LONG)
    prefill, decode = rig.prefill[0], rig.decode[0]
    _reach(rig, asked, lambda: decode.queue("transfer") and prefill.queue("bootstrap"))
    return asked


def waiting_at_the_producer(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    """The pages that the prefill node publishes for another request fill its pool."""
    rig.faults[0].freeze()
    other = rig.ask(OTHER)
    rig.until(lambda: other.tokens, "the other one is being read")
    asked = ask(LONG)
    _reach(rig, asked, lambda: rig.prefill[0].queue("waiting"))
    return asked


def between_chunks(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    asked = ask(LONG)
    _reach(rig, asked, lambda: rig.prefill[0].queue("chunked"))
    return asked


def published(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    """The prompt is computed, and the decode node has not received the message yet."""
    rig.wires.hold_back(PagesReady)
    asked = ask(LONG)
    _reach(rig, asked, lambda: rig.prefill[0].queue("inflight"))
    return asked


def being_read(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    rig.faults[0].freeze()
    asked = ask(LONG)
    _reach(rig, asked, lambda: asked.tokens)
    return asked


def read_but_not_confirmed(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    rig.wires.hold_back(PagesReleased)
    asked = ask(LONG)
    _reach(rig, asked, lambda: rig.prefill[0].count("handoffs_completed"))
    return asked


def confirmed(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    """The decode node gets the confirmation at its next poll."""
    asked = ask(LONG)
    prefill, decode = rig.prefill[0], rig.decode[0]
    _reach(rig, asked, lambda: decode.queue("transfer"))
    rig.settle()
    rig.turn(prefill)  # it has received the message now
    _reach(rig, asked, lambda: not prefill.role.busy, prefill)  # or has dropped it at its deadline
    rig.settle()
    return asked


def running(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    asked = ask(LONG)
    _reach(rig, asked, lambda: len(asked.tokens) > 3)
    return asked


def retracted(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    other = rig.ask(OTHER[:20], 60)
    rig.until(lambda: len(other.tokens) > 16, "the other one runs")
    asked = ask(LONG[:28])
    (decode,) = rig.decode
    joined = decode.count("handoffs_completed") + 1
    _reach(rig, asked, lambda: decode.queue("transfer"), decode)
    rig.until_news(  # before the other one ends, however slow threads are
        lambda: asked.ended or decode.count("handoffs_completed") == joined, "it joins", decode
    )
    _reach(rig, asked, lambda: decode.queue("retracted"))
    return asked


def between_chunks_here(rig: PairRig, ask: Callable[..., Asked]) -> Asked:
    asked = ask(LONG, prefill=[])
    _reach(rig, asked, lambda: rig.decode[0].queue("chunked"))
    return asked


def _reach(rig: PairRig, asked: Asked, condition: Callable[[], object], *nodes: object) -> None:
    rig.until(lambda: condition() or asked.ended, "the request is in the state wanted", *nodes)


@dataclass(frozen=True)
class State:
    """A state. `reach` brings a request, made by `ask`, into it."""

    reach: Callable[[PairRig, Callable[..., Asked]], Asked]
    sizes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.reach.__name__

    def rig(self, loaded: Loaded, **options: Any) -> PairRig:
        options = {"chunked_prefill_tokens": 32, "new_token_ratio": 0.01, **self.sizes, **options}
        return PairRig(loaded, **options)


AT_THE_PRODUCER = [
    State(with_its_grant_under_way),
    State(waiting_at_the_producer, {"prefill": [Size(num_pages=10)]}),
    State(between_chunks),
    State(published),
    State(being_read),
]
EVERYWHERE = [
    *AT_THE_PRODUCER,
    State(in_prealloc, {"decode": [Size(num_pages=10)]}),
    State(read_but_not_confirmed),
    State(confirmed),
    State(running),
    State(retracted, {"decode": [Size(num_pages=5)]}),
    State(between_chunks_here),
]


def make_decode_state(request: Request, **fields: Any) -> DecodeState:
    """Return the record of a request that is prepared on a decode node.

    Args:
        fields: of DecodeState.
    """
    timings = RequestTimings(request.spec.request_id, request.num_prompt, UNTRACED, 0.0, 0.0)
    own = {"timings": timings, "placement": Placement(), "on_end": lambda state, ending: None}
    state = DecodeState(request=request, **{**own, **fields})
    state.move(RequestStage.PREPARING, None)
    return state
