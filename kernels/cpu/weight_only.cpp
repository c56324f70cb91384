// Products of rows with 4-bit weights. Blocks of weights are widened into the first-level cache.
//
// A weight is (number - zero) * scale. A group is a range of consecutive inputs of an output that share
// scale and zero. Numbers are widened exactly. The sum of a group is multiplied by its scale. Then the
// sum of its inputs, times zero and scale, is subtracted. The order of all sums does not depend on the
// number of rows.

#include <memory>

#include "lanes.h"
#include "operations.h"
#include "panels.h"
#include "tiles.h"

namespace {

constexpr int CODES = 8;       // numbers in a word of codes
constexpr int64_t BLOCK = 256;  // maximum of inputs widened at a time, all of one group

// The values of codes from 0 to 15.
struct Integers {  // 8 is subtracted, so that symmetric weights need no zeros
    using Scale = float;
    static Lanes value(Words code) { return __builtin_convertvector((Ints)code - 8, Lanes); }
};

struct ShortFloats {  // e2m1
    using Scale = bfloat16;
    static Lanes value(Words code) {
        Words size = code & 7;
        Lanes small = __builtin_convertvector(size, Lanes) * 0.5f;
        Lanes large = (Lanes)((size << 22) + (126u << 23));
        return (Lanes)((Words)(size < 2 ? small : large) | (code & 8) << 28);
    }
};

// Widens a word of codes to words for a kind of product. Code 2i of eight is in bits 4i to 4i + 3, and
// code 2i + 1 is 16 bits higher.
template <class Kind, class Number>
struct Widened;

template <class Number>
struct Widened<Floats, Number> {
    static constexpr int WORDS = CODES;
#if defined(__AVX512F__)
    const Lanes values = Number::value(Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
    Words word(Words codes, int i) const {
        Words code = codes >> 4 * (i / 2 + i % 2 * 4);
        return (Words)_mm512_permutexvar_ps((__m512i)code, (__m512)values);
    }
#else
    Words word(Words codes, int i) const {
        return (Words)Number::value(codes >> 4 * (i / 2 + i % 2 * 4) & 15);
    }
#endif
};

#if defined(__AVX512BF16__)
template <class Number>
struct Widened<BfloatProducts, Number> {
    static constexpr int WORDS = CODES / 2;
    Words values;  // 32 bfloat16, the same 16 twice

    Widened() {
        Words code = {0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14};
        values = ((Words)Number::value(code) >> 16) | (Words)Number::value(code + 1);
    }

    Words word(Words codes, int i) const {
        return (Words)_mm512_permutexvar_epi16(
            (__m512i)(codes >> 4 * i & 0x000f000f), (__m512i)values
        );
    }
};
#endif

// A matrix. Scales and zeros: [panels, groups, COLUMNS].
struct Weights {
    const uint32_t* panels;
    const void* scales;
    const uint8_t* zeros;  // null: weights are symmetric
    int64_t inputs, outputs, group;

    int64_t groups() const { return (inputs + group - 1) / group; }
};

// A panel's codes for inputs of one group.
struct Block {
    const uint32_t* codes;
    int64_t size;  // inputs
};

// Widens a block, and multiplies up to TILE_ROWS rows by it.
template <class Kind, class Number>
struct Engine {
    static constexpr int64_t TILE_ROWS = BY_TILE<Kind> ? WIDTH : TILE;
    using Wide = Widened<Kind, Number>;
    using Scale = typename Number::Scale;

    const Wide wide{};
    alignas(64) uint32_t laid[BLOCK / CODES * Wide::WORDS * COLUMNS];

    void lay(const Block& block) {
        uint32_t* to = laid;
        for (int64_t word = 0; word < block.size / CODES; word++)
            for (int part = 0; part < PARTS; part++) {
                Words codes;
                std::memcpy(&codes, block.codes + word * COLUMNS + part * WIDTH, sizeof codes);
#pragma GCC unroll 8
                for (int i = 0; i < Wide::WORDS; i++) {
                    Words one = wide.word(codes, i);
                    std::memcpy(to + (word * Wide::WORDS + i) * COLUMNS + part * WIDTH, &one, 64);
                }
            }
    }

    // rows: words of the rows, from the first input of the block.
    void add(
        const Block& block, const uint32_t* rows, int64_t stride, int64_t count, Lanes* sums
    ) const {
        int64_t words = block.size / CODES * Wide::WORDS;
        add_rows<Kind>(laid, rows, stride, count, words, sums, PARTS, true);
    }
};

// Adds up the inputs of each group of each row. out: [rows, groups].
template <class T>
void add_inputs(const T* x, int64_t stride, const Weights& weights, int64_t num_rows, float* out) {
    int64_t groups = weights.groups();
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t group = 0; group < groups; group++) {
            int64_t from = group * weights.group;
            int64_t end = std::min(weights.inputs, from + weights.group);
            Lanes total = {};
            for (int64_t i = from; i < end; i += WIDTH) total += load(x + row * stride + i, end - i);
            out[row * groups + group] = sum(total);
        }
}

// Returns a function that multiplies rows by a panel, block by block. input_sums: from `add_inputs`.
template <class Kind, class Number>
auto widening(
    const Weights& weights, const uint32_t* rows, int64_t stride, const float* input_sums
) {
    using Scale = typename Number::Scale;
    constexpr int64_t WORDS = Widened<Kind, Number>::WORDS, TILE_ROWS = Engine<Kind, Number>::TILE_ROWS;
    return [=](int64_t panel, int64_t first, int64_t count, Lanes* sums) {
        const int64_t groups = weights.groups(), codes = weights.inputs / CODES;
        Engine<Kind, Number> engine;
        Lanes found[TILE_ROWS * PARTS];
        for (int64_t from = 0, size; from < weights.inputs; from += size) {
            const int64_t group = from / weights.group;
            const int64_t end = std::min(weights.inputs, (group + 1) * weights.group);
            size = std::min(BLOCK, end - from);
            const Block block{weights.panels + (panel * codes + from / CODES) * COLUMNS, size};
            engine.lay(block);
            Lanes scales[PARTS], zeros[PARTS];
            const int64_t place = (panel * groups + group) * COLUMNS;
            const bool subtracts = weights.zeros && from == group * weights.group;
            for (int part = 0; part < PARTS; part++) {
                scales[part] = load((const Scale*)weights.scales + place + part * WIDTH);
                if (!subtracts) continue;
                typedef uint8_t Octets __attribute__((vector_size(WIDTH)));
                Octets octets;
                std::memcpy(&octets, weights.zeros + place + part * WIDTH, sizeof octets);
                zeros[part] = (8 - __builtin_convertvector(octets, Lanes)) * scales[part];
            }
            for (int64_t row = 0; row < count; row += TILE_ROWS) {
                const int64_t some = std::min(TILE_ROWS, count - row);
                const uint32_t* own = rows + (first + row) * stride + from / CODES * WORDS;
                engine.add(block, own, stride, some, found);
                for (int64_t i = 0; i < some; i++)
                    for (int part = 0; part < PARTS; part++) {
                        Lanes& total = sums[(row + i) * PARTS + part];
                        if (from == 0) total = Lanes{};
                        const Words product = (Words)found[i * PARTS + part];
                        total = Floats::add(total, (Words)scales[part], product);
                        if (subtracts) {
                            Lanes input = Lanes{} + input_sums[(first + row + i) * groups + group];
                            total = Floats::add(total, (Words)zeros[part], (Words)input);
                        }
                    }
            }
        }
    };
}

}  // namespace

extern "C" {

// Multiplies rows of any dtype by panels of 4-bit codes, and adds a bias unless it is null. fp4: codes
// are e2m1 instead of integers, and scales bfloat16 instead of float32. Each word of a panel has CODES
// inputs of an output, see Widened. stride: in elements.
void weight_only_product(
    int dtype, int fp4, const uint32_t* panels, const void* scales, const uint8_t* zeros,
    int64_t group, const void* x, int64_t stride, const void* bias, void* out, int64_t num_rows,
    int64_t inputs, int64_t num_outputs, Team* team
) {
    const Weights weights{panels, scales, zeros, inputs, num_outputs, group};
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        std::unique_ptr<float[]> input_sums;
        if (zeros) {
            input_sums.reset(new float[num_rows * weights.groups()]);
            add_inputs((const T*)x, stride, weights, num_rows, input_sums.get());
        }
        auto with = [&](auto kind, auto code, const uint32_t* rows, int64_t row_words) {
            using Kind = decltype(kind);
            using Number = decltype(code);
            auto add = widening<Kind, Number>(weights, rows, row_words, input_sums.get());
            multiply<Kind>(
                num_rows, inputs / CODES * Widened<Kind, Number>::WORDS, num_outputs, team, add,
                with_bias<T>(bias, out, num_outputs)
            );
        };
        auto by = [&](auto kind, const uint32_t* rows, int64_t row_words) {
            if (fp4) with(kind, ShortFloats(), rows, row_words);
            else with(kind, Integers(), rows, row_words);
        };
        if constexpr (std::is_same_v<T, float>) return by(Floats(), (const uint32_t*)x, stride);
#if defined(__AVX512BF16__)
        if constexpr (std::is_same_v<T, bfloat16>)
            if (may_multiply()) return by(BfloatProducts(), (const uint32_t*)x, stride / 2);
#endif
        std::unique_ptr<float[]> wide(new float[num_rows * inputs]);
        each(num_rows, num_rows * inputs * sizeof(T), team, [&](int64_t row) {
            for (int64_t i = 0; i < inputs; i += WIDTH)
                store(
                    wide.get() + row * inputs + i, load((const T*)x + row * stride + i, inputs - i),
                    inputs - i
                );
        });
        by(Floats(), (const uint32_t*)wide.get(), inputs);
    });
}

}  // extern "C"
