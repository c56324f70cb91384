"""Kernel launches of serving: every operation of a forward pass, on shapes of served models.

Operations are called as the engine calls them, on host tensors with the real widths, strides,
dtypes and alignment. Their memory is never accessed, so callers must record launches without
running them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
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
MIXTRAL = Shape("mixtral-8x7b", 4096, 32, 8, 128, 14336, 32000, 32, experts=(8, 2))
GPT_OSS = Shape("gpt-oss-20b", 2880, 64, 8, 64, 2880, 201088, 24, experts=(32, 4))
# One rank's part of a model: an eighth with one KV head, and half of the experts' inner size.
LLAMA3_70B_TP8 = Shape("llama3-70b-tp8", 8192, 8, 1, 128, 3584, 128256, 80)
QWEN3_30B_TP2 = replace(QWEN3_30B, name="qwen3-30b-a3b-tp2", heads=16, kv_heads=2, intermediate=384)
SHAPES = (QWEN3_06B, LLAMA3_8B, QWEN3_8B, QWEN2_05B, WIDE_HEAD, MASKED)
WIDE = "wide heads"  # group of operations with their own budget
QWEN3_NEXT, DEEPSEEK_V3 = "qwen3-next", "deepseek-v3"  # groups of hybrids and of latents
WITH_EXPERTS = (QWEN3_30B, MIXTRAL)
ADAPTED = (LLAMA3_8B, QWEN2_05B)


@dataclass(frozen=True, slots=True)
class Variant:
    """One operation of one model. `launch` calls it for a batch of that many rows or tokens."""

    name: str
    launch: Callable[[int], object]


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
        assert self.shape.experts is not None
        count, per_token = self.shape.experts
        weights, ids = route(self.tensor(n, count), Routing(per_token, normalise=True))
        grouped = Routing(per_token, True, "sigmoid", 2.5, 8, 4, 2)  # as in DeepSeek-V3
        if count >= 16 * grouped.groups:
            route(_floats(n, count), grouped, _floats(count))
        self._grouped(weights, ids)

    def many_pairs(self, n: int) -> None:
        """Run the products of a prompt, in larger tiles."""
        assert self.shape.experts is not None
        count, per_token = self.shape.experts
        tokens = n + MANY_PAIRS * count // per_token
        self._grouped(_floats(tokens, per_token), _ints(tokens, per_token))

    def _grouped(self, weights: Tensor, ids: Tensor) -> None:
        assert self.shape.experts is not None
        count, shape = self.shape.experts[0], self.shape
        gate_up = ExpertMatrices(self.tensor(count, 2 * shape.intermediate, shape.hidden))
        down = ExpertMatrices(self.tensor(count, shape.hidden, shape.intermediate))
        x = self.tensor(len(ids), shape.hidden)
        grouped_mlp(x, gate_up, down, weights, ids, shape.activation)

    def quantised_product(self, kind: NumberKind, n: int) -> None:
        rows, columns = 2 * self.shape.intermediate, self.shape.hidden
        matrix = _quantised_matrix(kind, rows, columns)
        quantised_linear(self.tensor(n, columns), *matrix)

    def many_quantised_pairs(self, kind: NumberKind, n: int) -> None:
        """Run the products of a prompt, in larger tiles."""
        assert self.shape.experts is not None
        count, per_token = self.shape.experts
        self.quantised_experts(kind, n + MANY_PAIRS * count // per_token)

    def quantised_experts(self, kind: NumberKind, n: int) -> None:
        assert self.shape.experts is not None
        (count, per_token), shape = self.shape.experts, self.shape
        weights, ids = route(self.tensor(n, count), Routing(per_token, normalise=True))
        gate_up, down = (
            ExpertMatrices(
                numbers, self.tensor(count, rows) if kind == "fp4" else None, quantisation
            )
            for rows, columns in (
                (2 * shape.intermediate, shape.hidden),
                (shape.hidden, shape.intermediate),
            )
            for numbers, quantisation in [_quantised_matrix(kind, count, rows, columns)]
        )
        gate: Gate = "clamped" if kind == "fp4" else shape.activation
        grouped_mlp(self.tensor(n, shape.hidden), gate_up, down, weights, ids, gate)

    def clamped(self, n: int) -> None:
        """Run experts of gpt-oss, which have biases."""
        assert self.shape.experts is not None
        (count, per_token), shape = self.shape.experts, self.shape
        weights, ids = route(self.tensor(n, count), Routing(per_token, normalise=True))
        gate_up, down = (
            ExpertMatrices(self.tensor(count, *each), self.tensor(count, each[0]))
            for each in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
        )
        grouped_mlp(self.tensor(n, shape.hidden), gate_up, down, weights, ids, "clamped")

    def adapters(self, n: int) -> None:
        """Run adapters for every product of a layer, with a separate adapter for each token."""
        shape, slots, rank = self.shape, 4, 32
        tiles = [(0, first, min(first + TILE_ROWS, n)) for first in range(0, n, TILE_ROWS)]
        tokens = TokensBySlot(_ints(n), torch.tensor(tiles, dtype=torch.int32))
        q, kv, inner = (
            shape.heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
            shape.intermediate,
        )
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
            step = AttentionRows(
                _ints(num_rows * 64),
                _ints(num_rows),
                _ints(num_rows + 1),
                _ints(num_rows),
                num_tokens,
                num_decodes,
            )
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

    def verified(self, n: int) -> None:
        """Verify as many drafts as other steps have rows, which needs no other code."""
        tokens, by_slot = _ints(n * (1 + n)), _ints(NUM_SLOTS)
        rows = DraftRows(_ints(n + 1), tokens, _longs(n), n, 1 + n)
        verify_drafts(rows, tokens, by_slot, by_slot)

    def moved(self, n: int) -> None:
        """Move rows that begin early, with as many tokens as other steps have rows, in one page
        table and in two."""
        words, longs = _ints(n * (1 + n)), _longs(n * (1 + n))
        rows = EarlyRows(words, n, _ints(n + 1), longs, n)
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
_BF16 = torch.bfloat16


def serving(arch: int, *, every: bool) -> list[Variant]:
    """Return the variants that are served on GPUs of this architecture.

    Args:
        every: all shapes in all dtypes with all page sizes. Otherwise, a selection that covers
            every difference between kernels, and a smaller one for architectures without
            deployments (all but sm_90).
    """
    if every:
        kinds = product((*WITH_EXPERTS, QWEN3_30B_TP2), DTYPES)
        experts = [each for shape, dtype in kinds for each in _experts(shape, dtype)]
        experts += _variants([(LLAMA3_70B_TP8, _BF16, 16)])
        experts += [_clamped(GPT_OSS, dtype) for dtype in DTYPES]
        experts += [each for dtype in DTYPES for each in _states(dtype)]
        experts += [_adapters(shape, dtype) for shape in ADAPTED for dtype in DTYPES]
        experts += [*_latents(torch.bfloat16), *_latents(torch.float16)]
        experts += [*_quantised(arch), *(_narrow() if arch >= FIRST_ARCHITECTURE else [])]
        experts += _invariant(product(SHAPES, DTYPES), arch)
        return [*_variants(product(SHAPES, DTYPES, PAGE_SIZES)), *experts]
    early = Variant("llama3-8b bfloat16 page 16 early", _Model(LLAMA3_8B, _BF16, 16).early)
    if arch != 90:
        few = _variants([(LLAMA3_8B, _BF16, 16), (WIDE_HEAD, _BF16, 16)])
        experts = [*_experts(QWEN3_30B, _BF16), _clamped(GPT_OSS, _BF16)]
        experts.append(_adapters(LLAMA3_8B, _BF16))
        narrow = [*_quantised(arch), *(_narrow() if arch >= FIRST_ARCHITECTURE else [])]
        invariant = _invariant([(LLAMA3_8B, _BF16), (WIDE_HEAD, _BF16)], arch)
        return [early, *few, *experts, *_states(_BF16), *_latents(_BF16), *narrow, *invariant]
    dtypes = [(QWEN3_06B, dtype, 16) for dtype in DTYPES]
    page_sizes = [(LLAMA3_8B, _BF16, page_size) for page_size in PAGE_SIZES]
    shapes = (QWEN3_8B, QWEN2_05B, WIDE_HEAD, MASKED, LLAMA3_70B_TP8)
    others = [(shape, _BF16, 16) for shape in shapes]
    experts = [*_experts(QWEN3_30B, _BF16), *_experts(QWEN3_30B, torch.float32)]
    experts += _experts(QWEN3_30B_TP2, _BF16)
    experts += [_clamped(GPT_OSS, _BF16), *_states(_BF16), *_states(torch.float32)]
    experts += [_adapters(shape, _BF16) for shape in ADAPTED]
    experts += [*_latents(_BF16), *_narrow(), *_quantised(arch)]
    experts += _invariant([(shape, _BF16) for shape in (LLAMA3_8B, WIDE_HEAD, MASKED)], arch)
    experts += _invariant([(QWEN3_06B, torch.float32)], arch)
    return [early, *_variants([*dtypes, *page_sizes, *others]), *experts]


def _states(dtype: torch.dtype) -> list[Variant]:
    name, model = f"{QWEN3_NEXT} {str(dtype).removeprefix('torch.')}", HybridModel(dtype)
    return [
        Variant(f"{name} states", model.states),
        Variant(f"{name} prompts", model.prompts),
        Variant(f"{name} gated", model.gated),
    ]


def _invariant(models: Iterable[tuple[Shape, torch.dtype]], arch: int) -> list[Variant]:
    """Return the variants of `engine.batch_invariant`, in 16 bits also those of latents."""
    found = {}
    for shape, dtype in models:
        kind = str(dtype).removeprefix("torch.")
        found[f"{shape.name} {kind} page 16 invariant"] = _Model(shape, dtype, 16).invariant
        if dtype.itemsize == 2:
            found[f"{DEEPSEEK_V3} {kind} latents invariant"] = LatentModel(dtype).invariant
    if arch >= FIRST_ARCHITECTURE:
        narrow = _Model(LLAMA3_8B, _BF16, 16, torch.float8_e4m3fn)
        found[f"{LLAMA3_8B.name} fp8_e4m3 invariant"] = narrow.invariant
    return [Variant(name, launch) for name, launch in found.items()]


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


def _quantised(arch: int) -> list[Variant]:
    kinds: list[NumberKind] = ["int8", "int4", "fp4"]
    if arch >= FIRST_ARCHITECTURE:
        kinds.append("fp8")
    dense, gpt_oss = (_Model(shape, _BF16, 16) for shape in (LLAMA3_8B, GPT_OSS))
    qwen = _Model(QWEN3_30B, _BF16, 16)
    experts: Mapping[NumberKind, _Model] = {"fp4": gpt_oss, "fp8": qwen, "int4": qwen}
    return [
        *(
            Variant(f"{dense.shape.name} {kind}", partial(dense.quantised_product, kind))
            for kind in kinds
        ),
        *(
            Variant(f"{model.shape.name} {kind}{what}", partial(run, kind))
            for kind, model in experts.items()
            for what, run in {
                "": model.quantised_experts,
                " of prompts": model.many_quantised_pairs,
            }.items()
            if kind in kinds
        ),
    ]


def _adapters(shape: Shape, dtype: torch.dtype) -> Variant:
    name = f"{shape.name} {str(dtype).removeprefix('torch.')} adapters"
    return Variant(name, _Model(shape, dtype, 16).adapters)


def _latents(dtype: torch.dtype) -> list[Variant]:
    kind, large = str(dtype).removeprefix("torch."), LatentModel(dtype)
    return [
        Variant(f"{DEEPSEEK_V3} {kind} latents store", large.store),
        Variant(f"{DEEPSEEK_V3} {kind} latents", large.mixed),
        Variant(f"{DEEPSEEK_V3} {kind} latents expanded", large.expanded),
        Variant(f"deepseek-v2-lite {kind} latents", LatentModel(dtype, heads=16).mixed),
    ]


def _narrow() -> list[Variant]:
    """Return the variants with keys, values and latents in 8 bits."""
    kinds = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    heads = {LLAMA3_8B: "", WIDE_HEAD: f"{WIDE} "}
    models = {
        f"{shape.name} bfloat16 {which}{kind}": _Model(shape, _BF16, 16, kept_in).narrow
        for kind, kept_in in kinds.items()
        for shape, which in heads.items()
    }
    latents = LatentModel(_BF16, kept_in=torch.float8_e4m3fn)
    models[f"{DEEPSEEK_V3} bfloat16 latents fp8_e4m3 store"] = latents.store
    models[f"{DEEPSEEK_V3} bfloat16 latents fp8_e4m3"] = latents.mixed
    models[f"{DEEPSEEK_V3} bfloat16 latents fp8_e4m3 expanded"] = latents.expanded
    return [Variant(name, launch) for name, launch in models.items()]


def _experts(shape: Shape, dtype: torch.dtype) -> list[Variant]:
    name = f"{shape.name} {str(dtype).removeprefix('torch.')} experts"
    model = _Model(shape, dtype, 16)
    return [Variant(name, model.experts), Variant(f"{name} of prompts", model.many_pairs)]


def _clamped(shape: Shape, dtype: torch.dtype) -> Variant:
    name = f"{shape.name} {str(dtype).removeprefix('torch.')} experts"
    return Variant(name, _Model(shape, dtype, 16).clamped)


def _variants(models: Iterable[tuple[Shape, torch.dtype, int]]) -> list[Variant]:
    variants: dict[str, Variant] = {}  # deduplicated: most do not depend on all three
    for shape, dtype, page_size in models:
        model = _Model(shape, dtype, page_size)
        kind = str(dtype).removeprefix("torch.")
        for prefix, names in (
            (f"{shape.name} {kind} page {page_size}", _BY_PAGE_SIZE),
            (f"{shape.name} {kind}", _BY_WIDTH),
            (shape.name, _BY_VOCABULARY),
        ):
            for name in names:
                full = f"{prefix} {name}"
                variants.setdefault(full, Variant(full, getattr(model, name)))
    return list(variants.values())


def _ints(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.int32)


def _longs(*sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.int64)


def _bytes(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.uint8)


def _floats(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.float32)
