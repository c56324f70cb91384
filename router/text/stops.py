"""Finds stop strings in text as it comes, holding back what may be the start of one."""

from collections.abc import Sequence


class StopStrings:
    """Cuts one request's text at the stop string that is complete first; of two that end at the
    same character, at the longer. The result does not depend on how the text is split.

    Attributes:
        found: the one that it was cut at, if it was.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop that the text now ends with
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is decided now, and whether a stop string is complete.

        Nothing may be pushed after a stop.
        """
        self._held += text
        start = len(self._held) - len(text)
        for index, character in enumerate(text, start=start + 1):
            found = self._advance(character)
            if found:
                self.found = self._held[index - found : index]
                return self._held[: index - found], True
        undecided = max(self._matched, default=0)
        decided = len(self._held) - undecided
        out, self._held = self._held[:decided], self._held[decided:]
        return out, False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        out, self._held = self._held, ""
        return out

    def _advance(self, character: str) -> int:
        """One step of Knuth-Morris-Pratt in every stop. Length of the longest complete, or 0."""
        found = 0
        for number, (stop, borders) in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = max(found, matched)
                matched = 0
            self._matched[number] = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`: how long is its longest proper prefix that is its suffix too."""
    borders = [0] * len(stop)
    for index in range(1, len(stop)):
        length = borders[index - 1]
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        borders[index] = length + (stop[length] == stop[index])
    return borders
