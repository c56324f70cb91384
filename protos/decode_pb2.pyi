from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class ToNode(_message.Message):
    __slots__ = ("peers", "submit", "cancel")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    peers: Peers
    submit: Submit
    cancel: CancelRequest
    def __init__(self, peers: _Optional[_Union[Peers, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("prefill_addresses",)
    PREFILL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    prefill_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prefill_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "request_id", "token_ids", "num_generated", "sampling", "prefill_addresses", "budget_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    request: int
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_generated: int
    sampling: _sampling_pb2.Sampling
    prefill_addresses: _containers.RepeatedScalarFieldContainer[str]
    budget_s: float
    def __init__(self, request: _Optional[int] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_generated: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., prefill_addresses: _Optional[_Iterable[str]] = ..., budget_s: _Optional[float] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: int
    def __init__(self, request: _Optional[int] = ...) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("step", "status")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    step: Step
    status: Status
    def __init__(self, step: _Optional[_Union[Step, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("request", "token", "ended", "reason", "cached_tokens", "error", "error_code")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    request: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    ended: _containers.RepeatedScalarFieldContainer[int]
    reason: _containers.RepeatedScalarFieldContainer[FinishReason]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    error: _containers.RepeatedScalarFieldContainer[str]
    error_code: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., ended: _Optional[_Iterable[int]] = ..., reason: _Optional[_Iterable[_Union[FinishReason, str]]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., error: _Optional[_Iterable[str]] = ..., error_code: _Optional[_Iterable[int]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("state", "serves_alone", "paired")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SERVES_ALONE_FIELD_NUMBER: _ClassVar[int]
    PAIRED_FIELD_NUMBER: _ClassVar[int]
    state: str
    serves_alone: bool
    paired: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, state: _Optional[str] = ..., serves_alone: _Optional[bool] = ..., paired: _Optional[_Iterable[str]] = ...) -> None: ...
