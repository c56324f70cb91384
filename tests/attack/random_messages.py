"""Random protobuf messages of any type, made from its descriptor, without knowledge of fields.

Values are extremes of their types, small numbers that other messages also have, so that they refer
to each other, and random ones.
"""

import math
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_COUNTS = (0, 1, 1, 2, 3, 17, 300)
_MAX_DEPTH = 4
_TEXTS = ("", "a", "request-1", "127.0.0.1:1", "\x00", "ü" * 40, "x" * 5000, "nixl", "tcp", "ready")
_FLOATS = (0.0, -0.0, 1.0, -1.0, 600.0, 1e-300, 1e300, math.inf, -math.inf, math.nan)


def random_message(kind: type[M], draw: Random) -> M:
    """Each field is set or not. Of a oneof, the last one drawn counts."""
    message = kind()
    _fill(message, draw, 0)
    return message


def mutated(data: bytes, draw: Random) -> bytes:
    """Return the bytes with some of them changed, removed or inserted."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(changed) + 1)
        match draw.randrange(3):
            case 0 if at < len(changed):
                changed[at] = draw.randrange(256)
            case 1:
                del changed[at : at + draw.randint(1, 9)]
            case _:
                changed[at:at] = draw.randbytes(draw.randint(1, 9))
    return bytes(changed)


def _fill(message: Message, draw: Random, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if draw.random() < 0.6:
            _set(message, field, draw, depth)


def _set(message: Message, field: FieldDescriptor, draw: Random, depth: int) -> None:
    held: Any = getattr(message, field.name)
    if _is_map(field):
        for _ in range(draw.choice(_COUNTS[:5])):
            key, value = field.message_type.fields
            held[_scalar(key, draw)] = _scalar(value, draw)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if depth >= _MAX_DEPTH:
            return
        if field.is_repeated:
            for _ in range(draw.choice(_COUNTS[: len(_COUNTS) - depth])):
                _fill(held.add(), draw, depth + 1)
        else:
            held.SetInParent()
            _fill(held, draw, depth + 1)
    elif field.is_repeated:
        held.extend(_scalar(field, draw) for _ in range(draw.choice(_COUNTS)))
    else:
        setattr(message, field.name, _scalar(field, draw))


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def _scalar(field: FieldDescriptor, draw: Random) -> Any:
    return _SCALARS[field.cpp_type](field, draw)


def _integer(bits: int, *, signed: bool) -> Callable[[FieldDescriptor, Random], int]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    edges = [low, low + 1, high - 1, high, (1 << 31) - 1, 1 << 20]

    def drawn(_: FieldDescriptor, draw: Random) -> int:
        match draw.randrange(6):
            case 0:
                return min(max(draw.choice(edges), low), high)
            case 1:
                return draw.randint(low, high)
            case _:
                return draw.randrange(6)

    return drawn


def _float(_: FieldDescriptor, draw: Random) -> float:
    return draw.choice(_FLOATS) if draw.random() < 0.5 else draw.uniform(0.0, 2.0)


def _bool(_: FieldDescriptor, draw: Random) -> bool:
    return draw.random() < 0.5


def _enum(field: FieldDescriptor, draw: Random) -> int:
    known = [value.number for value in field.enum_type.values]
    return draw.choice([*known, 99, -1])


def _text(field: FieldDescriptor, draw: Random) -> str | bytes:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.choice((0, 1, 32, 1000)))
    return draw.choice(_TEXTS)


_SCALARS: dict[int, Callable[[FieldDescriptor, Random], Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _integer(32, signed=True),
    FieldDescriptor.CPPTYPE_INT64: _integer(64, signed=True),
    FieldDescriptor.CPPTYPE_UINT32: _integer(32, signed=False),
    FieldDescriptor.CPPTYPE_UINT64: _integer(64, signed=False),
    FieldDescriptor.CPPTYPE_DOUBLE: _float,
    FieldDescriptor.CPPTYPE_FLOAT: _float,
    FieldDescriptor.CPPTYPE_BOOL: _bool,
    FieldDescriptor.CPPTYPE_ENUM: _enum,
    FieldDescriptor.CPPTYPE_STRING: _text,
}
