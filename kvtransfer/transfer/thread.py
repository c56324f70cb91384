"""The transfer thread of an engine process. It drives the pair streams, hand-offs and links.

It sleeps until the frontend, the engine thread, a link or a deadline needs it, and responds
immediately, even during a forward pass. TransferSides does the work.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from common.process.ipc import FrameSocket, PeerGone, WakeUp
from kvtransfer.frontend_messages import (
    EngineHeartbeat,
    PairClosed,
    PairInput,
    PairMessage,
    PairOpened,
)
from kvtransfer.ports import NodeCommand, NodeEvent
from kvtransfer.protocol.progress import EventOutlet
from kvtransfer.transfer.sides import TransferSides

log = logging.getLogger(__name__)

LONGEST_SLEEP_S = 1.0
HEARTBEAT_S = 1.0  # seconds between two heartbeats to the frontend


class Transfer:
    """The work of the transfer thread, and the engine thread's port to it. It never sleeps itself:
    a driver calls `turn` when `fileno` is readable, after each `wake`, and after `due_in_s`.

    Args:
        frames: connection to the frontend's pair streams. Owned by this object.
        make_sides: creates the sides from the outlet and `wake`.
        wake: ends the driver's sleep. Called by any thread.
        engine_late_s: returns the seconds by which the engine is late. Called by `turn`.
        stall_s: heartbeats stop once the engine is later than this.
        wake_engine: ends the engine thread's sleep.
    """

    def __init__(
        self,
        frames: FrameSocket[PairInput],
        make_sides: Callable[[EventOutlet, Callable[[], None]], TransferSides],
        *,
        wake: Callable[[], None],
        engine_late_s: Callable[[], float],
        stall_s: float = HEARTBEAT_S,
        wake_engine: Callable[[], None],
    ) -> None:
        self._frames = frames
        self._outlet = EventOutlet(frames.send)
        self._sides = make_sides(self._outlet, wake)
        self._wake = wake
        self._engine_late_s = engine_late_s
        self._stall_s = stall_s
        self._wake_engine = wake_engine
        self._commands: deque[NodeCommand] = deque()
        self._heartbeat_at = 0.0
        self._fault: BaseException | None = None

    # The engine thread's port

    def post(self, command: NodeCommand) -> None:
        self._commands.append(command)
        self._wake()

    def take(self) -> list[NodeEvent]:
        """Return the events not consumed yet. Raises the fault that ended the transfer thread, if
        any, because the engine cannot work without it.
        """
        if self._fault is not None:
            raise self._fault
        return self._outlet.take()

    def fileno(self) -> int:
        return self._frames.fileno()

    @property
    def wants_write(self) -> bool:
        """Return whether `turn` is also needed once the socket is writable."""
        return self._frames.wants_write

    def open(self) -> None:
        """Start both sides. Called once, before the first `turn`."""
        self._sides.start()

    def turn(self) -> None:
        """Handle all input and expired deadlines. Raises PeerGone if the frontend has ended."""
        now = time.monotonic()
        for message in self._frames.receive():
            match message:
                case PairOpened():
                    self._sides.opened(message, now)
                case PairMessage(stream, content):
                    self._sides.received(stream, content, now)
                case PairClosed(stream, reason, engine_died):
                    self._sides.closed(stream, reason, engine_died)
        for _ in range(len(self._commands)):
            self._sides.command(self._commands.popleft(), now)
        late_s = self._engine_late_s()
        moves = late_s < self._stall_s
        self._sides.tick(now, engine_moves=moves)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_S
            if moves:
                self._outlet.send(EngineHeartbeat(late_s))
        if self._outlet.has_events:
            self._wake_engine()

    def due_in_s(self) -> float:
        """Return the seconds until the next `turn`, at most LONGEST_SLEEP_S."""
        deadline = self._sides.next_deadline()
        due = self._heartbeat_at if deadline is None else min(deadline, self._heartbeat_at)
        return min(max(due - time.monotonic(), 0.0), LONGEST_SLEEP_S)

    def fail(self, fault: BaseException) -> None:
        """Report to the engine thread the fault that ends the driver."""
        self._fault = fault
        self._wake_engine()

    def close(self) -> None:
        self._sides.close()
        self._frames.close()


class TransferThread(Transfer):
    """A Transfer with the thread that drives it.

    Args:
        frames, make_sides, engine_late_s, stall_s, wake_engine: see Transfer.
    """

    def __init__(
        self,
        frames: FrameSocket[PairInput],
        make_sides: Callable[[EventOutlet, Callable[[], None]], TransferSides],
        *,
        engine_late_s: Callable[[], float],
        stall_s: float = HEARTBEAT_S,
        wake_engine: Callable[[], None],
    ) -> None:
        self._wake_up = WakeUp()
        super().__init__(
            frames,
            make_sides,
            wake=self._wake_up.wake,
            engine_late_s=engine_late_s,
            stall_s=stall_s,
            wake_engine=wake_engine,
        )
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread, every stream and every link."""
        self._stopped = True
        self._wake_up.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self.open()
            while not self._stopped:
                self._wake_up.sleep(self._frames, self.due_in_s())
                self.turn()
        except PeerGone:
            pass  # the engine thread's own socket reports the same
        except BaseException as fault:
            log.exception("the transfer thread failed")
            self.fail(fault)
        finally:
            self.close()
