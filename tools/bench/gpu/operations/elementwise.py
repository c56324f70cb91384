"""Operations between the matrix products: norm, rotation, activation, embedding.

With 1 or 64 tokens they take as long as a launch, so only their share of a ceiling with 8192 tokens
is meaningful.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from kernels.layers.act_and_mul import act_and_mul
from kernels.layers.embedding import embed
from kernels.layers.rms_norm import add_rms_norm
from kernels.layers.rope import rope_angles
from kernels.pages.rope_and_store import rope_and_store
from tools.bench.gpu.ops import Op, relative_error, roundings, worst
from tools.bench.gpu.setting import Setting

EPS = 1e-6
PAGE_SIZE = 16


def ops(setting: Setting) -> Iterator[Callable[[], Op]]:
    for tokens in setting.sized((1, 64, 8192), (1, 3)):
        yield partial(_add_rms_norm, setting, tokens)
        yield partial(_rope_angles, setting, tokens)
        yield partial(_rope_and_store, setting, tokens)
        yield partial(_act_and_mul, setting, tokens)
        yield partial(_embed, setting, tokens)


def _add_rms_norm(setting: Setting, tokens: int) -> Op:
    hidden = setting.sized(4096, 96)
    x, residual = setting.randn(tokens, hidden), setting.randn(tokens, hidden)
    weight = setting.randn(hidden)

    def error() -> float:
        normed, total = add_rms_norm(x, residual, weight, EPS)
        wide = x.double() + residual.double()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
        return worst(relative_error(total, wide), relative_error(normed, exact))

    return Op(
        name="add_rms_norm",
        shape=f"[{tokens}, {hidden}]",
        call=lambda: add_rms_norm(x, residual, weight, EPS),
        error=error,
        tolerance=roundings(setting.dtype, 3),  # roundings of the sum, the norm and its product
        ceiling="copy",
        amount=4 * x.nbytes + weight.nbytes,
        cold=False,
        peers={"torch rms_norm of a sum": lambda: F.rms_norm(x + residual, (hidden,), weight, EPS)},
    )


def _rope_angles(setting: Setting, tokens: int) -> Op:
    half = setting.sized(64, 16)
    positions = setting.integers(131072, tokens)
    exponents = torch.arange(half, dtype=torch.float32, device=setting.device) / half
    frequencies = 1.0 / 1e6**exponents

    def error() -> float:
        product = (positions.float()[:, None] * frequencies).double()  # rounded like in models
        return relative_error(
            rope_angles(positions, frequencies, 1.0), torch.stack((product.cos(), product.sin()))
        )

    return Op(
        name="rope_angles",
        shape=f"[{tokens}, {half}]",
        call=lambda: rope_angles(positions, frequencies, 1.0),
        error=error,
        tolerance=1e-5,
        ceiling="copy",
        amount=positions.nbytes + 2 * 4 * tokens * half,
        cold=False,
    )


def _rope_and_store(setting: Setting, tokens: int) -> Op:
    heads, kv_heads, head_dim = setting.sized((32, 8, 128), (4, 2, 32))
    qkv = setting.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    num_pages = -(-tokens // PAGE_SIZE) + 1
    kv = setting.randn(num_pages, kv_heads, 2, PAGE_SIZE, head_dim)
    locations = torch.randperm(num_pages * PAGE_SIZE, device=setting.device)[:tokens]
    positions = setting.integers(8192, tokens)
    exponents = torch.arange(head_dim // 2, dtype=torch.float32, device=setting.device)
    angles = rope_angles(positions, 1.0 / 1e6 ** (2.0 * exponents / head_dim), 1.0)
    q_norm, k_norm = setting.randn(head_dim), setting.randn(head_dim)
    call = partial(
        rope_and_store, qkv, angles, kv, locations, q_norm=q_norm, k_norm=k_norm, eps=EPS
    )

    def error() -> float:
        q = call()
        packed = qkv.view(tokens, -1, head_dim).double()
        weights = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1))).double()
        turned = packed[:, : heads + kv_heads]
        turned = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + EPS) * weights
        low, high = turned.chunk(2, dim=-1)
        cos, sin = angles.double().unsqueeze(2).unbind(0)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        stored = kv.permute(0, 3, 2, 1, 4)[locations // PAGE_SIZE, locations % PAGE_SIZE]
        return worst(
            relative_error(q, turned[:, :heads]),
            relative_error(stored[:, 0], turned[:, heads:]),
            relative_error(stored[:, 1], packed[:, heads + kv_heads :]),
        )

    return Op(
        name="rope_and_store",
        shape=f"[{tokens}, {heads}/{kv_heads}x{head_dim}], QK norm",
        call=call,
        error=error,
        tolerance=roundings(setting.dtype, 3),  # of the norm, its product, the rotation
        ceiling="copy",
        amount=2 * qkv.nbytes + angles.nbytes + locations.nbytes,
        cold=False,
    )


def _act_and_mul(setting: Setting, tokens: int) -> Op:
    size = setting.sized(14336, 160)
    x = setting.randn(tokens, 2 * size)

    def error() -> float:
        gate, up = x.double().chunk(2, dim=-1)
        return relative_error(act_and_mul(x, "silu"), F.silu(gate) * up)

    return Op(
        name="act_and_mul",
        shape=f"[{tokens}, {2 * size}] silu",
        call=lambda: act_and_mul(x, "silu"),
        error=error,
        tolerance=roundings(setting.dtype, 1),
        ceiling="copy",
        amount=1.5 * x.nbytes,
        cold=False,
    )


def _embed(setting: Setting, tokens: int) -> Op:
    vocabulary, hidden = setting.sized((151936, 4096), (64, 96))
    weight = setting.randn(vocabulary, hidden)
    future = setting.integers(vocabulary, 256)
    token_ids = setting.integers(vocabulary, tokens)
    token_ids[::2] = -1 - setting.integers(256, len(token_ids[::2]))

    def error() -> float:
        resolved = token_ids.where(token_ids >= 0, future[(-1 - token_ids).clamp(min=0)])
        return relative_error(embed(token_ids, future, weight), weight[resolved])

    return Op(
        name="embed",
        shape=f"[{tokens}, {hidden}] of {vocabulary}, every other one by its slot",
        call=lambda: embed(token_ids, future, weight),
        error=error,
        tolerance=0.0,
        ceiling="copy",
        amount=2 * tokens * hidden * weight.element_size(),
    )
