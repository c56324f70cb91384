// The parts of a gated delta net other than its matrix products: the short convolution, and the delta
// rule.
//
// Both process a row's tokens one after the other, in float32 and in a fixed order of sums. So the bits
// of outputs and states depend neither on where a row is cut nor on other rows.

#include <cmath>
#include <vector>

#include "lanes.h"
#include "panels.h"
#include "team.h"

namespace {

// The states of a step's rows, see kernels/linear_attention/state_cells.py. operators.py has the same
// structure. Strides are in elements.
struct States {
    void* cells;
    int64_t page_stride, place_stride, per_page, first_page, first, step;
    const int32_t *starts, *reads, *writes, *marks, *kept;
    int64_t num_rows, state_pages;

    // A head's cell in a row's pages of `reads`, `writes` or `kept`, or null.
    template <class T>
    T* cell(const int32_t* pages, int64_t row, int64_t head) const {
        int64_t number = first + head * step;
        int64_t page = pages[row * state_pages + first_page + number / per_page];
        if (page < 0) return nullptr;
        return (T*)cells + page * page_stride + number % per_page * place_stride;
    }

    int64_t num_tokens() const { return starts[num_rows] - starts[0]; }

    // Calls advance(first, count) for the tokens of a row, at most `most` at a time, and save(pages)
    // where the state must be written to the row's pages of `writes` or `kept`.
    template <class Advance, class Save>
    void process(int64_t row, int64_t most, Advance advance, Save save) const {
        int64_t start = starts[row], mark = start + marks[row], end = starts[row + 1];
        for (int64_t stop : {mark, end}) {
            for (; start < stop; start += most) advance(start, std::min(most, stop - start));
            start = stop;
            if (stop == mark && marks[row]) save(kept);
        }
        save(writes);
    }
};

// The size of a row, rounded up to whole vectors, in floats.
inline int64_t padded(int64_t size) { return (size + WIDTH - 1) / WIDTH * WIDTH; }

inline Lanes fused(Lanes sum, Lanes a, Lanes b) { return Floats::add(sum, (Words)a, (Words)b); }

inline Lanes all(float number) { return Lanes{} + number; }

// Scratch memory of a thread, valid until its next call. It is kept, because most steps have many small
// items.
inline float* scratch(int64_t size) {
    static thread_local std::vector<float> memory;
    if ((int64_t)memory.size() < size + WIDTH) memory.resize(size + WIDTH);
    uintptr_t address = (uintptr_t)memory.data();
    return (float*)((address + sizeof(Lanes) - 1) / sizeof(Lanes) * sizeof(Lanes));
}

// ---- Convolution

constexpr int64_t SPAN = 128;   // channels that are processed together
constexpr int64_t INPUTS = 16;  // tokens that are processed together

// Some channels of one head.
template <class T>
struct Channels {
    const T* x;  // [num_tokens, any]
    int64_t stride;
    const int32_t* columns;  // columns of the channels in x
    const T* weight;         // [channels, width]
    int64_t count, width;

    // Reads the inputs of tokens as [tokens, SPAN].
    void read(int64_t first, int64_t tokens, T* inputs) const {
        bool adjacent = true;
        for (int64_t i = 1; i < count; i++) adjacent &= columns[i] == columns[0] + i;
        for (int64_t token = first; token < first + tokens; token++, inputs += SPAN) {
            const T* row = x + token * stride;
            if (adjacent) std::memcpy(inputs, row + columns[0], count * sizeof(T));
            else
                for (int64_t i = 0; i < count; i++) inputs[i] = row[columns[i]];
        }
    }
};

// SiLU of the sum of `width` inputs times weights, in order. The sum is rounded before the SiLU.
template <class T>
__attribute__((noinline)) void convolve(
    const T* inputs, const T* weights, int64_t width, int64_t count, T* out
) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        Lanes total = {};
        for (int64_t tap = 0; tap < width; tap++)
            total = fused(total, load(inputs + tap * SPAN + i), load(weights + tap * SPAN + i));
        total = rounded<T>(total);
        store(out + i, total * sigmoid(total), count - i);
    }
}

// The convolution of a head's channels from `first` on, for the tokens of a row.
template <class T>
void convolve_row(
    const Channels<T>& channels, const States& states, int64_t row, int64_t head, int64_t first,
    T* out, int64_t out_stride
) {
    const int64_t width = channels.width, before = width - 1, count = channels.count;
    T* weights = (T*)scratch((width + before + INPUTS) * SPAN);
    T* seen = weights + width * SPAN;  // the inputs before some tokens, then their own
    std::memset(weights, 0, (width + before) * SPAN * sizeof(T));
    const T* state = states.cell<T>(states.reads, row, head);
    for (int64_t i = 0; i < count; i++) {
        for (int64_t tap = 0; tap < width; tap++)
            weights[tap * SPAN + i] = channels.weight[i * width + tap];
        for (int64_t tap = 0; state && tap < before; tap++)
            seen[tap * SPAN + i] = state[(first + i) * before + tap];
    }
    auto advance = [&](int64_t token, int64_t tokens) {
        channels.read(token, tokens, seen + before * SPAN);
        for (int64_t i = 0; i < tokens; i++)
            convolve(seen + i * SPAN, weights, width, count, out + (token + i) * out_stride);
        std::memmove(seen, seen + tokens * SPAN, before * SPAN * sizeof(T));
    };
    auto save = [&](const int32_t* pages) {
        T* to = states.cell<T>(pages, row, head);
        for (int64_t i = 0; to && i < count; i++)
            for (int64_t tap = 0; tap < before; tap++)
                to[(first + i) * before + tap] = seen[tap * SPAN + i];
    };
    states.process(row, INPUTS, advance, save);
}

// ---- Delta rule

constexpr int64_t TOKENS = 32;     // tokens whose keys and gates are computed together
constexpr int PARTS_OF_BLOCK = 4;  // vectors per row of a block
constexpr int64_t BLOCK = PARTS_OF_BLOCK * WIDTH;  // columns of a matrix that a near cache holds

// log(1 + x) for x >= 0, within 2 units in the last place.
inline Lanes log_of_one_and(Lanes x) {
    Lanes sum = 1.0f + x;
    Ints bits = (Ints)sum;
    Ints exponent = (bits - 0x3f3504f3) >> 23;  // of sum / sqrt(1/2), so that 1 has exponent 0
    Lanes m = (Lanes)(bits - (exponent << 23)) - 1.0f, square = m * m;
    Lanes n = __builtin_convertvector(exponent, Lanes);
    Lanes p = Lanes{} + 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    Lanes log = p * m * square - n * 2.12194440e-4f - 0.5f * square + m + n * 0.693359375f;
    return log + (x - (sum - 1.0f)) / sum;  // corrects the rounding of sum
}

// Gates of some tokens of a head: the part of the state that stays, and the part of a value that is
// learnt.
__attribute__((noinline)) void open_gates(
    Lanes a, Lanes b, float speed, float bias, float* decays, float* rates
) {
    a += bias;
    Lanes soft = log_of_one_and(exponential(a > 20.0f ? all(20.0f) : a));
    store(decays, exponential(speed * (a > 20.0f ? a : soft)));
    store(rates, sigmoid(b));
}

// Normalises x to length 1, times scale.
template <class T>
__attribute__((noinline)) void normalise(
    const T* x, int64_t size, float scale, float eps, float* out
) {
    Lanes squares = {};
    for (int64_t i = 0; i < size; i += WIDTH) {
        Lanes value = load(x + i, size - i);
        squares = fused(squares, value, value);
    }
    scale /= std::sqrt(sum(squares) + eps);
    for (int64_t i = 0; i < size; i += WIDTH) store(out + i, load(x + i, size - i) * scale);
}

// What a block of a matrix returns for a key.
void recall(const float* block, const float* key, int64_t size, Lanes (&known)[PARTS_OF_BLOCK]) {
    Lanes sums[PARTS_OF_BLOCK] = {};
    for (int64_t i = 0; i < size; i++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS_OF_BLOCK; part++)
            sums[part] = fused(sums[part], widened(block + i * BLOCK + part * WIDTH), all(key[i]));
    for (int part = 0; part < PARTS_OF_BLOCK; part++) known[part] = sums[part];
}

// Decays a block and learns a value for a key. Also computes the output for the query and what the block
// then returns for the next key, while the block is in registers.
void learn(
    float* block, int64_t size, float decay, const float* key, const float* query,
    const float* next_key, const Lanes (&learnt)[PARTS_OF_BLOCK], Lanes (&outputs)[PARTS_OF_BLOCK],
    Lanes (&known)[PARTS_OF_BLOCK]
) {
    Lanes added[PARTS_OF_BLOCK], out[PARTS_OF_BLOCK] = {}, next[PARTS_OF_BLOCK] = {};
#pragma GCC unroll 4
    for (int part = 0; part < PARTS_OF_BLOCK; part++) added[part] = learnt[part];
    for (int64_t i = 0; i < size; i++) {
        Lanes k = all(key[i]), q = all(query[i]), n = all(next_key[i]);
#pragma GCC unroll 4
        for (int part = 0; part < PARTS_OF_BLOCK; part++) {
            float* at = block + i * BLOCK + part * WIDTH;
            Lanes state = fused(widened(at) * decay, added[part], k);
            narrowed(at, state);
            out[part] = fused(out[part], state, q);
            next[part] = fused(next[part], state, n);
        }
    }
#pragma GCC unroll 4
    for (int part = 0; part < PARTS_OF_BLOCK; part++) {
        outputs[part] = out[part];
        known[part] = next[part];
    }
}

// The delta rule of a value head. Names are those of kernels/linear_attention/delta_rule.py. Gates:
// [num_tokens, key_heads, group].
template <class T>
struct DeltaRule {
    const T *x, *a, *b;
    int64_t a_stride, a_head, b_stride, b_head;
    const float *a_log, *dt_bias;
    T* out;
    int64_t key_heads, group, k_size, v_size;
    float eps;

    int64_t blocks() const { return (v_size + BLOCK - 1) / BLOCK; }

    void apply(const States& states, int64_t row, int64_t head) const {
        const int64_t matrix = blocks() * k_size * BLOCK, key = padded(k_size);
        float* state = scratch(matrix + 2 * (TOKENS + 1) * key + 2 * TOKENS);
        float* keys = state + matrix;
        float* queries = keys + (TOKENS + 1) * key;
        float *decays = queries + (TOKENS + 1) * key, *rates = decays + TOKENS;
        read(states.cell<float>(states.reads, row, head), state);
        auto advance = [&](int64_t token, int64_t count) {
            open(token, count, head, decays, rates);
            for (int64_t i = 0; i < count; i++) {
                const T* own = vectors(token + i, head);
                normalise(own, k_size, 1.0f / std::sqrt((float)k_size), eps, queries + i * key);
                normalise(own + k_size, k_size, 1.0f, eps, keys + i * key);
            }
            // The last token here has no next key.
            std::memset(keys + count * key, 0, key * sizeof *keys);
            for (int64_t block = 0; block < blocks(); block++) {
                const int64_t column = block * BLOCK;
                float* own = state + block * k_size * BLOCK;
                Lanes known[PARTS_OF_BLOCK], learnt[PARTS_OF_BLOCK], outputs[PARTS_OF_BLOCK];
                recall(own, keys, k_size, known);
                for (int64_t i = 0; i < count; i++) {
                    const T* values = vectors(token + i, head) + 2 * k_size +
                                      head % group * v_size + column;
#pragma GCC unroll 4
                    for (int part = 0; part < PARTS_OF_BLOCK; part++) {
                        Lanes value = load(values + part * WIDTH, left(column, part));
                        learnt[part] = fused(value, known[part], all(-decays[i])) * rates[i];
                    }
                    learn(
                        own, k_size, decays[i], keys + i * key, queries + i * key,
                        keys + (i + 1) * key, learnt, outputs, known
                    );
                    T* to = out + ((token + i) * key_heads * group + head) * v_size + column;
                    for (int part = 0; part < PARTS_OF_BLOCK && left(column, part) > 0; part++)
                        store(to + part * WIDTH, outputs[part], left(column, part));
                }
            }
        };
        states.process(row, TOKENS, advance, [&](const int32_t* pages) {
            write(state, states.cell<float>(pages, row, head));
        });
    }

   private:
    const T* vectors(int64_t token, int64_t head) const {
        return x + (token * key_heads + head / group) * (2 * k_size + group * v_size);
    }

    // Number of existing columns from a part of a block on.
    int64_t left(int64_t column, int part) const {
        return std::max<int64_t>(0, v_size - column - part * WIDTH);
    }

    void open(int64_t token, int64_t count, int64_t head, float* decays, float* rates) const {
        const T* own_a = a + token * a_stride + head / group * a_head + head % group;
        const T* own_b = b + token * b_stride + head / group * b_head + head % group;
        const float speed = -exponential(all(a_log[head]))[0];
        for (int64_t i = 0; i < count; i += WIDTH) {
            T gathered[2][WIDTH] = {};
            for (int64_t j = 0; j < std::min<int64_t>(WIDTH, count - i); j++) {
                gathered[0][j] = own_a[(i + j) * a_stride];
                gathered[1][j] = own_b[(i + j) * b_stride];
            }
            open_gates(
                load(gathered[0]), load(gathered[1]), speed, dt_bias[head], decays + i, rates + i
            );
        }
    }

    // Splits a cell [k_size, v_size], or zeros, into padded blocks of columns.
    void read(const float* cell, float* state) const {
        for (int64_t block = 0; block < blocks(); block++)
            for (int64_t i = 0; i < k_size; i++, state += BLOCK)
                for (int part = 0; part < PARTS_OF_BLOCK; part++) {
                    int64_t column = block * BLOCK + part * WIDTH, count = left(block * BLOCK, part);
                    Lanes lanes = {};
                    if (cell && count) lanes = load(cell + i * v_size + column, count);
                    narrowed(state + part * WIDTH, lanes);
                }
    }

    void write(const float* state, float* cell) const {
        for (int64_t block = 0; cell && block < blocks(); block++)
            for (int64_t i = 0; i < k_size; i++, state += BLOCK)
                for (int part = 0; part < PARTS_OF_BLOCK; part++) {
                    int64_t column = block * BLOCK + part * WIDTH, count = left(block * BLOCK, part);
                    if (count)
                        store(cell + i * v_size + column, widened(state + part * WIDTH), count);
                }
    }
};

}  // namespace

extern "C" {

// See kernels/linear_attention/causal_conv.py.
void causal_conv(
    int dtype, const void* x, int64_t x_stride, const int32_t* columns, const void* weight,
    const States* states, void* out, int64_t heads, int64_t channels, int64_t width, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        const int64_t rows = states->num_rows, parts = (channels + SPAN - 1) / SPAN;
        const int64_t bytes = (states->num_tokens() + rows * width) * heads * channels * sizeof(T);
        // Rows are innermost, so that all threads share a long one.
        each(heads * parts * rows, bytes, team, [&](int64_t item) {
            const int64_t head = item / rows / parts, first = item / rows % parts * SPAN;
            const int64_t channel = head * channels + first;
            const Channels<T> own{
                (const T*)x, x_stride, columns + channel, (const T*)weight + channel * width,
                std::min(SPAN, channels - first), width
            };
            convolve_row(
                own, *states, item % rows, head, first, (T*)out + channel, heads * channels
            );
        });
    });
}

// See kernels/linear_attention/delta_rule.py.
void delta_rule(
    int dtype, const void* x, const void* a, int64_t a_stride, int64_t a_head, const void* b,
    int64_t b_stride, int64_t b_head, const float* a_log, const float* dt_bias,
    const States* states, void* out, int64_t key_heads, int64_t group, int64_t k_size,
    int64_t v_size, double eps, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        const DeltaRule<T> rule{
            (const T*)x, (const T*)a, (const T*)b, a_stride,  a_head, b_stride, b_head,    a_log,
            dt_bias,     (T*)out,     key_heads,   group,     k_size, v_size,   (float)eps
        };
        const int64_t rows = states->num_rows, heads = key_heads * group;
        const int64_t bytes = (rows + states->num_tokens()) * heads * k_size * v_size * 4;
        each(heads * rows, bytes, team, [&](int64_t item) {
            rule.apply(*states, item % rows, item / rows);
        });
    });
}

}  // extern "C"
