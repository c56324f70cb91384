from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pool(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_UNSPECIFIED: _ClassVar[Pool]
    POOL_LAST: _ClassVar[Pool]
    POOL_MEAN: _ClassVar[Pool]
    POOL_FIRST: _ClassVar[Pool]
    POOL_LABELS: _ClassVar[Pool]
    POOL_TOKENS: _ClassVar[Pool]
POOL_UNSPECIFIED: Pool
POOL_LAST: Pool
POOL_MEAN: Pool
POOL_FIRST: Pool
POOL_LABELS: Pool
POOL_TOKENS: Pool

class PoolRequest(_message.Message):
    __slots__ = ("request_id", "prompts", "pool", "label_token_ids", "dimensions", "normalize", "budget_s", "queue_s", "namespace", "engine_crashes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CRASHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompts: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.TokenSequence]
    pool: Pool
    label_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dimensions: int
    normalize: bool
    budget_s: float
    queue_s: float
    namespace: bytes
    engine_crashes: int
    def __init__(self, request_id: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[_sampling_pb2.TokenSequence, _Mapping]]] = ..., pool: _Optional[_Union[Pool, str]] = ..., label_token_ids: _Optional[_Iterable[int]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., budget_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., namespace: _Optional[bytes] = ..., engine_crashes: _Optional[int] = ...) -> None: ...

class PoolResponse(_message.Message):
    __slots__ = ("vectors", "cached_tokens")
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    vectors: _containers.RepeatedScalarFieldContainer[bytes]
    cached_tokens: int
    def __init__(self, vectors: _Optional[_Iterable[bytes]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
