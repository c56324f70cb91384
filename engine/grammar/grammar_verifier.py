"""Verification of a guide's cost in a separate process, before the engine compiles it."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

import msgspec

from common.errors import InvalidRequest, Overloaded
from common.process.helper import ANSWERED, Helper, HelperLost, Question
from common.requests.sampling import GuidedDecoding, Prepared

MAX_BYTES = 2 << 30  # memory limit of one guide, in addition to the memory in use
S_PER_TOKEN = 0.05  # CPU seconds to accept a token and compute the next mask
_DEADLINE_S = 300.0  # for a trial on a busy machine, or for the first start


class VerifierLane(Enum):
    """The two queues of trials, so that short trials do not wait for long ones. The value is the
    limit in CPU seconds."""

    QUICK = 2
    SLOW = 60


class Verdict(msgspec.Struct, frozen=True):
    """The result of a trial.

    Attributes:
        form: the guide to compile. None: the guide is rejected, see `refusal`.
    """

    form: Prepared | None = None
    refusal: str = ""


class GrammarTimeout(Exception):
    """The trial exceeded its time limit."""


class GrammarVerifier(Protocol):
    """Verifies guides. Called by one thread per lane."""

    def verify(self, guide: GuidedDecoding, lane: VerifierLane) -> Prepared:
        """Return the guide to compile, if its compilation terminates and its tokens are cheap
        enough.

        Raises:
            GrammarTimeout: the lane's time limit was exceeded.
            InvalidRequest: the guide is invalid, takes too much memory, has tokens that cost too
                much, or crashes the compiler.
            Overloaded: the trial could not be run.
        """
        ...

    def close(self) -> None: ...


class SubprocessVerifier:
    """A GrammarVerifier that sends guides to a process with `trials.py`. It starts the process with
    the first guide, and restarts it if it has failed.

    Args:
        deadline_s: longest wait for a result, in seconds. The process is then killed.
    """

    def __init__(
        self,
        directory: Path,
        vocabulary_size: int,
        eos_token_ids: Sequence[int],
        *,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        eos = ",".join(str(token) for token in eos_token_ids)
        self.helper = Helper(
            "engine.grammar.trials",
            [str(directory), str(vocabulary_size), eos],
            num_lanes=len(VerifierLane),
            deadline_s=deadline_s,
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )

    def verify(self, guide: GuidedDecoding, lane: VerifierLane) -> Prepared:
        question = Question(msgspec.msgpack.encode(guide), lane.value, MAX_BYTES)
        try:
            answer = self.helper.ask(list(VerifierLane).index(lane), question)
        except HelperLost as error:
            raise Overloaded("the grammar verification process failed or stalled") from error
        if answer.took_too_long:
            raise GrammarTimeout(
                f"sampling.{guide.kind}: compiling and testing it takes more than {lane.value} s "
                "of CPU time"
            )
        if answer.code != ANSWERED:
            raise InvalidRequest(
                f"sampling.{guide.kind}: compiling it takes more than {MAX_BYTES >> 20} MiB"
            )
        verdict = msgspec.msgpack.decode(answer.content, type=Verdict)
        if verdict.form is None:
            raise InvalidRequest(verdict.refusal)
        return verdict.form

    def close(self) -> None:
        self.helper.close()
