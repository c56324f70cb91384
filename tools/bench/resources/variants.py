"""Kernel launches of serving: every operation of a forward pass, on shapes of served models.

Operations are called as the engine calls them, on host tensors with the real widths, strides,
dtypes and alignment. Their memory is never accessed, so callers must record launches without
running them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias
from unittest import mock

import torch
from torch import Tensor

from engine.kv_cache.kv import KVPool
from engine.kv_cache.layout import KVLayout
from engine.kv_cache.states import PagedKV
from kernels import device, early_launch
from kernels.adapters.low_rank import TILE_ROWS, TokensBySlot, add_low_rank
from kernels.attention.arguments import AttentionKind, AttentionRows, Scoring
from kernels.attention.paged import paged_attention, plan_attention
from kernels.experts.grouped_kernels import MANY_PAIRS
from kernels.experts.grouped_mlp import ExpertMatrices, Gate, grouped_mlp
from kernels.experts.routing import Routing, route
from kernels.layers.act_and_mul import Activation, act_and_mul
from kernels.layers.embedding import embed
from kernels.layers.linear import linear
from kernels.layers.quantised_linear import quantised_linear
from kernels.layers.rms_norm import add_rms_norm
from kernels.layers.rope import rope_angles
from kernels.narrow import FIRST_ARCHITECTURE
from kernels.pages.pack import pack_pages, unpack_pages
from kernels.pages.rope_and_store import rope_and_store
from kernels.pages.store_kv import store_kv
from kernels.quantised import NumberKind, Quantisation
from kernels.sampling.bitmask import apply_bitmask
from kernels.sampling.early_rows import EarlyRows, RowInputs, move_early_rows
from kernels.sampling.logprobs import logprobs
from kernels.sampling.penalties import apply_penalties, count_tokens
from kernels.sampling.sample import SamplingColumns, sample
from kernels.sampling.verify import DraftRows, verify_drafts
from tools.bench.resources.latent_variants import LatentModel
from tools.bench.resources.state_variants import HybridModel

COUNTS = (1, 2, 16, 33, 256, 1000)  # rows or tokens, none of which may need a separate kernel
PAGE_SIZES = (16, 64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Lengths of the prefill row of a mixed batch: two whose keys are split, and one that occupies the
# device.
PROMPTS = (2, 300, 4096)
NUM_PAGES = 4
NUM_SLOTS = 1024
NUM_TOP = 20  # maximum logprobs of a request


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a model on which kernels depend."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    layers: int
    qk_norm: bool = False
    activation: Activation = "silu"
    window: int | None = None  # of some layers
    soft_cap: float | None = None
    experts: tuple[int, int] | None = None  # number, and number per token. Intermediate: of each


QWEN3_06B = Shape("qwen3-0.6b", 1024, 16, 8, 128, 3072, 151936, 28, qk_norm=True)
LLAMA3_8B = Shape("llama3-8b", 4096, 32, 8, 128, 14336, 128256, 32)
QWEN3_8B = Shape("qwen3-8b", 4096, 32, 8, 128, 12288, 151936, 36, qk_norm=True)
QWEN2_05B = Shape("qwen2-0.5b", 896, 14, 2, 64, 4864, 151936, 24)
WIDE_HEAD = Shape(
    "gemma2-2b",
    2304,
    8,
    4,
    256,
    9216,
    256000,
    26,
    activation="gelu_tanh",
    window=4096,
    soft_cap=50.0,
)
MASKED = replace(WIDE_HEAD, name="gemma2-27b", heads=32, kv_heads=16, head_dim=128)
QWEN3_30B = Shape(
    "qwen3-30b-a3b", 2048, 32, 4, 128, 768, 151936, 48, qk_norm=True, experts=(128, 8)
)
GPT_OSS = Shape("gpt-oss-20b", 2880, 64, 8, 64, 2880, 201088, 24, experts=(32, 4))
# One rank's part of a model: an eighth with one KV head, and half of the experts' inner size.
LLAMA3_70B_TP8 = Shape("llama3-70b-tp8", 8192, 8, 1, 128, 3584, 128256, 80)
QWEN3_30B_TP2 = replace(QWEN3_30B, name="qwen3-30b-a3b-tp2", heads=16, kv_heads=2, intermediate=384)
WIDE = "wide heads"  # group of operations with their own budget
QWEN3_NEXT, DEEPSEEK_V3 = "qwen3-next", "deepseek-v3"  # groups of hybrids and of latents
ADAPTED = (LLAMA3_8B, QWEN2_05B)


Launcher: TypeAlias = Callable[[int], object]  # for a batch of that many rows or tokens


class Variant(NamedTuple):
    """One operation of one model."""

    name: str
    launch: Launcher


@dataclass(frozen=True)
class _Model:
    """Tensors as in a forward pass of the model."""

    shape: Shape
    dtype: torch.dtype
    page_size: int
    kept_in: torch.dtype | None = None  # dtype of keys and values, if different

    @cached_property
    def kv(self) -> Tensor:
        """Return one layer of a KV pool, as the engine makes it."""
        return self.pool.layers[1]

    @cached_property
    def pool(self) -> KVPool:
        shape = self.shape
        states = (PagedKV(shape.kv_heads, shape.head_dim),) * shape.layers
        layout = KVLayout.of(states, self.page_size, self.dtype, self.kept_in)
        return KVPool(layout, NUM_PAGES, torch.device("cpu"))

    def tensor(self, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=self.dtype)

    def embed(self, n: int) -> None:
        embed(_ints(n), _ints(NUM_SLOTS), self.tensor(self.shape.vocabulary, self.shape.hidden))

    def angles(self, n: int) -> None:
        rope_angles(_ints(n), _floats(self.shape.head_dim // 2), 1.0)

    def first_norm(self, n: int) -> None:
        add_rms_norm(self.tensor(n, self.shape.hidden), None, self.tensor(self.shape.hidden), 1e-6)

    def norm(self, n: int) -> None:
        x = self.tensor(n, self.shape.hidden)
        add_rms_norm(x, x, self.tensor(self.shape.hidden), 1e-6)

    def last_norm(self, n: int) -> None:
        x = self.tensor(n, self.shape.hidden)
        add_rms_norm(x, x, self.tensor(self.shape.hidden), 1e-6, rows=_longs(n))

    def act(self, n: int) -> None:
        act_and_mul(self.tensor(n, 2 * self.shape.intermediate), self.shape.activation)

    def experts(self, n: int) -> None:
        count, per_token = self._experts
        ways = self._routed(n)
        grouped = Routing(per_token, True, "sigmoid", 2.5, 8, 4, 2)  # as in DeepSeek-V3
        if count >= 16 * grouped.groups:
            route(_floats(n, count), grouped, _floats(count))
        self._grouped(*ways, self._stacked(), self.shape.activation)

    def many_pairs(self, n: int) -> None:
        """Run the products of a prompt, in larger tiles."""
        count, per_token = self._experts
        tokens = n + MANY_PAIRS * count // per_token
        ways = _floats(tokens, per_token), _ints(tokens, per_token)
        self._grouped(*ways, self._stacked(), self.shape.activation)

    def clamped(self, n: int) -> None:
        """Run experts of gpt-oss, which have biases."""
        self._grouped(*self._routed(n), self._stacked(biases=True), "clamped")

    def quantised_product(self, kind: NumberKind, n: int) -> None:
        rows, columns = 2 * self.shape.intermediate, self.shape.hidden
        matrix = _quantised_matrix(kind, rows, columns)
        quantised_linear(self.tensor(n, columns), *matrix)

    def quantised_experts(self, kind: NumberKind, n: int) -> None:
        gate: Gate = "clamped" if kind == "fp4" else self.shape.activation
        self._grouped(*self._routed(n), self._stacked(kind, biases=kind == "fp4"), gate)

    def many_quantised_pairs(self, kind: NumberKind, n: int) -> None:
        """Run the products of a prompt, in larger tiles."""
        count, per_token = self._experts
        self.quantised_experts(kind, n + MANY_PAIRS * count // per_token)

    @property
    def _experts(self) -> tuple[int, int]:
        assert self.shape.experts is not None
        return self.shape.experts

    def _routed(self, n: int) -> tuple[Tensor, Tensor]:
        count, per_token = self._experts
        return route(self.tensor(n, count), Routing(per_token, normalise=True))

    def _stacked(
        self, kind: NumberKind | None = None, *, biases: bool = False
    ) -> tuple[ExpertMatrices, ExpertMatrices]:
        """Return the matrices of all experts: gate and up, and down."""
        (count, _), hidden, inner = self._experts, self.shape.hidden, self.shape.intermediate

        def matrices(rows: int, columns: int) -> ExpertMatrices:
            bias = self.tensor(count, rows) if biases else None
            if kind is None:
                return ExpertMatrices(self.tensor(count, rows, columns), bias)
            numbers, own = _quantised_matrix(kind, count, rows, columns)
            return ExpertMatrices(numbers, bias, own)

        return matrices(2 * inner, hidden), matrices(hidden, inner)

    def _grouped(
        self,
        weights: Tensor,
        ids: Tensor,
        matrices: tuple[ExpertMatrices, ExpertMatrices],
        gate: Gate,
    ) -> None:
        x = self.tensor(len(ids), self.shape.hidden)
        grouped_mlp(x, *matrices, weights, ids, gate)

    def adapters(self, n: int) -> None:
        """Run adapters for every product of a layer, with a separate adapter for each token."""
        shape, slots, rank = self.shape, 4, 32
        tiles = [(0, first, min(first + TILE_ROWS, n)) for first in range(0, n, TILE_ROWS)]
        tokens = TokensBySlot(_ints(n), torch.tensor(tiles, dtype=torch.int32))
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        inner = shape.intermediate
        for inputs, parts in (
            (shape.hidden, (q, kv, kv)),
            (q, (shape.hidden,)),
            (shape.hidden, (inner, inner)),
            (inner, (shape.hidden,)),
        ):
            down = self.tensor(slots, len(parts) * rank, inputs)
            up = self.tensor(slots, sum(parts), rank)
            y = self.tensor(n, sum(parts))
            add_low_rank(y, self.tensor(n, inputs), down, up, tokens, parts)

    def store(self, n: int) -> Tensor:
        shape = self.shape
        norm = self.tensor(shape.head_dim) if shape.qk_norm else None
        return rope_and_store(
            self.tensor(n, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
            _floats(2, n, shape.head_dim // 2),
            self.kv,
            _longs(n),
            q_norm=norm,
            k_norm=norm,
            eps=1e-6,
        )

    def write(self, n: int) -> None:
        """Write K and V in the layout of transformers' classes: all tokens of a head together."""
        shape = self.shape
        k, v = (self.tensor(shape.kv_heads, n, shape.head_dim).transpose(0, 1) for _ in "kv")
        store_kv(k, v, self.kv, _longs(n))

    def decode(self, n: int) -> None:
        self._attend(num_rows=n, num_tokens=n, num_decodes=n)

    def extend(self, n: int) -> None:
        self._attend(num_rows=-(-n // 64), num_tokens=n + 1, num_decodes=0)

    def mixed(self, n: int) -> None:
        for prompt in PROMPTS:
            self._attend(num_rows=n + 1, num_tokens=n + prompt, num_decodes=n)

    def _attend(self, *, num_rows: int, num_tokens: int, num_decodes: int) -> None:
        shape = self.shape
        q = self.tensor(num_tokens, shape.heads, shape.head_dim)
        for window in dict.fromkeys((None, shape.window)):
            columns = _ints(num_rows * 64), _ints(num_rows), _ints(num_rows + 1), _ints(num_rows)
            step = AttentionRows(*columns, num_tokens, num_decodes)
            plan = plan_attention(step, self.kv, AttentionKind(shape.heads, window))
            paged_attention(q, self.kv, plan, Scoring(shape.head_dim**-0.5, shape.soft_cap))

    def pack(self, n: int) -> None:
        """Pack the half of every page that belongs to one of two tensor-parallel ranks."""
        pages = self.pool.tensor
        packed = torch.empty(n, pages.shape[1] // 2, dtype=torch.uint8)
        pack_pages(pages, _ints(n), packed, offset=packed.shape[1])
        unpack_pages(packed, pages, _ints(n), offset=packed.shape[1])

    def greedy(self, n: int) -> None:
        sample(self.tensor(n, self.shape.vocabulary), None)

    def sampled(self, n: int) -> None:
        columns = SamplingColumns(
            temperature=_floats(n),
            top_k=_ints(n),
            top_p=_floats(n),
            min_p=_floats(n),
            seeds=_ints(n, 2),
            positions=_ints(n),
        )
        sample(self.tensor(n, self.shape.vocabulary), columns)

    def restricted(self, n: int) -> None:
        """Run the logits operations before and beside sampling, all in float32."""
        vocabulary = self.shape.vocabulary
        logits = _floats(n, vocabulary)
        counts = torch.empty(NUM_SLOTS, vocabulary, dtype=torch.int32)
        weights = {name: _floats(n) for name in ("repetition", "frequency", "presence")}
        apply_penalties(logits, _longs(n), counts, _longs(n), **weights)
        count_tokens(counts, _longs(n), _ints(n), prompt=False)
        count_tokens(counts, _longs(n), _ints(n), prompt=True)
        apply_bitmask(logits, _longs(n), _ints(n, -(-vocabulary // 32)))
        logprobs(logits, _ints(n), NUM_TOP)
        sample(logits, None)

    def counted(self, n: int) -> None:
        """Count tokens of prompts, responses and drafts, which come from the host in 64 bits."""
        counts = torch.empty(NUM_SLOTS, self.shape.vocabulary, dtype=torch.int32)
        count_tokens(counts, _longs(n), _longs(n), prompt=True)
        for times in (1, -1):
            count_tokens(counts, _longs(n), _longs(n), prompt=False, times=times)

    def verified(self, n: int) -> None:
        """Verify as many drafts as other steps have rows, which needs no other code."""
        tokens, by_slot = _ints(n * (1 + n)), _ints(NUM_SLOTS)
        rows = DraftRows(_ints(n + 1), tokens, _longs(n), _ints(1))
        verify_drafts(rows, tokens, by_slot, by_slot, _ints(n, 2 + 1 + n))

    def moved(self, n: int) -> None:
        """Move rows that begin early, with as many tokens as other steps have rows, in one page
        table and in two."""
        words, longs = _ints(n * (1 + n)), _longs(n * (1 + n))
        rows = EarlyRows(_ints(n), _ints(n, 2 * n), _ints(n + 1), longs, _ints(1))
        for tables in (1, 2):
            inputs = RowInputs(words, words, words, [longs] * tables, [words] * tables, words)
            move_early_rows(rows, inputs, _ints(NUM_SLOTS), words, self.page_size)

    def narrow(self, n: int) -> None:
        """Run all operations that write or read keys and values."""
        self.store(n)
        self.write(n)
        self.mixed(n)

    def invariant(self, n: int) -> None:
        """Run the operations that `engine.batch_invariant` changes."""
        with mock.patch.object(device, "batch_invariant", return_value=True):
            self.mixed(n)
            self._attend(num_rows=1, num_tokens=n + 1, num_decodes=0)
            hidden, inner = self.shape.hidden, self.shape.intermediate
            linear(self.tensor(n, hidden), self.tensor(2 * inner, hidden))

    def early(self, n: int) -> None:
        """Run a layer's kernels, each of which starts while the previous one ends."""
        with mock.patch.object(early_launch, "ENABLED", True):
            self.store(n)
            self.mixed(n)
            self.norm(n)
            self.act(n)


_BY_PAGE_SIZE = ("store", "write", "decode", "extend", "mixed", "moved", "pack")
_BY_WIDTH = ("embed", "angles", "first_norm", "norm", "last_norm", "act", "greedy", "sampled")
_BY_VOCABULARY = ("restricted", "verified")
_BF16, _FP32 = torch.bfloat16, torch.float32
_Typed: TypeAlias = tuple[Shape, torch.dtype]


class Selection(NamedTuple):
    """The models whose operations are compiled. Others have one shape, in bfloat16.

    Attributes:
        states: dtypes of the hybrid model.
    """

    plain: Sequence[tuple[Shape, torch.dtype, int]]  # with the size of pages
    experts: Sequence[_Typed]
    adapted: Sequence[_Typed]
    invariant: Sequence[_Typed]  # with engine.batch_invariant
    states: Sequence[torch.dtype] = (_BF16,)


# Covers every difference between kernels.
DEPLOYED = Selection(
    [
        *((QWEN3_06B, dtype, 16) for dtype in DTYPES),
        *((LLAMA3_8B, _BF16, page_size) for page_size in PAGE_SIZES),
        *((each, _BF16, 16) for each in (QWEN3_8B, QWEN2_05B, WIDE_HEAD, MASKED, LLAMA3_70B_TP8)),
    ],
    [(QWEN3_30B, _BF16), (QWEN3_30B, _FP32), (QWEN3_30B_TP2, _BF16)],
    [(shape, _BF16) for shape in ADAPTED],
    [*((shape, _BF16) for shape in (LLAMA3_8B, WIDE_HEAD, MASKED)), (QWEN3_06B, _FP32)],
    states=(_BF16, _FP32),
)
NOT_DEPLOYED = Selection(
    [(LLAMA3_8B, _BF16, 16), (WIDE_HEAD, _BF16, 16)],
    [(QWEN3_30B, _BF16)],
    [(LLAMA3_8B, _BF16)],
    [(LLAMA3_8B, _BF16), (WIDE_HEAD, _BF16)],
)


def serving(arch: int) -> list[Variant]:
    """Return the variants that are served on GPUs of this architecture.

    They cover every difference between kernels on sm_90. Other architectures have no deployments,
    and fewer variants.
    """
    chosen = DEPLOYED if arch == 90 else NOT_DEPLOYED
    early = _Model(LLAMA3_8B, _BF16, 16).early
    found: dict[str, Launcher] = {"llama3-8b bfloat16 page 16 early": early}
    found[f"{QWEN3_06B.name} counted"] = _Model(QWEN3_06B, _BF16, 16).counted
    for shape, dtype, page_size in chosen.plain:
        _add_plain(found, _Model(shape, dtype, page_size))
    for shape, dtype in chosen.experts:
        model, name = _Model(shape, dtype, 16), f"{shape.name} {_named(dtype)} experts"
        found |= {name: model.experts, f"{name} of prompts": model.many_pairs}
    found[f"{GPT_OSS.name} bfloat16 experts"] = _Model(GPT_OSS, _BF16, 16).clamped
    for shape, dtype in chosen.adapted:
        found[f"{shape.name} {_named(dtype)} adapters"] = _Model(shape, dtype, 16).adapters
    for dtype in chosen.states:
        name, hybrid = f"{QWEN3_NEXT} {_named(dtype)}", HybridModel(dtype)
        found |= {f"{name} states": hybrid.states, f"{name} prompts": hybrid.prompts}
        found[f"{name} gated"] = hybrid.gated
    _add_latents(found, "bfloat16 latents", LatentModel(_BF16))
    found["deepseek-v2-lite bfloat16 latents"] = LatentModel(_BF16, heads=16).mixed
    _add_quantised(found, arch)
    if arch >= FIRST_ARCHITECTURE:
        _add_narrow(found)
    for shape, dtype in chosen.invariant:
        found[f"{shape.name} {_named(dtype)} page 16 invariant"] = _Model(
            shape, dtype, 16
        ).invariant
        if dtype.itemsize == 2:
            found[f"{DEEPSEEK_V3} {_named(dtype)} latents invariant"] = LatentModel(dtype).invariant
    return [Variant(name, launch) for name, launch in found.items()]


def _add_plain(found: dict[str, Launcher], model: _Model) -> None:
    """Add operations of any model. Most do not depend on all of shape, dtype and page size."""
    shape, kind = model.shape.name, _named(model.dtype)
    for prefix, names in (
        (f"{shape} {kind} page {model.page_size}", _BY_PAGE_SIZE),
        (f"{shape} {kind}", _BY_WIDTH),
        (shape, _BY_VOCABULARY),
    ):
        for name in names:
            found.setdefault(f"{prefix} {name}", getattr(model, name))


def _add_latents(found: dict[str, Launcher], kind: str, model: LatentModel) -> None:
    name = f"{DEEPSEEK_V3} {kind}"
    found |= {f"{name} store": model.store, name: model.mixed, f"{name} expanded": model.expanded}


def _add_quantised(found: dict[str, Launcher], arch: int) -> None:
    dense, gpt_oss, qwen = (_Model(shape, _BF16, 16) for shape in (LLAMA3_8B, GPT_OSS, QWEN3_30B))
    kinds: dict[NumberKind, _Model | None] = {"int8": None, "int4": qwen, "fp4": gpt_oss}
    if arch >= FIRST_ARCHITECTURE:
        kinds["fp8"] = qwen
    for kind, experts in kinds.items():
        found[f"{dense.shape.name} {kind}"] = partial(dense.quantised_product, kind)
        if experts is not None:
            name = f"{experts.shape.name} {kind}"
            found[name] = partial(experts.quantised_experts, kind)
            found[f"{name} of prompts"] = partial(experts.many_quantised_pairs, kind)


def _add_narrow(found: dict[str, Launcher]) -> None:
    """Add variants with keys, values and latents in 8 bits."""
    for kind, kept_in in {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.items():
        for shape, which in {LLAMA3_8B: "", WIDE_HEAD: f"{WIDE} "}.items():
            model = _Model(shape, _BF16, 16, kept_in)
            found[f"{shape.name} bfloat16 {which}{kind}"] = model.narrow
    model = _Model(LLAMA3_8B, _BF16, 16, torch.float8_e4m3fn)
    found[f"{LLAMA3_8B.name} fp8_e4m3 invariant"] = model.invariant
    latents = LatentModel(_BF16, kept_in=torch.float8_e4m3fn)
    _add_latents(found, "bfloat16 latents fp8_e4m3", latents)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _quantised_matrix(kind: NumberKind, *sizes: int) -> tuple[Tensor, Quantisation]:
    """Return matrices [..., out, in] as in checkpoints: fp8 and int4 in groups of 128 inputs, int8
    by channel, fp4 as in MXFP4."""
    *rows, columns = sizes
    group = {"int8": 0, "fp8": 128, "int4": 128, "fp4": 32}[kind]
    groups = columns // group if group else 1
    match kind:
        case "int8" | "fp8":
            dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
            return torch.empty(sizes, dtype=dtype), Quantisation(_floats(*rows, groups), group)
        case "int4":
            zeros = _bytes(*rows, groups)
            own = Quantisation(_floats(*rows, groups), group, zeros)
            return _bytes(*rows, columns // 2), own
        case "fp4":
            scales = torch.empty(*rows, groups, dtype=torch.bfloat16)
            return _bytes(*rows, columns // 2), Quantisation(scales, group)


def _ints(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.int32)


def _longs(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.int64)


def _bytes(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.uint8)


def _floats(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32)
