from protos import last_words_pb2 as _last_words_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HostMessage(_message.Message):
    __slots__ = ("join", "packet")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    PACKET_FIELD_NUMBER: _ClassVar[int]
    join: JoinNode
    packet: RankPacket
    def __init__(self, join: _Optional[_Union[JoinNode, _Mapping]] = ..., packet: _Optional[_Union[RankPacket, _Mapping]] = ...) -> None: ...

class JoinNode(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class RankPacket(_message.Message):
    __slots__ = ("rank", "packet")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PACKET_FIELD_NUMBER: _ClassVar[int]
    rank: int
    packet: bytes
    def __init__(self, rank: _Optional[int] = ..., packet: _Optional[bytes] = ...) -> None: ...

class LeaderMessage(_message.Message):
    __slots__ = ("start", "step", "packet", "last_words")
    START_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PACKET_FIELD_NUMBER: _ClassVar[int]
    LAST_WORDS_FIELD_NUMBER: _ClassVar[int]
    start: HostStart
    step: StepPart
    packet: bytes
    last_words: _last_words_pb2.LastWords
    def __init__(self, start: _Optional[_Union[HostStart, _Mapping]] = ..., step: _Optional[_Union[StepPart, _Mapping]] = ..., packet: _Optional[bytes] = ..., last_words: _Optional[_Union[_last_words_pb2.LastWords, _Mapping]] = ...) -> None: ...

class HostStart(_message.Message):
    __slots__ = ("first_rank", "config", "store")
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    first_rank: int
    config: bytes
    store: str
    def __init__(self, first_rank: _Optional[int] = ..., config: _Optional[bytes] = ..., store: _Optional[str] = ...) -> None: ...

class StepPart(_message.Message):
    __slots__ = ("offset", "tensors", "header")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    offset: int
    tensors: bytes
    header: bytes
    def __init__(self, offset: _Optional[int] = ..., tensors: _Optional[bytes] = ..., header: _Optional[bytes] = ...) -> None: ...
