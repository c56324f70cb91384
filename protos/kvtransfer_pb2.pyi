from protos import images_pb2 as _images_pb2
from protos import last_words_pb2 as _last_words_pb2
from protos import prefixes_pb2 as _prefixes_pb2
from protos import request_pb2 as _request_pb2
from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromConsumer(_message.Message):
    __slots__ = ("hello", "open", "grant", "done", "cancel", "heartbeat", "forget")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    grant: Grant
    done: Done
    cancel: Cancel
    heartbeat: Heartbeat
    forget: Forget
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ...) -> None: ...

class FromProducer(_message.Message):
    __slots__ = ("hello", "admitted", "ready", "released", "failed", "heartbeat", "last_words")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LAST_WORDS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    admitted: Admitted
    ready: Ready
    released: Released
    failed: Failed
    heartbeat: Heartbeat
    last_words: _last_words_pb2.LastWords
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., last_words: _Optional[_Union[_last_words_pb2.LastWords, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("instance_id", "protocol_version", "fingerprint", "paths", "regions", "address", "tp", "pp", "state_pages")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    STATE_PAGES_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    protocol_version: int
    fingerprint: _containers.ScalarMap[str, str]
    paths: _containers.RepeatedCompositeFieldContainer[DataPath]
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    address: str
    tp: int
    pp: int
    state_pages: int
    def __init__(self, instance_id: _Optional[int] = ..., protocol_version: _Optional[int] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., paths: _Optional[_Iterable[_Union[DataPath, _Mapping]]] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., address: _Optional[str] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ..., state_pages: _Optional[int] = ...) -> None: ...

class DataPath(_message.Message):
    __slots__ = ("backend", "description", "rank")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    backend: str
    description: bytes
    rank: int
    def __init__(self, backend: _Optional[str] = ..., description: _Optional[bytes] = ..., rank: _Optional[int] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("base", "page_bytes", "num_pages")
    BASE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    base: int
    page_bytes: int
    num_pages: int
    def __init__(self, base: _Optional[int] = ..., page_bytes: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class HandoffId(_message.Message):
    __slots__ = ("instance", "request", "attempt")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    instance: int
    request: int
    attempt: int
    def __init__(self, instance: _Optional[int] = ..., request: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("id", "weight_version", "remaining", "prompt", "live", "prefix", "weights", "embeddings")
    ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    weight_version: bytes
    remaining: _request_pb2.Remaining
    prompt: Prompt
    live: Live
    prefix: Prefix
    weights: Weights
    embeddings: Embeddings
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., weight_version: _Optional[bytes] = ..., remaining: _Optional[_Union[_request_pb2.Remaining, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., live: _Optional[_Union[Live, _Mapping]] = ..., prefix: _Optional[_Union[Prefix, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., embeddings: _Optional[_Union[Embeddings, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("request", "prefix_hints", "encode_addresses")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HINTS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    request: _request_pb2.Request
    prefix_hints: _containers.RepeatedCompositeFieldContainer[_prefixes_pb2.PrefixAt]
    encode_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request: _Optional[_Union[_request_pb2.Request, _Mapping]] = ..., prefix_hints: _Optional[_Iterable[_Union[_prefixes_pb2.PrefixAt, _Mapping]]] = ..., encode_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Live(_message.Message):
    __slots__ = ("request", "ticket")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    request: _request_pb2.Request
    ticket: int
    def __init__(self, request: _Optional[_Union[_request_pb2.Request, _Mapping]] = ..., ticket: _Optional[int] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("token_ids", "namespace", "ticket")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    namespace: bytes
    ticket: int
    def __init__(self, token_ids: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., ticket: _Optional[int] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("first_piece", "num_pieces", "piece_bytes")
    FIRST_PIECE_FIELD_NUMBER: _ClassVar[int]
    NUM_PIECES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    first_piece: int
    num_pieces: int
    piece_bytes: int
    def __init__(self, first_piece: _Optional[int] = ..., num_pieces: _Optional[int] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class Embeddings(_message.Message):
    __slots__ = ("image", "num_pieces", "piece_bytes")
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PIECES_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    image: _images_pb2.Image
    num_pieces: int
    piece_bytes: int
    def __init__(self, image: _Optional[_Union[_images_pb2.Image, _Mapping]] = ..., num_pieces: _Optional[int] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("id", "prefix_tokens", "room_tokens", "gib_per_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROOM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GIB_PER_S_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    prefix_tokens: int
    room_tokens: int
    gib_per_s: float
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., prefix_tokens: _Optional[int] = ..., room_tokens: _Optional[int] = ..., gib_per_s: _Optional[float] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("id", "compute_tokens", "queued_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    compute_tokens: int
    queued_tokens: int
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., compute_tokens: _Optional[int] = ..., queued_tokens: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("id", "start", "end", "pages", "last", "first_token", "times", "logprobs", "prompt_logprobs", "checked", "sums", "token_ids")
    ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    start: int
    end: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    last: bool
    first_token: int
    times: PrefillTimes
    logprobs: _sampling_pb2.Logprobs
    prompt_logprobs: _sampling_pb2.Logprobs
    checked: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., last: _Optional[bool] = ..., first_token: _Optional[int] = ..., times: _Optional[_Union[PrefillTimes, _Mapping]] = ..., logprobs: _Optional[_Union[_sampling_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.Logprobs, _Mapping]] = ..., checked: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillTimes(_message.Message):
    __slots__ = ("bootstrap_s", "waiting_s", "prefill_s", "chunks")
    BOOTSTRAP_S_FIELD_NUMBER: _ClassVar[int]
    WAITING_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    bootstrap_s: float
    waiting_s: float
    prefill_s: float
    chunks: int
    def __init__(self, bootstrap_s: _Optional[float] = ..., waiting_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., chunks: _Optional[int] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("id", "held")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    held: bool
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., held: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    reason: str
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Forget(_message.Message):
    __slots__ = ("token_ids", "namespace")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    namespace: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("id", "reason", "retryable", "retry_after_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    reason: str
    retryable: bool
    retry_after_s: float
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., reason: _Optional[str] = ..., retryable: _Optional[bool] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "open_handoffs", "connecting")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPEN_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    CONNECTING_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    open_handoffs: int
    connecting: bool
    def __init__(self, sequence: _Optional[int] = ..., open_handoffs: _Optional[int] = ..., connecting: _Optional[bool] = ...) -> None: ...
