"""Sampling on a GPU: an outline of the logits, a race (Gumbel-max) between all tokens, a choice per
row.

Every row takes part in the same launches, and does only the work that its parameters require.
Greedy rows read the outline and one group of tokens. Rows without top_k race over the vocabulary in
parallel blocks. Rows with top_k or top_p end in kernels/sampling/filters.py.
"""

import triton
import triton.language as tl

from kernels.bound import bound
from kernels.sampling.filters import list_groups, settle, top_k_bound, top_k_edge
from kernels.sampling.generator import row_keys, token_noise
from kernels.sampling.outline import GROUP, first_among, inverse_temperature, outline_row

# Noise lies in [-2.82, 16.64]. A token with a lower scaled logit loses to the likeliest, with 0.
_HOPELESS = tl.constexpr(-19.5)


@bound
@triton.jit
def likeliest_kernel(
    logits_ptr,
    logits_stride,
    maxima_ptr,
    out_ptr,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    NOT_FINITE: tl.constexpr,
):
    """Choose the token of one row. All rows are greedy."""
    row = tl.program_id(0).to(tl.int64)
    maxima = outline_row(maxima_ptr, row, float("-inf"), WIDTH, LANES)
    largest = tl.max(maxima)
    token = _likeliest(logits_ptr + row * logits_stride, maxima, largest, VOCABULARY, LANES)
    tl.store(out_ptr + row, tl.where(largest < float("inf"), token, NOT_FINITE))


@bound
@triton.jit(
    do_not_specialize=["temperature_ptr", "top_k_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr"]
)
def race_kernel(
    logits_ptr,
    logits_stride,
    peaks_ptr,
    temperature_ptr,
    top_k_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    scores_ptr,
    winners_ptr,
    VOCABULARY: tl.constexpr,
    NUM_PEAKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PEAKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sample one token of one row and one block of tokens, which spans several peaks. Only for rows
    that are neither greedy nor limited by top_k.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    if (temperature > 0.0) & ((top_k < 1) | (top_k >= VOCABULARY)):
        peaks = outline_row(peaks_ptr, row, float("-inf"), NUM_PEAKS, LANES)
        largest = tl.max(peaks)
        if largest < float("inf"):
            own = tl.arange(0, LANES) // PEAKS == block
            highest = tl.max(tl.where(own, peaks, float("-inf")))
            inverse = inverse_temperature(temperature)
            least = _least_scaled(min_p_ptr, row)
            score = tl.full([], float("-inf"), tl.float32)
            winner = tl.full([], 0, tl.int32)
            if (highest - largest) * inverse >= least:
                first, second = row_keys(seeds_ptr, positions_ptr, row)
                best = tl.full([TILE], float("-inf"), tl.float32)
                best_token = tl.zeros([TILE], tl.int32)
                for start in range(0, BLOCK, TILE):
                    tokens = block * BLOCK + start + tl.arange(0, TILE)
                    logits = tl.load(
                        logits_ptr + row * logits_stride + tokens,
                        mask=tokens < VOCABULARY,
                        other=float("-inf"),
                    )
                    scaled = (logits.to(tl.float32) - largest) * inverse
                    scores = scaled + token_noise(first, second, tokens)
                    scores = tl.where(scaled >= least, scores, float("-inf"))
                    better = scores > best
                    best = tl.where(better, scores, best)
                    best_token = tl.where(better, tokens, best_token)
                score = tl.max(best)
                winner = first_among(best == score, best_token)
            place = row * tl.num_programs(1) + block
            tl.store(scores_ptr + place, score)
            tl.store(winners_ptr + place, winner)


@bound
@triton.jit(
    do_not_specialize=[
        "temperature_ptr",
        "top_k_ptr",
        "top_p_ptr",
        "min_p_ptr",
        "seeds_ptr",
        "positions_ptr",
    ]
)
def choose_kernel(
    logits_ptr,
    logits_stride,
    maxima_ptr,
    sums_ptr,
    scores_ptr,
    winners_ptr,
    list_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    out_ptr,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    NOT_FINITE: tl.constexpr,
):
    """Choose the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    list_ptr += row * WIDTH
    maxima = outline_row(maxima_ptr, row, float("-inf"), WIDTH, LANES)
    largest = tl.max(maxima)
    temperature = tl.load(temperature_ptr + row)
    token = tl.full([], NOT_FINITE, tl.int32)
    if largest < float("inf"):
        if temperature > 0.0:
            inverse = inverse_temperature(temperature)
            top_k = tl.load(top_k_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            limit = tl.full([], float("inf"), tl.float32)
            if (top_k < 1) | (top_k >= VOCABULARY):
                top_k = tl.full([], VOCABULARY, tl.int32)
                blocks = tl.arange(0, BLOCK_LANES)
                raced = blocks < NUM_BLOCKS
                places = row * NUM_BLOCKS + blocks
                scores = tl.load(scores_ptr + places, mask=raced, other=float("-inf"))
                winners = tl.load(winners_ptr + places, mask=raced, other=0)
                token = first_among(scores == tl.max(scores), winners)
                value = tl.load(row_ptr + token).to(tl.float32)
                if top_p < 1.0:
                    sums = outline_row(sums_ptr, row, 0.0, WIDTH, LANES)
                    weights = tl.exp((maxima - largest) * inverse)
                    limit = top_p * tl.sum(sums * weights)
            else:
                # None yet: a drawn token must be ahead of it.
                token = tl.full([], VOCABULARY, tl.int32)
                value = top_k_bound(maxima, largest, top_k, VOCABULARY)
                if top_p < 1.0:
                    count = list_groups(list_ptr, maxima, value, LANES)
                    value, mass = top_k_edge(
                        row_ptr, list_ptr, count, value, top_k, largest, inverse, VOCABULARY
                    )
                    limit = top_p * mass
            if (top_k < VOCABULARY) | (top_p < 1.0):
                least = _least_scaled(min_p_ptr, row)
                first, second = row_keys(seeds_ptr, positions_ptr, row)
                token = settle(
                    row_ptr,
                    list_ptr,
                    maxima,
                    value,
                    token,
                    largest,
                    inverse,
                    least,
                    first,
                    second,
                    top_k,
                    limit,
                    VOCABULARY,
                    LANES,
                )
        else:
            token = _likeliest(row_ptr, maxima, largest, VOCABULARY, LANES)
    tl.store(out_ptr + row, token)


@triton.jit
def _likeliest(row_ptr, maxima, largest, VOCABULARY: tl.constexpr, LANES: tl.constexpr):
    """Return the first token with the largest logit, from the only group that can have it."""
    group = first_among(maxima == largest, tl.arange(0, LANES))
    tokens = group * GROUP + tl.arange(0, GROUP)
    logits = tl.load(row_ptr + tokens, mask=tokens < VOCABULARY, other=float("-inf"))
    return first_among(logits.to(tl.float32) == largest, tokens)


@triton.jit
def _least_scaled(min_p_ptr, row):
    """Return the scaled logit that a token must reach to be sampled, given by min_p or by the range
    of the noise."""
    min_p = tl.minimum(tl.load(min_p_ptr + row), 1.0)
    return tl.maximum(tl.log(tl.maximum(min_p, 1e-30)), _HOPELESS)
