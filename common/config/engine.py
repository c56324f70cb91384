"""The engine of a node: the model, its memory, and how batches are built."""

import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from common.config.record import ConfigRecord, Positive, Seconds
from common.limits import MAX_ADAPTERS
from common.priority import HIGHEST, LOWEST


class CacheConfig(ConfigRecord):
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


class TiersConfig(ConfigRecord):
    """KV offload tiers for pages evicted from the prefix cache, see docs/tiers.md."""

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


class SchedulerConfig(ConfigRecord):
    """Scheduling and batching."""

    max_running: Positive = Field(256, description="requests in the running batch, and slots")
    max_waiting: Positive = Field(
        1024, description="requests that wait, before Overloaded; before a replay is, twice as many"
    )
    max_waiting_tokens: Positive = Field(
        1 << 24, description="tokens of requests that wait, before Overloaded; 4 bytes each"
    )
    chunk_tokens: int = Field(
        0,
        ge=-1,
        description="prompt tokens per forward; -1: never cut, 0: by device, role and memory",
    )
    auto_chunk_tokens: int = Field(
        0,
        ge=0,
        description="most that chunk_tokens 0 chooses on a GPU, where the activations of a "
        "chunk larger than 2048 take at most a sixteenth of free memory. 0: 8192 on prefill nodes, "
        "else 2048",
    )
    max_prefill_tokens: Positive = Field(
        16384, description="prompt tokens per forward over all requests"
    )
    policy: Literal["slack", "fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key"] = Field(
        "slack",
        description="order of the waiting queue; slack: as they came, but who may wait less first;"
        " see docs/tuning.md",
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
        1.0,
        description="seconds without progress, beyond what the step under way may take, until "
        "heartbeats stop",
    )
    first_step_s: Seconds = Field(
        120.0,
        description="seconds that a first step of its kind may take, since it may compile kernels, "
        "and that compiling a kernel while serving may take",
    )
    watchdog_s: Seconds = Field(
        300.0, description="longest time with work waiting and no step, until the node ends"
    )

    @property
    def spare_slots(self) -> int:
        """Slots in addition to those of running requests."""
        return self.max_preempted if self.preempt_by else 0

    @property
    def num_slots(self) -> int:
        return self.max_running + self.spare_slots


_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def check_adapter_name(name: str) -> str:
    """Return the name. Raises ValueError if it is no valid adapter name."""
    if _ADAPTER_NAME.fullmatch(name) is None:
        raise ValueError(
            "a name of an adapter is 1 to 128 letters, digits, and ._:/- after the first"
        )
    return name


class LoraConfig(ConfigRecord):
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
CpuKernels = Literal["auto", "required", "off"]
Drafter = Literal["none", "ngram", "mtp", "eagle"]


class SpeculationConfig(ConfigRecord):
    """Speculative decoding on decode nodes."""

    drafter: Drafter = Field(
        "none",
        description="who guesses an answer's next tokens; ngram: they follow where the newest ones "
        "stood before; mtp: the layer that the model's checkpoint has for it; eagle: the layer in "
        "draft_model. Answers are the same, only sooner. Prefill nodes need mtp and eagle, too",
    )
    draft_model: str = Field(
        "", description="directory or hub id of the checkpoint of an EAGLE head, for eagle"
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

    @model_validator(mode="after")
    def _eagle_has_a_checkpoint(self) -> Self:
        if (self.drafter == "eagle") != bool(self.draft_model):
            raise ValueError("draft_model and the drafter eagle go together")
        return self

    @property
    def has_layer(self) -> bool:
        """True if the drafter is a layer behind the model, with KV like the model's layers."""
        return self.drafter in ("mtp", "eagle")


class EngineConfig(ConfigRecord):
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
        description="operations compiled for this CPU, by the image or at the first start; auto: "
        "torch's own where there are none, required: no start without, off: torch's own",
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
