// Flash-decoding: attention of one query per row over pages, which are read in place.
//
// A segment of a row's keys and a KV head are one piece of work, see attention.h. So a row's result
// depends neither on other rows nor on the number of threads.

#include <limits>
#include <memory>
#include <vector>

#include "attention.h"
#include "operations.h"

namespace {

// Prefetches a key or a value, because the processor cannot predict the jump to another page. Not into
// the nearest cache, which can wait for only a few lines at a time.
template <class T>
inline void fetch(const T* line) {
    __builtin_prefetch(line, 0, 2);
}

// Products of G queries [G, LONGEST] with the keys of a block, and prefetches of their values. Computes
// several runs of keys at once, because each addition to a sum waits for the one before.
template <int G, class T>
inline void multiply(
    const typename Products<T>::Number (*queries)[LONGEST], const KeyBlock<T>& keys, int64_t size,
    Lanes (*products)[PARTS]
) {
    constexpr int64_t GROUP = Products<T>::GROUP, STEP = WIDTH * GROUP;
    constexpr int RUNS = PARTS / G;
    for (int first = 0; first < PARTS; first += RUNS) {
        Lanes own[RUNS][G] = {};
        auto add = [&](int64_t i, auto left) __attribute__((always_inline)) {
            const int num_words = (left + GROUP - 1) / GROUP;
#pragma GCC unroll 4
            for (int run = 0; run < RUNS; run++) {
                const T* key = keys.runs[first + run] + i;
                // Words of WIDTH keys, then after the transposition the same word of all keys.
                Words words[WIDTH];
#pragma GCC unroll 16
                for (int k = 0; k < WIDTH; k++, key += keys.stride) {
                    words[k] = key_words(key, left);
                    fetch(key + keys.value);
                }
                transpose(words);
#pragma GCC unroll 16
                for (int word = 0; word < num_words; word++)
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) {
                        uint32_t query;
                        std::memcpy(&query, queries[g] + i + word * GROUP, sizeof query);
                        own[run][g] =
                            Products<T>::Kind::add(own[run][g], words[word], Words{} + query);
                    }
            }
        };
        if (first * WIDTH < keys.count) {
            int64_t i = 0;
            for (; i + STEP <= size; i += STEP) add(i, Count<STEP>());
            if (i < size) add(i, size - i);
        }
#pragma GCC unroll 4
        for (int run = 0; run < RUNS; run++)
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) products[g][first + run] = own[run][g];
    }
}

// Adds LANES lanes of a block's values from number `from` on, and prefetches the next block's keys.
// left: numbers of a value from there on, at most those of the lanes.
template <int G, int LANES, class T, class Left>
inline void add_values(
    const typename Products<T>::Number (*weights)[COLUMNS], const KeyBlock<T>& keys,
    const KeyBlock<T>& next, int64_t from, Left left, Lanes* sums, int64_t num_lanes
) {
    constexpr int64_t GROUP = Products<T>::GROUP;
    Lanes own[G][LANES] = {};
    auto add = [&](int64_t key, auto num_keys) __attribute__((always_inline)) {
        const T* values[GROUP];
#pragma GCC unroll 2
        for (int one = 0; one < GROUP; one++) {
            values[one] = keys.key(key + one) + keys.value + from;
            const T* ahead = next.key(key + one) + from;
#pragma GCC unroll 8
            for (int lane = 0; lane < LANES; lane += GROUP) fetch(ahead + lane * WIDTH);
        }
#pragma GCC unroll 8
        for (int lane = 0; lane < LANES; lane += GROUP) {
            Words stored[GROUP] = {}, words[GROUP];
#pragma GCC unroll 2
            for (int one = 0; one < num_keys; one++)
                stored[one] = key_words(values[one] + lane * WIDTH, left - lane * WIDTH);
            value_words(stored, words);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) {
                uint32_t weight;
                std::memcpy(&weight, weights[g] + key, sizeof weight);
#pragma GCC unroll 2
                for (int one = 0; one < GROUP; one++)
                    own[g][lane + one] = Products<T>::Kind::add(
                        own[g][lane + one], words[one], Words{} + weight
                    );
            }
        }
    };
    int64_t key = keys.begin;
    for (; key + GROUP <= keys.count; key += GROUP) add(key, Count<GROUP>());
    if (key < keys.count) add(key, Count<1>());
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 8
        for (int lane = 0; lane < LANES; lane++)
            sums[g * num_lanes + from / WIDTH + lane] += own[g][lane];
}

// A segment of a row's keys for G query heads: the keys [first, end), all visible to the query.
template <int G, class T>
void attend_segment(
    const T* q, const T* kv, const Pages& pages, int64_t row, int64_t head, int64_t first,
    int64_t end, int64_t size, Scoring scoring, Softmax* segment, Lanes* sums
) {
    using Number = typename Products<T>::Number;
    const int64_t num_lanes = lanes_of<T>(size);
    alignas(64) Number queries[G][LONGEST] = {}, weights[G][COLUMNS];
    Lanes products[G][PARTS];
    for (int g = 0; g < G; g++) {
        converted(q + g * size, queries[g], size);
        segment[g] = {};
    }
    for (int64_t i = 0; i < G * num_lanes; i++) sums[i] = Lanes{};
    int64_t start = first / COLUMNS * COLUMNS;
    KeyBlock<T> keys(kv, pages, row, head, start, first, end);
    for (; start < end; start += COLUMNS) {
        KeyBlock<T> next(kv, pages, row, head, start + COLUMNS, first, end);
        multiply<G>(queries, keys, size, products);
        for (int g = 0; g < G; g++)
            weigh(
                products[g], Visible{first - start, end - 1 - start}, scoring, segment[g],
                sums + g * num_lanes, num_lanes, weights[g]
            );
        int64_t from = 0;
        auto add = [&](auto lanes, auto left) {
            constexpr int LANES = decltype(lanes)::value;
            add_values<G, LANES>(weights, keys, next, from, left, sums, num_lanes);
            from += LANES * WIDTH;
        };
        // Vectors that fit into registers.
        constexpr int MOST = std::min(8, 16 / G), LEAST = Products<T>::GROUP;
        while (from + MOST * WIDTH <= size) add(Count<MOST>(), Count<MOST * WIDTH>());
        while (from + 4 * WIDTH <= size) add(Count<4>(), Count<4 * WIDTH>());
        while (from < size) add(Count<LEAST>(), size - from);
        keys = next;
    }
}

// The segments of all rows, in order.
struct Segments {
    std::vector<int64_t> starts, row_of;  // starts: [num_rows + 1]
    int64_t keys = 0;

    Segments(const Pages& pages, int64_t num_rows) : starts(num_rows + 1) {
        for (int64_t row = 0; row < num_rows; row++) {
            int64_t length = pages.lengths[row];
            int64_t count = (length + SEGMENT - 1) / SEGMENT - first(pages, row);
            starts[row + 1] = starts[row] + count;
            row_of.insert(row_of.end(), count, row);
            keys += length - pages.first_key(row);
        }
    }

    int64_t count() const { return row_of.size(); }

    static int64_t first(const Pages& pages, int64_t row) { return pages.first_key(row) / SEGMENT; }
};

}  // namespace

// See kernels/attention. q: [num_rows, kv_heads * group, size], rows q_stride apart. out: the same
// shape, contiguous.
extern "C" void decode_attention(
    int dtype, const void* q, int64_t q_stride, const void* kv, int64_t page_stride,
    int64_t head_stride, int64_t kv_stride, int64_t token_stride, const int32_t* page_ids,
    const int32_t* page_starts, const int32_t* lengths, void* out, int64_t num_rows,
    int64_t kv_heads, int64_t group, int64_t page_size, int64_t size, int64_t window, double scale,
    double soft_cap, const float* sinks, Team* team
) {
    Pages pages{page_stride, head_stride, kv_stride,   token_stride, page_ids,
                page_starts, lengths,     page_size, window};
    const Segments segments(pages, num_rows);
    const Scoring scoring{(float)scale, (float)soft_cap};
    const int64_t heads = kv_heads * group, results = segments.count() * heads;
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        const int64_t num_lanes = lanes_of<T>(size);
        std::unique_ptr<Lanes[]> sums(new Lanes[results * num_lanes]);
        std::unique_ptr<Softmax[]> softmaxes(new Softmax[results]);
        int64_t bytes = segments.keys * kv_heads * size * 2 * sizeof(T);
        each(segments.count() * kv_heads, bytes, team, [&](int64_t item) {
            int64_t segment = item / kv_heads, head = item % kv_heads;
            int64_t row = segments.row_of[segment];
            int64_t number = Segments::first(pages, row) + segment - segments.starts[row];
            int64_t first = std::max(number * SEGMENT, pages.first_key(row));
            int64_t end = std::min((number + 1) * SEGMENT, (int64_t)lengths[row]);
            const T* queries = (const T*)q + row * q_stride + head * group * size;
            for (int64_t g = 0; g < group;) {
                int64_t place = segment * heads + head * group + g;
                auto attend = [&](auto tile) {
                    attend_segment<decltype(tile)::value>(
                        queries + g * size, (const T*)kv, pages, row, head, first, end, size,
                        scoring, softmaxes.get() + place, sums.get() + place * num_lanes
                    );
                    g += decltype(tile)::value;
                };
                if (group - g >= 4) attend(Count<4>());
                else if (group - g >= 2) attend(Count<2>());
                else attend(Count<1>());
            }
        });
        each(num_rows * heads, results * num_lanes * sizeof(Lanes), team, [&](int64_t item) {
            int64_t row = item / heads, head = item % heads;
            T* own = (T*)out + item * size;
            if (!lengths[row]) {
                std::memset(own, 0, size * sizeof(T));
                return;
            }
            Softmax total;
            Lanes merged[LONGEST / WIDTH] = {};
            for (int64_t i = segments.starts[row]; i < segments.starts[row + 1]; i++) {
                int64_t place = i * heads + head;
                merge(total, merged, softmaxes[place], sums.get() + place * num_lanes, num_lanes);
            }
            float sink = sinks ? sinks[head] : -std::numeric_limits<float>::infinity();
            finish(total, merged, sink, size, own);
        });
    });
}
