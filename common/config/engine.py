"""The engine of a node: the model, its memory, and how batches are built."""

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.config.record import ConfigRecord, Port, Positive, Seconds
from common.limits import HIGHEST, LOWEST, MAX_ADAPTERS


class CacheConfig(ConfigRecord):
    """KV pages on the device and in host memory."""

    page_size: int = Field(16, description="Tokens per KV page: a power of two of at least 16")
    num_pages: Positive | None = Field(
        None, description="KV pages in the pool. Default: computed from the available memory"
    )
    memory_fraction: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="Fraction of GPU memory for weights, CUDA graphs and pages. On a CPU, "
        "fraction of free memory, of which the pool gets an eighth and at least 1 GiB",
    )
    swap_pages: int = Field(
        -1,
        ge=-1,
        description="Host memory pages for retracted requests on decode nodes. -1: as many as the "
        "pool has, with CUDA at most 4 GiB (pinned)",
    )
    dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="Data type of the KV cache. auto: the compute type; fp8: half the memory of "
        "16 bits. Paired nodes must have the same value",
    )
    prefix_cache: bool = Field(
        True, description="Prefix cache: keep the KV of finished requests for reuse"
    )
    max_cached_pages: int = Field(
        0,
        ge=0,
        description="Pages in the prefix cache. Pages beyond that number are evicted as soon as no "
        "request uses them, least recently used first. 0: no limit but the pool",
    )

    @field_validator("page_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 16 or value & (value - 1):
            raise ValueError("must be a power of two of at least 16")
        return value


class OffloadConfig(ConfigRecord):
    """KV offload tiers for pages evicted from the prefix cache, see docs/tiers.md."""

    cpu_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of host memory for offloaded pages, in addition to swap_pages, pinned "
        "with CUDA. Useful if larger than the pool. 0: no offloading",
    )
    disk_dir: Path | None = Field(
        None,
        description="Directory of page files, which survive a restart. Only users who may read "
        "prompts should be able to read it. Default: no disk tier",
    )
    disk_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of page files of this node in disk_dir. Useful if larger than cpu_bytes",
    )

    @model_validator(mode="after")
    def _files_are_below_host_memory(self) -> Self:
        if (self.disk_dir is not None) != (self.disk_bytes > 0):
            raise ValueError("disk_dir and disk_bytes must be set together")
        if self.disk_bytes and not self.cpu_bytes:
            raise ValueError("disk_dir needs cpu_bytes: pages are read through host memory")
        return self


class SchedulerConfig(ConfigRecord):
    """Scheduling and batching."""

    max_running_requests: Positive = Field(
        256, description="Requests in the running batch, and slots for them"
    )
    max_queued_requests: Positive = Field(
        1024,
        description="Queued requests before new ones are rejected as overloaded. Replayed "
        "requests may use twice as many",
    )
    max_queued_tokens: Positive = Field(
        1 << 24,
        description="Tokens of queued requests (4 bytes each) before new ones are rejected as "
        "overloaded",
    )
    chunked_prefill_tokens: int = Field(
        0,
        ge=-1,
        description="Prompt tokens of a chunk. -1: prompts are not split. 0: chosen by device, "
        "role and memory, and at most 512 beside more than 10 running requests",
    )
    auto_chunk_tokens: int = Field(
        0,
        ge=0,
        description="Maximum tokens that chunked_prefill_tokens=0 chooses on a GPU, where "
        "activations of a chunk over 2048 tokens may use a sixteenth of free memory. "
        "0: 8192 on prefill nodes, 2048 on others",
    )
    max_prefill_tokens: Positive = Field(
        16384, description="Prompt tokens of all requests in a forward pass"
    )
    max_prefill_requests: int = Field(
        0, ge=0, description="Requests whose prompts share a forward pass. 0: no limit"
    )
    policy: Literal["slack", "fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"] = Field(
        "slack",
        description="Order of the queue. slack: first come, first served, but shorter wait limits "
        "first. See docs/tuning.md",
    )
    preemption_threshold: int = Field(
        0,
        ge=0,
        le=HIGHEST - LOWEST,
        description="Priority difference from which a waiting request preempts running ones. "
        "Preempted requests are kept in host memory. 0: no preemption",
    )
    max_preempted_requests: Positive = Field(
        64, description="Requests that can be preempted at the same time. Each has a slot"
    )
    overlap_schedule: bool = Field(
        True,
        description="Overlap scheduling: process the results of step N while the device runs step "
        "N+1",
    )
    overlap_prefills: bool = Field(
        True,
        description="Overlap of two consecutive prefill steps. off: lower TTFT of the first one",
    )
    mixed_chunk: bool = Field(
        True,
        description="Decode rows in the forward pass of a prefill chunk. off: decoding waits "
        "until no prompt is left to compute",
    )
    split_prefill_ms: float = Field(
        0.0,
        ge=0,
        le=10_000,
        description="Split prefill: milliseconds by which a prompt may delay a decode step. Its "
        "layers are computed in groups between decode steps, in place of mixed_chunk. 0: off. See "
        "docs/split-prefill.md",
    )
    prefill_delayer: bool = Field(
        False,
        description="In a data-parallel group, delay a prompt by up to 30 steps until most nodes "
        "have one, so that prompts slow down fewer steps",
    )
    new_token_ratio: float = Field(
        0.7,
        gt=0,
        le=1,
        description="Initial fraction of a request's remaining output tokens for which pages are "
        "reserved",
    )
    min_new_token_ratio: float = Field(
        0.098, gt=0, le=1, description="Final value of new_token_ratio after its decay"
    )
    new_token_ratio_steps: Positive = Field(
        600, description="Decode steps until new_token_ratio reaches its final value"
    )
    schedule_conservativeness: float = Field(
        1.0,
        gt=0,
        description="Factor of new_token_ratio and min_new_token_ratio, whose results are at most "
        "1. Higher: fewer retractions, and fewer running requests",
    )
    retract_every: int = Field(
        0,
        ge=0,
        description="Decode steps after which a running request is retracted as if pages were "
        "short, for tests. 0: never",
    )
    step_timeout_s: Seconds = Field(
        1.0,
        description="Seconds without progress, beyond the expected time of the current step, "
        "before the engine stops its heartbeats",
    )
    first_step_timeout_s: Seconds = Field(
        120.0,
        description="Seconds that the first step of its kind may take, because it can compile "
        "kernels. Also the limit for a kernel compiled while serving",
    )
    watchdog_timeout_s: Seconds = Field(
        300.0,
        description="Seconds with queued work and without a step before the node is terminated",
    )

    @property
    def spare_slots(self) -> int:
        """Slots in addition to those of running requests."""
        return self.max_preempted_requests if self.preemption_threshold else 0

    @property
    def num_slots(self) -> int:
        return self.max_running_requests + self.spare_slots


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def check_adapter_name(name: str) -> str:
    """Return the name. Raises ValueError if it is not a valid adapter name."""
    if _ADAPTER_NAME.fullmatch(name) is None:
        raise ValueError(
            "an adapter name has 1 to 128 letters, digits or ._:/-, and begins with a "
            "letter or digit"
        )
    return name


class LoraConfig(ConfigRecord):
    """LoRA adapters, see docs/lora.md."""

    adapter_dir: Path | None = Field(
        None,
        description="Directory that contains all LoRA adapters. Default: LoRA is disabled and "
        "uses no memory",
    )
    preload: tuple[str, ...] = Field(
        (),
        description="Adapters to load at start: NAME or NAME=PATH, with a path below adapter_dir",
    )
    max_loras: Positive = Field(
        4, description="Adapter slots on the device: adapters that a batch can use at the same time"
    )
    max_rank: int = Field(
        32, ge=1, le=512, description="Maximum rank of an adapter. Slots have memory for this rank"
    )
    max_cpu_loras: int = Field(
        64, ge=1, le=MAX_ADAPTERS, description="Adapters in host memory, with or without a slot"
    )
    max_cpu_lora_bytes: Positive = Field(
        4 << 30, description="Bytes of host memory for all adapters together"
    )

    @field_validator("preload")
    @classmethod
    def _below(cls, adapters: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if adapters and info.data.get("adapter_dir") is None:
            raise ValueError("needs lora.adapter_dir")
        for adapter in adapters:
            check_adapter_name(adapter.partition("=")[0])
        return adapters


Quantize = Literal["none", "int8"]
ModelBackend = Literal["auto", "native", "transformers"]
CpuKernels = Literal["auto", "required", "off"]
AttentionBackend = Literal["native", "flashinfer"]
LinearAttentionBackend = Literal["native", "fla"]
Drafter = Literal["none", "ngram", "mtp", "eagle", "draft_model"]


class SpeculativeConfig(ConfigRecord):
    """Speculative decoding on decode nodes."""

    method: Drafter = Field(
        "none",
        description="Speculative decoding method. ngram: continue an earlier occurrence of the "
        "last tokens. mtp: the checkpoint's MTP layer. eagle: the EAGLE head of "
        "draft_model. draft_model: a smaller model with the same vocabulary. Does not change "
        "responses. Prefill nodes need the same value for all but ngram",
    )
    draft_model: str = Field("", description="Directory or hub id of the draft model or EAGLE head")
    num_speculative_tokens: int = Field(
        5, ge=1, le=15, description="Maximum draft tokens of a request in a step"
    )
    prompt_lookup_min: Positive = Field(3, description="Minimum n-gram length for the method ngram")
    adaptive: bool = Field(
        True,
        description="Adaptive number of draft tokens, by acceptance rate and step time. off: "
        "always the maximum",
    )

    @model_validator(mode="after")
    def _some_drafters_have_checkpoints(self) -> Self:
        if (self.method in ("eagle", "draft_model")) != bool(self.draft_model):
            raise ValueError(
                "the methods eagle and draft_model need draft_model, and draft_model needs one of "
                "these methods"
            )
        return self

    @property
    def max_drafts(self) -> int:
        """Maximum draft tokens of a request in a step. 0: speculative decoding is disabled."""
        return 0 if self.method == "none" else self.num_speculative_tokens

    @property
    def has_layers(self) -> bool:
        """True if the drafter has layers after the model's layers, with the same kind of KV."""
        return self.method in ("mtp", "eagle", "draft_model")


class ParallelConfig(ConfigRecord):
    """Ranks: processes that compute a model together, each with a part of its weights and pages."""

    tp: int = Field(
        1,
        ge=1,
        le=64,  # each rank gets descriptors of all others in one message of at most 253
        description="Tensor-parallel ranks of this node, see docs/parallel.md. threads counts for "
        "each of them",
    )
    pp: int = Field(
        1,
        ge=1,
        le=2,
        description="Stages of this node, each with tp ranks and a part of the layers. With 2, the "
        "chunks of prompts follow each other through the stages, see docs/parallel.md",
    )
    experts: Literal["tp", "ep"] = Field(
        "tp",
        description="Split of mixtures of experts between ranks. tp: a part of every expert; "
        "ep: whole experts",
    )
    redundant_experts: int = Field(
        0,
        ge=0,
        le=4096,
        description="Replicas of experts in each layer, in addition to its experts, with experts "
        "ep. The experts with the most tokens get them when experts are rebalanced",
    )
    rebalance_steps: int = Field(
        0,
        ge=0,
        description="Steps after which experts are moved between ranks, so that the ranks compute "
        "similar numbers of tokens, with experts ep. 0: never",
    )
    collectives: Literal["auto", "shm", "gloo", "nccl"] = Field(
        "auto",
        description="Exchange of tensors between ranks. auto: nccl on GPUs, shm on a CPU, gloo on "
        "CPUs of several hosts; shm: shared memory; gloo: torch.distributed, slower, on one host "
        "over loopback and for comparisons",
    )
    collective_s: Seconds = Field(
        30.0, description="Seconds that a rank waits for the others before the node is terminated"
    )
    hosts: int = Field(
        1,
        ge=1,
        le=64,
        description="Hosts of this node, each with an equal number of its ranks. All but the first "
        "run `baton rank-host`, see docs/parallel.md",
    )
    trusted_network: str | None = Field(
        None,
        description="Network (CIDR) of several hosts, such as 10.0.0.0/24. Ranks exchange tensors "
        "there without authentication, so only hosts of this node may reach it. Needed with hosts",
    )
    listen_port: Port = Field(
        50300,
        description="Port for `baton rank-host` of other hosts, at this host's address in "
        "trusted_network",
    )
    join_timeout_s: Seconds = Field(
        1800.0, le=3600, description="Seconds that the first host waits for the others at start"
    )

    @field_validator("trusted_network")
    @classmethod
    def _network(cls, value: str | None) -> str | None:
        if value is not None:
            ip_network(value)  # raises ValueError with the reason
        return value

    @model_validator(mode="after")
    def _hosts_have_a_network(self) -> Self:
        if self.hosts == 1:
            if self.trusted_network is not None:
                raise ValueError("trusted_network needs hosts > 1")
            return self
        if self.trusted_network is None:
            raise ValueError(
                "hosts > 1 needs trusted_network: ranks exchange tensors without authentication, "
                "so this must be a network that only hosts of this node can reach"
            )
        if self.collectives == "shm":
            raise ValueError("collectives shm is for one host: use auto with hosts > 1")
        if self.num_ranks % self.hosts:
            raise ValueError(
                f"hosts is {self.hosts}, and tp x pp is {self.num_ranks}: each host needs an equal "
                "number of ranks"
            )
        return self

    dp: int = Field(
        1,
        ge=1,
        le=64,  # each node gets two descriptors of all others in one message of at most 253
        description="Nodes of this node's data-parallel group. They share the experts of the "
        "model, and each is started separately, see docs/parallel.md",
    )
    dp_rank: int = Field(0, ge=0, description="Rank of this node in its group, from 0")
    dp_group: Path | None = Field(
        None,
        description="Directory in which the nodes of the group find each other. It gives the group "
        "its name, must belong to this user alone, and is created if it is missing",
    )

    @model_validator(mode="after")
    def _a_group_has_a_place(self) -> Self:
        if self.dp_rank >= self.dp:
            raise ValueError(f"dp_rank {self.dp_rank} must be less than dp, which is {self.dp}")
        if (self.dp > 1) != (self.dp_group is not None):
            raise ValueError("dp_group and a dp of 2 or more must be set together")
        if self.dp > 1 and self.num_ranks > 1:
            raise ValueError("dp is not supported together with tp or pp")
        return self

    @model_validator(mode="after")
    def _placed_experts_are_whole(self) -> Self:
        for name in ("redundant_experts", "rebalance_steps"):
            if not getattr(self, name):
                continue
            if self.dp > 1 or self.pp > 1:
                raise ValueError(f"{name} is not supported together with dp or pp")
            if self.tp == 1 or self.experts != "ep":
                raise ValueError(f"{name} needs experts ep and a tp of 2 or more")
        return self

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def ranks_per_host(self) -> int:
        return self.num_ranks // self.hosts

    def place(self, rank: int) -> int:
        """Return the index of a rank among the ranks of its host."""
        return rank % self.ranks_per_host


_PER_HOST = " / parallel.hosts"
_GPUS = re.compile(r"cuda:([0-9]{1,3}(?:-[0-9]{1,3})?(?:,[0-9]{1,3}(?:-[0-9]{1,3})?)*)")


def gpus_of(device: str) -> tuple[int, ...]:
    """Return the device numbers by rank: (0, 1, 3) for cuda:0-1,3. Empty: no numbers are given."""
    found = _GPUS.fullmatch(device)
    if found is None:
        return ()
    ends = [part.partition("-")[::2] for part in found[1].split(",")]
    return tuple(n for first, last in ends for n in range(int(first), int(last or first) + 1))


class HiddenStatesConfig(ConfigRecord):
    """Hidden states of the last layer, returned to clients."""

    enabled: bool = Field(
        False,
        description="Return hidden states to requests that ask for them. Set it on prefill and "
        "decode nodes",
    )
    max_request_bytes: int = Field(
        2 << 20,
        ge=1,
        le=8 << 20,
        description="Maximum bytes of the hidden states of one request, as float32. The prompt "
        "and max_tokens count",
    )


class RoutedExpertsConfig(ConfigRecord):
    """Experts of each token in each layer, returned to clients."""

    enabled: bool = Field(
        False,
        description="Return routed experts to requests that ask for them. Set it on prefill and "
        "decode nodes of a model with experts",
    )
    max_request_bytes: int = Field(
        2 << 20,
        ge=1,
        le=8 << 20,
        description="Maximum bytes of the routed experts of one request, as int16. The prompt "
        "and max_tokens count",
    )


class InputEmbeddingsConfig(ConfigRecord):
    """Prompts as embeddings, accepted from clients."""

    enabled: bool = Field(
        False,
        description="Accept input embeddings in place of token ids. Set it on prefill and decode "
        "nodes",
    )


class SimConfig(ConfigRecord):
    """Simulated nodes, see docs/simulation.md."""

    link: Literal["nvlink", "rdma400", "tcp100", "tcp25"] = Field(
        "rdma400",
        description="Simulated network of the node: nvlink, rdma400 (400 Gbit/s), tcp100 or tcp25",
    )
    pool_dir: Path | None = Field(
        None,
        description="Directory of files with simulated pages, which nodes of a host share. "
        "Default: /dev/shm/baton-sim-UID",
    )
    draft_acceptance: float = Field(
        0.6,
        ge=0,
        le=1,
        description="Probability that a simulated draft token is accepted, if those before it are",
    )


_SIMULATED = "sim:"


class EngineConfig(ConfigRecord):
    """The model and the device it runs on."""

    model: str = Field(description="Directory or hub id of a Hugging Face checkpoint")
    device: str = Field(
        "auto",
        description="Device: auto, cpu or cuda:N. With several ranks, a GPU for each: cuda:0-3 or "
        "cuda:0,2. sim:h100: a simulated GPU, see docs/simulation.md",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Compute type. auto: bfloat16 on CUDA and on CPUs with native bfloat16, "
        "except for small float32 checkpoints; otherwise float32",
    )
    quantize: Quantize = Field(
        "none",
        description="Weight quantization. int8: 8-bit matrices, half the memory of bfloat16 and "
        "faster on a CPU. Paired nodes must have the same value",
    )
    model_backend: ModelBackend = Field(
        "auto",
        description="Model implementation. native: Baton's own modules; transformers: the class "
        "of the Transformers library with Baton's attention; auto: native if the "
        "family is supported. Paired nodes must have the same value",
    )
    weights_dir: Path | None = Field(
        None,
        description="Directory that contains all weights for updates at run time. Default: "
        "updates are disabled",
    )
    profile_dir: Path | None = Field(
        None, description="Directory for profiler traces. Default: profiling is disabled"
    )
    context_length: Positive | None = Field(
        None, description="Maximum tokens of a request. Default: the model's context length"
    )
    threads: int = Field(
        0,
        ge=0,
        description="Torch threads of the engine on a CPU. 0: OMP_NUM_THREADS if set, otherwise "
        "one per available core",
    )
    cpu_kernels: CpuKernels = Field(
        "auto",
        description="Kernels compiled for this CPU, in the image or at first start. auto: fall "
        "back to torch; required: no start without them; off: torch only",
    )
    attention_backend: AttentionBackend = Field(
        "native",
        description="Attention kernels. native: Baton's own; flashinfer: the package "
        "flashinfer-python, without CUDA graphs. See docs/gpu.md",
    )
    linear_attention_backend: LinearAttentionBackend = Field(
        "native",
        description="Kernels for prompts of gated delta nets. native: Baton's own; fla: the "
        "package flash-linear-attention. See docs/gpu.md",
    )
    batch_invariant: bool = Field(
        False,
        description="Batch-invariant responses: tokens and logprobs of a request have the same "
        "bits whatever runs beside it. Only for text models, on a CPU or a GPU whose bits were "
        "compared. Paired nodes must have the same value, see docs/batch-invariance.md",
    )
    cuda_graphs: bool = Field(
        True,
        description="CUDA graphs for steps of decode nodes, captured at start: decode steps, steps "
        "that verify drafts, and short prompts. off: for debugging",
    )
    early_launch: bool = Field(
        True,
        description="Programmatic dependent launch: kernels start while the one before ends, on "
        "GPUs of compute capability 9.0 and up with a driver of CUDA 12.3 and up. off: for "
        "debugging",
    )
    memory_saver: bool = Field(
        False,
        description="GPU memory for weights and pages that sleep mode can release. Other processes "
        "cannot map it, so hand-offs from this node use rdma or tcp, not cuda_ipc or nvlink. A CPU "
        "needs no option. See docs/memory.md",
    )
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    offload: OffloadConfig = OffloadConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    lora: LoraConfig = LoraConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    hidden_states: HiddenStatesConfig = HiddenStatesConfig()
    routed_experts: RoutedExpertsConfig = RoutedExpertsConfig()
    input_embeddings: InputEmbeddingsConfig = InputEmbeddingsConfig()
    sim: SimConfig = SimConfig()

    @property
    def simulated_gpu(self) -> str:
        """Name of the simulated GPU. Empty: the device is real."""
        return self.device.removeprefix(_SIMULATED) if self.device.startswith(_SIMULATED) else ""

    @model_validator(mode="after")
    def _sim_needs_a_simulated_device(self) -> Self:
        if self.device == _SIMULATED:
            raise ValueError("device sim: needs a GPU, as in sim:h100")
        if not self.simulated_gpu and self.sim != SimConfig():
            raise ValueError("sim.* needs a simulated device, such as device=sim:h100")
        return self

    @model_validator(mode="after")
    def _only_own_kernels_are_batch_invariant(self) -> Self:
        for name in ("attention_backend", "linear_attention_backend"):
            if self.batch_invariant and (backend := getattr(self, name)) != "native":
                raise ValueError(f"batch_invariant is not supported with {name} {backend}")
        return self

    @model_validator(mode="after")
    def _each_rank_has_a_gpu(self) -> Self:
        gpus, num_ranks = gpus_of(self.device), self.parallel.ranks_per_host
        if len(set(gpus)) < len(gpus):
            raise ValueError(f"device {self.device} names a GPU twice, and ranks cannot share one")
        if gpus and len(gpus) != num_ranks:
            needed = f"cuda:0-{num_ranks - 1}" if num_ranks > 1 else "cuda:0"
            raise ValueError(
                f"the number of GPUs in device {self.device} is {len(gpus)}, and parallel.tp x "
                f"parallel.pp{_PER_HOST if self.parallel.hosts > 1 else ''} is {num_ranks}: each "
                f"rank needs one, as in {needed}"
            )
        return self
