from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class LastWords(_message.Message):
    __slots__ = ("code", "sentence")
    CODE_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    code: int
    sentence: str
    def __init__(self, code: _Optional[int] = ..., sentence: _Optional[str] = ...) -> None: ...
