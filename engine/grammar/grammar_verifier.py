"""Whether a guide can be compiled with little enough, asked of a process beside this one."""

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

import msgspec

from common.errors import InvalidRequest, Overloaded
from common.process.helper import ANSWERED, Helper, HelperLost, Question
from common.requests.guide import Guide, Prepared

MAX_BYTES = 2 << 30  # that one guide may take, beside what is there already
S_PER_TOKEN = 0.05  # of a core: to accept a token and to make the mask behind it
_DEADLINE_S = 300.0  # of a trial on a machine that is busy with other things, or of the first start


class Lane(Enum):
    """Short trials do not wait for long ones. Its value: seconds of a core."""

    QUICK = 2
    SLOW = 60


class Verdict(msgspec.Struct, frozen=True):
    """The result of a trial.

    Attributes:
        form: the guide as it is to be compiled; None: `refusal` says why there is none.
    """

    form: Prepared | None = None
    refusal: str = ""


class TooSlow(Exception):
    """It has used up its time."""


class Prover(Protocol):
    """Asked by one thread for each lane."""

    def prove(self, guide: Guide, lane: Lane) -> Prepared:
        """Returns the guide as it is to be compiled, if its compilation ends and its tokens cost
        little enough.

        Raises:
            TooSlow: not in the time of that lane.
            InvalidRequest: it is wrong, takes more memory than a guide may, has tokens that cost
                too much, or breaks the compiler.
            Overloaded: nobody could find out.
        """
        ...

    def close(self) -> None: ...


class Beside:
    """A Prover: asks `trials.py`, which it starts with the first guide, and anew when that has
    died.

    Args:
        deadline_s: longest wait for an answer. Then that process is ended.
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
            num_lanes=len(Lane),
            deadline_s=deadline_s,
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )

    def prove(self, guide: Guide, lane: Lane) -> Prepared:
        question = Question(msgspec.msgpack.encode(guide), lane.value, MAX_BYTES)
        try:
            answer = self.helper.ask(list(Lane).index(lane), question)
        except HelperLost as error:
            raise Overloaded("the process that tries guides has died or stands still") from error
        if answer.took_too_long:
            raise TooSlow(
                f"sampling.{guide.kind}: compiling and trying it takes more than {lane.value} s of "
                "a core"
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
