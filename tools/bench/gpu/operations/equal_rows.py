"""Operations of a step whose rows are computed alone and beside others, and compared bit by bit."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kernels.adapters.low_rank import TILE_ROWS, TokensBySlot, add_low_rank
from kernels.device import architecture
from kernels.experts.grouped_mlp import ExpertMatrices, grouped_mlp
from kernels.experts.routing import Routing, route
from kernels.experts.shared_expert import add_gated
from kernels.layers.act_and_mul import act_and_mul
from kernels.layers.by_head import HeadMatrices
from kernels.layers.linear import linear
from kernels.layers.output_gate import gate_heads
from kernels.layers.quantised_linear import quantised_linear
from kernels.layers.rms_norm import add_rms_norm
from kernels.layers.rope import rope_angles
from kernels.layers.soft_cap import soft_cap
from kernels.narrow import FIRST_ARCHITECTURE
from kernels.pages.rope_and_store import rope_and_store
from kernels.pages.store_latents import rope_and_store_latents
from kernels.quantised import NumberKind
from kernels.sampling.logprobs import logprobs
from kernels.sampling.penalties import apply_penalties
from kernels.sampling.sample import SamplingColumns, sample
from tools.bench.gpu.operations.products import DRY_SHAPES, SHAPES, group_of, quantised_matrix
from tools.bench.gpu.setting import Setting

# Around the sizes of tiles. The last one uses the larger tiles of experts.
COUNTS, DRY_COUNTS = (2, 3, 16, 17, 63, 64, 65, 127, 128, 129, 256, 1100), (3, 66)
PROBED = 5  # rows that are also computed alone
EPS = 1e-6
EXPERTS, PER_TOKEN = 16, 4

Operation: TypeAlias = Callable[[Tensor], Tensor]  # int64 [n]: indices of rows. Returns [n, any]


class Compared(NamedTuple):
    """Number of compared numbers, and number of differences."""

    numbers: int
    differing: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> "Compared":
        numbers = differing = 0
        for one, other in pairs:
            numbers += one.numel()
            differing += int((as_bits(one) != as_bits(other)).sum())
        return cls(numbers, differing)


def as_bits(x: Tensor) -> Tensor:
    """Return numbers as integers with the same bits."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def compare(operation: Operation, counts: Sequence[int], device: torch.device) -> Compared:
    """Compare rows alone with the same rows at random positions among others."""
    generator, total = torch.Generator().manual_seed(0), max(counts)
    probed = torch.randperm(total, generator=generator)[:PROBED]
    alone = [operation(row.view(1).to(device))[0] for row in probed]

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for count in counts:
            rest = torch.randperm(total, generator=generator)
            rest = rest[~torch.isin(rest, probed)]
            rows = torch.cat((probed, rest))[:count]
            rows = rows[torch.randperm(len(rows), generator=generator)]
            together = operation(rows.to(device))
            for row, expected in zip(probed, alone, strict=True):
                for place in (rows == row).nonzero().flatten().tolist():
                    yield together[place], expected

    return Compared.of(pairs())


def operations(setting: Setting, dtype: torch.dtype) -> Iterator[tuple[str, Operation]]:
    """Yield the operations of natively supported architectures, on the shape of an 8B model."""
    data = _Data(setting, dtype)
    for name, size in setting.sized(SHAPES, DRY_SHAPES).items():
        yield f"linear {name}", partial(data.linear, *size)
    for kind in data.kinds:
        yield f"linear {kind}", partial(data.quantised, kind)
    yield "products of heads", data.by_head
    yield "experts", data.experts
    yield "router", data.router
    yield "shared expert", data.shared
    yield "adapters", data.adapters
    yield "norm", data.norm
    yield "activation", data.activation
    yield "angles", data.angles
    yield "rotated keys and queries", data.rotated
    yield "rotated latents", data.latents
    yield "gated heads", data.gated
    yield "soft cap", data.capped
    yield "logprobs", data.logprobs
    yield "penalties", data.penalties
    yield "sampled tokens", data.sampled


class _Data:
    """Random inputs of operations, the same at every call."""

    def __init__(self, setting: Setting, dtype: torch.dtype) -> None:
        self._setting, self._dtype = setting, dtype
        self._rows = max(setting.sized(COUNTS, DRY_COUNTS))
        self._hidden, self._head, self._vocabulary = setting.sized(
            (4096, 128, 128256), (96, 16, 320)
        )

    @property
    def kinds(self) -> Sequence[NumberKind]:
        kinds: list[NumberKind] = ["int8", "int4", "fp4"]
        if architecture() >= FIRST_ARCHITECTURE:
            kinds.append("fp8")
        return self._setting.sized(kinds, ["int8", "int4"])

    def _numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        device = self._setting.device
        generator = torch.Generator(device).manual_seed(sum(shape))
        drawn = torch.randn(*shape, generator=generator, device=device)
        return drawn.to(dtype or self._dtype)

    def _floats(self, *shape: int) -> Tensor:
        return self._numbers(*shape, dtype=torch.float32)

    def _of(self, rows: Tensor, *shape: int) -> Tensor:
        return self._numbers(self._rows, *shape)[rows]

    def linear(self, inputs: int, outputs: int, rows: Tensor) -> Tensor:
        weight, bias = self._numbers(outputs, inputs), self._numbers(outputs)
        return linear(self._of(rows, inputs), weight, bias)

    def quantised(self, kind: NumberKind, rows: Tensor) -> Tensor:
        hidden = self._setting.sized(self._hidden, 128)
        codes = (self._floats(hidden, hidden).abs() * 5).clamp(max=15).to(torch.uint8)
        scales = self._floats(hidden, hidden // (group_of(kind) or hidden)).abs()
        zeros = (scales * 5).clamp(max=15).to(torch.uint8)
        matrix = quantised_matrix(kind, codes, scales, zeros)
        return quantised_linear(self._of(rows, hidden), *matrix)

    def by_head(self, rows: Tensor) -> Tensor:
        inputs, outputs = self._setting.sized((128, 512), (16, 40))
        out = torch.empty(len(rows), 8, outputs, dtype=self._dtype, device=rows.device)
        HeadMatrices.of(self._numbers(8, inputs, outputs)).multiply(self._of(rows, 8, inputs), out)
        return out.flatten(1)

    def experts(self, rows: Tensor) -> Tensor:
        hidden, inner = self._hidden, self._setting.sized(768, 40)
        gate_up = ExpertMatrices(self._numbers(EXPERTS, 2 * inner, hidden))
        down = ExpertMatrices(self._numbers(EXPERTS, hidden, inner))
        weights, ids = route(self._of(rows, EXPERTS), Routing(PER_TOKEN, True))
        return grouped_mlp(self._of(rows, hidden), gate_up, down, weights, ids, "silu")

    def router(self, rows: Tensor) -> Tensor:
        grouped = Routing(PER_TOKEN, True, "sigmoid", 2.5, 4, 2, 2)
        ways = (Routing(PER_TOKEN, True), None), (grouped, self._floats(EXPERTS))
        parts = [route(self._of(rows, EXPERTS), way, bias) for way, bias in ways]
        return torch.cat([part.float() for both in parts for part in both], 1)

    def shared(self, rows: Tensor) -> Tensor:
        y, added, x = (self._of(rows, part, self._hidden)[:, -1] for part in (1, 2, 3))
        weight = self._numbers(1, self._hidden)
        return add_gated(y.contiguous(), added.contiguous(), x.contiguous(), weight)

    def adapters(self, rows: Tensor) -> Tensor:
        rank, count = 32, len(rows)
        tiles = [(0, at, min(at + TILE_ROWS, count)) for at in range(0, count, TILE_ROWS)]
        order = torch.arange(count, dtype=torch.int32, device=rows.device)
        table = torch.tensor(tiles, dtype=torch.int32, device=rows.device)
        y, parts = self._of(rows, 96), (64, 32)
        down, up = self._numbers(1, 2 * rank, self._hidden), self._numbers(1, 96, rank)
        by_slot = TokensBySlot(order, table)
        add_low_rank(y, self._of(rows, self._hidden), down, up, by_slot, parts)
        return y

    def norm(self, rows: Tensor) -> Tensor:
        x, weight = self._of(rows, self._hidden), self._numbers(self._hidden)
        return torch.cat(add_rms_norm(x, self._of(rows, self._hidden), weight, EPS), 1)

    def activation(self, rows: Tensor) -> Tensor:
        x = self._of(rows, self._hidden)
        return torch.cat([act_and_mul(x, name) for name in ("silu", "gelu", "gelu_tanh")], 1)

    def angles(self, rows: Tensor) -> Tensor:
        found = rope_angles(rows.int() * 37, self._floats(self._head // 2).abs(), 1.0)
        return found.transpose(0, 1).flatten(1)

    def rotated(self, rows: Tensor) -> Tensor:
        head, pages = self._head, self._rows // 16 + 1
        kv = torch.zeros(pages, 2, 2, 16, head, dtype=self._dtype, device=rows.device)
        angles = self._floats(2, self._rows, head // 2)[:, rows].contiguous()
        norm, qkv = self._numbers(head), self._of(rows, 8 * head)
        q = rope_and_store(qkv, angles, kv, rows, q_norm=norm, k_norm=norm, eps=EPS)
        return torch.cat((q.flatten(1), kv[rows // 16, :, :, rows % 16].flatten(1)), 1)

    def latents(self, rows: Tensor) -> Tensor:
        rank, turned, pages = *self._setting.sized((512, 64), (32, 8)), self._rows // 16 + 1
        kept = torch.zeros(pages, 1, 1, 16, rank + turned, dtype=self._dtype, device=rows.device)
        angles = self._floats(2, self._rows, turned // 2)[:, rows].contiguous()
        q, out = self._of(rows, 4, turned), self._of(rows, 4, turned)
        x, norm = self._of(rows, rank + turned), self._numbers(rank)
        rope_and_store_latents(x, norm, EPS, q, angles, kept, rows, out, interleaved=True)
        return torch.cat((out.flatten(1), kept[rows // 16, 0, 0, rows % 16]), 1)

    def gated(self, rows: Tensor) -> Tensor:
        return gate_heads(self._of(rows, self._hidden), self._of(rows, 4, self._hidden // 4))

    def capped(self, rows: Tensor) -> Tensor:
        return soft_cap(self._of(rows, self._vocabulary), 30.0)

    def logprobs(self, rows: Tensor) -> Tensor:
        logits = self._of(rows, self._vocabulary)
        chosen, ids, top = logprobs(logits, rows.int() % self._vocabulary, 5)
        return torch.cat((chosen.unsqueeze(1), ids.float(), top), 1)

    def penalties(self, rows: Tensor) -> Tensor:
        logits = self._of(rows, self._vocabulary).float()
        counts = (self._floats(self._rows, self._vocabulary) * 2).int().clamp(0)
        each, local = 1 + rows.float() / self._rows, torch.arange(len(rows), device=rows.device)
        apply_penalties(logits, local, counts, rows, repetition=each, frequency=each, presence=each)
        return logits

    def sampled(self, rows: Tensor) -> Tensor:
        columns = SamplingColumns(
            temperature=0.5 + rows.float() / self._rows,
            top_k=rows.int() % 40,
            top_p=torch.full((len(rows),), 0.9, device=rows.device),
            min_p=torch.full((len(rows),), 0.01, device=rows.device),
            seeds=torch.stack((rows, rows + 7), 1).int(),
            positions=rows.int(),
        )
        return sample(self._of(rows, self._vocabulary), columns).unsqueeze(1)
