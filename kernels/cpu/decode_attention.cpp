// Attention of one query per row over pages, which are read where they lie: flash-decoding.
//
// A row's keys are cut into pieces at multiples of SPLIT, and each piece of each KV head is a piece
// of work; so a row's result depends on neither the other rows nor the number of threads.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "pages.h"
#include "operations.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int SPLIT = 512;

// A run of keys of one page, or of their values, and the next page's, which is worth fetching early:
// pages lie anywhere, and a processor foresees no jump.
template <class T>
struct Run {
    const T *start, *next;
    int64_t stride, count;

    void fetch_ahead(int64_t place, int64_t size) const {
        const char* ahead = (const char*)(next + place * stride);
        // Not into the nearest cache: a core waits for few lines that are on their way there.
        for (int64_t i = 0; i < size * (int64_t)sizeof(T); i += 64)
            __builtin_prefetch(ahead + i, 0, 2);
    }
};

// Calls work(run) for the runs that have keys [first, end) of a row and a head; 1: their values.
template <class T, class Work>
inline void each_run(
    const T* kv, const Pages& pages, int64_t row, int64_t head, int64_t values, int64_t first,
    int64_t end, Work work
) {
    const int32_t* ids = pages.page_ids + pages.page_starts[row];
    const T* own = kv + head * pages.head_stride + values * pages.kv_stride;
    const int64_t last = (end - 1) / pages.page_size;
    while (first < end) {
        int64_t page = first / pages.page_size, offset = first % pages.page_size;
        int64_t count = std::min(pages.page_size - offset, end - first);
        int64_t next = std::min(page + 1, last);
        work(Run<T>{own + ids[page] * pages.page_stride + offset * pages.token_stride,
                    own + ids[next] * pages.page_stride, pages.token_stride, count});
        first += count;
    }
}

// What a piece of a row's keys gives G query heads: weighted values, and the largest score and the
// sum of weights that they are to be combined by.
struct Partial {
    float *values, *largest, *total;  // [heads, size], [heads], [heads]
};

// How queries of keys of type T are held, STEP numbers at a time, and what their products add to sums.
template <class T>
struct Query {
    using Number = float;
    static constexpr int64_t STEP = WIDTH;

    static Lanes add(Lanes sums, const T* key, const Number* query, int64_t count) {
        return sums + load(key, count) * widened(query);
    }
};

#if defined(__AVX512BF16__)
template <>
struct Query<bfloat16> {
    using Number = bfloat16;
    static constexpr int64_t STEP = 2 * WIDTH;

    static Lanes add(Lanes sums, const bfloat16* key, const Number* query, int64_t count) {
        Words keys = {}, queries;
        if (count >= STEP) std::memcpy(&keys, key, sizeof keys);
        else std::memcpy(&keys, key, count * sizeof *key);
        std::memcpy(&queries, query, sizeof queries);
        return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)keys, (__m512bh)queries);
    }
};
#endif

template <int G, class T>
struct Queries {
    using Number = typename Query<T>::Number;
    Number numbers[G][256 + Query<T>::STEP] = {};

    Queries(const T* q, int64_t size) {
        for (int g = 0; g < G; g++)
            for (int64_t i = 0; i < size; i += WIDTH)
                store(numbers[g] + i, load(q + g * size + i, size - i), size - i);
    }
};

// One Lanes of the sums of twice as many numbers, DISTANCE apart, as `sum` adds them up.
inline Lanes folded(Count<8>, Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
inline Lanes folded(Count<4>, Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
inline Lanes folded(Count<2>, Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
inline Lanes folded(Count<1>, Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Products of G queries with N keys: the sums of a key are in the WIDTH / N lanes of its place. With
// WIDTH keys at a time no lane is added up alone, and a key's score is the same to the bit.
template <int N, int G, class T>
inline __attribute__((always_inline)) void multiply(
    const Queries<G, T>& queries, const T* key, int64_t stride, int64_t size, Lanes (&sums)[G]
) {
    if constexpr (N == 1) {
        constexpr int64_t STEP = Query<T>::STEP;
        for (int g = 0; g < G; g++) sums[g] = Lanes{};
        int64_t i = 0;
        for (; i + STEP <= size; i += STEP)
            for (int g = 0; g < G; g++)
                sums[g] = Query<T>::add(sums[g], key + i, queries.numbers[g] + i, STEP);
        if (i < size)
            for (int g = 0; g < G; g++)
                sums[g] = Query<T>::add(sums[g], key + i, queries.numbers[g] + i, size - i);
    } else {
        Lanes other[G];
        multiply<N / 2>(queries, key, stride, size, sums);
        multiply<N / 2>(queries, key + N / 2 * stride, stride, size, other);
        for (int g = 0; g < G; g++) sums[g] = folded(Count<WIDTH / N>(), sums[g], other[g]);
    }
}

// BLOCK values at a time, in an order of their own until all have been added up.
constexpr int TILE = 4, BLOCK = TILE * WIDTH;

template <class T>
struct Value {
    static void load_block(const T* p, Lanes (&lanes)[TILE]) {
        for (int t = 0; t < TILE; t++) lanes[t] = widened(p + t * WIDTH);
    }
    static void store_block(float* p, const Lanes (&lanes)[TILE]) {
        for (int t = 0; t < TILE; t++) narrowed(p + t * WIDTH, lanes[t]);
    }
};

template <>
struct Value<bfloat16> {  // even numbers, then odd ones: half the work of one after the other
    static void load_block(const bfloat16* p, Lanes (&lanes)[TILE]) {
        for (int t = 0; t < TILE; t += 2) {
            Words pairs;
            std::memcpy(&pairs, p + t * WIDTH, sizeof pairs);
            lanes[t] = (Lanes)(pairs << 16);
            lanes[t + 1] = (Lanes)(pairs & 0xffff0000u);
        }
    }
    static void store_block(float* p, const Lanes (&lanes)[TILE]) {
        for (int t = 0; t < TILE; t += 2)
            for (int i = 0; i < WIDTH; i++) {
                p[t * WIDTH + 2 * i] = lanes[t][i];
                p[t * WIDTH + 2 * i + 1] = lanes[t + 1][i];
            }
    }
};

template <int G, class T>
void attend_piece(
    const T* q, const T* kv, const Pages& pages, int64_t row, int64_t head, int64_t first,
    int64_t end, int64_t size, float scale, float soft_cap, Partial out
) {
    float scores[G][SPLIT + WIDTH];
    const Queries<G, T> queries(q, size);
    int64_t place = 0;
    each_run(kv, pages, row, head, 0, first, end, [&](Run<T> keys) {
        Lanes sums[G];
        int64_t key = 0;
        for (; key + WIDTH <= keys.count; key += WIDTH, place += WIDTH) {
            for (int i = 0; i < WIDTH; i++) keys.fetch_ahead(key + i, size);
            multiply<WIDTH>(queries, keys.start + key * keys.stride, keys.stride, size, sums);
            for (int g = 0; g < G; g++) narrowed(scores[g] + place, sums[g] * scale);
        }
        for (; key < keys.count; key++, place++) {
            keys.fetch_ahead(key, size);
            multiply<1>(queries, keys.start + key * keys.stride, keys.stride, size, sums);
            for (int g = 0; g < G; g++) scores[g][place] = sum(sums[g]) * scale;
        }
    });
    for (int g = 0; g < G; g++) {
        float* own = scores[g];
        if (soft_cap > 0)
            for (int64_t i = 0; i < place; i++) own[i] = soft_cap * std::tanh(own[i] / soft_cap);
        float largest = -std::numeric_limits<float>::infinity();
        for (int64_t i = 0; i < place; i++) largest = own[i] > largest ? own[i] : largest;
        Lanes total = {};
        for (int64_t i = 0; i < WIDTH; i++) own[place + i] = -std::numeric_limits<float>::infinity();
        for (int64_t i = 0; i < place; i += WIDTH) {
            Lanes weights = exponential(widened(own + i) - largest);
            narrowed(own + i, weights);
            total += weights;
        }
        out.largest[g] = largest;
        out.total[g] = sum(total);
    }
    Lanes blocks[256 / BLOCK][G][TILE] = {};
    Lanes rest[BLOCK / WIDTH][G] = {};
    place = 0;
    each_run(kv, pages, row, head, 1, first, end, [&](Run<T> values) {
        int64_t i = 0;
        for (; i + BLOCK <= size; i += BLOCK) {
            Lanes own[G][TILE];
            std::memcpy(own, blocks[i / BLOCK], sizeof own);
            for (int64_t key = 0; key < values.count; key++) {
                if (i == 0) values.fetch_ahead(key, size);
                Lanes value[TILE];
                Value<T>::load_block(values.start + key * values.stride + i, value);
                for (int g = 0; g < G; g++)
                    for (int t = 0; t < TILE; t++) own[g][t] += value[t] * scores[g][place + key];
            }
            std::memcpy(blocks[i / BLOCK], own, sizeof own);
        }
        for (int part = 0; i < size; i += WIDTH, part++)
            for (int64_t key = 0; key < values.count; key++) {
                Lanes value = load(values.start + key * values.stride + i, size - i);
                for (int g = 0; g < G; g++) rest[part][g] += value * scores[g][place + key];
            }
        place += values.count;
    });
    for (int g = 0; g < G; g++) {
        float* own = out.values + g * size;
        int64_t i = 0;
        for (; i + BLOCK <= size; i += BLOCK) Value<T>::store_block(own + i, blocks[i / BLOCK][g]);
        for (int part = 0; i < size; i += WIDTH, part++) store(own + i, rest[part][g], size - i);
    }
}

// Combines `count` partial results of one head, each `stride` heads after the one before. sink: the
// score of a key beside them, without a value; -infinity: there is none.
template <class T>
void combine(
    const Partial& parts, int64_t count, int64_t stride, int64_t size, float sink, T* out
) {
    float largest = sink;
    for (int64_t part = 0; part < count; part++)
        largest = std::max(largest, parts.largest[part * stride]);
    float sums[256 + WIDTH] = {};
    float total = count ? std::exp(sink - largest) : 0;
    for (int64_t part = 0; part < count; part++) {
        float weight = std::exp(parts.largest[part * stride] - largest);
        total += weight * parts.total[part * stride];
        for (int64_t i = 0; i < size; i++)
            sums[i] += weight * parts.values[part * stride * size + i];
    }
    float scale = count ? 1.0f / total : 0.0f;
    for (int64_t i = 0; i < size; i += WIDTH) store(out + i, widened(sums + i) * scale, size - i);
}

}  // namespace

// See kernels/attention. q: [num_rows, kv_heads * group, size], rows q_stride apart; out: the same,
// contiguous.
extern "C" void decode_attention(
    int dtype, const void* q, int64_t q_stride, const void* kv, int64_t page_stride,
    int64_t head_stride, int64_t kv_stride, int64_t token_stride, const int32_t* page_ids,
    const int32_t* page_starts, const int32_t* lengths, void* out, int64_t num_rows,
    int64_t kv_heads, int64_t group, int64_t page_size, int64_t size, int64_t window, double scale,
    double soft_cap, const float* sinks, Team* team
) {
    Pages pages{page_stride, head_stride, kv_stride,   token_stride, page_ids,
                page_starts, lengths,     page_size, window};
    std::vector<int64_t> piece_starts(num_rows + 1);
    std::vector<int64_t> row_of;
    int64_t keys = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t first = pages.first_key(row) / SPLIT;
        int64_t pieces = lengths[row] ? (lengths[row] + SPLIT - 1) / SPLIT - first : 0;
        piece_starts[row + 1] = piece_starts[row] + pieces;
        row_of.insert(row_of.end(), pieces, row);
        keys += lengths[row] - pages.first_key(row);
    }
    int64_t heads = kv_heads * group;
    int64_t results = piece_starts[num_rows] * heads;
    std::vector<float> memory(results * (size + 2));
    Partial parts{memory.data(), memory.data() + results * size,
                  memory.data() + results * (size + 1)};
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        int64_t bytes = keys * kv_heads * size * 2 * sizeof(T);
        each(piece_starts[num_rows] * kv_heads, bytes, team, [&](int64_t item) {
            int64_t piece = item / kv_heads, head = item % kv_heads, row = row_of[piece];
            int64_t base = pages.first_key(row) / SPLIT + piece - piece_starts[row];
            int64_t first = std::max(base * SPLIT, pages.first_key(row));
            int64_t end = std::min((base + 1) * SPLIT, (int64_t)lengths[row]);
            int64_t place = piece * heads + head * group;
            const T* queries = (const T*)q + row * q_stride + head * group * size;
            for (int64_t g = 0; g < group;) {
                Partial own{parts.values + (place + g) * size, parts.largest + place + g,
                            parts.total + place + g};
                auto attend = [&](auto tile) {
                    attend_piece<decltype(tile)::value>(
                        queries + g * size, (const T*)kv, pages, row, head, first, end, size,
                        (float)scale, (float)soft_cap, own
                    );
                    g += decltype(tile)::value;
                };
                if (group - g >= 4) attend(Count<4>());
                else if (group - g >= 2) attend(Count<2>());
                else attend(Count<1>());
            }
        });
        each(num_rows * heads, results * size * 4, team, [&](int64_t item) {
            int64_t row = item / heads, head = item % heads;
            int64_t place = piece_starts[row] * heads + head;
            Partial own{parts.values + place * size, parts.largest + place, parts.total + place};
            int64_t count = piece_starts[row + 1] - piece_starts[row];
            float sink = sinks ? sinks[head] : -std::numeric_limits<float>::infinity();
            combine(own, count, heads, size, sink, (T*)out + item * size);
        });
    });
}
