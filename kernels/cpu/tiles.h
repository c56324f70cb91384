// Products on the tile registers of processors with AMX. One instruction adds 16 words to the sums of
// 16 rows by 16 outputs. See panels.h for panels, words and parts.
//
// A tile of weights has 16 words of 16 outputs of a panel. A sum adds its words in order, for any number
// of rows, because a register can load a partial sum and continue it without rounding.

#pragma once

#include "panels.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t SIDE = 16;   // rows, outputs and words of a tile
constexpr int64_t NEAR = 128;  // words of a panel that stay in the first-level cache
static_assert(WIDTH == SIDE && PARTS == 4);

// Registers 0 to 3 hold the sums of a panel's parts, 4 the rows, 5 and 6 the weights of two parts.
// Intrinsics take these numbers as literals.
struct BfloatTiles {
    using Sums = Lanes;
    static void add_to_first_parts() {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 6);
    }
    static void add_to_last_parts() {
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 6);
    }
};

struct ByteTiles {  // unsigned inputs by signed weights
    using Sums = Ints;
    static void add_to_first_parts() {
        _tile_dpbusd(0, 4, 5);
        _tile_dpbusd(1, 4, 6);
    }
    static void add_to_last_parts() {
        _tile_dpbusd(2, 4, 5);
        _tile_dpbusd(3, 4, 6);
    }
};

template <>
constexpr bool BY_TILE<BfloatTiles> = true;
template <>
constexpr bool BY_TILE<ByteTiles> = true;

// Returns whether 16-bit and 8-bit products may run. A process must request the registers from Linux.
inline bool may_multiply() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return granted;
}

// Configures the registers for `rows` rows and `words` words at a time. Their content becomes 0.
inline void shape_tiles(int64_t rows, int64_t words) {
    struct {
        uint8_t palette = 1, first_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 4; tile++) shape.bytes[tile] = 4 * SIDE, shape.rows[tile] = rows;
    shape.bytes[4] = 4 * words, shape.rows[4] = rows;
    for (int tile = 5; tile < 7; tile++) shape.bytes[tile] = 4 * SIDE, shape.rows[tile] = words;
    _tile_loadconfig(&shape);
}

// Adds `words` words, `step` at a time, to the sums of a tile of rows. stride: words between rows.
// apart: vectors of sums between rows. fresh: the sums start at 0.
template <class Kind>
void add_words(
    const uint32_t* panel, const uint32_t* rows, int64_t stride, int64_t words, int64_t step,
    typename Kind::Sums* sums, int64_t apart, bool fresh
) {
    const int64_t to_next = apart * sizeof *sums;
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, to_next);
        _tile_loadd(1, sums + 1, to_next);
        _tile_loadd(2, sums + 2, to_next);
        _tile_loadd(3, sums + 3, to_next);
    }
    for (int64_t word = 0; word < words; word += step, panel += step * COLUMNS) {
        _tile_loadd(4, rows + word, 4 * stride);
        _tile_loadd(5, panel, 4 * COLUMNS);
        _tile_loadd(6, panel + WIDTH, 4 * COLUMNS);
        Kind::add_to_first_parts();
        _tile_loadd(5, panel + 2 * WIDTH, 4 * COLUMNS);
        _tile_loadd(6, panel + 3 * WIDTH, 4 * COLUMNS);
        Kind::add_to_last_parts();
    }
    _tile_stored(0, sums, to_next);
    _tile_stored(1, sums + 1, to_next);
    _tile_stored(2, sums + 2, to_next);
    _tile_stored(3, sums + 3, to_next);
}

// Computes the same as add_rows in panels.h, for any number of rows.
template <class Kind>
void add_tiles(
    const uint32_t* panel, const uint32_t* rows, int64_t stride, int64_t count, int64_t words,
    typename Kind::Sums* sums, int64_t apart, bool fresh
) {
    asm volatile("" ::: "memory");  // GCC 12 does not know that the intrinsics read memory
    const int64_t whole = words / SIDE * SIDE, depth = count > SIDE ? NEAR : words;
    auto add = [&](int64_t first, int64_t end, int64_t from, int64_t past, int64_t step) {
        for (int64_t row = first; row < end; row += SIDE)
            add_words<Kind>(
                panel + from * COLUMNS, rows + row * stride + from, stride, past - from, step,
                sums + row * apart, apart, fresh && from == 0
            );
    };
    auto add_all = [&](int64_t first, int64_t end) {
        if (first == end) return;
        const int64_t height = std::min(SIDE, end - first);
        if (whole) shape_tiles(height, SIDE);
        for (int64_t from = 0; from < whole; from += depth)
            add(first, end, from, std::min(from + depth, whole), SIDE);
        if (whole == words) return;
        shape_tiles(height, words - whole);
        add(first, end, whole, words, words - whole);
    };
    const int64_t full = count / SIDE * SIDE;
    add_all(0, full);
    add_all(full, count);
    _tile_release();
}

template <>
void add_rows<BfloatTiles>(
    const uint32_t* panel, const uint32_t* rows, int64_t stride, int64_t count, int64_t words,
    Lanes* sums, int64_t apart, bool fresh
) {
    add_tiles<BfloatTiles>(panel, rows, stride, count, words, sums, apart, fresh);
}

template <>
void add_rows<ByteTiles>(
    const uint32_t* panel, const uint32_t* rows, int64_t stride, int64_t count, int64_t words,
    Ints* sums, int64_t apart, bool fresh
) {
    add_tiles<ByteTiles>(panel, rows, stride, count, words, sums, apart, fresh);
}

using BfloatProducts = BfloatTiles;
using ByteProducts = ByteTiles;

}  // namespace
#else
namespace {

#if defined(__AVX512BF16__)
using BfloatProducts = Bfloats;
#endif
#if defined(__AVX512VNNI__)
using ByteProducts = Bytes;
#endif

inline bool may_multiply() { return true; }

}  // namespace
#endif
