"""Operations that move numbers: norm, rotation, activation, embedding, and copies of pages.

With 1 or 64 tokens they take as long as a launch, so only their share of a ceiling with 8192 tokens
is meaningful.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from kernels.layers.act_and_mul import act_and_mul
from kernels.layers.embedding import embed
from kernels.layers.rms_norm import add_rms_norm
from kernels.layers.rope import rope_angles
from kernels.pages.pack import pack_pages, unpack_pages
from kernels.pages.rope_and_store import rope_and_store
from tools.bench.gpu.operation import Compared, Make, Op, roundings
from tools.bench.gpu.setting import Floor, Setting

EPS = 1e-6
PAGE_SIZE = 16


def ops(setting: Setting) -> Iterator[Make]:
    for tokens in setting.sized((1, 64, 8192), (1, 3)):
        for make in (_add_rms_norm, _rope_angles, _rope_and_store, _act_and_mul, _embed):
            yield partial(make, setting, tokens)


def page_ops(setting: Setting) -> Iterator[Make]:
    """Yield pages gathered into one block and back, for copies to the host and slices of heads."""
    page_bytes = setting.sized(2 << 20, 512)  # 16 tokens of Llama-3-8B
    for count in setting.sized((16, 256), (3,)):
        for slice_bytes in (page_bytes, page_bytes // 2):
            for packs in (True, False):
                yield partial(_pack, setting, page_bytes, count, slice_bytes, packs)


def _add_rms_norm(setting: Setting, tokens: int) -> Op:
    hidden = setting.sized(4096, 96)
    x, residual = setting.randn(tokens, hidden), setting.randn(tokens, hidden)
    weight = setting.randn(hidden)

    def compare(found: tuple[torch.Tensor, torch.Tensor]) -> Compared:
        total = x.double() + residual.double()
        scaled = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
        return zip(found, (scaled * weight.double(), total), strict=True)

    return Op(
        "add_rms_norm",
        f"[{tokens}, {hidden}]",
        lambda: add_rms_norm(x, residual, weight, EPS),
        Floor("copy", 4 * x.nbytes + weight.nbytes),
        compare,
        roundings(setting.dtype, 3),  # roundings of the sum, the norm and its product
        peers={"torch rms_norm of a sum": lambda: F.rms_norm(x + residual, (hidden,), weight, EPS)},
        cold=False,
    )


def _frequencies(setting: Setting, count: int) -> torch.Tensor:
    exponents = torch.arange(count, dtype=torch.float32, device=setting.device) / count
    return 1.0 / 1e6**exponents


def _rope_angles(setting: Setting, tokens: int) -> Op:
    half = setting.sized(64, 16)
    positions, frequencies = setting.integers(131072, tokens), _frequencies(setting, half)

    def compare(found: torch.Tensor) -> Compared:
        product = (positions.float()[:, None] * frequencies).double()  # rounded like in models
        return [(found, torch.stack((product.cos(), product.sin())))]

    return Op(
        "rope_angles",
        f"[{tokens}, {half}]",
        lambda: rope_angles(positions, frequencies, 1.0),
        Floor("copy", positions.nbytes + 2 * 4 * tokens * half),
        compare,
        1e-5,
        cold=False,
    )


def _rope_and_store(setting: Setting, tokens: int) -> Op:
    heads, kv_heads, size = setting.sized((32, 8, 128), (4, 2, 32))
    qkv = setting.randn(tokens, (heads + 2 * kv_heads) * size)
    num_pages = -(-tokens // PAGE_SIZE) + 1
    kv = setting.randn(num_pages, kv_heads, 2, PAGE_SIZE, size)
    locations = torch.randperm(num_pages * PAGE_SIZE, device=setting.device)[:tokens]
    angles = rope_angles(setting.integers(8192, tokens), _frequencies(setting, size // 2), 1.0)
    q_norm, k_norm = setting.randn(size), setting.randn(size)

    def compare(q: torch.Tensor) -> Compared:
        packed = qkv.view(tokens, -1, size).double()
        weights = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1))).double()
        turned = packed[:, : heads + kv_heads]
        turned = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + EPS) * weights
        low, high = turned.chunk(2, dim=-1)
        cos, sin = angles.double().unsqueeze(2).unbind(0)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        stored = kv.permute(0, 3, 2, 1, 4)[locations // PAGE_SIZE, locations % PAGE_SIZE]
        yield q, turned[:, :heads]
        yield stored[:, 0], turned[:, heads:]
        yield stored[:, 1], packed[:, heads + kv_heads :]

    return Op(
        "rope_and_store",
        f"[{tokens}, {heads}/{kv_heads}x{size}], QK norm",
        partial(rope_and_store, qkv, angles, kv, locations, q_norm=q_norm, k_norm=k_norm, eps=EPS),
        Floor("copy", 2 * qkv.nbytes + angles.nbytes + locations.nbytes),
        compare,
        roundings(setting.dtype, 3),  # of the norm, its product, the rotation
        cold=False,
    )


def _act_and_mul(setting: Setting, tokens: int) -> Op:
    size = setting.sized(14336, 160)
    x = setting.randn(tokens, 2 * size)

    def compare(found: torch.Tensor) -> Compared:
        gate, up = x.double().chunk(2, dim=-1)
        return [(found, F.silu(gate) * up)]

    return Op(
        "act_and_mul",
        f"[{tokens}, {2 * size}] silu",
        lambda: act_and_mul(x, "silu"),
        Floor("copy", 1.5 * x.nbytes),
        compare,
        roundings(setting.dtype, 1),
        cold=False,
    )


def _embed(setting: Setting, tokens: int) -> Op:
    vocabulary, hidden = setting.sized((151936, 4096), (64, 96))
    weight, future = setting.randn(vocabulary, hidden), setting.integers(vocabulary, 256)
    token_ids = setting.integers(vocabulary, tokens)
    token_ids[::2] = -1 - setting.integers(256, len(token_ids[::2]))

    def compare(found: torch.Tensor) -> Compared:
        resolved = token_ids.where(token_ids >= 0, future[(-1 - token_ids).clamp(min=0)])
        return [(found, weight[resolved])]

    return Op(
        "embed",
        f"[{tokens}, {hidden}] of {vocabulary}, every other one by its slot",
        lambda: embed(token_ids, future, weight),
        Floor("copy", 2 * tokens * hidden * weight.element_size()),
        compare,
    )


def _pack(setting: Setting, page_bytes: int, count: int, slice_bytes: int, packs: bool) -> Op:
    pool = setting.integers(256, 4 * count, page_bytes, dtype=torch.uint8)
    pages = torch.randperm(4 * count, device=setting.device)[:count].int()
    packed = setting.integers(256, count, slice_bytes, dtype=torch.uint8)
    offset = page_bytes - slice_bytes
    pack = partial(pack_pages, pool, pages, packed, offset=offset)
    return Op(
        "pack_pages" if packs else "unpack_pages",
        f"{count} x {slice_bytes} of {page_bytes} bytes",
        pack if packs else partial(unpack_pages, packed, pool, pages, offset=offset),
        Floor("copy", 2 * packed.nbytes),
        lambda _: [(packed, pool[pages.long(), offset:])],
        peers={"torch index_select": partial(pool.index_select, 0, pages)} if packs else {},
    )
