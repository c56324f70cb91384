"""Whether a node is fit for work: told by its engine's signs of life, asked by health probes.

Knows no sockets and no processes; the time is passed in.
"""

from common.errors import InvalidRequest
from node.messages import EngineReady, Moving

SILENCE_S = 3.0
SERVES = ("ready", "paused")  # states in which requests are taken, if only to wait


class Supervision:
    """States: "starting" -> "ready" <-> "paused"; both <-> "unhealthy"; any -> "draining".

    Signs of life are the engine's beats, which go on through a long step, and its reports.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._moved_at = 0.0
        self._moving: Moving | None = None
        self.ready: EngineReady | None = None
        self.draining = False

    @property
    def moving(self) -> Moving | None:
        """The engine's last report."""
        return self._moving

    def started(self, ready: EngineReady, now: float) -> None:
        self.ready = ready
        self._moved_at = now

    def check_length(self, num_tokens: int, field: str = "token_ids") -> None:
        """Raises InvalidRequest, with the sentence of the engine's own check, where so many tokens
        can never be served. For a front, before it has touched any. Nothing before `started`."""
        if self.ready is not None and num_tokens >= self.ready.context_length:
            raise InvalidRequest(
                f"{field}: {num_tokens} tokens leave no room in a context of "
                f"{self.ready.context_length}"
            )

    def moved(self, moving: Moving, now: float) -> None:
        self._moving = moving
        self._moved_at = now

    def beat(self, now: float, late_s: float) -> None:
        """Note a heartbeat of an engine that is late by `late_s` seconds."""
        self._moved_at = max(self._moved_at, now - late_s)

    def moves(self, now: float) -> bool:
        """Whether the engine has given a sign of life recently."""
        return now - self._moved_at < self._silence_s

    def liveness(self, now: float) -> tuple[str, float]:
        """The state, and the seconds since the engine's last sign of life; 0 before its first
        report."""
        return self.state(now), now - self._moved_at if self._moving else 0.0

    def state(self, now: float) -> str:
        if self.draining:
            return "draining"
        if self.ready is None:
            return "starting"
        if not self.moves(now):
            return "unhealthy"
        return "paused" if self._moving and self._moving.state == "paused" else "ready"
