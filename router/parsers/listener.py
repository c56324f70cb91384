"""One answer, as it comes, for whoever tells it: how much of which part each piece adds."""

import random
import string
from collections.abc import Sequence

import msgspec

from router.parsers.said import Arguments, Call, Content, Parser, Reasoning, Said

_CHARACTERS = string.ascii_letters + string.digits
_ID_CHARACTERS = 9  # as many as Mistral's templates take, and letters and digits alone


class CallPart(msgspec.Struct, frozen=True):
    """What is added to one call; in the first part is its id and name."""

    index: int
    id: str
    name: str
    arguments: str


class Heard(msgspec.Struct, frozen=True):
    content: str
    reasoning: str
    calls: Sequence[CallPart]  # one part of each at most, in order

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Listener:
    """For one answer."""

    def __init__(self, parser: Parser, *, parallel: bool = True) -> None:
        """
        Args:
            parallel: False: of several calls only the first is heard.
        """
        self._parser = parser
        self._parallel = parallel
        self._num_calls = 0

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def hear(self, text: str, marks: Sequence[int] = (), *, last: bool) -> Heard:
        """What the answer's text adds.

        Args:
            marks: as of Parser.push.
            last: there is no more of it.
        """
        said = [*self._parser.push(text, marks)]
        if last:
            said += self._parser.finish()
        return self._together(said)

    def _together(self, said: Sequence[Said]) -> Heard:
        content, reasoning = "", ""
        calls: dict[int, CallPart] = {}
        for each in said:
            match each:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case Call(name):
                    calls[self._num_calls] = CallPart(self._num_calls, _new_id(), name, "")
                    self._num_calls += 1
                case Arguments(text):
                    index = self._num_calls - 1
                    before = calls.get(index, CallPart(index, "", "", ""))
                    calls[index] = msgspec.structs.replace(
                        before, arguments=before.arguments + text
                    )
        told = [part for index, part in calls.items() if self._parallel or index == 0]
        return Heard(content, reasoning, told)


def _new_id() -> str:
    return "".join(random.choices(_CHARACTERS, k=_ID_CHARACTERS))
