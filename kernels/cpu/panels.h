// Panels: a layout of matrices in which any number of rows is multiplied at the speed of the memory or
// cache that holds the matrix.
//
// A panel has COLUMNS outputs. Its words are in the order in which they are read: for every 4 bytes of a
// row (one float32, two bfloat16, four int8), one word of each output. The sum of an output consists of
// parts of DEPTH words. Each part adds its words in order, for any number of rows.

#pragma once

#include <algorithm>

#include "lanes.h"
#include "team.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int PARTS = 4;
constexpr int COLUMNS = PARTS * WIDTH;
constexpr int TILE = 6;               // rows whose sums fit into registers, beside a word of each part
constexpr int64_t DEPTH = 256;        // words of a row, and of each output, that are summed as one part

struct Floats {
    using Sums = Lanes;
    static Sums add(Sums sums, Words weights, Words input) {
#if defined(__AVX512F__)  // always fused, because the compiler would otherwise be free to choose
        return (Sums)_mm512_fmadd_ps((__m512)weights, (__m512)input, (__m512)sums);
#else
        return sums + (Lanes)weights * (Lanes)input;
#endif
    }
};

#if defined(__AVX512BF16__)
struct Bfloats {
    using Sums = Lanes;
    static Sums add(Sums sums, Words weights, Words input) {
        return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)input);
    }
};
#endif

#if defined(__AVX512VNNI__)
struct Bytes {  // unsigned inputs by signed weights
    using Sums = Ints;
    static Sums add(Sums sums, Words weights, Words input) {
        return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)input, (__m512i)weights);
    }
};
#endif

// Whether words are added a tile at a time (tiles.h), so that Kind::add does not exist.
template <class Kind>
constexpr bool BY_TILE = false;

// WIDTH words of numbers in the dtype of the product. Numbers from `count` on are 0.
template <class T>
inline Words words_of(const T* numbers, int64_t count) {
    Words words = {};
    if (count >= (int64_t)(sizeof words / sizeof(T))) std::memcpy(&words, numbers, sizeof words);
    else if (count > 0) std::memcpy(&words, numbers, count * sizeof(T));
    return words;
}

// Transposes WIDTH rows of WIDTH words.
#if defined(__AVX512F__)
inline __attribute__((always_inline)) void transpose(Words (&rows)[WIDTH]) {
    typedef uint64_t Pairs __attribute__((vector_size(4 * WIDTH)));
    Words other[WIDTH];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        Words a = rows[i], b = rows[i + 1];
        other[i] = __builtin_shufflevector(
            a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
        );
        other[i + 1] = __builtin_shufflevector(
            a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
        );
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            Pairs a = (Pairs)other[i + j], b = (Pairs)other[i + j + 2];
            rows[i + 2 * j] = (Words)__builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
            rows[i + 2 * j + 1] = (Words)__builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
        }
    auto even = [](Words a, Words b) __attribute__((always_inline)) {
        return __builtin_shufflevector(
            a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
        );
    };
    auto odd = [](Words a, Words b) __attribute__((always_inline)) {
        return __builtin_shufflevector(
            a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
        );
    };
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        other[i] = even(rows[i], rows[i + 4]);
        other[i + 4] = even(rows[i + 8], rows[i + 12]);
        other[i + 8] = odd(rows[i], rows[i + 4]);
        other[i + 12] = odd(rows[i + 8], rows[i + 12]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows[i] = even(other[i], other[i + 4]);
        rows[i + 8] = odd(other[i], other[i + 4]);
        rows[i + 4] = even(other[i + 8], other[i + 12]);
        rows[i + 12] = odd(other[i + 8], other[i + 12]);
    }
}
#else
inline void transpose(Words (&rows)[WIDTH]) {  // four words of four rows at a time
    typedef uint32_t Quad __attribute__((vector_size(16)));
    Quad from[WIDTH][4], to[WIDTH][4];
    std::memcpy(from, rows, sizeof from);
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            Quad a = from[4 * i][j], b = from[4 * i + 1][j];
            Quad c = from[4 * i + 2][j], d = from[4 * i + 3][j];
            Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            Quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            to[4 * j][i] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
            to[4 * j + 1][i] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
            ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            to[4 * j + 2][i] = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
            to[4 * j + 3][i] = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
        }
    std::memcpy(rows, to, sizeof to);
}
#endif

template <class Kind, int COUNT>
void add_tile(
    const uint32_t* panel, const uint32_t* rows, int64_t stride, int64_t words,
    typename Kind::Sums* sums, int64_t apart, bool fresh
) {
    typename Kind::Sums own[COUNT][PARTS];
#pragma GCC unroll 8
    for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++) own[row][part] = typename Kind::Sums{};
    for (int64_t word = 0; word < words; word++, panel += COLUMNS) {
        Words weights[PARTS];  // one by one, because they would otherwise go through memory
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++)
            std::memcpy(&weights[part], panel + part * WIDTH, sizeof weights[part]);
#pragma GCC unroll 8
        for (int row = 0; row < COUNT; row++) {
            Words input = Words{} + rows[row * stride + word];
#pragma GCC unroll 8
            for (int part = 0; part < PARTS; part++)
                own[row][part] = Kind::add(own[row][part], weights[part], input);
        }
    }
    // Unrolled, so that everything stays in registers.
#pragma GCC unroll 8
    for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++)
            sums[row * apart + part] =
                fresh ? own[row][part] : sums[row * apart + part] + own[row][part];
}

// Sums of some rows with one panel. fresh: replaces the content of `sums`, else adds to it. A row has
// PARTS sums, and rows are `apart`.
template <class Kind>
void add_rows(
    const uint32_t* panel, const uint32_t* rows, int64_t stride, int64_t count, int64_t words,
    typename Kind::Sums* sums, int64_t apart, bool fresh
) {
    for (int64_t from = 0; from < words; from += DEPTH) {
        int64_t depth = std::min(DEPTH, words - from);
        for (int64_t row = 0; row < count;) {
            auto add = [&](auto tile) {
                constexpr int COUNT = decltype(tile)::value;
                add_tile<Kind, COUNT>(
                    panel + from * COLUMNS, rows + row * stride + from, stride, depth,
                    sums + row * apart, apart, fresh && from == 0
                );
                row += COUNT;
            };
            switch (std::min<int64_t>(count - row, TILE)) {
                case 1: add(Count<1>()); break;
                case 2: add(Count<2>()); break;
                case 3: add(Count<3>()); break;
                case 4: add(Count<4>()); break;
                case 5: add(Count<5>()); break;
                default: add(Count<TILE>());
            }
        }
    }
}

constexpr int64_t ROWS = 64 * TILE;  // rows that stay in a near cache with their sums, for all panels

// Calls finish(row, column, sums) with the sums of WIDTH outputs from `column` on. add(panel, first,
// count, sums) computes those of `count` rows from `first` on.
template <class Kind, class Add, class Finish>
void multiply(
    int64_t num_rows, int64_t words, int64_t num_outputs, Team* team, Add add, Finish finish
) {
    int64_t num_panels = (num_outputs + COLUMNS - 1) / COLUMNS;
    int64_t blocks = (num_rows + ROWS - 1) / ROWS;
    auto piece = [&](int64_t number) {
        int64_t panel = number % num_panels, first = number / num_panels * ROWS;
        int64_t count = std::min(ROWS, num_rows - first);
        typename Kind::Sums sums[ROWS][PARTS];
        add(panel, first, count, sums[0]);
        for (int64_t row = 0; row < count; row++)
            for (int part = 0; part < PARTS; part++) {
                int64_t column = panel * COLUMNS + part * WIDTH;
                if (column < num_outputs) finish(first + row, column, sums[row][part]);
            }
    };
    int64_t count = num_panels * blocks;
    // A tile of rows costs as much as one row that reads the panel.
    if (num_panels * COLUMNS * words * 4 * ((num_rows + TILE - 1) / TILE) < SMALL)
        for (int64_t number = 0; number < count; number++) piece(number);
    else
        team->share(count, piece);
}

template <class T>
auto with_bias(const void* bias, void* out, int64_t num_outputs) {
    return [=](int64_t row, int64_t column, Lanes sums) {
        if (bias) sums += load((const T*)bias + column, num_outputs - column);
        store((T*)out + row * num_outputs + column, sums, num_outputs - column);
    };
}

}  // namespace
