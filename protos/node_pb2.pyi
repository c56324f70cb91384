from protos import router_pb2 as _router_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("role", "instance_id", "pids", "state", "model", "fingerprint", "tokenizer_hash", "context_length", "pages", "queues", "links", "steps", "counters", "mode", "prompts", "weights", "ranks", "group", "group_rank")
    class PagesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class QueuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    role: str
    instance_id: int
    pids: _containers.RepeatedScalarFieldContainer[int]
    state: str
    model: str
    fingerprint: str
    tokenizer_hash: str
    context_length: int
    pages: _containers.ScalarMap[str, int]
    queues: _containers.ScalarMap[str, int]
    links: _containers.RepeatedCompositeFieldContainer[_router_pb2.LinkState]
    steps: int
    counters: _containers.ScalarMap[str, int]
    mode: str
    prompts: _router_pb2.Backlog
    weights: bytes
    ranks: _containers.RepeatedCompositeFieldContainer[_router_pb2.RankState]
    group: str
    group_rank: int
    def __init__(self, role: _Optional[str] = ..., instance_id: _Optional[int] = ..., pids: _Optional[_Iterable[int]] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., context_length: _Optional[int] = ..., pages: _Optional[_Mapping[str, int]] = ..., queues: _Optional[_Mapping[str, int]] = ..., links: _Optional[_Iterable[_Union[_router_pb2.LinkState, _Mapping]]] = ..., steps: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., mode: _Optional[str] = ..., prompts: _Optional[_Union[_router_pb2.Backlog, _Mapping]] = ..., weights: _Optional[bytes] = ..., ranks: _Optional[_Iterable[_Union[_router_pb2.RankState, _Mapping]]] = ..., group: _Optional[str] = ..., group_rank: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class SwitchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareWeightsRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class PrepareWeightsResponse(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    def __init__(self, id: _Optional[bytes] = ...) -> None: ...

class PutWeightsRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    def __init__(self, id: _Optional[bytes] = ...) -> None: ...

class PutWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TakeWeightsRequest(_message.Message):
    __slots__ = ("id", "address")
    ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    address: str
    def __init__(self, id: _Optional[bytes] = ..., address: _Optional[str] = ...) -> None: ...

class TakeWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("page_size", "cleared", "stored", "removed")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    cleared: bool
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, page_size: _Optional[int] = ..., cleared: _Optional[bool] = ..., stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class ExplainHereRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainHereResponse(_message.Message):
    __slots__ = ("flights", "kept")
    FLIGHTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    flights: _containers.RepeatedCompositeFieldContainer[Flight]
    kept: int
    def __init__(self, flights: _Optional[_Iterable[_Union[Flight, _Mapping]]] = ..., kept: _Optional[int] = ...) -> None: ...

class Flight(_message.Message):
    __slots__ = ("began_ago_s", "events")
    BEGAN_AGO_S_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    began_ago_s: float
    events: _containers.RepeatedCompositeFieldContainer[_router_pb2.RequestEvent]
    def __init__(self, began_ago_s: _Optional[float] = ..., events: _Optional[_Iterable[_Union[_router_pb2.RequestEvent, _Mapping]]] = ...) -> None: ...
