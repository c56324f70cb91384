"""Calls into the compiled library, with tensors: one method per operation.

The callers in `kernels` define the operations and have checked the arguments. Results are in
torch's memory.
"""

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.memory import HUGE_PAGE_BYTES, empty_in_huge_pages

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers of the dtypes in `typed`
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped": 3}
_KINDS = {"i": ctypes.c_int, "l": ctypes.c_int64, "p": ctypes.c_void_p, "d": ctypes.c_double}
_FUNCTIONS = {
    "add_rms_norm": "iiplplpppplldp",
    "rope_and_store": "iiplppllllpppplllllldp",
    "rope_and_store_latents": "iplpdpllppllpplllllllip",
    "act_and_mul": "iippllp",
    "soft_cap": "ipplldp",
    "rope_angles": "ppplldp",
    "route": "ippppllliidlllp",
    "add_experts": "ipppplllp",
    "add_gated": "ippppllp",
    "causal_conv": "iplpppplllp",
    "delta_rule": "ippllpllpppplllldp",
    "gated_rms_norm": "iippllpplllldp",
    "gate_heads": "ippllplllp",
    "decode_attention": "iplpllllppppllllllddpp",
    "extend_attention": "iplpllllppppplllllllddpp",
    "likeliest": "iplpllip",
    "sample": "iplpppppppllip",
    "apply_penalties": "plpplppppllip",
    "embed": "ppplpllp",
    "pack_panels": "ipllpp",
    "float_product": "ipplpplllp",
    "by_head_product": "ippllpllllllp",
    "stored_product": "iplplpplllp",
    "int8_product": "ipplpppplllp",
    "weight_only_product": "iippplplpplllp",
    "compute_layers": "ppllppppp",
}
PANEL = 64  # outputs, as in products.cpp
CODES = 8  # numbers of 4 bits in a word
WORD_BYTES = 4  # bytes of a row that a product processes at once
_PRODUCTS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}  # bits of the dtypes in `products`


class States(ctypes.Structure):
    """Addresses and strides of the states of a step's rows, as in delta_net.cpp. See
    kernels/linear_attention/state_cells.py."""

    _fields_ = (
        ("cells", ctypes.c_void_p),
        *(
            (name, ctypes.c_int64)
            for name in ("page_stride", "place_stride", "per_page", "first_page", "first", "step")
        ),
        *((name, ctypes.c_void_p) for name in ("starts", "reads", "writes", "marks", "kept")),
        *((name, ctypes.c_int64) for name in ("num_rows", "state_pages")),
    )


class Operators:
    """The functions of a compiled library, for tensors in host memory. Thread-safe.

    Attributes:
        name: of the library, with a hash of everything that determines its machine code.

    Args:
        threads: number of threads that share the work, until the process ends. They sleep between
            forwards.
    Raises:
        OSError: the library cannot be loaded here.
    """

    def __init__(self, path: Path, threads: int) -> None:
        library = ctypes.CDLL(str(path))
        for name, kinds in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes = [_KINDS[kind] for kind in kinds]
            function.restype = None
        library.team_open.argtypes = [ctypes.c_int]
        library.team_open.restype = ctypes.c_void_p
        library.products.restype = ctypes.c_int
        self.name = path.stem
        self._products: int = library.products()
        self._team = library.team_open(threads)
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
            DTYPES[x.dtype],
            DTYPES[weight.dtype],
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
            self._team,
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
            DTYPES[qkv.dtype],
            0 if q_norm is None else DTYPES[q_norm.dtype],
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
            angles.shape[2],
            eps,
            self._team,
        )
        return q

    def rope_and_store_latents(
        self,
        kv: Tensor,
        norm: Tensor,
        eps: float,
        q: Tensor,
        angles: Tensor,
        latents: Tensor,
        locations: Tensor,
        out: Tensor,
        *,
        interleaved: bool,
    ) -> None:
        self._library.rope_and_store_latents(
            DTYPES[kv.dtype],
            kv.data_ptr(),
            kv.stride(0),
            norm.data_ptr(),
            eps,
            q.data_ptr(),
            *q.stride()[:2],
            angles.data_ptr(),
            latents.data_ptr(),
            latents.stride(0),
            latents.stride(3),
            locations.data_ptr(),
            out.data_ptr(),
            *out.stride()[:2],
            *q.shape[:2],
            latents.shape[3],
            norm.shape[0],
            angles.shape[2],
            interleaved,
            self._team,
        )

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        num_rows, size = x.shape[0], x.shape[1] // 2
        out = x.new_empty(num_rows, size)
        self._library.act_and_mul(
            DTYPES[x.dtype],
            ACTIVATIONS[activation],
            x.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            self._team,
        )
        return out

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        k: int,
        *,
        sigmoid: bool,
        normalise: bool,
        scale: float,
        groups: int,
        chosen_groups: int,
        group_top: int,
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_experts = logits.shape
        weights = torch.empty(num_rows, k)
        ids = torch.empty(num_rows, k, dtype=torch.int32)
        self._library.route(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            None if bias is None else bias.data_ptr(),
            weights.data_ptr(),
            ids.data_ptr(),
            num_rows,
            num_experts,
            k,
            sigmoid,
            normalise,
            scale,
            groups,
            chosen_groups,
            group_top,
            self._team,
        )
        return weights, ids

    def add_experts(self, parts: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Return each token's sum over j of weights[:, j] * parts[places[:, j]], in the order of j
        and in float32.

        Args:
            parts: contiguous [any, hidden].
            places, weights: contiguous int64 and float32 [n, k].
        """
        (num_rows, k), hidden = places.shape, parts.shape[1]
        out = parts.new_empty(num_rows, hidden)
        self._library.add_experts(
            DTYPES[parts.dtype],
            parts.data_ptr(),
            places.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            num_rows,
            k,
            hidden,
            self._team,
        )
        return out

    def add_gated(self, y: Tensor, x: Tensor, gates: Tensor) -> Tensor:
        out = torch.empty_like(y)
        self._library.add_gated(
            DTYPES[y.dtype],
            y.data_ptr(),
            x.data_ptr(),
            gates.data_ptr(),
            out.data_ptr(),
            *y.shape,
            self._team,
        )
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty(x.shape)
        self._library.soft_cap(
            DTYPES[x.dtype], x.data_ptr(), out.data_ptr(), *x.shape, cap, self._team
        )
        return out

    def rope_angles(self, positions: Tensor, inverse_frequencies: Tensor, scale: float) -> Tensor:
        num_tokens, pairs = positions.shape[0], inverse_frequencies.shape[0]
        out = torch.empty(2, num_tokens, pairs)
        self._library.rope_angles(
            positions.data_ptr(),
            inverse_frequencies.data_ptr(),
            out.data_ptr(),
            num_tokens,
            pairs,
            scale,
            self._team,
        )
        return out

    def causal_conv(self, x: Tensor, columns: Tensor, weight: Tensor, states: States) -> Tensor:
        heads, channels, width = weight.shape
        out = x.new_empty(x.shape[0], heads, channels)
        self._library.causal_conv(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            columns.data_ptr(),
            weight.data_ptr(),
            ctypes.byref(states),
            out.data_ptr(),
            heads,
            channels,
            width,
            self._team,
        )
        return out

    def delta_rule(
        self,
        x: Tensor,
        gates: tuple[Tensor, Tensor, Tensor, Tensor],
        states: States,
        matrix: tuple[int, int],
        eps: float,
    ) -> Tensor:
        """Compute the gated delta rule.

        Args:
            gates: a, b, a_log and dt_bias.
            matrix: size of a key, size of a value.
        """
        a, b, a_log, dt_bias = gates
        (num_tokens, key_heads, group), (k_size, v_size) = a.shape, matrix
        out = x.new_empty(num_tokens, key_heads * group, v_size)
        self._library.delta_rule(
            DTYPES[x.dtype],
            x.data_ptr(),
            a.data_ptr(),
            *a.stride()[:2],
            b.data_ptr(),
            *b.stride()[:2],
            a_log.data_ptr(),
            dt_bias.data_ptr(),
            ctypes.byref(states),
            out.data_ptr(),
            key_heads,
            group,
            k_size,
            v_size,
            eps,
            self._team,
        )
        return out

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_tokens, heads, size = x.shape
        groups = gate.shape[1]
        out = x.new_empty(num_tokens, heads * size)
        self._library.gated_rms_norm(
            DTYPES[x.dtype],
            DTYPES[weight.dtype],
            x.data_ptr(),
            gate.data_ptr(),
            *gate.stride()[:2],
            weight.data_ptr(),
            out.data_ptr(),
            num_tokens,
            groups,
            heads // groups,
            size,
            eps,
            self._team,
        )
        return out

    def gate_heads(self, x: Tensor, gate: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._library.gate_heads(
            DTYPES[x.dtype],
            x.data_ptr(),
            gate.data_ptr(),
            *gate.stride()[:2],
            out.data_ptr(),
            *gate.shape,
            self._team,
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
        window: int | None,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Attend from rows of one query each: q [n, heads, head_dim] into contiguous out [n, heads
        * head_dim]. page_starts and lengths are int32 [n]."""
        sinks = None if sinks is None else sinks.float()  # keeps it alive during the call
        self._library.decode_attention(
            *_queries_and_pages(q, kv, page_ids, page_starts, lengths),
            out.data_ptr(),
            q.shape[0],
            *_heads(q, kv, window, scale, soft_cap, sinks),
            self._team,
        )

    def extend_attention(
        self,
        q: Tensor,
        kv: Tensor,
        page_ids: Tensor,
        page_starts: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        out: Tensor,
        window: int | None,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Attend from rows of any number of queries: q [n, heads, head_dim] into contiguous out [n,
        heads * value_dim], with the first value_dim numbers of each value.

        page_starts and lengths are int32 [rows], query_starts is int32 [rows + 1].
        """
        sinks = None if sinks is None else sinks.float()  # keeps it alive during the call
        self._library.extend_attention(
            *_queries_and_pages(q, kv, page_ids, page_starts, lengths),
            query_starts.data_ptr(),
            out.data_ptr(),
            lengths.shape[0],
            out.shape[1] // q.shape[1],
            *_heads(q, kv, window, scale, soft_cap, sinks),
            self._team,
        )

    def likeliest(self, logits: Tensor, not_finite: int) -> Tensor:
        num_rows, vocabulary = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int32)
        self._library.likeliest(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            tokens.data_ptr(),
            num_rows,
            vocabulary,
            not_finite,
            self._team,
        )
        return tokens

    def sample(
        self,
        logits: Tensor,
        *,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        not_finite: int,
    ) -> Tensor:
        num_rows, vocabulary = logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int32)
        self._library.sample(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            temperature.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            min_p.data_ptr(),
            seeds.data_ptr(),
            positions.data_ptr(),
            tokens.data_ptr(),
            num_rows,
            vocabulary,
            not_finite,
            self._team,
        )
        return tokens

    def apply_penalties(
        self,
        logits: Tensor,
        rows: Tensor,
        counts: Tensor,
        count_rows: Tensor,
        repetition: Tensor,
        frequency: Tensor,
        presence: Tensor,
        in_prompt: int,
    ) -> None:
        self._library.apply_penalties(
            logits.data_ptr(),
            logits.stride(0),
            rows.data_ptr(),
            counts.data_ptr(),
            counts.stride(0),
            count_rows.data_ptr(),
            repetition.data_ptr(),
            frequency.data_ptr(),
            presence.data_ptr(),
            rows.shape[0],
            logits.shape[1],
            in_prompt,
            self._team,
        )

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
            self._team,
        )
        return out

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Return whether this processor has `pack_panels` and the product for this dtype."""
        return bool(self._products & _PRODUCTS.get(dtype, 0))

    def pack_panels(self, matrix: Tensor) -> Tensor:
        """Return a matrix [out, in] in the layout of the products. Any dtype that they accept, and
        any strides.

        Returns:
            [out / 64, in / group, 64, group], rounded up and padded with 0. A group is 4 bytes.
        """
        matrix = matrix.contiguous()
        (outputs, inputs), group = matrix.shape, WORD_BYTES // matrix.itemsize
        shape = (-(-outputs // PANEL), -(-inputs // group), PANEL, group)
        # Smaller matrices, such as those of experts, would exceed the process's limit of mappings.
        large = math.prod(shape) * matrix.itemsize >= HUGE_PAGE_BYTES
        panels = (empty_in_huge_pages if large else torch.empty)(shape, dtype=matrix.dtype)
        self._library.pack_panels(
            matrix.itemsize, matrix.data_ptr(), outputs, inputs, panels.data_ptr(), self._team
        )
        return panels

    def float_product(self, x: Tensor, panels: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        """Multiply x [n, in] by a matrix of x's dtype with `outputs` outputs, and add bias: [n,
        out].

        Inputs are added one after the other in float32, so no row depends on the others.
        """
        words = panels.shape[1]
        x = _in_words(x)
        out = x.new_empty(x.shape[0], outputs)
        self._library.float_product(
            DTYPES[x.dtype],
            panels.data_ptr(),
            x.data_ptr(),
            x.stride(0) * x.itemsize // WORD_BYTES,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            words,
            outputs,
            self._team,
        )
        return out

    def by_head_product(self, x: Tensor, panels: Tensor, out: Tensor) -> None:
        """Compute out[:, h] = float_product(x[:, h], panels[h]) for each head h.

        Args:
            x: [n, heads, in] with rows of whole words.
            panels: [heads, ...], from `pack_panels` for each head.
            out: [n, heads, outputs] of x's dtype, any strides but the last.
        """
        group = WORD_BYTES // x.itemsize
        if x.stride(2) != 1 or x.stride(0) % group or x.stride(1) % group:
            x = x.contiguous()
        num_rows, heads, outputs = out.shape
        self._library.by_head_product(
            DTYPES[x.dtype],
            panels.data_ptr(),
            x.data_ptr(),
            x.stride(0) // group,
            x.stride(1) // group,
            out.data_ptr(),
            *out.stride()[:2],
            num_rows,
            heads,
            panels.shape[2],
            outputs,
            self._team,
        )

    def stored_product(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `float_product` bit for bit with a matrix [out, in] of x's dtype as it is stored.

        For small matrices, and for matrices that other operations read too. Otherwise panels are
        faster.
        """
        (outputs, inputs), x = matrix.shape, _in_words(x)
        if matrix.stride(1) != 1:
            matrix = matrix.contiguous()
        out = x.new_empty(x.shape[0], outputs)
        self._library.stored_product(
            DTYPES[x.dtype],
            matrix.data_ptr(),
            matrix.stride(0),
            x.data_ptr(),
            x.stride(0) * x.itemsize // WORD_BYTES,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            inputs,
            outputs,
            self._team,
        )
        return out

    def int8_product(
        self, x: Tensor, panels: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Multiply x [n, in] by an int8 matrix with scales [out], and add bias of x's dtype: [n,
        out].

        Each row is rounded to 8 bits by the scale s = 1e-30 + its largest magnitude / 127. Its
        bytes are floor(x / s + 128.5). The result (bytes W^T - zeros) * scales * s is computed from
        exact sums. A row with a value that is not finite gives NaN.

        Args:
            scales: float32 [out].
            zeros: int32 [out]: 128 times the sums of W's rows.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(x.shape[0], scales.shape[0])
        self._library.int8_product(
            DTYPES[x.dtype],
            panels.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            scales.data_ptr(),
            zeros.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            scales.shape[0],
            self._team,
        )
        return out

    def pack_codes(self, codes: Tensor) -> Tensor:
        """Return codes from 0 to 15, uint8 [out, in], in the layout of `weight_only_product`.

        Args:
            codes: the number of inputs is a multiple of CODES.
        Returns:
            uint8 [out / 64, in / 8, 64, 4], rounded up and padded with 0.
        """
        outputs, inputs = codes.shape
        # Inputs 2 i and 2 i + 1 of 8 are half a word apart, so that a pair needs one shift.
        places = codes.reshape(outputs, inputs // CODES, 2, 2, 2).permute(0, 1, 4, 2, 3)
        return self.pack_panels((places[..., 0] | places[..., 1] << 4).reshape(outputs, -1))

    def weight_only_product(
        self,
        x: Tensor,
        panels: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group: int,
        outputs: int,
        bias: Tensor | None,
    ) -> Tensor:
        """Multiply x [n, in] by a matrix of 4-bit numbers, and add bias of x's dtype: [n, out].

        A weight is (number - zero) * scale. Numbers are widened exactly. Products are added in
        float32, in an order that does not depend on the number of rows.

        Args:
            panels: from `pack_codes`. Integers if there are zeros, else e2m1.
            scales: [panels, groups, 64], float32 for integers and bfloat16 for e2m1.
            zeros: uint8, shaped like scales.
            group: consecutive inputs that share a scale, a multiple of CODES.
        """
        if x.stride(1) != 1 or x.stride(0) % 2:
            x = x.contiguous()
        out = x.new_empty(x.shape[0], outputs)
        self._library.weight_only_product(
            DTYPES[x.dtype],
            zeros is None,
            panels.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            group,
            x.data_ptr(),
            x.stride(0),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *x.shape,
            outputs,
            self._team,
        )
        return out

    def compute_layers(
        self,
        layers: ctypes.Array[Any],
        keys: ctypes.Array[Any],
        group: tuple[int, int],
        step: ctypes.Structure,
        x: Tensor,
        residual: Tensor,
        wide: Tensor,
        other: Tensor,
    ) -> None:
        """Run layers `group[0]` to `group[1] - 1`. layers.py makes the arguments, whose structures
        equal those of layers.cpp."""
        step.team = self._team
        self._library.compute_layers(
            ctypes.addressof(layers),
            ctypes.addressof(keys),
            *group,
            ctypes.addressof(step),
            x.data_ptr(),
            residual.data_ptr(),
            wide.data_ptr(),
            other.data_ptr(),
        )


def _in_words(x: Tensor) -> Tensor:
    """Return rows [n, in] of whole words that begin at whole words, padded with 0 if needed."""
    group = WORD_BYTES // x.itemsize
    if x.shape[1] % group or x.stride(1) != 1 or x.stride(0) % group:
        return F.pad(x, (0, -x.shape[1] % group)).contiguous()
    return x


def _queries_and_pages(
    q: Tensor, kv: Tensor, page_ids: Tensor, page_starts: Tensor, lengths: Tensor
) -> tuple[int, ...]:
    """Return the leading arguments of both kinds of attention."""
    return (
        DTYPES[q.dtype],
        q.data_ptr(),
        q.stride(0),
        kv.data_ptr(),
        *kv.stride()[:4],
        page_ids.data_ptr(),
        page_starts.data_ptr(),
        lengths.data_ptr(),
    )


def _heads(
    q: Tensor,
    kv: Tensor,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> tuple[int | float | None, ...]:
    """Return the trailing arguments of both kinds of attention."""
    _, kv_heads, _, page_size, head_dim = kv.shape
    return (
        kv_heads,
        q.shape[1] // kv_heads,
        page_size,
        head_dim,
        window or 0,
        scale,
        soft_cap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )
