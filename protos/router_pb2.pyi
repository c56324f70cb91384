from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "reasoning", "tool_calls", "tool_call_id", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    parts: _containers.RepeatedCompositeFieldContainer[ChatPart]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ChatPart, _Mapping]]] = ...) -> None: ...

class ChatPart(_message.Message):
    __slots__ = ("text", "image", "video", "low_detail")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    LOW_DETAIL_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: bytes
    video: Video
    low_detail: bool
    def __init__(self, text: _Optional[str] = ..., image: _Optional[bytes] = ..., video: _Optional[_Union[Video, _Mapping]] = ..., low_detail: _Optional[bool] = ...) -> None: ...

class Video(_message.Message):
    __slots__ = ("frames", "fps")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedScalarFieldContainer[bytes]
    fps: float
    def __init__(self, frames: _Optional[_Iterable[bytes]] = ..., fps: _Optional[float] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools", "template_settings", "reasoning_effort", "continue_final_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedScalarFieldContainer[str]
    template_settings: str
    reasoning_effort: str
    continue_final_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ..., template_settings: _Optional[str] = ..., reasoning_effort: _Optional[str] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "messages", "token_ids", "input_embeddings", "sampling", "timeout_s", "session_id", "cache_salt", "priority", "adapter", "prediction", "stream_interval", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INPUT_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    messages: ChatMessages
    token_ids: TokenIds
    input_embeddings: InputEmbeddings
    sampling: _sampling_pb2.Sampling
    timeout_s: float
    session_id: str
    cache_salt: str
    priority: int
    adapter: str
    prediction: str
    stream_interval: int
    model: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., input_embeddings: _Optional[_Union[InputEmbeddings, _Mapping]] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., timeout_s: _Optional[float] = ..., session_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., adapter: _Optional[str] = ..., prediction: _Optional[str] = ..., stream_interval: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class InputEmbeddings(_message.Message):
    __slots__ = ("values", "num_tokens")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    num_tokens: int
    def __init__(self, values: _Optional[bytes] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "finish_reason", "usage", "stop_string", "stop_token_id", "logprobs", "prompt_logprobs", "reasoning", "tool_calls", "versions", "prompt_hidden_states", "hidden_states", "prompt_routed_experts", "routed_experts", "seed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    usage: Usage
    stop_string: str
    stop_token_id: int
    logprobs: _sampling_pb2.Logprobs
    prompt_logprobs: _sampling_pb2.Logprobs
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallPart]
    versions: _containers.RepeatedCompositeFieldContainer[ModelVersion]
    prompt_hidden_states: bytes
    hidden_states: bytes
    prompt_routed_experts: bytes
    routed_experts: bytes
    seed: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_sampling_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_sampling_pb2.Logprobs, _Mapping]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallPart, _Mapping]]] = ..., versions: _Optional[_Iterable[_Union[ModelVersion, _Mapping]]] = ..., prompt_hidden_states: _Optional[bytes] = ..., hidden_states: _Optional[bytes] = ..., prompt_routed_experts: _Optional[bytes] = ..., routed_experts: _Optional[bytes] = ..., seed: _Optional[int] = ...) -> None: ...

class ModelVersion(_message.Message):
    __slots__ = ("first_token", "weights", "system_fingerprint")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    weights: bytes
    system_fingerprint: str
    def __init__(self, first_token: _Optional[int] = ..., weights: _Optional[bytes] = ..., system_fingerprint: _Optional[str] = ...) -> None: ...

class ToolCallPart(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Input(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "inputs", "dimensions", "timeout_s", "cache_salt", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    inputs: _containers.RepeatedCompositeFieldContainer[Input]
    dimensions: int
    timeout_s: float
    cache_salt: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., dimensions: _Optional[int] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "vectors", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    vectors: _containers.RepeatedScalarFieldContainer[bytes]
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., vectors: _Optional[_Iterable[bytes]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "queries", "documents", "timeout_s", "cache_salt", "instruct", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    INSTRUCT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    queries: _containers.RepeatedScalarFieldContainer[str]
    documents: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    cache_salt: str
    instruct: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., queries: _Optional[_Iterable[str]] = ..., documents: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., instruct: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("request_id", "scores", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    scores: _containers.RepeatedScalarFieldContainer[float]
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., scores: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class ScoreTokensRequest(_message.Message):
    __slots__ = ("request_id", "prompts", "label_token_ids", "apply_softmax", "timeout_s", "cache_salt", "model")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    LABEL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    APPLY_SOFTMAX_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompts: _containers.RepeatedCompositeFieldContainer[Input]
    label_token_ids: _containers.RepeatedScalarFieldContainer[int]
    apply_softmax: bool
    timeout_s: float
    cache_salt: str
    model: str
    def __init__(self, request_id: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[Input, _Mapping]]] = ..., label_token_ids: _Optional[_Iterable[int]] = ..., apply_softmax: _Optional[bool] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ScoreTokensResponse(_message.Message):
    __slots__ = ("request_id", "scores", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    scores: _containers.RepeatedCompositeFieldContainer[TokenScores]
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[TokenScores, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, scores: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "messages", "model")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages: ChatMessages
    model: str
    def __init__(self, text: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "model")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    model: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., model: _Optional[str] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "context_length", "vocabulary_size", "eos_token_ids", "has_chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    def __init__(self, name: _Optional[str] = ..., context_length: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("nodes", "router", "plan", "plans")
    NODES_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[ClusterNode]
    router: RouterState
    plan: Plan
    plans: _containers.RepeatedCompositeFieldContainer[Plan]
    def __init__(self, nodes: _Optional[_Iterable[_Union[ClusterNode, _Mapping]]] = ..., router: _Optional[_Union[RouterState, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., plans: _Optional[_Iterable[_Union[Plan, _Mapping]]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("acts", "pressures", "events", "ago_s", "model")
    class PressuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ACTS_FIELD_NUMBER: _ClassVar[int]
    PRESSURES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    acts: bool
    pressures: _containers.ScalarMap[str, float]
    events: _containers.RepeatedCompositeFieldContainer[PlanEvent]
    ago_s: float
    model: str
    def __init__(self, acts: _Optional[bool] = ..., pressures: _Optional[_Mapping[str, float]] = ..., events: _Optional[_Iterable[_Union[PlanEvent, _Mapping]]] = ..., ago_s: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class PlanEvent(_message.Message):
    __slots__ = ("what", "because", "ago_s")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    what: str
    because: str
    ago_s: float
    def __init__(self, what: _Optional[str] = ..., because: _Optional[str] = ..., ago_s: _Optional[float] = ...) -> None: ...

class ReportPlanRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class ReportPlanResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterState(_message.Message):
    __slots__ = ("state", "reason", "version", "uptime_s", "live_requests", "max_requests", "model", "context_length", "has_chat_template", "processes", "silent_processes", "oldest_process_s", "in_use", "rejected_requests", "failed_requests", "recent", "models")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    SILENT_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROCESS_S_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    REJECTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    state: str
    reason: str
    version: str
    uptime_s: float
    live_requests: int
    max_requests: int
    model: str
    context_length: int
    has_chat_template: bool
    processes: int
    silent_processes: int
    oldest_process_s: float
    in_use: _containers.RepeatedScalarFieldContainer[str]
    rejected_requests: int
    failed_requests: int
    recent: RecentRequests
    models: _containers.RepeatedCompositeFieldContainer[ModelState]
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., live_requests: _Optional[int] = ..., max_requests: _Optional[int] = ..., model: _Optional[str] = ..., context_length: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., processes: _Optional[int] = ..., silent_processes: _Optional[int] = ..., oldest_process_s: _Optional[float] = ..., in_use: _Optional[_Iterable[str]] = ..., rejected_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., recent: _Optional[_Union[RecentRequests, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelState, _Mapping]]] = ...) -> None: ...

class ModelState(_message.Message):
    __slots__ = ("name", "state", "reason", "context_length", "has_chat_template", "live_requests", "max_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    reason: str
    context_length: int
    has_chat_template: bool
    live_requests: int
    max_requests: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., context_length: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., live_requests: _Optional[int] = ..., max_requests: _Optional[int] = ...) -> None: ...

class RecentRequests(_message.Message):
    __slots__ = ("window_s", "rejected_requests", "failed_requests", "ttft", "itl")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    REJECTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    rejected_requests: int
    failed_requests: int
    ttft: LatencySummary
    itl: LatencySummary
    def __init__(self, window_s: _Optional[float] = ..., rejected_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., ttft: _Optional[_Union[LatencySummary, _Mapping]] = ..., itl: _Optional[_Union[LatencySummary, _Mapping]] = ...) -> None: ...

class LatencySummary(_message.Message):
    __slots__ = ("count", "p50_s", "p99_s")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50_s: float
    p99_s: float
    def __init__(self, count: _Optional[int] = ..., p50_s: _Optional[float] = ..., p99_s: _Optional[float] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("state", "window_s", "rejected_requests", "failed_requests", "ttft", "itl")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    REJECTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    state: RouterState
    window_s: float
    rejected_requests: int
    failed_requests: int
    ttft: _containers.RepeatedScalarFieldContainer[int]
    itl: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, state: _Optional[_Union[RouterState, _Mapping]] = ..., window_s: _Optional[float] = ..., rejected_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., ttft: _Optional[_Iterable[int]] = ..., itl: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainRouterRequest(_message.Message):
    __slots__ = ("in_turn",)
    IN_TURN_FIELD_NUMBER: _ClassVar[int]
    in_turn: bool
    def __init__(self, in_turn: _Optional[bool] = ...) -> None: ...

class DrainRouterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("request_id", "source", "target")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    source: str
    target: str
    def __init__(self, request_id: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class MoveResponse(_message.Message):
    __slots__ = ("request_id", "source", "target")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    source: str
    target: str
    def __init__(self, request_id: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("id", "fresh")
    ID_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    fresh: bool
    def __init__(self, id: _Optional[bytes] = ..., fresh: _Optional[bool] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("pages_freed",)
    PAGES_FREED_FIELD_NUMBER: _ClassVar[int]
    pages_freed: int
    def __init__(self, pages_freed: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode", "model")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    mode: str
    model: str
    def __init__(self, mode: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("fresh", "aborted")
    FRESH_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    fresh: bool
    aborted: int
    def __init__(self, fresh: _Optional[bool] = ..., aborted: _Optional[int] = ...) -> None: ...

class ContinueRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ContinueResponse(_message.Message):
    __slots__ = ("was_paused",)
    WAS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    was_paused: bool
    def __init__(self, was_paused: _Optional[bool] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("path", "abort", "from_node", "model")
    PATH_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FROM_NODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    path: str
    abort: bool
    from_node: str
    model: str
    def __init__(self, path: _Optional[str] = ..., abort: _Optional[bool] = ..., from_node: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("id", "aborted")
    ID_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    aborted: int
    def __init__(self, id: _Optional[bytes] = ..., aborted: _Optional[int] = ...) -> None: ...

class ReleaseMemoryRequest(_message.Message):
    __slots__ = ("tags", "model")
    TAGS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    model: str
    def __init__(self, tags: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ...) -> None: ...

class ReleaseMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeMemoryRequest(_message.Message):
    __slots__ = ("tags", "model")
    TAGS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    model: str
    def __init__(self, tags: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ...) -> None: ...

class ResumeMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("num_steps", "model")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    model: str
    def __init__(self, num_steps: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ProfilesResponse(_message.Message):
    __slots__ = ("profiles",)
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    profiles: _containers.RepeatedCompositeFieldContainer[Profile]
    def __init__(self, profiles: _Optional[_Iterable[_Union[Profile, _Mapping]]] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("role", "address", "path")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    path: str
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ClusterNode(_message.Message):
    __slots__ = ("role", "address", "instance_id", "pids", "state", "pages", "links", "queues", "counters", "steps", "model", "mode", "context_length", "weights", "seen_s", "prompts", "ranks", "group", "group_rank", "served_model")
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
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SEEN_S_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    GROUP_RANK_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    instance_id: int
    pids: _containers.RepeatedScalarFieldContainer[int]
    state: str
    pages: _containers.ScalarMap[str, int]
    links: _containers.RepeatedCompositeFieldContainer[LinkState]
    queues: _containers.ScalarMap[str, int]
    counters: _containers.ScalarMap[str, int]
    steps: int
    model: str
    mode: str
    context_length: int
    weights: bytes
    seen_s: float
    prompts: Backlog
    ranks: _containers.RepeatedCompositeFieldContainer[RankState]
    group: str
    group_rank: int
    served_model: str
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., instance_id: _Optional[int] = ..., pids: _Optional[_Iterable[int]] = ..., state: _Optional[str] = ..., pages: _Optional[_Mapping[str, int]] = ..., links: _Optional[_Iterable[_Union[LinkState, _Mapping]]] = ..., queues: _Optional[_Mapping[str, int]] = ..., counters: _Optional[_Mapping[str, int]] = ..., steps: _Optional[int] = ..., model: _Optional[str] = ..., mode: _Optional[str] = ..., context_length: _Optional[int] = ..., weights: _Optional[bytes] = ..., seen_s: _Optional[float] = ..., prompts: _Optional[_Union[Backlog, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankState, _Mapping]]] = ..., group: _Optional[str] = ..., group_rank: _Optional[int] = ..., served_model: _Optional[str] = ...) -> None: ...

class Backlog(_message.Message):
    __slots__ = ("queued_s", "token_s")
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    queued_s: float
    token_s: float
    def __init__(self, queued_s: _Optional[float] = ..., token_s: _Optional[float] = ...) -> None: ...

class RankState(_message.Message):
    __slots__ = ("rank", "pid", "device", "memory_bytes", "steps_behind")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_BEHIND_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    device: str
    memory_bytes: int
    steps_behind: int
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., device: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., steps_behind: _Optional[int] = ...) -> None: ...

class LinkState(_message.Message):
    __slots__ = ("peer", "path", "gib_per_s", "members")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    GIB_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    path: str
    gib_per_s: float
    members: _containers.RepeatedCompositeFieldContainer[LinkMember]
    def __init__(self, peer: _Optional[str] = ..., path: _Optional[str] = ..., gib_per_s: _Optional[float] = ..., members: _Optional[_Iterable[_Union[LinkMember, _Mapping]]] = ...) -> None: ...

class LinkMember(_message.Message):
    __slots__ = ("rank", "producer_rank", "path", "gib_per_s")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_RANK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    GIB_PER_S_FIELD_NUMBER: _ClassVar[int]
    rank: int
    producer_rank: int
    path: str
    gib_per_s: float
    def __init__(self, rank: _Optional[int] = ..., producer_rank: _Optional[int] = ..., path: _Optional[str] = ..., gib_per_s: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request_id", "label", "outcome", "error", "seconds", "prompt_tokens", "cached_tokens", "completion_tokens", "events", "nodes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    label: str
    outcome: str
    error: str
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    events: _containers.RepeatedCompositeFieldContainer[ExplainedEvent]
    nodes: _containers.RepeatedCompositeFieldContainer[ExplainingNode]
    def __init__(self, request_id: _Optional[str] = ..., label: _Optional[str] = ..., outcome: _Optional[str] = ..., error: _Optional[str] = ..., seconds: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., events: _Optional[_Iterable[_Union[ExplainedEvent, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[ExplainingNode, _Mapping]]] = ...) -> None: ...

class ExplainedEvent(_message.Message):
    __slots__ = ("at_s", "where", "node", "event")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    where: str
    node: str
    event: RequestEvent
    def __init__(self, at_s: _Optional[float] = ..., where: _Optional[str] = ..., node: _Optional[str] = ..., event: _Optional[_Union[RequestEvent, _Mapping]] = ...) -> None: ...

class ExplainingNode(_message.Message):
    __slots__ = ("role", "address", "parts", "kept", "problem")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    parts: int
    kept: int
    problem: str
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., parts: _Optional[int] = ..., kept: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("at_s", "what", "detail")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    what: str
    detail: str
    def __init__(self, at_s: _Optional[float] = ..., what: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
