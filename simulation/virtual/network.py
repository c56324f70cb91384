"""gRPC in memory: channels and servers that behave like those of grpc.aio.

Each direction of a call is a queue. A chain of timers delivers its entries, because asyncio runs
timers with equal deadlines in no defined order. Servers have only handlers for streams both ways,
which common/rpc/services.py makes of all methods. Faults of Wires delay, hold or end calls.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio

from common.rpc.channels import CallingChannel
from simulation.node.link import Wire, WireTo
from simulation.virtual.faults import KEEPALIVE_S, Ends, Wires

LATENCY_S = 100e-6  # seconds for a message
_RESEND_S = 0.2  # seconds until a lost packet is sent again
_WINDOW = 64  # messages in transit or unread, after which writes wait
_NO_METADATA = grpc.aio.Metadata()


@dataclass(frozen=True, slots=True)
class _Status:
    code: grpc.StatusCode
    details: str = ""


_OK = _Status(grpc.StatusCode.OK)
_UNREACHABLE = _Status(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
_RESET = _Status(grpc.StatusCode.UNAVAILABLE, "Socket closed")
_STOPPED = _Status(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
_LATE = _Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class _Direction:
    """One direction of a call. Messages arrive in order, each after the latency.

    While the wire is silent, they are sent again and again.
    """

    def __init__(self, wire: Callable[[], Wire], on_end: Callable[[_Status], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._wire = wire
        self._on_end = on_end
        self._under_way: deque[bytes | _Status] = deque()
        self._arrived: deque[bytes] = deque()
        self._changed = asyncio.Event()  # wakes the reader
        self._room = asyncio.Event()
        self._room.set()
        self.ended = False  # the reader has seen the end

    def put(self, item: bytes | _Status) -> None:
        """Send a message, or the end, which arrives after all messages."""
        self._under_way.append(item)
        self._update_room()
        self._loop.call_later(LATENCY_S * self._wire().factor, self._deliver)

    async def room(self) -> None:
        """Wait until the reader has read enough."""
        await self._room.wait()

    def cut(self) -> None:
        """End the direction immediately. Messages that have not arrived are lost."""
        self._under_way.clear()
        self.ended = True
        self._changed.set()
        self._room.set()

    async def next(self) -> bytes | None:
        """Return the next message, or None at the end."""
        while not self._arrived:
            if self.ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._arrived.popleft()
        self._update_room()
        return message

    def _deliver(self) -> None:
        if self.ended or not self._under_way:
            return
        if self._wire().is_silent:
            self._loop.call_later(_RESEND_S, self._deliver)
            return
        item = self._under_way.popleft()
        if isinstance(item, bytes):
            self._arrived.append(item)
        else:
            self.ended = True
            self._on_end(item)
        self._changed.set()

    def _update_room(self) -> None:
        if self.ended or len(self._under_way) + len(self._arrived) < _WINDOW:
            self._room.set()
        else:
            self._room.clear()


class _Connection:
    """One call between a client and a server.

    Attributes:
        ends: names of the client and the server.
        handler: None until the request has arrived.
        metadata: set when the server has sent its initial metadata.
    """

    def __init__(self, ends: Ends, wires: Wires) -> None:
        client, server = self.ends = ends
        self._wires = wires
        self.status: asyncio.Future[_Status] = asyncio.get_running_loop().create_future()
        self.to_server = _Direction(lambda: wires.wire(client, server), lambda _: None)
        self.to_client = _Direction(lambda: wires.wire(server, client), self.end)
        self.handler: asyncio.Task[None] | None = None
        self.metadata = asyncio.Event()
        wires.connections[self] = None

    @property
    def wire(self) -> Wire:
        return self._wires.both(*self.ends)

    def end(self, status: _Status) -> None:
        """Record the status that the client sees. Only the first one counts."""
        if not self.status.done():
            self.status.set_result(status)
        self.metadata.set()
        if self.handler is None or self.handler.done():
            self._wires.connections.pop(self, None)

    def reset(self) -> None:
        """End both sides immediately."""
        self._end_client(_RESET)
        self._end_server()

    def close(self, status: _Status) -> None:
        """End the client's side immediately, and the server's when the message arrives."""
        self._end_client(status)
        self._when_informed(self.ends, self._end_server)

    def stop(self, status: _Status) -> None:
        """End the server's side immediately, and the client's when the message arrives."""
        self._end_server()
        self._when_informed(self.ends[::-1], partial(self._end_client, status))

    def served(self) -> None:
        """Record the end of the handler."""
        if self.status.done():
            self._wires.connections.pop(self, None)

    def _when_informed(self, ends: Ends, then: Callable[[], None]) -> None:
        if self._wires.wire(*ends).is_silent:
            loop = asyncio.get_running_loop()
            loop.call_later(_RESEND_S, self._when_informed, ends, then)
        else:
            then()

    def _end_client(self, status: _Status) -> None:
        self.end(status)
        self.to_client.cut()

    def _end_server(self) -> None:
        self.to_server.cut()
        if self.handler is not None:
            self.handler.cancel()


class _Context:
    """The server's view of a call."""

    def __init__(self, connection: _Connection, serialize: Callable[[Any], bytes]) -> None:
        self._connection = connection
        self._serialize = serialize

    def peer(self) -> str:
        return f"{self._connection.ends[0]}:0"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Do nothing: nothing in the simulation reads it."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._connection.metadata.set()

    async def write(self, message: Any) -> None:
        connection = self._connection
        connection.metadata.set()
        await connection.to_client.room()
        if connection.status.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        connection.to_client.put(self._serialize(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", _more: Any = ()) -> NoReturn:
        self._connection.to_client.put(_Status(code, details))
        raise grpc.aio.AbortError("Locally aborted.")


class MemoryServer:
    """A server. See grpc.aio.Server."""

    def __init__(self, network: "MemoryNetwork", name: str) -> None:
        self._network = network
        self._name = name
        self._handlers: list[Any] = []
        self._context = copy_context()  # context of the server's process, not of its callers
        self._address = ""
        self._connections: dict[_Connection, None] = {}  # in order, unlike a set

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        self._address = address
        self._network.names[address] = self._name
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        self._network.servers[self._address] = self

    async def stop(self, grace: float | None = None) -> None:
        self._forget()
        running = {each.handler for each in self._connections if each.handler is not None}
        if running and grace:
            await asyncio.wait(running, timeout=grace)
        self.cut(_STOPPED)

    def cut(self, status: _Status = _RESET) -> None:
        """End all calls immediately, as when the process is killed."""
        self._forget()
        for each in list(self._connections):
            each.stop(status)

    def _forget(self) -> None:
        servers = self._network.servers
        if servers.get(self._address) is self:
            del servers[self._address]

    def accept(self, connection: _Connection, method: str) -> None:
        """Start the handler of a call whose request has arrived."""
        details = _Details(method)
        handler = next(filter(None, (each.service(details) for each in self._handlers)), None)
        if handler is None:
            connection.to_client.put(_Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        self._connections[connection] = None
        connection.handler = asyncio.get_running_loop().create_task(
            self._serve(connection, handler), context=self._context.copy()
        )
        connection.handler.add_done_callback(lambda _: self._ended(connection))

    def _ended(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)
        connection.served()

    async def _serve(self, connection: _Connection, handler: Any) -> None:
        context = _Context(connection, handler.response_serializer)
        try:
            await handler.stream_stream(_incoming(connection.to_server), context)
        except (grpc.aio.AbortError, asyncio.InvalidStateError):
            return  # the client has the reason, or has disconnected
        connection.to_client.put(_OK)


@dataclass(frozen=True, slots=True)
class _Details:
    method: str
    invocation_metadata: tuple[()] = ()


async def _incoming(direction: _Direction) -> AsyncIterator[bytes]:
    while (message := await direction.next()) is not None:
        yield message


class MemoryCall:
    """The client's view of a call. See grpc.aio's calls."""

    def __init__(self, connection: _Connection, how: dict[str, Any]) -> None:
        self._connection = connection
        self._serialize = how["request_serializer"]
        self._parse = how["response_deserializer"]
        self._cancelled = False
        self._half_closed = False

    def done(self) -> bool:
        return self._connection.status.done()

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if self.done():
            return False
        self._cancelled = True
        self._connection.close(_Status(grpc.StatusCode.CANCELLED, "Locally cancelled"))
        return True

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._connection.status.add_done_callback(lambda _: callback(self))

    async def initial_metadata(self) -> grpc.aio.Metadata:
        await self._connection.metadata.wait()
        return _NO_METADATA

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        await asyncio.shield(self._connection.status)
        return _NO_METADATA

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._connection.status)).code

    async def details(self) -> str:
        return (await asyncio.shield(self._connection.status)).details

    async def write(self, message: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError("RPC is half closed after calling done_writing.")
        with _cancelling(self):
            await self._connection.to_server.room()
        if self.done():
            await self._raise_for_status()
        self._connection.to_server.put(self._serialize(message))

    async def done_writing(self) -> None:
        if not (self.done() or self._half_closed):
            self._half_closed = True
            self._connection.to_server.put(_OK)

    async def read(self) -> Any:
        if self._cancelled:
            raise asyncio.CancelledError
        with _cancelling(self):
            data = await self._connection.to_client.next()
        if data is None:
            await self._raise_for_status()
            return grpc.aio.EOF
        return self._parse(data)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = await self.read()
        await self.read()
        return answer

    async def _raise_for_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        status = await asyncio.shield(self._connection.status)
        if status is not _OK:
            raise grpc.aio.AioRpcError(
                status.code, _NO_METADATA, _NO_METADATA, details=status.details
            )


@contextmanager
def _cancelling(call: MemoryCall) -> Iterator[None]:
    """Cancel the call if its task is cancelled inside, like grpc.aio."""
    try:
        yield
    except asyncio.CancelledError:
        call.cancel()
        raise


class MemoryChannel(CallingChannel):
    """A channel to one address. See grpc.aio.Channel."""

    def __init__(self, host: "MemoryHost", address: str) -> None:
        self._host = host
        self._address = address
        self._connections: dict[_Connection, None] = {}  # in order, unlike a set

    def current(self) -> grpc.aio.Channel:
        return self

    async def close(self, grace: float | None = None) -> None:
        self.cut(_Status(grpc.StatusCode.CANCELLED, "Channel closed!"))

    def cut(self, status: _Status = _RESET) -> None:
        """End all calls immediately, as when the process is killed."""
        for each in list(self._connections):
            each.close(status)
        self._host.channels.pop(self, None)

    def calling(self, kind: str, method: tuple[Any, ...], how: dict[str, Any]) -> Any:
        def call(request: Any = None, timeout: float | None = None, **_settings: Any) -> MemoryCall:
            connection = self._connect(method[0], timeout)
            if kind.startswith("unary"):
                connection.to_server.put(how["request_serializer"](request))
                connection.to_server.put(_OK)
            return MemoryCall(connection, how)

        return call

    def _connect(self, method: str, timeout: float | None) -> _Connection:
        network = self._host.network
        ends = (self._host.name, network.names.get(self._address, self._address))
        connection = _Connection(ends, network.wires)
        self._connections[connection] = None
        connection.status.add_done_callback(lambda _: self._connections.pop(connection, None))
        loop = asyncio.get_running_loop()
        by = loop.time() + KEEPALIVE_S
        delay_s = LATENCY_S * connection.wire.factor
        loop.call_later(delay_s, self._arrive, connection, method, by)
        if timeout is not None:
            late = loop.call_later(timeout, connection.close, _LATE)
            connection.status.add_done_callback(lambda _: late.cancel())
        return connection

    def _arrive(self, connection: _Connection, method: str, by: float) -> None:
        """Start the call at the server, or fail it if the network does not deliver it."""
        if connection.status.done():
            return
        loop, wire = asyncio.get_running_loop(), connection.wire
        server = self._host.network.servers.get(self._address)
        if server is None or wire.is_cut or (wire.is_silent and loop.time() >= by):
            connection.close(_UNREACHABLE)
        elif wire.is_silent:
            loop.call_later(_RESEND_S, self._arrive, connection, method, by)
        else:
            server.accept(connection, method)


class MemoryNetwork:
    """The network between all processes.

    Attributes:
        servers: listening servers by address.
        names: names of processes by address.
    """

    def __init__(self) -> None:
        self.wires = Wires()
        self.servers: dict[str, MemoryServer] = {}
        self.names: dict[str, str] = {}

    def wires_of(self, name: str) -> WireTo:
        """Return the network conditions of a process, for its reads of pages."""
        return lambda address: self.wires.both(name, self.names.get(address, address))


class MemoryHost:
    """One process on the network. Implements common.rpc.Network."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        self.name = name
        self.network = network
        self.channels: dict[MemoryChannel, None] = {}
        self._own: list[MemoryServer] = []

    def channel(self, address: str) -> grpc.aio.Channel:
        channel = MemoryChannel(self, address)
        self.channels[channel] = None
        return channel

    def server(self) -> Any:
        server = MemoryServer(self.network, self.name)
        self._own.append(server)
        return server

    def kill(self) -> None:
        """End all calls from and to this process immediately."""
        for server in self._own:
            server.cut()
        for channel in list(self.channels):
            channel.cut()
