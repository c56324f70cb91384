from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Image(_message.Message):
    __slots__ = ("at", "rows", "columns", "pixels", "frames", "time")
    AT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    at: int
    rows: int
    columns: int
    pixels: bytes
    frames: int
    time: int
    def __init__(self, at: _Optional[int] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., pixels: _Optional[bytes] = ..., frames: _Optional[int] = ..., time: _Optional[int] = ...) -> None: ...
