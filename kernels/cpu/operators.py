"""Calls into the compiled library, with tensors: one method per operation.

Arguments have been checked by the callers, the operations' own files in `kernels`, which also say
what they mean. Results are memory of torch's.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `typed` has them
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_KINDS = {"i": ctypes.c_int, "l": ctypes.c_int64, "p": ctypes.c_void_p, "d": ctypes.c_double}
_FUNCTIONS = {
    "add_rms_norm": "iiplplpppplldi",
    "rope_and_store": "iiplppllllppppllllldi",
    "act_and_mul": "iipplli",
    "decode_attention": "iplpllllppppllllllddi",
    "likeliest": "iplpllii",
    "embed": "ppplplli",
}


class Operators:
    """The functions of a compiled library, for tensors in host memory. Any thread.

    Raises:
        OSError: the library cannot be loaded here.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        for name, kinds in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes = [_KINDS[kind] for kind in kinds]
            function.restype = None
        self._library = library

    def add_rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        hidden = x.shape[1]
        num_rows = x.shape[0] if rows is None else rows.shape[0]
        normed = x.new_empty(num_rows, hidden)
        is_x = residual is None and rows is None
        total = x if is_x else torch.empty_like(normed)
        self._library.add_rms_norm(
            _DTYPES[x.dtype],
            _DTYPES[weight.dtype],
            x.data_ptr(),
            x.stride(0),
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            weight.data_ptr(),
            None if rows is None else rows.data_ptr(),
            normed.data_ptr(),
            None if is_x else total.data_ptr(),
            num_rows,
            hidden,
            eps,
            torch.get_num_threads(),
        )
        return normed, total

    def rope_and_store(
        self,
        qkv: Tensor,
        angles: Tensor,
        kv: Tensor,
        locations: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        num_tokens, (_, kv_heads, _, page_size, head_dim) = qkv.shape[0], kv.shape
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q = qkv.new_empty(num_tokens, heads, head_dim)
        self._library.rope_and_store(
            _DTYPES[qkv.dtype],
            0 if q_norm is None else _DTYPES[q_norm.dtype],
            qkv.data_ptr(),
            qkv.stride(0),
            angles.data_ptr(),
            kv.data_ptr(),
            *kv.stride()[:4],
            locations.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            q.data_ptr(),
            num_tokens,
            heads,
            kv_heads,
            page_size,
            head_dim,
            eps,
            torch.get_num_threads(),
        )
        return q

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        num_rows, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(num_rows, size)
        self._library.act_and_mul(
            _DTYPES[x.dtype],
            _ACTIVATIONS[activation],
            x.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            torch.get_num_threads(),
        )
        return out

    def decode_attention(
        self,
        q: Tensor,
        kv: Tensor,
        page_ids: Tensor,
        page_starts: Tensor,
        lengths: Tensor,
        out: Tensor,
        *,
        window: int | None,
        scale: float,
        soft_cap: float | None,
    ) -> None:
        """Rows of one query each: q [n, heads, head_dim] into contiguous out [n, heads * head_dim];
        int32 page_starts and lengths [n]."""
        _, kv_heads, _, page_size, head_dim = kv.shape
        self._library.decode_attention(
            _DTYPES[q.dtype],
            q.data_ptr(),
            q.stride(0),
            kv.data_ptr(),
            *kv.stride()[:4],
            page_ids.data_ptr(),
            page_starts.data_ptr(),
            lengths.data_ptr(),
            out.data_ptr(),
            q.shape[0],
            kv_heads,
            q.shape[1] // kv_heads,
            page_size,
            head_dim,
            window or 0,
            scale,
            soft_cap or 0.0,
            torch.get_num_threads(),
        )

    def likeliest(self, logits: Tensor, not_finite: int) -> Tensor:
        num_rows, vocabulary = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int32)
        self._library.likeliest(
            _DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            tokens.data_ptr(),
            num_rows,
            vocabulary,
            not_finite,
            torch.get_num_threads(),
        )
        return tokens

    def embed(self, token_ids: Tensor, future: Tensor, weight: Tensor) -> Tensor:
        out = weight.new_empty(token_ids.shape[0], weight.shape[1])
        self._library.embed(
            token_ids.data_ptr(),
            future.data_ptr(),
            weight.data_ptr(),
            weight.stride(0) * weight.itemsize,
            out.data_ptr(),
            out.shape[0],
            out.shape[1] * out.itemsize,
            torch.get_num_threads(),
        )
        return out
