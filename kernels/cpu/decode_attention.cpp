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
#include "team.h"

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

template <int G, class T>
void attend_piece(
    const T* q, const T* kv, const Pages& pages, int64_t row, int64_t head, int64_t first,
    int64_t end, int64_t size, float scale, float soft_cap, Partial out
) {
    float scores[G][SPLIT + WIDTH];
    float queries[G][256 + WIDTH];
    for (int g = 0; g < G; g++)
        for (int64_t i = 0; i < size; i += WIDTH)
            narrowed(queries[g] + i, load(q + g * size + i, size - i) * scale);
    int64_t place = 0;
    each_run(kv, pages, row, head, 0, first, end, [&](Run<T> keys) {
        for (int64_t key = 0; key < keys.count; key++, place++) {
            const T* k = keys.start + key * keys.stride;
            keys.fetch_ahead(key, size);
            Lanes products[G] = {};
            spans(size, [&](int64_t i, auto count) {
                Lanes values = load(k + i, count);
                for (int g = 0; g < G; g++) products[g] += values * widened(queries[g] + i);
            });
            for (int g = 0; g < G; g++) scores[g][place] = sum(products[g]);
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
    float sums[G][256 + WIDTH] = {};
    place = 0;
    each_run(kv, pages, row, head, 1, first, end, [&](Run<T> values) {
        auto add = [&](auto lanes, int64_t i) {  // so many Lanes of every head stay in registers
            constexpr int TILE = decltype(lanes)::value;
            Lanes tile[G][TILE];
            for (int g = 0; g < G; g++)
                for (int t = 0; t < TILE; t++) tile[g][t] = widened(sums[g] + i + t * WIDTH);
            for (int64_t key = 0; key < values.count; key++) {
                const T* v = values.start + key * values.stride + i;
                if (i == 0) values.fetch_ahead(key, size);
                for (int t = 0; t < TILE; t++) {
                    Lanes value = load(v + t * WIDTH, TILE == 1 ? size - i : WIDTH);
                    for (int g = 0; g < G; g++) tile[g][t] += value * scores[g][place + key];
                }
            }
            for (int g = 0; g < G; g++)
                for (int t = 0; t < TILE; t++) narrowed(sums[g] + i + t * WIDTH, tile[g][t]);
        };
        int64_t i = 0;
        for (; i + 4 * WIDTH <= size; i += 4 * WIDTH) add(Count<4>(), i);
        for (; i < size; i += WIDTH) add(Count<1>(), i);
        place += values.count;
    });
    for (int g = 0; g < G; g++) std::memcpy(out.values + g * size, sums[g], size * sizeof(float));
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

// See kernels/attention.py. q: [num_rows, kv_heads * group, size], rows q_stride apart; out: the same,
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
