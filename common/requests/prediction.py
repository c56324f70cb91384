"""Statistics of predicted outputs, which clients send with a request."""

import msgspec


class PredictionUsage(msgspec.Struct, frozen=True):
    """Predicted tokens used as drafts: in the response (accepted), or wrong (rejected)."""

    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: "PredictionUsage") -> "PredictionUsage":
        return PredictionUsage(self.accepted + other.accepted, self.rejected + other.rejected)


NOTHING = PredictionUsage()
