"""Sampling with top_k or top_p without a sort: draw, verify, draw again.

Tokens are ordered by descending logit, and equal ones by ascending id. top_k and top_p keep a
prefix of that order. A token drawn from a superset of the prefix is correct if it lies in the
prefix. A count and a sum over the tokens ahead of it decide that. If it does not, the next one is
drawn from the tokens ahead of it. The probability of another round is that of the tokens outside
the prefix, so there is rarely more than one. Every round is exact.

Each program handles one row. It reads only groups of tokens whose maximum, known from the outline,
is large enough. `list_groups` writes the numbers of these groups to memory of the program.

Source of rejection instead of a sort: FlashInfer, Sorting-Free GPU Kernels for LLM Sampling, 2025.
"""

import triton
import triton.language as tl

from kernels.sampling.generator import token_noise
from kernels.sampling.outline import GROUP, first_among

_CHUNK = tl.constexpr(32)  # groups read at once. To be tuned with tools/bench/gpu
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NO_KEY = tl.constexpr(-(1 << 31))


@triton.jit
def settle(
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
    VOCABULARY: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the sampled token among those that top_k and top_p keep.

    A token is final if fewer than top_k tokens are ahead of it and they weigh less than limit
    together. Otherwise the next one is sampled among the tokens ahead of it. The likeliest token is
    always final.

    Args:
        value, token: logit and id of a token sampled from a superset of the kept ones. token may be
            VOCABULARY: no token is sampled yet, and the tokens that reach value are such a
            superset.
        least: scaled logit that a sampled token must reach.
        limit: in units of the likeliest token's weight.
    """
    searching = tl.full([], True, tl.int1)
    while searching:
        count = list_groups(list_ptr, maxima, value, LANES)
        ahead, mass, _ = _weigh(
            row_ptr, list_ptr, count, value, token, largest, inverse, VOCABULARY
        )
        searching = (ahead > 0) & ((ahead >= top_k) | (mass >= limit))
        if searching:
            value, token = _draw(
                row_ptr,
                list_ptr,
                count,
                value,
                token,
                largest,
                inverse,
                least,
                first,
                second,
                VOCABULARY,
            )
    return token


@triton.jit
def top_k_bound(maxima, largest, top_k, VOCABULARY: tl.constexpr):
    """Return at most the top_k-th largest of the maxima. At least top_k tokens reach it."""
    bound = tl.full([], _LOWEST, tl.float32)
    if top_k <= (VOCABULARY + GROUP - 1) // GROUP:
        pivot = tl.full([], _NO_KEY, tl.int64)
        step = tl.full([], 1 << 31, tl.int64)
        while step > 0:
            trial = pivot + step
            if trial <= _to_key(largest):
                reaching = tl.sum((maxima >= _from_key(trial)).to(tl.int32))
                if reaching >= top_k:
                    pivot = trial
                if reaching == top_k:
                    step = step * 0
            step = step >> 1
        bound = _from_key(pivot)
    return bound


@triton.jit
def top_k_edge(
    row_ptr,
    list_ptr,
    count,
    bound,
    top_k,
    largest,
    inverse,
    VOCABULARY: tl.constexpr,
):
    """Return a value that the first top_k tokens reach and at most top_k exceed, and the weight of
    those tokens.

    Finds the bits of the value from the highest on, until they separate top_k tokens from the
    others.

    Args:
        count, bound: number of listed groups, and the value that they reach. At least top_k tokens
            reach it.
    """
    pivot = tl.full([], _NO_KEY, tl.int64)
    step = tl.full([], 1 << 31, tl.int64)
    while step > 0:
        trial = pivot + step
        if trial <= _to_key(bound):
            pivot = trial
        elif trial <= _to_key(largest):
            above, _, reaching = _weigh(
                row_ptr, list_ptr, count, _from_key(trial), 0, largest, inverse, VOCABULARY
            )
            if reaching >= top_k:
                pivot = trial
                if above <= top_k:
                    step = step * 0
        step = step >> 1
    edge = _from_key(pivot)
    above, mass, _ = _weigh(row_ptr, list_ptr, count, edge, 0, largest, inverse, VOCABULARY)
    return edge, mass + (top_k - above) * tl.exp((edge - largest) * inverse)


@triton.jit
def list_groups(list_ptr, maxima, value, LANES: tl.constexpr):
    """List the groups that have a logit of at least value, in order. Returns their number."""
    chosen = maxima >= value
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # other threads of the program may still read the previous list
    tl.store(list_ptr + places, tl.arange(0, LANES), mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32))


@triton.jit
def _weigh(row_ptr, list_ptr, count, value, token, largest, inverse, VOCABULARY: tl.constexpr):
    """Return how many listed tokens are ahead of (value, token), their weight, and how many listed
    tokens reach value."""
    ahead = tl.zeros([_CHUNK, GROUP], tl.int32)
    reaching = tl.zeros([_CHUNK, GROUP], tl.int32)
    mass = tl.zeros([_CHUNK, GROUP], tl.float32)
    for start in range(0, count, _CHUNK):
        tokens, logits = _listed(row_ptr, list_ptr, start, count, VOCABULARY)
        precedes = (logits > value) | ((logits == value) & (tokens < token))
        ahead += precedes.to(tl.int32)
        reaching += (logits >= value).to(tl.int32)
        mass += tl.where(precedes, tl.exp((logits - largest) * inverse), 0.0)
    return tl.sum(ahead), tl.sum(mass), tl.sum(reaching)


@triton.jit
def _draw(
    row_ptr,
    list_ptr,
    count,
    value,
    token,
    largest,
    inverse,
    least,
    first,
    second,
    VOCABULARY: tl.constexpr,
):
    """Sample one of the listed tokens ahead of (value, token). Returns its logit and its id."""
    best = tl.full([_CHUNK, GROUP], float("-inf"), tl.float32)
    best_token = tl.zeros([_CHUNK, GROUP], tl.int32)
    for start in range(0, count, _CHUNK):
        tokens, logits = _listed(row_ptr, list_ptr, start, count, VOCABULARY)
        precedes = (logits > value) | ((logits == value) & (tokens < token))
        scaled = (logits - largest) * inverse
        scores = scaled + token_noise(first, second, tokens)
        scores = tl.where(precedes & (scaled >= least), scores, float("-inf"))
        better = scores > best
        best = tl.where(better, scores, best)
        best_token = tl.where(better, tokens, best_token)
    drawn = first_among(best == tl.max(best), best_token)
    return tl.load(row_ptr + drawn).to(tl.float32), drawn


@triton.jit
def _listed(row_ptr, list_ptr, start, count, VOCABULARY: tl.constexpr):
    """Return ids and logits of the next listed groups, with -inf where there is no token."""
    places = start + tl.arange(0, _CHUNK)
    listed = places < count
    groups = tl.load(list_ptr + places, mask=listed, other=0)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = listed[:, None] & (tokens < VOCABULARY)
    logits = tl.load(row_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    return tokens, logits


@triton.jit
def _to_key(value):
    """Map finite float32 values to int64 in the range of int32, in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
