"""gRPC services: error mapping, tolerant decoding and authorization.

`add_service` protects a servicer. For malformed messages the caller gets INVALID_ARGUMENT, where
grpcio alone would return UNKNOWN. No message is received from a caller that the guard rejects. A
ServingError of a method becomes the status and message of the call.

The fields of a message are counted before it is parsed, because a field of two bytes can become an
object of a hundred. A message of megabytes with only such fields would take seconds and hundreds of
megabytes to parse on the event loop. Counting only skips from field to field, and stops at the
limit. Descriptors say which fields are messages.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from common.errors import InvalidRequest, ServingError
from common.identity.guard import UNAUTHENTICATED
from common.logs import ThrottledLog

log = logging.getLogger(__name__)

# For messages between nodes and routers: ten thousand Submits with twenty fields each. Counting
# takes 60 ms.
MAX_FIELDS = 1 << 18
_SMALLEST_FIELD_BYTES = 2
_LONGEST_VARINT_BYTES = 10
_BYTES_OF_KIND = {1: 8, 5: 4}  # fixed64, fixed32; ends of groups have no bytes


class FieldCounter:
    """Counts the fields of messages of one type."""

    def __init__(self, descriptor: Descriptor, allowed: int) -> None:
        self._root = _messages_inside(descriptor, {})
        self._allowed = allowed

    def exceeded(self, data: bytes) -> bool:
        """Return whether a serialised message, including nested ones, has too many fields.

        For malformed bytes, the fields before the error count.
        """
        if len(data) <= self._allowed * _SMALLEST_FIELD_BYTES:
            return False
        try:
            return _left(data, 0, len(data), self._root, self._allowed) < 0
        except IndexError:  # malformed: it ends within a number, or a number is too long
            return False


_Inside = dict[int, "_Inside"]  # by field number: the fields of messages in that field


def _messages_inside(descriptor: Descriptor, known: dict[str, _Inside]) -> _Inside:
    if descriptor.full_name not in known:
        inside = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                inside[field.number] = _messages_inside(field.message_type, known)
    return known[descriptor.full_name]


def _left(data: bytes, at: int, end: int, inside: _Inside, allowed: int) -> int:
    """Return `allowed` minus the number of fields of the message in data[at:end].

    If it is negative, there are more fields that were not counted.
    """
    while at < end and allowed >= 0:
        allowed -= 1
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _varint(data, at - 1)
        kind = tag & 7
        if kind == 2:  # length, then bytes, text, packed numbers or a message
            size = data[at]
            at += 1
            if size > 127:
                size, at = _varint(data, at - 1)
            if size and (deeper := inside.get(tag >> 3)) is not None:
                allowed = _left(data, at, min(at + size, end), deeper, allowed)
            at += size
        elif kind == 0:
            at = at + 1 if data[at] < 128 else _varint(data, at)[1]
        else:
            at += _BYTES_OF_KIND.get(kind, 0)
    return allowed


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at data[at], and the position after it."""
    value = 0
    for index in range(_LONGEST_VARINT_BYTES):
        byte = data[at + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    raise IndexError


log_of_faults = ThrottledLog(log)  # throttled, because callers may trigger a bug often
S = TypeVar("S")
# Called with the context of a call. Returns the caller for the servicer. Raises ServingError.
Admit: TypeAlias = Callable[[Any], Awaitable[Any]]


class RpcGuard(Protocol):
    """Authorization of calls, checked before any message of the caller is received."""

    def of(self, method: str) -> Admit:
        """Return the check for callers of a method.

        Raises:
            KeyError: the method has no rule.
        """


class AdmittedCall:
    """The context of a call, and its authenticated caller."""

    def __init__(self, context: "grpc.aio.ServicerContext[Any, Any]", caller: Any) -> None:
        self.caller = caller
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


@asynccontextmanager
async def rpc_errors(context: "grpc.aio.ServicerContext[Any, Any]") -> AsyncIterator[None]:
    """End the call with the status and message of a ServingError raised inside.

    Any other exception is a bug: it is logged, and the caller gets INTERNAL.
    """
    try:
        yield
    except ServingError as error:
        await _abort(context, error.status, str(error))
    except grpc.aio.BaseError:
        raise
    except NotImplementedError:  # raised by generated code: the servicer lacks the method
        await _abort(
            context, grpc.StatusCode.UNIMPLEMENTED, "this process does not implement this method"
        )
    except Exception as error:
        log_of_faults.error("call failed by an internal error", exc_info=error)
        await _abort(
            context, grpc.StatusCode.INTERNAL, "internal error; see the log of this process"
        )


async def _abort(
    context: "grpc.aio.ServicerContext[Any, Any]", status: grpc.StatusCode, sentence: str
) -> NoReturn:
    try:
        await context.abort(status, sentence)
    except grpc.aio.InternalError as error:
        # The connection has ended, which grpc would log as a bug until it reports the end itself.
        raise asyncio.CancelledError from error


class _Recorder:
    """Stands in for a server to record the methods that generated code registers."""

    def __init__(self) -> None:
        self.services: dict[str, Mapping[str, Any]] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.services[service] = handlers

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Ignore this call, which registers the same methods again."""


def add_service(
    server: grpc.aio.Server,
    add: Callable[[S, Any], None],
    servicer: S,
    guard: RpcGuard | None = None,
    *,
    max_fields: int = MAX_FIELDS,
) -> tuple[str, ...]:
    """Register a service with a guard, tolerant decoding and `rpc_errors` around every method.

    Methods get an `AdmittedCall` as their context.

    Args:
        server: not started yet.
        add: the generated `add_XServicer_to_server`.
        guard: None: callers are not authenticated.
        max_fields: limit per message. Messages with more are rejected before they are parsed.
    Returns:
        The full names of the registered services, for reflection and health.
    Raises:
        KeyError: the guard has no rule for a method.
    """
    recorder = _Recorder()
    add(servicer, recorder)
    for service, handlers in recorder.services.items():
        guarded = {
            name: _guarded(handler, _admission(handler, guard, f"/{service}/{name}"), max_fields)
            for name, handler in handlers.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))
    return tuple(recorder.services)


def _admission(handler: Any, guard: RpcGuard | None, method: str) -> Admit:
    if guard is not None:
        return guard.of(method)
    return _unauthenticated_at_once if handler.request_streaming else _unauthenticated


async def _unauthenticated(_context: Any) -> Any:
    return UNAUTHENTICATED


async def _unauthenticated_at_once(context: Any) -> Any:
    """Send empty metadata immediately: callers wait for a proof before their first message."""
    await context.send_initial_metadata(())
    return UNAUTHENTICATED


def _guarded(handler: Any, admit: Admit, max_fields: int) -> Any:
    """Return a handler for streams both ways, for any kind of method.

    Other kinds of handlers are called only after the first message. The wire format is the same.
    """
    parse = _bounded(handler.request_deserializer, max_fields)
    behavior = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )

    async def method(incoming: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        async with rpc_errors(context):
            admitted = AdmittedCall(context, await admit(context))
            if handler.request_streaming:
                answer = behavior(_messages(parse, incoming), admitted)
            else:
                answer = behavior(await _message(parse, incoming), admitted)
            if inspect.isasyncgen(answer):
                async with aclosing(answer):
                    async for reply in answer:
                        await context.write(reply)
            elif handler.response_streaming:
                await answer  # the method writes its own responses
            else:
                await context.write(await answer)

    # Without a deserialiser, the handler gets bytes.
    return grpc.stream_stream_rpc_method_handler(method, None, handler.response_serializer)


def _bounded(parse: Any, max_fields: int) -> Callable[[bytes], Any]:
    """Return a parser with a field limit.

    Args:
        parse: `FromString` of a message class.
    """
    fields = FieldCounter(parse.__self__.DESCRIPTOR, max_fields)

    def parsed(data: bytes) -> Any:
        if fields.exceeded(data):
            raise InvalidRequest(f"the message has more than {max_fields} fields")
        try:
            return parse(data)
        except (DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                "not a message of this method: a field is malformed, or a string is not UTF-8"
            ) from error

    return parsed


async def _message(parse: Callable[[bytes], Any], incoming: AsyncIterator[bytes]) -> Any:
    async for data in incoming:
        return parse(data)
    raise InvalidRequest("the call has no message")


async def _messages(parse: Callable[[bytes], Any], incoming: AsyncIterator[bytes]) -> Any:
    async for data in incoming:
        yield parse(data)
