from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PrefixAt(_message.Message):
    __slots__ = ("address", "tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    tokens: int
    def __init__(self, address: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...
