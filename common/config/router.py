"""The router, its clients, and what they may send."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from common.config.front import NAME_WITHOUT_CA, ServerConfig, TlsConfig
from common.config.record import ConfigRecord, Port, Positive, Seconds
from common.limits import MAX_IMAGES
from common.priority import HIGHEST, LOWEST

Priority = Annotated[int, Field(ge=LOWEST, le=HIGHEST)]
_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


class ClientsConfig(ConfigRecord):
    """Authentication of clients, and how they share the router."""

    api_keys: Path | None = Field(
        None,
        description="file of API keys' hashes, see docs/clients.md, read anew when it changes; "
        "default: clients need none",
    )
    salt_by_key: bool = Field(
        False, description="each API key has prefix caches of its own, apart from other keys'"
    )
    longest_wait_s: float = Field(
        2.0,
        ge=0,
        le=60,
        description="longest wait for one of --max-requests, in a short line; 0: refused at once",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (), description="names that HTTP clients may call this host by, besides loopback's own"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="web sites whose pages may call /v1, such as https://example.com; *: all"
    )
    priority: Priority = Field(
        0,
        description="highest priority that a request may have, and what it has unless it asks for "
        "less; a key may have another",
    )
    low_priority_values_first: bool = Field(
        False, description="clients count priorities the other way round: what is lower goes first"
    )

    @field_validator("salt_by_key")
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
                raise ValueError("must be names or addresses, without ports")
        return tuple(host.lower() for host in hosts)

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and _ORIGIN.fullmatch(origin) is None:
                raise ValueError("must be http://HOST[:PORT], or https, or *")
        return origins


class ImagesConfig(ConfigRecord):
    """Images in conversations with a vision model, see docs/images.md."""

    max_images: int = Field(8, ge=1, le=MAX_IMAGES, description="of one request")
    max_tokens: Positive = Field(1280, description="of one image: a larger one is made smaller")
    fetch: bool = Field(
        False,
        description="fetch images that a request names by an address: http(s), of public hosts, "
        "without redirects",
    )
    fetch_s: Seconds = Field(10.0, description="longest time for one of them")


class RouterConfig(ConfigRecord):
    """The router. It loads the tokenizer and the chat template of `model`, but no weights."""

    front: ServerConfig = ServerConfig(port=50050)
    http_port: Port = Field(8000, description="OpenAI-compatible HTTP, on the same host")
    model: str = Field(description="directory or hub id of a Hugging Face checkpoint")
    served_model_name: str | None = Field(
        None, description="what HTTP clients call the model; default: --model"
    )
    prefill: tuple[str, ...] = Field(
        (), description="prefill nodes: host:port, dns:NAME:PORT or file:PATH"
    )
    decode: tuple[str, ...] = Field(
        (), description="decode nodes: host:port, dns:NAME:PORT or file:PATH"
    )
    policy: Literal[
        "round_robin",
        "random",
        "power_of_two",
        "least_tokens",
        "prefix_aware",
        "session_affinity",
        "consistent_hash",
    ] = Field("prefix_aware", description="how a request's nodes are chosen, see docs/routing.md")
    processes: Positive = Field(
        1,
        description="router processes that share the ports; each has --max-requests of its own",
    )
    clients: ClientsConfig = ClientsConfig()
    images: ImagesConfig = ImagesConfig()
    max_requests: Positive = Field(
        1024, description="live requests, of which one client has 7/8 at most"
    )
    budget_s: Seconds = Field(
        600.0,
        le=7 * 24 * 3600,  # nodes reject requests with a longer budget
        description="total time a request may take",
    )
    silent_s: Seconds = Field(
        5.0, description="no request goes to a decode node whose engine has not moved for so long"
    )
    dead_s: Seconds = Field(
        10.0, description="the same until its requests go on at another decode node"
    )
    queue_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="share of its budget that a request may wait at the nodes before its prompt's "
        "turn; where it would be longer, it is refused at once",
    )
    keep_answers_s: float = Field(
        30.0,
        ge=0,
        le=3600,
        description="an answer to a request with an idempotency key is kept for so long after its"
        " end, and goes on for so long once its client has left; 0: keys are not heeded",
    )
    hide_cached_tokens: bool = Field(
        False, description="do not tell clients how much of their prompt was cached"
    )
    ignore_unknown_fields: bool = Field(
        False,
        description="ignore fields of HTTP requests that are unknown or not supported, also those "
        "that would change the answer; the header baton-ignored-fields of the answer names them",
    )
    reasoning_parser: Literal["auto", "none", "deepseek-r1", "qwen3", "harmony"] = Field(
        "auto", description="how the model marks what it thinks; auto: as its chat template shows"
    )
    reranker: Literal["none", "qwen3"] = Field(
        "none",
        description="how a model that generates is asked for scores; qwen3: in Qwen3-Reranker's "
        "words, for a yes or a no; none: embeddings are compared",
    )
    pooling: Literal["auto", "last", "mean", "cls"] = Field(
        "auto",
        description="how hidden states become an embedding; auto: as the checkpoint's "
        "1_Pooling/config.json says, else that of the last token",
    )
    tool_arguments: Literal["free", "json", "schema"] = Field(
        "json",
        description="grammar of the arguments of a tool call that the model chooses to make; json: "
        "any JSON object, schema: the tool's schema (strict tools always), free: none",
    )
    tool_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3",
        "mistral",
        "deepseek",
        "qwen3-coder",
        "glm45",
        "harmony",
    ] = Field("auto", description="how the model calls tools; auto: as its chat template shows")
    unread_s: Seconds = Field(
        60.0,
        description="an HTTP client that has not read for so long what waits for it is cut off",
    )
    trace_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests that get a trace, where theirs has not begun",
    )
    nodes_tls: TlsConfig = Field(
        TlsConfig(), description="for calls to nodes; what is unset is taken from front.tls"
    )

    @field_validator("dead_s")
    @classmethod
    def _after_silence(cls, dead_s: float, info: ValidationInfo) -> float:
        if dead_s < info.data.get("silent_s", 0.0):
            raise ValueError("must not be less than --silent-s")
        return dead_s

    @field_validator("nodes_tls")
    @classmethod
    def _calls(cls, tls: TlsConfig, info: ValidationInfo) -> TlsConfig:
        front = info.data.get("front")
        if not (tls.ca or (front and front.tls.ca)):
            if tls.cert:
                raise ValueError("needs ca: nodes that nobody checks could be anyone's")
            if tls.server_name:
                raise ValueError(NAME_WITHOUT_CA)
        return tls

    @property
    def tls_to_nodes(self) -> TlsConfig:
        """TLS for calls to nodes. It is used if it has a `ca`."""
        own, front = self.nodes_tls, self.front.tls
        shown = own if own.cert else front
        return TlsConfig(
            cert=shown.cert,
            key=shown.key,
            ca=own.ca or front.ca,
            server_name=own.server_name or front.server_name,
        )
