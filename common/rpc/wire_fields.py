"""How many fields a protobuf message has, counted before it is parsed.

A field of two bytes becomes an object of a hundred: a message of megabytes that is nothing but
such fields costs seconds and hundreds of megabytes to parse, all of it on the event loop. Counting
only skips from one field to the next, and ends where there are too many. Knows which fields are
messages from their descriptors; checks nothing else.
"""

from google.protobuf.descriptor import Descriptor

# Between our own programs: a message of ten thousand Submits, twenty each. 60 ms to count.
MAX_FIELDS = 1 << 18

_SMALLEST_FIELD_BYTES = 2
_LONGEST_VARINT_BYTES = 10
_BYTES_OF_KIND = {1: 8, 5: 4}  # fixed64, fixed32; ends of groups have none


class FieldCounter:
    """Counts for one kind of message."""

    def __init__(self, descriptor: Descriptor, allowed: int) -> None:
        self._root = _messages_inside(descriptor, {})
        self._allowed = allowed

    def exceeded(self, data: bytes) -> bool:
        """Whether a serialised message has more fields than allowed, those of messages inside it
        included. Of what is no message, the fields before that shows count."""
        if len(data) <= self._allowed * _SMALLEST_FIELD_BYTES:
            return False
        try:
            return _left(data, 0, len(data), self._root, self._allowed) < 0
        except IndexError:  # it ends in the middle of a number, or has one too long: no message
            return False


_Inside = dict[int, "_Inside"]  # by field number, what the messages in that field have inside


def _messages_inside(descriptor: Descriptor, known: dict[str, _Inside]) -> _Inside:
    if descriptor.full_name not in known:
        inside = known[descriptor.full_name] = {}
        for field in descriptor.fields:
            if field.message_type is not None:
                inside[field.number] = _messages_inside(field.message_type, known)
    return known[descriptor.full_name]


def _left(data: bytes, at: int, end: int, inside: _Inside, allowed: int) -> int:
    """What is left of `allowed` after the message that data[at:end] is; negative: nothing, and
    the rest was not looked at."""
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
    """A number that begins at data[at], and where it ends."""
    value = 0
    for index in range(_LONGEST_VARINT_BYTES):
        byte = data[at + index]
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    raise IndexError
