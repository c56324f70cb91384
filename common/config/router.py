"""The router, its clients, and what they may send."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from common.config.record import ConfigRecord, Port, Positive, Seconds
from common.config.server import NAME_WITHOUT_CA, ServerConfig, TlsConfig
from common.limits import HIGHEST, LOWEST, MAX_FRAMES, MAX_IMAGES, MAX_STREAM_INTERVAL

Priority = Annotated[int, Field(ge=LOWEST, le=HIGHEST)]
_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


class ClientsConfig(ConfigRecord):
    """Authentication of clients, and how they share the router."""

    api_keys: Path | None = Field(
        None,
        description="File of hashed API keys, reloaded when it changes, see docs/clients.md. "
        "Default: no authentication of clients",
    )
    isolate_cache_by_key: bool = Field(
        False, description="Separate prefix cache namespace for each API key"
    )
    max_queue_wait_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="Seconds that a request may wait for one of max_concurrent_requests. 0: "
        "rejected immediately",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="Host names that HTTP clients may use for this host, in addition to those of "
        "loopback",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Web sites whose pages may call /v1, such as https://example.com. *: all"
    )
    priority: Priority = Field(
        0,
        description="Maximum and default priority of a request. An API key can override it",
    )
    low_priority_values_first: bool = Field(
        False, description="Reverse priorities: a lower value is more urgent"
    )

    @field_validator("isolate_cache_by_key")
    @classmethod
    def _by_a_key(cls, salt_by_key: bool, info: ValidationInfo) -> bool:
        if salt_by_key and info.data.get("api_keys") is None:
            raise ValueError("needs --api-keys")
        return salt_by_key

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if _HOST.fullmatch(host) is None:
                raise ValueError("must be host names or addresses without ports")
        return tuple(host.lower() for host in hosts)

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError("must be http://HOST[:PORT], https://HOST[:PORT] or *")
        return origins


class ImagesConfig(ConfigRecord):
    """Images and videos in conversations with a vision model, see docs/images.md."""

    max_images: int = Field(8, ge=1, le=MAX_IMAGES, description="Maximum images of a request")
    max_tokens_per_image: Positive = Field(
        1280,
        description="Maximum tokens of an image, or of two frames of a video. Larger ones are "
        "scaled down",
    )
    max_frames: int = Field(
        64, ge=2, le=MAX_FRAMES, description="Maximum frames of all videos of a request"
    )
    allow_urls: bool = Field(
        False,
        description="Fetch images by http(s) URL from public hosts, without redirects",
    )
    fetch_timeout_s: Seconds = Field(10.0, description="Seconds for fetching one image")


Policy = Literal[
    "round_robin",
    "random",
    "power_of_two",
    "least_tokens",
    "least_requests",
    "shortest_queue",
    "prefix_aware",
    "session_affinity",
    "consistent_hash",
]
ReasoningParser = Literal["auto", "none", "deepseek-r1", "qwen3", "harmony"]
ToolParser = Literal[
    "auto",
    "none",
    "hermes",
    "llama3",
    "mistral",
    "deepseek",
    "qwen3-coder",
    "glm45",
    "harmony",
]
ToolArguments = Literal["free", "json", "schema"]
FingerprintChange = Literal["fail", "report"]
Reranker = Literal["none", "qwen3"]
PoolingType = Literal["auto", "last", "mean", "cls"]

MAX_MODELS = 16  # of one router: each has a tokenizer in memory and its own metric series


class ModelConfig(ConfigRecord):
    """One of several models of a router. Unset fields have the values of the router."""

    model: str = Field(min_length=1)
    served_model_name: str | None = Field(None, min_length=1)
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    encode: tuple[str, ...] = ()
    policy: Policy | None = None
    max_concurrent_requests: Positive | None = None
    reasoning_parser: ReasoningParser | None = None
    tool_parser: ToolParser | None = None
    tool_arguments: ToolArguments | None = None
    reranker: Reranker | None = None
    pooling_type: PoolingType | None = None

    @property
    def name(self) -> str:
        return self.served_model_name or self.model

    @property
    def nodes(self) -> frozenset[str]:
        """Node entries of all roles, which belong to this model alone."""
        return frozenset((*self.prefill, *self.decode, *self.encode))


class RouterConfig(ConfigRecord):
    """The router. It loads the tokenizers and the chat templates of its models, but no weights."""

    server: ServerConfig = ServerConfig(port=50050)
    http_port: Port = Field(
        8000, description="Port of the OpenAI-compatible HTTP API, on the same host"
    )
    models: tuple[ModelConfig, ...] = Field(
        (),
        description="Several models instead of --model, as a list in the file, or as one JSON "
        "object for each flag, see docs/multi-model.md. At most 16",
    )
    model: str = Field(
        "",
        validate_default=True,
        description="Directory or hub id of a Hugging Face checkpoint. Required without --models",
    )
    served_model_name: str | None = Field(
        None, description="Model name for HTTP clients. Default: the value of --model"
    )
    prefill: tuple[str, ...] = Field(
        (), description="Prefill nodes: host:port, dns:NAME:PORT or file:PATH"
    )
    decode: tuple[str, ...] = Field(
        (), description="Decode nodes: host:port, dns:NAME:PORT or file:PATH"
    )
    encode: tuple[str, ...] = Field(
        (), description="Encode nodes: host:port, dns:NAME:PORT or file:PATH. See docs/images.md"
    )
    policy: Policy = Field("prefix_aware", description="Routing policy, see docs/routing.md")
    processes: Positive = Field(
        1,
        description="Router processes that share the ports. Each has its own "
        "max_concurrent_requests",
    )
    clients: ClientsConfig = ClientsConfig()
    images: ImagesConfig = ImagesConfig()
    max_concurrent_requests: Positive = Field(
        1024,
        description="Concurrent requests of each model. One client can use at most 7/8 of them",
    )
    request_timeout_s: Seconds = Field(
        600.0,
        le=7 * 24 * 3600,  # nodes reject requests with a longer budget
        description="Seconds for a complete request",
    )
    suspect_after_s: Seconds = Field(
        5.0,
        description="Seconds without progress of a decode node's engine before it gets no new "
        "requests",
    )
    dead_after_s: Seconds = Field(
        10.0,
        description="Seconds without progress of a decode node's engine before its requests are "
        "replayed elsewhere",
    )
    max_queue_fraction: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Fraction of a request's time limit that it may wait on nodes. Requests with "
        "a longer expected wait are rejected immediately",
    )
    fingerprint_change: FingerprintChange = Field(
        "fail",
        description="Batch-invariant responses whose node is lost, if no node with its "
        "system_fingerprint is left. fail: they fail; report: another node continues them, and "
        "system_fingerprints of the response shows where",
    )
    idempotency_ttl_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="Seconds to keep a finished response for its idempotency key, and to continue "
        "one whose client has disconnected. 0: keys are ignored",
    )
    stream_interval: Positive = Field(
        1,
        le=MAX_STREAM_INTERVAL,
        description="Tokens of each event of a stream, after the first token. Requests can set "
        "their own",
    )
    hide_cached_tokens: bool = Field(
        False, description="Omit the number of cached prompt tokens from responses"
    )
    ignore_unknown_fields: bool = Field(
        False,
        description="Ignore unknown or unsupported fields of HTTP requests, even if they would "
        "affect the response. The response header baton-ignored-fields names them",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="Parser of the model's reasoning. auto: by its chat template"
    )
    reranker: Reranker = Field(
        "none",
        description="Prompt format for reranking with a generative model. qwen3: yes or no in the "
        "format of Qwen3-Reranker; none: compare embeddings",
    )
    pooling_type: PoolingType = Field(
        "auto",
        description="Pooling of hidden states into an embedding. auto: by the checkpoint's "
        "1_Pooling/config.json, otherwise the last token",
    )
    tool_arguments: ToolArguments = Field(
        "json",
        description="Grammar for arguments of tool calls that the model chooses. json: any JSON "
        "object; schema: the tool's schema (always for strict tools); free: none",
    )
    tool_parser: ToolParser = Field(
        "auto", description="Parser of the model's tool calls. auto: by its chat template"
    )
    slow_client_timeout_s: Seconds = Field(
        60.0,
        description="Seconds for which an HTTP client may leave response data unread before it is "
        "disconnected",
    )
    trace_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Fraction of requests to trace if the caller sends no trace context",
    )
    node_tls: TlsConfig = Field(
        TlsConfig(),
        description="TLS for calls to nodes. Unset fields have the values of server.tls",
    )

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        if len(models) > MAX_MODELS:
            raise ValueError(f"has {len(models)} models, at most {MAX_MODELS} are allowed")
        for name, count in Counter(each.name for each in models).items():
            if count > 1:
                raise ValueError(f"{count} models are called {name!r}: set served_model_name")
        for entry, count in Counter(entry for each in models for entry in each.nodes).items():
            if count > 1:
                raise ValueError(f"{entry} is listed for {count} models, and a node has only one")
        return models

    @field_validator("model")
    @classmethod
    def _one_or_several(cls, model: str, info: ValidationInfo) -> str:
        models = info.data.get("models")
        if models and model:
            raise ValueError("cannot be combined with --models")
        if not model and models == ():
            raise PydanticCustomError("missing", "required")
        return model

    @field_validator("served_model_name", "prefill", "decode", "encode")
    @classmethod
    def _of_one_model(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("models"):
            raise ValueError("must be set in each entry of --models")
        return value

    @field_validator("dead_after_s")
    @classmethod
    def _after_silence(cls, dead_s: float, info: ValidationInfo) -> float:
        if dead_s < info.data.get("suspect_after_s", 0.0):
            raise ValueError("must be at least --suspect-after-s")
        return dead_s

    @field_validator("node_tls")
    @classmethod
    def _calls(cls, tls: TlsConfig, info: ValidationInfo) -> TlsConfig:
        server = info.data.get("server")
        if not (tls.ca or (server and server.tls.ca)):
            if tls.cert:
                raise ValueError("needs ca: without it the certificates of nodes are not verified")
            if tls.server_name:
                raise ValueError(NAME_WITHOUT_CA)
        return tls

    @property
    def each_model(self) -> "tuple[RouterConfig, ...]":
        """The configuration of each model, as if the router served only that one."""
        if not self.models:
            return (self,)
        given = [each.model_dump(exclude_none=True) for each in self.models]
        return tuple(self.model_copy(update={"models": (), **fields}) for fields in given)

    @property
    def tls_to_nodes(self) -> TlsConfig:
        """TLS settings for calls to nodes. Used if it has a `ca`."""
        own, default = self.node_tls, self.server.tls
        shown = own if own.cert else default
        return TlsConfig(
            cert=shown.cert,
            key=shown.key,
            ca=own.ca or default.ca,
            server_name=own.server_name or default.server_name,
        )
