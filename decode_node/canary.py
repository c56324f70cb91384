"""The canary: checks that a prefill node computes correct KV before requests are sent to it.

    paired -> waits -> checking --same, or unknown--> in use
      |     ^  ^  |
      |     |  |  `--different--> kept out --(AGAIN_S, not busy)--> checking
     busy    |  |                      ^--different, or unknown--'
      `-> in use, untried: tried once, as soon as this node is not busy

A short prompt is decoded greedily twice: with KV from a hand-off of that node, and with KV of this
node. Each request has a namespace of its own, in which no node has cached KV. Two devices may
legitimately choose different tokens if two are equally likely. Therefore a prefill node is wrong
only if several prompts in a row give different responses. A busy node runs no canaries.
"""

import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random

from grpc import StatusCode

from common.errors import NodeUnavailable
from common.logs import kv
from common.request import Remaining, RequestSpec
from common.requests.namespace import IDENTITY_BYTES, as_bytes
from common.requests.sampling import SamplingParams
from decode_node.active_requests import DecodeCounters
from engine.batch.request import FinishReason
from kvtransfer.ports import NodeEvent, ProducerDown, ProducerUp
from node.messages import Placement, RequestEnded, StepTokens, SubmitRequest

log = logging.getLogger(__name__)

STREAM = 0  # stream number of the canary; those of routers start at 1
PROMPT_TOKENS = 40
NUM_ANSWERS = 3  # a prefill node is wrong only if this many responses differ
AGAIN_S = 60.0
BUDGET_S = 10.0


@dataclass(slots=True, eq=False)
class _Answer:
    request: int
    tokens: list[int] = field(default_factory=list)
    end: RequestEnded | None = None

    @property
    def failed(self) -> bool:
        """Return whether it ended without a result. Corrupt KV (NaN or Inf logits) is a result."""
        if self.end is None or self.end.reason == FinishReason.LENGTH:
            return False
        code, _ = StatusCode.INTERNAL.value
        return self.end.error_code != code


class _Standing(IntEnum):
    """The status of a producer without a passed check. Lower values are checked first."""

    NEW = 0
    KEPT_OUT = 1
    IN_USE = 2


@dataclass(slots=True, eq=False)
class _Unchecked:
    """A paired producer without a passed check.

    Attributes:
        check_at: time of its next check, by time.monotonic().
    """

    producer: ProducerUp
    standing: _Standing = _Standing.NEW
    check_at: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _CanaryCheck:
    """A check with one prompt. All earlier checks of this producer gave different responses."""

    subject: _Unchecked
    number: int  # of this producer's checks, from 1
    handed: _Answer
    own: _Answer

    @property
    def verdict(self) -> str:
        """Result of the check: "passed", "failed" or "unknown". Empty while it runs."""
        if self.handed.failed or self.own.failed:
            return "unknown"
        if not (self.handed.end and self.own.end):
            return ""
        return "passed" if self.handed.tokens == self.own.tokens else "failed"


class Canary:
    """Runs canary checks of producers. Engine thread only.

    Args:
        num_tokens: length of a response. 0 disables checks.
        submit: submits a request of this stream. A prefill address in it is the address of
            `producer`.
        is_busy: returns whether checks would delay client requests.
    Attributes:
        unchecked: paired producers without a passed check.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        vocabulary_size: int,
        submit: Callable[[SubmitRequest], None],
        is_busy: Callable[[], bool],
        counts: DecodeCounters,
    ) -> None:
        self._num_tokens = num_tokens
        self._vocabulary_size = vocabulary_size
        self._submit = submit
        self._is_busy = is_busy
        self._counts = counts
        self._numbers = itertools.count(1)
        self._check: _CanaryCheck | None = None
        self.unchecked: dict[int, _Unchecked] = {}  # by instance, in order of pairing

    @property
    def producer(self) -> ProducerUp:
        """The producer being checked. Raises NodeUnavailable if it is lost."""
        if self._check is None:
            raise NodeUnavailable("the node to check is no longer paired")
        return self._check.subject.producer

    def admitted(self, events: Sequence[NodeEvent], now: float) -> list[NodeEvent]:
        """Filter transfer events, so that the rest of the node sees only producers in use. Need not
        be called while `unchecked` is empty and no producer has paired.

        Args:
            now: time.monotonic().
        """
        if not self._num_tokens:
            return list(events)
        passed = self._settled(now)
        for event in events:
            match event:
                case ProducerUp(instance=instance):
                    self.unchecked[instance] = _Unchecked(event)
                case ProducerDown(instance=instance) if self._forgets(instance):
                    pass
                case _:
                    passed.append(event)
        passed += self._begin(now)
        return passed

    def take(self, step: StepTokens) -> None:
        """Receive the output of the canary's own requests."""
        if self._check is None:
            return
        answers = {each.request: each for each in (self._check.handed, self._check.own)}
        for request, token in zip(*step.columns(), strict=True):
            if request in answers:
                answers[request].tokens.append(token)
        for end in step.ended:
            if end.request in answers:
                answers[end.request].end = end

    def _settled(self, now: float) -> list[NodeEvent]:
        """Handle the result of a check. Returns an event if the producer enters or leaves use."""
        check = self._check
        if check is None or not check.verdict:
            return []
        self._check = None
        verdict, subject, producer = check.verdict, check.subject, check.subject.producer
        if verdict == "failed" and check.number < NUM_ANSWERS:
            self._try(subject, check.number + 1)
            return []
        self._counts.count(f"canaries/{verdict}")
        in_use = subject.standing is _Standing.IN_USE
        # An unknown result changes nothing for a producer that was excluded before.
        if verdict == "passed" or (verdict == "unknown" and subject.standing != _Standing.KEPT_OUT):
            del self.unchecked[producer.instance]
            return [] if in_use else [producer]
        subject.standing, subject.check_at = _Standing.KEPT_OUT, now + AGAIN_S
        if verdict == "failed":
            log.error(
                "canary check failed, prefill node not used %s",
                kv(
                    producer=producer.address,
                    path=producer.path,
                    handed=check.handed.tokens,
                    own=check.own.tokens,
                    again_s=AGAIN_S,
                ),
            )
        gone = ProducerDown(
            producer.instance, producer.address, "its KV differs from the KV computed here"
        )
        return [gone] if in_use else []

    def _begin(self, now: float) -> list[NodeEvent]:
        """Start the next check. Returns producers that are put in use without one."""
        if self._check is not None or not self.unchecked:
            return []
        if self._is_busy():
            return self._use_new()
        due = [each for each in self.unchecked.values() if each.check_at <= now]
        if due:
            self._try(min(due, key=lambda each: each.standing))
        return []

    def _use_new(self) -> list[NodeEvent]:
        new = [each for each in self.unchecked.values() if each.standing is _Standing.NEW]
        for each in new:
            each.standing = _Standing.IN_USE
            self._counts.count("canaries/unknown")
        return [each.producer for each in new]

    def _try(self, subject: _Unchecked, number: int = 1) -> None:
        producer = subject.producer
        draw = Random(f"{producer.instance} {number}")
        tokens = [draw.randrange(self._vocabulary_size) for _ in range(PROMPT_TOKENS)]
        handed, own = _Answer(next(self._numbers)), _Answer(next(self._numbers))
        self._check = _CanaryCheck(subject, number, handed, own)
        for answer, addresses in ((handed, (producer.address,)), (own, ())):
            self._submit(
                SubmitRequest(
                    stream=STREAM,
                    number=answer.request,
                    spec=RequestSpec(
                        request_id=f"canary of {producer.address}",
                        token_ids=as_bytes(tokens),
                        sampling=SamplingParams(
                            max_tokens=self._num_tokens, temperature=0.0, seed=0, ignore_eos=True
                        ),
                        namespace=secrets.token_bytes(IDENTITY_BYTES),
                    ),
                    remaining=Remaining(BUDGET_S),
                    placement=Placement(prefill_addresses=addresses),
                )
            )

    def _forgets(self, instance: int) -> bool:
        """Remove a producer. Returns whether it was not in use."""
        if self._check is not None and self._check.subject.producer.instance == instance:
            self._check = None
        subject = self.unchecked.pop(instance, None)
        return subject is not None and subject.standing is not _Standing.IN_USE
