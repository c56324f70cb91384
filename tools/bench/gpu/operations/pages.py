"""Pages gathered into one block and back, for copies to the host and slices of heads."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.pages.pack import pack_pages, unpack_pages
from tools.bench.gpu.ops import Op, unequal_share
from tools.bench.gpu.setting import Setting


def ops(setting: Setting) -> Iterator[Callable[[], Op]]:
    page_bytes = setting.sized(2 << 20, 512)  # 16 tokens of Llama-3-8B
    for count in setting.sized((16, 256), (3,)):
        for slice_bytes in (page_bytes, page_bytes // 2):
            for packs in (True, False):
                yield partial(_op, setting, page_bytes, count, slice_bytes, packs)


def _op(setting: Setting, page_bytes: int, count: int, slice_bytes: int, packs: bool) -> Op:
    pool, pages, packed = _memory(setting, page_bytes, count, slice_bytes)
    offset = page_bytes - slice_bytes
    pack = partial(pack_pages, pool, pages, packed, offset=offset)
    call = pack if packs else partial(unpack_pages, packed, pool, pages, offset=offset)

    def error() -> float:
        call()
        return unequal_share(packed, pool[pages.long(), offset:])

    return Op(
        name="pack_pages" if packs else "unpack_pages",
        shape=f"{count} x {slice_bytes} of {page_bytes} bytes",
        call=call,
        error=error,
        tolerance=0.0,
        ceiling="copy",
        amount=2 * packed.nbytes,
        peers={"torch index_select": partial(pool.index_select, 0, pages)} if packs else {},
    )


def _memory(
    setting: Setting, page_bytes: int, count: int, slice_bytes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a pool, some of its pages in random order, and a buffer for their slices."""
    num_pages = 4 * count
    pool = setting.integers(256, num_pages, page_bytes, dtype=torch.uint8)
    pages = torch.randperm(num_pages, device=setting.device)[:count].int()
    return pool, pages, setting.integers(256, count, slice_bytes, dtype=torch.uint8)
