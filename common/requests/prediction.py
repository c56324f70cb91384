"""What became of the tokens of a text that a client had expected of its answer."""

import msgspec


class Predicted(msgspec.Struct, frozen=True):
    """Tokens of it that were guesses: those that are in the answer, and those that were wrong."""

    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: "Predicted") -> "Predicted":
        return Predicted(self.accepted + other.accepted, self.rejected + other.rejected)


NOTHING = Predicted()
