// The parts of attention that extend_attention.cpp and decode_attention.cpp share. Both compute the same
// bits for a query.
//
// A row's keys are cut into segments of SEGMENT keys, and segments into blocks of COLUMNS keys, at
// multiples of these sizes from the first token on. A score is summed word after word. A block's weights
// are relative to the largest score of its segment so far. Its values are summed from 0 and then added
// to the segment's sums. A row's segments are merged in order. Sinks and the division come last.
//
// attention.cpp compiles `weigh`, `merge` and `finish` once, because in a copy for each kernel the
// compiler could fuse other products and sums. Inline functions here only move numbers.

#pragma once

#include "lanes.h"
#include "pages.h"
#include "panels.h"

constexpr int64_t SEGMENT = 512;   // keys, also the work of a thread at once in a decode step
constexpr int64_t LONGEST = 256;   // maximum numbers of a key or a value
constexpr float LOWEST = -1e30f;   // below every score, and finite: no key seen yet
static_assert(SEGMENT % COLUMNS == 0);
static_assert(COLUMNS <= DEPTH && LONGEST <= DEPTH);  // no sum is split into parts

// A query's softmax over the keys so far: the largest score, and the sum of weights relative to it.
struct Softmax {
    float largest = LOWEST, total = 0;
};

struct Scoring {
    float scale, soft_cap;  // soft_cap 0: none
};

// A query's first and last visible key, relative to a block's start.
struct Visible {
    int64_t first, last;
};

// How keys and values of type T are multiplied: as Number, GROUP of them in a word.
template <class T>
struct Products {
    using Number = float;
    using Kind = Floats;
    static constexpr int64_t GROUP = 1;
};

#if defined(__AVX512BF16__)
template <>
struct Products<bfloat16> {
    using Number = bfloat16;
    using Kind = Bfloats;
    static constexpr int64_t GROUP = 2;
};
#endif

// Number of lanes for the sums of a value. A span of GROUP lanes is in the order of `value_words`.
template <class T>
constexpr int64_t lanes_of(int64_t size) {
    constexpr int64_t GROUP = Products<T>::GROUP;
    return (size + WIDTH * GROUP - 1) / (WIDTH * GROUP) * GROUP;
}

// Turns the products of a query with a block's keys into weights [COLUMNS]. Scales the segment's sums if
// the largest score rises.
template <class Number>
void weigh(
    const Lanes (&products)[PARTS], Visible visible, Scoring scoring, Softmax& segment, Lanes* sums,
    int64_t num_lanes, Number* weights
);

// Adds a segment to the row's sums. A segment without a visible key changes nothing.
void merge(Softmax& row, Lanes* sums, const Softmax& segment, const Lanes* added, int64_t num_lanes);

// Writes `size` numbers. sink: score of a key without a value. -infinity: no sink.
template <class T>
void finish(const Softmax& row, const Lanes* sums, float sink, int64_t size, T* out);

namespace {

template <class T>
inline void converted(const T* from, typename Products<T>::Number* to, int64_t size) {
    if constexpr (std::is_same_v<T, typename Products<T>::Number>)
        std::memcpy(to, from, size * sizeof(T));
    else
        for (int64_t i = 0; i < size; i += WIDTH) store(to + i, load(from + i, size - i), size - i);
}

// WIDTH words of a key. Numbers from `count` on are 0.
template <class T, class Count>
inline Words key_words(const T* key, Count count) {
    if constexpr (std::is_same_v<T, typename Products<T>::Number>) return words_of(key, count);
    else return count > 0 ? (Words)load(key, count) : Words{};
}

// GROUP words from the same numbers of GROUP values. Each word has one number of each value.
inline void value_words(const Words (&values)[1], Words (&words)[1]) { words[0] = values[0]; }

inline void value_words(const Words (&values)[2], Words (&words)[2]) {
    typedef uint16_t Numbers __attribute__((vector_size(4 * WIDTH)));
    Numbers a = (Numbers)values[0], b = (Numbers)values[1];
    words[0] = (Words)__builtin_shufflevector(
        a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50, 19,
        51, 24, 56, 25, 57, 26, 58, 27, 59
    );
    words[1] = (Words)__builtin_shufflevector(
        a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22, 54,
        23, 55, 28, 60, 29, 61, 30, 62, 31, 63
    );
}

// The keys [start, start + COLUMNS) of a row and a head, in runs of WIDTH keys that are in one page. A
// run without a key in [first, end) is replaced by the nearest run that has one, so only pages with such
// keys are read. Values outside [begin, count) may be NaN.
template <class T>
struct KeyBlock {
    const T* runs[PARTS];
    int64_t stride, value;  // stride: to the next key. value: from a key to its value
    int64_t begin, count;   // begin is a multiple of WIDTH

    KeyBlock(
        const T* kv, const Pages& pages, int64_t row, int64_t head, int64_t start, int64_t first,
        int64_t end
    )
        : stride(pages.token_stride),
          value(pages.kv_stride),
          begin(std::max<int64_t>(0, first - start) / WIDTH * WIDTH),
          count(std::min<int64_t>(COLUMNS, end - start)) {
        for (int part = 0; part < PARTS; part++) {
            int64_t key = std::max(start + part * WIDTH, first / WIDTH * WIDTH);
            key = std::min(key, (end - 1) / WIDTH * WIDTH);
            runs[part] = kv + pages.place(row, head, key);
        }
    }

    const T* key(int64_t i) const { return runs[i / WIDTH] + i % WIDTH * stride; }
};

}  // namespace
