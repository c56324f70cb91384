from protos import last_words_pb2 as _last_words_pb2
from protos import prefixes_pb2 as _prefixes_pb2
from protos import request_pb2 as _request_pb2
from protos import router_pb2 as _router_pb2
from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_DISPATCH: _ClassVar[Phase]
    PHASE_PREALLOC_QUEUE: _ClassVar[Phase]
    PHASE_PREFILL_WAIT: _ClassVar[Phase]
    PHASE_TRANSFER: _ClassVar[Phase]
    PHASE_RELEASE: _ClassVar[Phase]
    PHASE_JOIN: _ClassVar[Phase]
    PHASE_LOCAL_QUEUE: _ClassVar[Phase]
    PHASE_LOCAL_PREFILL: _ClassVar[Phase]
    PHASE_RUNNING: _ClassVar[Phase]
    PHASE_RETRACTED: _ClassVar[Phase]
    PHASE_BOOTSTRAP_QUEUE: _ClassVar[Phase]
    PHASE_WAITING_QUEUE: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_INFLIGHT_QUEUE: _ClassVar[Phase]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_MOVED: _ClassVar[FinishReason]
PHASE_UNSPECIFIED: Phase
PHASE_DISPATCH: Phase
PHASE_PREALLOC_QUEUE: Phase
PHASE_PREFILL_WAIT: Phase
PHASE_TRANSFER: Phase
PHASE_RELEASE: Phase
PHASE_JOIN: Phase
PHASE_LOCAL_QUEUE: Phase
PHASE_LOCAL_PREFILL: Phase
PHASE_RUNNING: Phase
PHASE_RETRACTED: Phase
PHASE_BOOTSTRAP_QUEUE: Phase
PHASE_WAITING_QUEUE: Phase
PHASE_PREFILL: Phase
PHASE_INFLIGHT_QUEUE: Phase
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_MOVED: FinishReason

class ToNode(_message.Message):
    __slots__ = ("peers", "submits", "cancels", "protocol_version")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    peers: Peers
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedScalarFieldContainer[int]
    protocol_version: int
    def __init__(self, peers: _Optional[_Union[Peers, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[int]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("prefill_addresses", "decode_addresses", "own_address")
    PREFILL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    OWN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    prefill_addresses: _containers.RepeatedScalarFieldContainer[str]
    decode_addresses: _containers.RepeatedScalarFieldContainer[str]
    own_address: str
    def __init__(self, prefill_addresses: _Optional[_Iterable[str]] = ..., decode_addresses: _Optional[_Iterable[str]] = ..., own_address: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("number", "request", "remaining", "ticket", "prefill_addresses", "prefix_hints", "move_from", "encode_addresses")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HINTS_FIELD_NUMBER: _ClassVar[int]
    MOVE_FROM_FIELD_NUMBER: _ClassVar[int]
    ENCODE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: _request_pb2.Request
    remaining: _request_pb2.Remaining
    ticket: int
    prefill_addresses: _containers.RepeatedScalarFieldContainer[str]
    prefix_hints: _containers.RepeatedCompositeFieldContainer[_prefixes_pb2.PrefixAt]
    move_from: MoveFrom
    encode_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., request: _Optional[_Union[_request_pb2.Request, _Mapping]] = ..., remaining: _Optional[_Union[_request_pb2.Remaining, _Mapping]] = ..., ticket: _Optional[int] = ..., prefill_addresses: _Optional[_Iterable[str]] = ..., prefix_hints: _Optional[_Iterable[_Union[_prefixes_pb2.PrefixAt, _Mapping]]] = ..., move_from: _Optional[_Union[MoveFrom, _Mapping]] = ..., encode_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class MoveFrom(_message.Message):
    __slots__ = ("address", "ticket")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    address: str
    ticket: int
    def __init__(self, address: _Optional[str] = ..., ticket: _Optional[int] = ...) -> None: ...

class FromNode(_message.Message):
    __slots__ = ("step", "status", "quarantine", "engine_heartbeat", "last_words", "protocol_version")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LAST_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    step: Step
    status: Status
    quarantine: Quarantine
    engine_heartbeat: EngineHeartbeat
    last_words: _last_words_pb2.LastWords
    protocol_version: int
    def __init__(self, step: _Optional[_Union[Step, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., quarantine: _Optional[_Union[Quarantine, _Mapping]] = ..., engine_heartbeat: _Optional[_Union[EngineHeartbeat, _Mapping]] = ..., last_words: _Optional[_Union[_last_words_pb2.LastWords, _Mapping]] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Quarantine(_message.Message):
    __slots__ = ("under_way", "request")
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    under_way: bool
    request: int
    def __init__(self, under_way: _Optional[bool] = ..., request: _Optional[int] = ...) -> None: ...

class EngineHeartbeat(_message.Message):
    __slots__ = ("late_s",)
    LATE_S_FIELD_NUMBER: _ClassVar[int]
    late_s: float
    def __init__(self, late_s: _Optional[float] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("request", "token", "ended", "reason", "cached_tokens", "error", "error_code", "timeline", "begun", "retry_after_s", "logprobs", "prompt_logprobs", "predicted", "accepted", "rejected")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    request: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    ended: _containers.RepeatedScalarFieldContainer[int]
    reason: _containers.RepeatedScalarFieldContainer[FinishReason]
    cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    error: _containers.RepeatedScalarFieldContainer[str]
    error_code: _containers.RepeatedScalarFieldContainer[int]
    timeline: _containers.RepeatedCompositeFieldContainer[Timeline]
    begun: _containers.RepeatedScalarFieldContainer[int]
    retry_after_s: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    predicted: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    rejected: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., ended: _Optional[_Iterable[int]] = ..., reason: _Optional[_Iterable[_Union[FinishReason, str]]] = ..., cached_tokens: _Optional[_Iterable[int]] = ..., error: _Optional[_Iterable[str]] = ..., error_code: _Optional[_Iterable[int]] = ..., timeline: _Optional[_Iterable[_Union[Timeline, _Mapping]]] = ..., begun: _Optional[_Iterable[int]] = ..., retry_after_s: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., predicted: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., rejected: _Optional[_Iterable[int]] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("request", "logprobs")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request: int
    logprobs: _sampling_pb2.Logprobs
    def __init__(self, request: _Optional[int] = ..., logprobs: _Optional[_Union[_sampling_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("phase", "attempt", "start_s", "end_s", "attempts", "first_token_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    phase: _containers.RepeatedScalarFieldContainer[Phase]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    start_s: _containers.RepeatedScalarFieldContainer[float]
    end_s: _containers.RepeatedScalarFieldContainer[float]
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    first_token_s: float
    def __init__(self, phase: _Optional[_Iterable[_Union[Phase, str]]] = ..., attempt: _Optional[_Iterable[int]] = ..., start_s: _Optional[_Iterable[float]] = ..., end_s: _Optional[_Iterable[float]] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., first_token_s: _Optional[float] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("prefill_address", "path", "outcome", "reason", "pages", "bytes", "chunks")
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    prefill_address: str
    path: str
    outcome: str
    reason: str
    pages: int
    bytes: int
    chunks: int
    def __init__(self, prefill_address: _Optional[str] = ..., path: _Optional[str] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., chunks: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: bytes
    def __init__(self, name: _Optional[str] = ..., id: _Optional[bytes] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("state", "serves_alone", "falls_back", "links", "pages_total", "pages_free", "page_size", "prompts", "pages_s", "adapters", "weights", "paused", "fingerprint", "batch_invariant")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SERVES_ALONE_FIELD_NUMBER: _ClassVar[int]
    FALLS_BACK_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    state: str
    serves_alone: bool
    falls_back: bool
    links: _containers.RepeatedCompositeFieldContainer[_router_pb2.LinkState]
    pages_total: int
    pages_free: int
    page_size: int
    prompts: _router_pb2.Backlog
    pages_s: float
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    weights: bytes
    paused: bool
    fingerprint: str
    batch_invariant: bool
    def __init__(self, state: _Optional[str] = ..., serves_alone: _Optional[bool] = ..., falls_back: _Optional[bool] = ..., links: _Optional[_Iterable[_Union[_router_pb2.LinkState, _Mapping]]] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., page_size: _Optional[int] = ..., prompts: _Optional[_Union[_router_pb2.Backlog, _Mapping]] = ..., pages_s: _Optional[float] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., weights: _Optional[bytes] = ..., paused: _Optional[bool] = ..., fingerprint: _Optional[str] = ..., batch_invariant: _Optional[bool] = ...) -> None: ...
