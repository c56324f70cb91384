// Panels: how a matrix lies so that rows of any number multiply it at the speed of what holds it.
//
// A panel has COLUMNS outputs. Its words follow each other as they are read: for every 4 bytes of a
// row (one float32, two bfloat16, four int8) a word of each output. The sum of an output is that of
// parts of DEPTH words, each of which runs over its words in order, whatever the number of rows.

#pragma once

#include <algorithm>

#include "lanes.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int PARTS = 4;
constexpr int COLUMNS = PARTS * WIDTH;
constexpr int TILE = 6;               // rows whose sums stay in registers, beside a word of each part
constexpr int64_t DEPTH = 256;        // words of a row, and of each output, that are added up alone

struct Floats {
    using Sums = Lanes;
    static Sums add(Sums sums, Words weights, Words input) {
        return sums + (Lanes)weights * (Lanes)input;
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

template <class Kind, int COUNT>
void add_tile(
    const uint32_t* panel, const uint32_t* rows, int64_t stride, int64_t words,
    typename Kind::Sums (*sums)[PARTS], bool fresh
) {
    typename Kind::Sums own[COUNT][PARTS];
#pragma GCC unroll 8
    for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++) own[row][part] = typename Kind::Sums{};
    for (int64_t word = 0; word < words; word++, panel += COLUMNS) {
        Words weights[PARTS];  // one by one, else they go by way of memory
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
    // Unrolled, so that nothing is indexed and all stays in registers.
#pragma GCC unroll 8
    for (int row = 0; row < COUNT; row++)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; part++)
            sums[row][part] = fresh ? own[row][part] : sums[row][part] + own[row][part];
}

// Sums of some rows with one panel, in place of what is in `sums` where `fresh`, or added to it.
template <class Kind>
void add_rows(
    const uint32_t* panel, const uint32_t* rows, int64_t stride, int64_t count, int64_t words,
    typename Kind::Sums (*sums)[PARTS], bool fresh
) {
    for (int64_t from = 0; from < words; from += DEPTH) {
        int64_t depth = std::min(DEPTH, words - from);
        for (int64_t row = 0; row < count;) {
            auto add = [&](auto tile) {
                constexpr int COUNT = decltype(tile)::value;
                add_tile<Kind, COUNT>(
                    panel + from * COLUMNS, rows + row * stride + from, stride, depth, sums + row,
                    fresh && from == 0
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

}  // namespace
