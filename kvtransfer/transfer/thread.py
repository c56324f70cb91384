"""The transfer thread of an engine process. It drives the pair streams, hand-offs and links.

It sleeps until the frontend, the engine thread, a link or a deadline needs it, and responds
immediately, even during a forward pass. A TransferSide implements the work of a producer or a
consumer, of which this module knows nothing.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from common.process.ipc import FrameSocket, PeerGone, WakeUp
from kvtransfer.frontend_messages import (
    EngineHeartbeat,
    PairClosed,
    PairInput,
    PairMessage,
    PairOpened,
    PairOutput,
)
from kvtransfer.messages import AnyMessage
from kvtransfer.ports import NodeEvent

log = logging.getLogger(__name__)

Command = TypeVar("Command")
CommandIn = TypeVar("CommandIn", contravariant=True)

LONGEST_SLEEP_S = 1.0
HEARTBEAT_S = 1.0  # seconds between two heartbeats to the frontend


class TransferSide(Protocol[CommandIn]):
    """A node's work on its pair streams. Transfer thread only. No call blocks."""

    def start(self) -> None:
        """Called first, once."""
        ...

    def opened(self, opening: PairOpened, now: float) -> None: ...

    def closed(self, stream: int, reason: str, engine_died: bool = False) -> None: ...

    def received(self, stream: int, message: AnyMessage, now: float) -> None: ...

    def command(self, command: CommandIn, now: float) -> None: ...

    def tick(self, now: float, *, engine_moves: bool) -> None:
        """Handle deadlines and send output. Called after all input, at the latest at
        `next_deadline`.
        """
        ...

    def next_deadline(self) -> float | None: ...

    def close(self) -> None:
        """Called last. Afterwards the pool may be unmapped."""
        ...


class EventOutlet:
    """The output of a side: messages to the frontend, and events to the engine thread."""

    def __init__(self, frames: FrameSocket[PairInput]) -> None:
        self.send: Callable[[PairOutput], None] = frames.send
        self._events: deque[NodeEvent] = deque()
        self.num_emitted = 0  # events, counted on the transfer thread
        self.num_consumed = 0  # consumed events, counted on the engine thread

    def emit(self, event: NodeEvent) -> None:
        self.num_emitted += 1
        self._events.append(event)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take(self) -> list[NodeEvent]:
        """Return the events not consumed yet. Engine thread only."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        self.num_consumed += len(events)
        return events


class Transfer(Generic[Command]):
    """The work of the transfer thread, and the engine thread's port to it. It never sleeps itself:
    a driver calls `turn` when `fileno` is readable, after each `wake`, and after `due_in_s`.

    Args:
        frames: connection to the frontend's pair streams. Owned by this object.
        make_side: creates the side from the outlet and `wake`.
        wake: ends the driver's sleep. Called by any thread.
        engine_late_s: returns the seconds by which the engine is late. Called by `turn`.
        stall_s: heartbeats stop once the engine is later than this.
        wake_engine: ends the engine thread's sleep.
    """

    def __init__(
        self,
        frames: FrameSocket[PairInput],
        make_side: Callable[[EventOutlet, Callable[[], None]], TransferSide[Command]],
        *,
        wake: Callable[[], None],
        engine_late_s: Callable[[], float],
        stall_s: float = HEARTBEAT_S,
        wake_engine: Callable[[], None],
    ) -> None:
        self._frames = frames
        self._outlet = EventOutlet(frames)
        self._side = make_side(self._outlet, wake)
        self._wake = wake
        self._engine_late_s = engine_late_s
        self._stall_s = stall_s
        self._wake_engine = wake_engine
        self._commands: deque[Command] = deque()
        self._heartbeat_at = 0.0
        self._fault: BaseException | None = None

    # The engine thread's port

    def post(self, command: Command) -> None:
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
        """Start the side. Called once, before the first `turn`."""
        self._side.start()

    def turn(self) -> None:
        """Handle all input and expired deadlines. Raises PeerGone if the frontend has ended."""
        now = time.monotonic()
        for message in self._frames.receive():
            match message:
                case PairOpened():
                    self._side.opened(message, now)
                case PairMessage(stream, content):
                    self._side.received(stream, content, now)
                case PairClosed(stream, reason, engine_died):
                    self._side.closed(stream, reason, engine_died)
        for _ in range(len(self._commands)):
            self._side.command(self._commands.popleft(), now)
        late_s = self._engine_late_s()
        moves = late_s < self._stall_s
        self._side.tick(now, engine_moves=moves)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_S
            if moves:
                self._outlet.send(EngineHeartbeat(late_s))
        if self._outlet.has_events:
            self._wake_engine()

    def due_in_s(self) -> float:
        """Return the seconds until the next `turn`, at most LONGEST_SLEEP_S."""
        deadline = self._side.next_deadline()
        due = self._heartbeat_at if deadline is None else min(deadline, self._heartbeat_at)
        return min(max(due - time.monotonic(), 0.0), LONGEST_SLEEP_S)

    def fail(self, fault: BaseException) -> None:
        """Report to the engine thread the fault that ends the driver."""
        self._fault = fault
        self._wake_engine()

    def close(self) -> None:
        self._side.close()
        self._frames.close()


class TransferThread(Generic[Command]):
    """The thread that drives a Transfer, and the engine thread's port to it.

    Args:
        frames, make_side, engine_late_s, stall_s, wake_engine: see Transfer.
    """

    def __init__(
        self,
        frames: FrameSocket[PairInput],
        make_side: Callable[[EventOutlet, Callable[[], None]], TransferSide[Command]],
        *,
        engine_late_s: Callable[[], float],
        stall_s: float = HEARTBEAT_S,
        wake_engine: Callable[[], None],
    ) -> None:
        self._frames = frames
        self._wake_up = WakeUp()
        self._transfer: Transfer[Command] = Transfer(
            frames,
            make_side,
            wake=self._wake_up.wake,
            engine_late_s=engine_late_s,
            stall_s=stall_s,
            wake_engine=wake_engine,
        )
        self.post, self.take = self._transfer.post, self._transfer.take
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
            self._transfer.open()
            while not self._stopped:
                self._wake_up.sleep(self._frames, self._transfer.due_in_s())
                self._transfer.turn()
        except PeerGone:
            pass  # the engine thread's own socket reports the same
        except BaseException as fault:
            log.exception("the transfer thread failed")
            self._transfer.fail(fault)
        finally:
            self._transfer.close()
