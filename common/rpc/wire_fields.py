"""Number of fields of a protobuf message, counted before it is parsed.

A field of two bytes becomes an object of a hundred. A message of megabytes with only such fields
takes seconds and hundreds of megabytes to parse, on the event loop. Counting only skips from field
to field, and stops at the limit. Descriptors show which fields are messages. Nothing else is
checked.
"""

from google.protobuf.descriptor import Descriptor

# For messages between nodes and routers: ten thousand Submits with twenty fields each. Counting
# takes 60 ms.
MAX_FIELDS = 1 << 18

_SMALLEST_FIELD_BYTES = 2
_LONGEST_VARINT_BYTES = 10
_BYTES_OF_KIND = {1: 8, 5: 4}  # fixed64, fixed32; ends of groups have no bytes


class FieldCounter:
    """Counter for one message type."""

    def __init__(self, descriptor: Descriptor, allowed: int) -> None:
        self._root = _messages_inside(descriptor, {})
        self._allowed = allowed

    def exceeded(self, data: bytes) -> bool:
        """Return whether a serialised message, nested ones included, has too many fields.

        For malformed bytes, the fields before the error count.
        """
        if len(data) <= self._allowed * _SMALLEST_FIELD_BYTES:
            return False
        try:
            return _left(data, 0, len(data), self._root, self._allowed) < 0
        except IndexError:  # it ends within a number, or a number is too long: malformed
            return False


_Inside = dict[int, "_Inside"]  # by field number: the fields inside the messages of that field


def _messages_inside(descriptor: Descriptor, known: dict[str, _Inside]) -> _Inside:
    if descriptor.full_name not in known:
        inside = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                inside[field.number] = _messages_inside(field.message_type, known)
    return known[descriptor.full_name]


def _left(data: bytes, at: int, end: int, inside: _Inside, allowed: int) -> int:
    """Return `allowed` minus the fields of the message in data[at:end].

    Negative: there are more, and the rest was not counted.
    """
    while at < end and allowed >= 0:
        allowed -= 1
        tag = data[at]
        at += 1
        if tag > 127:
            tag, at = _varint(data, at - 1)
        kind = tag & 7
        if kind == 2:  # bytes, text, packed numbers or a message, after their length
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
