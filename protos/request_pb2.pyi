from protos import images_pb2 as _images_pb2
from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Request(_message.Message):
    __slots__ = ("request_id", "token_ids", "num_generated", "sampling", "namespace", "adapter", "priority", "routing_key", "client", "client_weight", "engine_crashes", "images", "prediction", "stream_interval", "input_embeddings", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROUTING_KEY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_CRASHES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    INPUT_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: bytes
    num_generated: int
    sampling: _sampling_pb2.Sampling
    namespace: bytes
    adapter: bytes
    priority: int
    routing_key: int
    client: int
    client_weight: float
    engine_crashes: int
    images: _containers.RepeatedCompositeFieldContainer[_images_pb2.Image]
    prediction: bytes
    stream_interval: int
    input_embeddings: bytes
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., num_generated: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., namespace: _Optional[bytes] = ..., adapter: _Optional[bytes] = ..., priority: _Optional[int] = ..., routing_key: _Optional[int] = ..., client: _Optional[int] = ..., client_weight: _Optional[float] = ..., engine_crashes: _Optional[int] = ..., images: _Optional[_Iterable[_Union[_images_pb2.Image, _Mapping]]] = ..., prediction: _Optional[bytes] = ..., stream_interval: _Optional[int] = ..., input_embeddings: _Optional[bytes] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Remaining(_message.Message):
    __slots__ = ("budget_s", "queue_s")
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    budget_s: float
    queue_s: float
    def __init__(self, budget_s: _Optional[float] = ..., queue_s: _Optional[float] = ...) -> None: ...
