"""Circumstances of a request that must not change its response, drawn at random."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple


class ComparedKind(NamedTuple):
    """A kind of model, and how all nodes compute it, including the reference.

    Attributes:
        flags: additional settings of all nodes.
    """

    family: str
    dtype: str
    flags: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def name(self) -> str:
        return " ".join((self.family, self.dtype, *self.flags, f"tp{self.ranks}"))

    @property
    def drafters(self) -> Sequence[str]:
        """Return the speculation methods for this model."""
        layers = _DRAFT_LAYERS if self.native else {}
        return ("none", "ngram", layers.get(self.family, "ngram"))

    @property
    def native(self) -> bool:
        return self.flags != _BY_TRANSFORMERS


_DRAFT_LAYERS = {
    "llama": "eagle",
    "deepseek_v3": "mtp",
    "qwen3_next": "mtp",
    "qwen3_5_text": "mtp",
}
_INT8 = ("--quantize=int8",)
_BY_TRANSFORMERS = ("--engine.model-backend=transformers",)
MODELS = (
    ComparedKind("llama", "float32"),
    ComparedKind("qwen3_moe", "float32"),
    ComparedKind("deepseek_v3", "bfloat16"),
    ComparedKind("qwen3_next", "float32"),
    ComparedKind("qwen3_5_text", "bfloat16"),
    ComparedKind("qwen3", "bfloat16", ("--engine.cache.dtype=fp8_e4m3",)),
    ComparedKind("llama", "float32", ranks=2),
    ComparedKind("gpt_oss", "bfloat16"),
    ComparedKind("gemma2", "float32"),
    ComparedKind("qwen2_moe", "bfloat16"),
    ComparedKind("llama", "bfloat16", _INT8),
    ComparedKind("deepseek_v3", "float32", ranks=2),
    ComparedKind("qwen3_moe", "bfloat16", ranks=2),
    ComparedKind("deepseek_v3", "bfloat16", _INT8),
    ComparedKind("qwen3_moe", "bfloat16", _INT8),
    ComparedKind("llama", "float32", _BY_TRANSFORMERS),
)
_CACHED_PAGES = 8  # of nodes with an offload tier, which gets all other pages
_DRAWN: dict[str, Sequence[Any]] = {
    "topology": ("colocated", "disaggregated", "disaggregated", "local"),
    "path": ("tcp", "nixl"),
    "chunk": (-1, 16, 37, 64, 128),
    "page_size": (16, 32, 64),
    "overlap": (False, True),
    "threads": (1, 2, 3, 8),
    "retraction": ("none", "swap", "recompute"),
    "tier": ("none", "none", "memory", "files"),
    "split_prefill": (False, False, True),
    "cache": ("cold", "prefix", "turn"),
    "load": (False, True),
    "event": ("none", "kill decode", *("kill prefill", "move", "switch") * 2),
}
_OF_ROUNDS = ("cache", "load", "event")
_NEED_A_PAIR = ("kill prefill", "switch")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances of some requests. The defaults are the reference's: one request at a time,
    in one piece, on a colocated node without a cache.

    Attributes:
        chunk: prompt tokens of a step. -1: all.
        retraction: where the KV of retracted requests goes. none: no request is retracted.
        tier: offload tier for pages evicted from the small prefix cache.
        cache: what an earlier request has left in the cache: nothing, a part of the prompt, or the
            prompt and the response that the request continues.
        load: other requests run at the same time.
        event: event during a response.
    """

    topology: str = "colocated"
    path: str = "tcp"
    chunk: int = -1
    page_size: int = 16
    overlap: bool = False
    threads: int = 1
    drafter: str = "none"
    retraction: str = "none"
    tier: str = "none"
    split_prefill: bool = False
    cache: str = "cold"
    load: bool = False
    event: str = "none"

    @classmethod
    def of_a_system(cls, draw: Random, model: ComparedKind) -> "Circumstances":
        """Draw the settings of a system for a model."""
        drawn = {name: draw.choice(all_) for name, all_ in _DRAWN.items() if name not in _OF_ROUNDS}
        drawn["drafter"] = draw.choice(model.drafters)
        if drawn["drafter"] in ("mtp", "eagle") or model.ranks > 1 or not model.native:
            drawn["split_prefill"] = False  # not supported together
        return cls(**drawn)

    def with_a_round(self, draw: Random) -> "Circumstances":
        """Draw the circumstances of one round of this system."""
        drawn = {name: draw.choice(_DRAWN[name]) for name in _OF_ROUNDS}
        if self.topology == "colocated" and drawn["event"] in _NEED_A_PAIR:
            drawn["event"] = "kill decode"
        return replace(self, **drawn)

    @property
    def differing(self) -> dict[str, object]:
        """Return the circumstances that differ from the reference's."""
        plain = Circumstances()
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(plain, field.name)
        }

    def without(self, name: str) -> "Circumstances":
        """Return these circumstances with one of them as in the reference."""
        plain: dict[str, Any] = {name: getattr(Circumstances(), name)}
        return replace(self, **plain)

    def flags(self, eagle: Path) -> Iterator[str]:
        """Yield the settings of all nodes.

        Args:
            eagle: directory of the EAGLE head.
        """
        yield f"--engine.cache.page-size={self.page_size}"
        yield f"--engine.threads={self.threads}"
        yield "--prefix-sharing.max-cost-ratio=1e9"  # fetching is always worthwhile
        yield "--prefix-sharing.fetch-timeout-s=300"
        scheduler = "--engine.scheduler"
        yield f"{scheduler}.chunked-prefill-tokens={self.chunk}"
        if not self.overlap:
            yield "--no-engine.scheduler.overlap-schedule"
        if self.split_prefill:
            yield f"{scheduler}.split-prefill-ms=1"
        if self.drafter != "none":
            yield f"--engine.speculative.method={self.drafter}"
            yield "--engine.speculative.prompt-lookup-min=1"
            yield "--no-engine.speculative.adaptive"
        if self.drafter == "eagle":
            yield f"--engine.speculative.draft-model={eagle}"
        if self.tier != "none":
            yield f"--engine.cache.max-cached-pages={_CACHED_PAGES}"
            yield f"--engine.offload.cpu-bytes={1 << (24 if self.tier == 'memory' else 16)}"

    def decode_flags(self) -> Iterator[str]:
        """Yield additional settings of decode nodes."""
        if self.topology == "colocated":
            yield "--mode=colocated"
        if self.topology == "local":
            yield "--local-prefill-max-tokens=200"
        if self.retraction != "none":
            yield "--engine.scheduler.retract-every=7"
        if self.retraction == "recompute":
            yield "--engine.cache.swap-pages=0"
