"""Everything that can be configured, as typed records. How they are read: common/settings.py.

A class of the system takes the record of its own concern, never the whole.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from common.priority import HIGHEST, LOWEST
from common.serve_protocol import MAX_ADAPTERS, MAX_IMAGES

_COLLECTOR = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?/?")

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]
Priority = Annotated[int, Field(ge=LOWEST, le=HIGHEST)]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CacheConfig(Record):
    """KV pages on the device and in host memory."""

    page_size: int = Field(16, description="tokens per KV page, a power of two of at least 16")
    num_pages: Positive | None = Field(None, description="pages in the pool; default: by memory")
    memory_fraction: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="of the GPU's memory, for weights, graphs and pages; of a CPU's free memory, "
        "of which pages get an eighth, or 1 GiB where that is more",
    )
    host_pages: int = Field(
        -1,
        ge=-1,
        description="host pages for retracted requests, on decode nodes; -1: as many as the pool, "
        "and with CUDA 4 GiB of them at most, which are pinned",
    )
    dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="of keys, values and latents in pages; auto: the one that is computed in, fp8: "
        "half the memory of 16 bits; alike on nodes that pair",
    )
    prefix_cache: bool = Field(True, description="keep the KV of finished requests for reuse")

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 16 or value & (value - 1):
            raise ValueError("must be a power of two of at least 16")
        return value


class TiersConfig(Record):
    """Where the KV is kept that the prefix cache has no room for, see docs/tiers.md."""

    host_bytes: int = Field(
        0,
        ge=0,
        description="host memory for it, beside host_pages, pinned with CUDA; it pays if there is "
        "more of it than of the pool. 0: nowhere",
    )
    file_dir: Path | None = Field(
        None,
        description="what leaves that host memory is in files below this directory, and is there "
        "after a restart; for those only who may read prompts. Default: nowhere",
    )
    file_bytes: int = Field(
        0, ge=0, description="of each node's files there; it pays if they are more than host_bytes"
    )

    @model_validator(mode="after")
    def _files_are_below_host_memory(self) -> Self:
        if (self.file_dir is not None) != (self.file_bytes > 0):
            raise ValueError("file_dir and file_bytes go together")
        if self.file_bytes and not self.host_bytes:
            raise ValueError("file_dir: files are read by way of host_bytes, of which there are 0")
        return self


class SchedulerConfig(Record):
    """How batches are built."""

    max_running: Positive = Field(256, description="requests in the running batch, and slots")
    max_waiting: Positive = Field(
        1024, description="requests that wait, before Overloaded; before a replay is, twice as many"
    )
    max_waiting_tokens: Positive = Field(
        1 << 24, description="tokens of requests that wait, before Overloaded; 4 bytes each"
    )
    chunk_tokens: int = Field(
        0, ge=-1, description="prompt tokens per forward; -1: never cut, 0: 2048, less on a CPU"
    )
    max_prefill_tokens: Positive = Field(
        16384, description="prompt tokens per forward over all requests"
    )
    policy: Literal["slack", "fcfs", "lpm", "dfs-weight", "lof", "random"] = Field(
        "slack",
        description="order of the waiting queue; slack: as they came, but who may wait less first",
    )
    preempt_by: int = Field(
        0,
        ge=0,
        le=HIGHEST - LOWEST,
        description="a request that finds no room takes the place of running ones whose priority "
        "is lower by so much; they wait in host memory. 0: never",
    )
    max_preempted: Positive = Field(
        64, description="running requests that may be away for that at once, each with a slot"
    )
    overlap: bool = Field(True, description="process step N while the device runs step N+1")
    overlap_prefills: bool = Field(
        True, description="overlap two prefills in a row; off favours the first one's TTFT"
    )
    mixed_chunk: bool = Field(
        True,
        description="decode rows ride in a prefill chunk's forward; off: they wait until no prompt "
        "is to be computed",
    )
    new_token_ratio: float = Field(
        0.7, gt=0, le=1, description="share of a request's remaining tokens reserved at first"
    )
    min_new_token_ratio: float = Field(0.098, gt=0, le=1, description="where its decay ends")
    new_token_ratio_steps: Positive = Field(600, description="decode steps that decay takes")
    stall_s: Seconds = Field(
        10.0,
        description="longest time without progress until the engine counts as dead, if its step "
        "should not take a fifth of that or more",
    )
    first_step_s: Seconds = Field(
        120.0, description="the same in a first step of its kind, which may compile kernels"
    )
    watchdog_s: Seconds = Field(
        300.0, description="longest time with work waiting and no step, until the node ends"
    )

    @property
    def spare_slots(self) -> int:
        """Besides those of running requests."""
        return self.max_preempted if self.preempt_by else 0

    @property
    def num_slots(self) -> int:
        return self.max_running + self.spare_slots


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def check_adapter_name(name: str) -> str:
    """Raises ValueError for what clients could not call an adapter."""
    if _ADAPTER_NAME.fullmatch(name) is None:
        raise ValueError(
            "a name of an adapter is 1 to 128 letters, digits, and ._:/- after the first"
        )
    return name


class LoraConfig(Record):
    """LoRA adapters, see docs/lora.md."""

    directory: Path | None = Field(
        None,
        description="adapters are read below it, and nowhere else; default: there are none, and no "
        "memory is taken for them",
    )
    adapters: tuple[str, ...] = Field(
        (), description="loaded at start: NAME, or NAME=PATH, of a directory below that one"
    )
    slots: Positive = Field(
        4, description="on the device: of so many adapters requests are computed at once"
    )
    max_rank: int = Field(32, ge=1, le=512, description="of an adapter; slots have room for it")
    max_loaded: int = Field(
        64, ge=1, le=MAX_ADAPTERS, description="adapters in host memory, in slots or not"
    )
    max_bytes: Positive = Field(4 << 30, description="host memory that they take together")

    @field_validator("adapters")
    @classmethod
    def _below(cls, adapters: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if adapters and info.data.get("directory") is None:
            raise ValueError("needs lora.directory")
        for adapter in adapters:
            check_adapter_name(adapter.partition("=")[0])
        return adapters


Quantize = Literal["none", "int8"]
ModelBackend = Literal["auto", "native", "transformers"]
CpuKernels = Literal["auto", "off"]


class SpeculationConfig(Record):
    """Tokens that are guessed, and verified several at a time, on decode nodes."""

    drafter: Literal["none", "ngram"] = Field(
        "none",
        description="who guesses an answer's next tokens; ngram: they follow where the newest ones "
        "stood before. Answers are the same, and sooner there where they repeat their prompt",
    )
    max_drafts: int = Field(
        5, ge=1, le=15, description="tokens guessed for a request and step, at most"
    )
    min_match: Positive = Field(
        3, description="newest tokens that must have stood before, for ngram to go on from there"
    )
    adaptive: bool = Field(
        True,
        description="guess as many as pay, by what became of those before and what a step costs; "
        "off: always as many as there are",
    )


class EngineConfig(Record):
    """The model and the device it runs on."""

    model: str = Field(description="directory or hub id of a Hugging Face checkpoint")
    device: str = Field("auto", description="auto | cpu | cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="auto: bfloat16 on CUDA and on a CPU that multiplies it natively, unless the "
        "checkpoint is float32 and small; else float32",
    )
    quantize: Quantize = Field(
        "none",
        description="int8: matrices in 8 bits, half the memory of bfloat16 and faster, on a CPU; "
        "alike on nodes that pair",
    )
    model_backend: ModelBackend = Field(
        "auto",
        description="what computes the model; auto: native where its family has blocks here, else "
        "transformers: its class there, with our attention; alike on nodes that pair",
    )
    weights_directory: Path | None = Field(
        None,
        description="other weights of the model are read below it at run time, and nowhere else; "
        "default: there are none",
    )
    profile_directory: Path | None = Field(
        None, description="traces of the profiler are written there; default: there are none"
    )
    context_length: Positive | None = Field(None, description="default: the model's")
    threads: int = Field(
        0,
        ge=0,
        description="torch threads of the engine on a CPU; 0: OMP_NUM_THREADS where it is set, "
        "else one for each core that it may use",
    )
    cpu_kernels: CpuKernels = Field(
        "auto",
        description="operations compiled for this CPU at the first start; auto: where there is a "
        "C++ compiler, off: torch's own",
    )
    cuda_graphs: bool = Field(
        True,
        description="decode steps of decode nodes on CUDA as graphs, captured at start; off: for "
        "debugging",
    )
    cache: CacheConfig = CacheConfig()
    tiers: TiersConfig = TiersConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    lora: LoraConfig = LoraConfig()
    speculation: SpeculationConfig = SpeculationConfig()


class TransferConfig(Record):
    """Pairing and hand-offs."""

    path: Literal["auto", "nixl", "tcp"] = Field(
        "auto", description="data path; auto: nixl where a one-sided path is proved, else tcp"
    )
    data_host: str = Field("127.0.0.1", description="address that the tcp backend binds and tells")
    data_port: Port = Field(
        0, description="port there; 0: any free one, which no firewall can name"
    )
    encrypt: Literal["auto", "on", "off"] = Field(
        "auto",
        description="TLS for pages over tcp; auto: where front.tls has a certificate; on: always,"
        " and no rdma, which has none",
    )
    heartbeat_s: Seconds = Field(1.0, description="between two beats of a stream of a pair")
    missed_beats: Positive = Field(5, description="beats missed until a stream is ended")
    progress_s: Seconds = Field(10.0, description="longest wait for a chunk, from admission on")
    released_s: Seconds = Field(2.0, description="longest wait for the answer to Done")
    read_s: Seconds = Field(5.0, description="longest read, before its bytes are counted")
    min_gib_per_s: float = Field(0.0, ge=0, description="a link slower than this is refused")
    check_every: int = Field(
        64,
        ge=0,
        description="of a prefill node: one page in so many is compared by its checksum once it has"
        " been read, where pages are in host memory; 0: none",
    )
    canary_tokens: int = Field(
        8,
        ge=0,
        le=64,
        description="of a decode node: so many tokens after a short prompt must be the same with "
        "the KV of a prefill node and with its own, when they are paired; 0: nothing is tried",
    )


_NAME_WITHOUT_CA = "server_name says nothing without ca"


class TlsConfig(Record):
    """TLS by PEM files, which are read anew when they change; without any, nothing is encrypted."""

    cert: Path | None = Field(
        None, description="certificate shown to the other side, and its chain"
    )
    key: Path | None = Field(None, description="its private key")
    ca: Path | None = Field(
        None,
        description="who must have signed the other side's certificate; callers must then show one",
    )
    server_name: str | None = Field(
        None, description="name that the certificates of nodes have; default: the address called"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        return self

    @property
    def mutual(self) -> bool:
        """Each side shows a certificate, and checks the other's."""
        return self.cert is not None and self.ca is not None


class FrontConfig(Record):
    """Where a program listens."""

    host: str = Field("127.0.0.1", description="address listened on; 0.0.0.0: all of this host's")
    port: Port = Field(description="gRPC")
    metrics_port: Port | None = Field(None, description="Prometheus metrics; default: none")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the least that is logged, to standard error"
    )
    log_format: Literal["text", "json"] = Field("text", description="json: one object a line")
    drain_s: Seconds = Field(45.0, description="longest wait for running requests at SIGTERM")
    health_port: Port | None = Field(
        None, description="gRPC health alone, never with TLS, for probes; default: none"
    )
    tls: TlsConfig = TlsConfig()
    secret_file: Path | None = Field(
        None,
        description="cluster secrets, one a line, read anew when it changes: the first one signs, "
        "all are heard; default: the variable BATON_SECRET, if it is set",
    )
    insecure: bool = Field(
        False,
        description="listen beyond this host although callers need neither secret nor certificate",
    )
    otlp_endpoint: str | None = Field(
        None, description="OpenTelemetry collector for traces, http://HOST:4317; default: none"
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _collector(cls, url: str | None) -> str | None:
        if url is not None and _COLLECTOR.fullmatch(url) is None:
            raise ValueError("must be http://HOST:PORT, or https, of OTLP over gRPC")
        return url

    @field_validator("tls")
    @classmethod
    def _serves(cls, tls: TlsConfig) -> TlsConfig:
        if tls.ca is not None and tls.cert is None:
            raise ValueError("ca is for checking callers over TLS, which takes cert and key")
        if tls.server_name and tls.ca is None:
            raise ValueError(_NAME_WITHOUT_CA)
        return tls


class SharingConfig(Record):
    """Prefixes that one node has cached and another one reads."""

    enabled: bool = Field(
        True,
        description="lend other nodes what the prefix cache has, and read what they have where that"
        " is cheaper than to compute it",
    )
    margin: float = Field(
        0.7,
        gt=0,
        allow_inf_nan=False,
        description="share of what computing a prefix would take, that reading it may take",
    )
    fetch_s: Seconds = Field(
        1.0,
        description="longest time for reading a prefix, before three times what it should take is"
        " counted; then it is computed",
    )


class NodeConfig(Record):
    """One prefill or decode node."""

    front: FrontConfig
    engine: EngineConfig
    transfer: TransferConfig = TransferConfig()
    sharing: SharingConfig = SharingConfig()
    silence_s: Seconds = Field(
        3.0, description="without a beat of the engine, one a second, until it is unhealthy"
    )


class PrefillConfig(NodeConfig):
    front: FrontConfig = FrontConfig(port=50100)


class DecodeConfig(NodeConfig):
    front: FrontConfig = FrontConfig(port=50200)
    mode: Literal["disaggregated", "colocated"] = Field(
        "disaggregated", description="colocated: prefill here, no prefill nodes"
    )
    local_prefill_tokens: int = Field(
        0, ge=0, description="prompts with at most so many uncached tokens are prefilled here"
    )
    retries: int = Field(2, ge=0, description="further prefill nodes tried before prefilling here")
    pair_again_s: float = Field(
        3.0,
        ge=0,
        allow_inf_nan=False,
        description="longest wait for prefill nodes whose pairs have just ended, before prefilling "
        "here; 0: none",
    )
    local_fallback: bool = Field(
        False, description="where no decode node has a prefill node, take requests all the same"
    )
    max_granted_pages: Positive | None = Field(
        None, description="pages in hand-offs granted but not ready; default: half the pool"
    )

    @field_validator("mode")
    @classmethod
    def _can_call(cls, mode: str, info: ValidationInfo) -> str:
        front = info.data.get("front")
        if mode == "disaggregated" and front and front.tls.cert and front.tls.ca is None:
            raise ValueError("with --tls-cert it needs --tls-ca too, to check prefill nodes")
        return mode


_ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


class ClientsConfig(Record):
    """Who may ask a router, and how what it has is shared among those who do."""

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


class ImagesConfig(Record):
    """Images in conversations with a model that sees them, see docs/images.md."""

    max_images: int = Field(8, ge=1, le=MAX_IMAGES, description="of one request")
    max_tokens: Positive = Field(1280, description="of one image: a larger one is made smaller")
    fetch: bool = Field(
        False,
        description="fetch images that a request names by an address: http(s), of public hosts, "
        "without redirects",
    )
    fetch_s: Seconds = Field(10.0, description="longest time for one of them")


class RouterConfig(Record):
    """The router. It loads the tokenizer and the chat template of `model`, never its weights."""

    front: FrontConfig = FrontConfig(port=50050)
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
        le=7 * 24 * 3600,  # nodes refuse a request that may take longer
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
        description="take HTTP requests with fields that are unknown here as if they had none; "
        "what is known to change an answer, and not supported, is refused all the same",
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
                raise ValueError(_NAME_WITHOUT_CA)
        return tls

    @property
    def tls_to_nodes(self) -> TlsConfig:
        """How this router calls nodes: over TLS if it has a `ca`."""
        own, front = self.nodes_tls, self.front.tls
        shown = own if own.cert else front
        return TlsConfig(
            cert=shown.cert,
            key=shown.key,
            ca=own.ca or front.ca,
            server_name=own.server_name or front.server_name,
        )
