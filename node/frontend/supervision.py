"""The health of a node, derived from its engine's heartbeats and queried by health probes.

Knows no sockets and no processes. The time is passed in.
"""

from common.errors import InvalidRequest
from node.messages import EngineReady, EngineStats

SILENCE_S = 3.0
SERVES = ("ready", "paused")  # states in which requests are accepted, even if they only wait


class EngineSupervisor:
    """The node's state: "starting" -> "ready" <-> "paused"; both <-> "unhealthy"; any ->
    "draining".

    The engine's heartbeats, which continue during a long step, and its reports count as progress.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._moved_at = 0.0
        self._moving: EngineStats | None = None
        self.ready: EngineReady | None = None
        self.draining = False

    @property
    def moving(self) -> EngineStats | None:
        """Return the engine's last report, or None."""
        return self._moving

    def started(self, ready: EngineReady, now: float) -> None:
        self.ready = ready
        self._moved_at = now

    def check_length(self, num_tokens: int, field: str = "token_ids") -> None:
        """Raise InvalidRequest, with the sentence of the engine's own check, if so many tokens can
        never be served. For a front, before it reads any token. Does nothing before `started`.
        """
        if self.ready is not None and num_tokens >= self.ready.context_length:
            raise InvalidRequest(
                f"{field}: {num_tokens} tokens leave no room in a context of "
                f"{self.ready.context_length}"
            )

    def moved(self, moving: EngineStats, now: float) -> None:
        self._moving = moving
        self._moved_at = now

    def beat(self, now: float, late_s: float) -> None:
        """Record a heartbeat of an engine that is late by `late_s` seconds."""
        self._moved_at = max(self._moved_at, now - late_s)

    def moves(self, now: float) -> bool:
        """Return whether the engine has sent a heartbeat or report recently."""
        return now - self._moved_at < self._silence_s

    def liveness(self, now: float) -> tuple[str, float]:
        """Return the state, and the seconds since the engine's last progress. 0 before its first
        report.
        """
        return self.state(now), now - self._moved_at if self._moving else 0.0

    def state(self, now: float) -> str:
        if self.draining:
            return "draining"
        if self.ready is None:
            return "starting"
        if not self.moves(now):
            return "unhealthy"
        return "paused" if self._moving and self._moving.state == "paused" else "ready"
