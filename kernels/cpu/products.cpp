// Products of rows with a model's matrices in panels, for processors with AVX-512.
//
// Few rows read a matrix as one stream. Many rows read each panel from a near cache. A row's result
// depends neither on other rows nor on the threads.

#include <memory>

#include "lanes.h"
#include "operations.h"
#include "panels.h"
#include "tiles.h"

namespace {

// Sums with a matrix in panels.
template <class Kind>
auto packed(const uint32_t* panels, const uint32_t* rows, int64_t stride, int64_t words) {
    return [=](int64_t panel, int64_t first, int64_t count, typename Kind::Sums* sums) {
        add_rows<Kind>(
            panels + panel * words * COLUMNS, rows + first * stride, stride, count, words, sums,
            PARTS, true
        );
    };
}

// COLUMNS rows of a matrix as it is stored, of which `count` exist.
template <class T>
struct StoredPanel {
    static constexpr int64_t GROUP = 4 / sizeof(T);
    const T* rows;
    int64_t stride, count, inputs;

    // Calls work(word, columns) for the words [from, from + DEPTH): with WIDTH words of each row of a
    // part, transposed so that the part's rows are lanes.
    template <class Work>
    void each_block(int part, int64_t from, Work work) const {
        const T* own = rows + part * WIDTH * stride;
        for (int64_t word = 0; word < DEPTH && (from + word) * GROUP < inputs; word += WIDTH) {
            int64_t number = (from + word) * GROUP, left = inputs - number;
            Words columns[WIDTH];
            auto read = [&](auto size) __attribute__((always_inline)) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++) {
                    columns[i] = words_of(own + i * stride + number, size);
                    __builtin_prefetch(own + i * stride + number + AHEAD, 0, 2);
                }
            };
            if (left >= WIDTH * GROUP && (part + 1) * WIDTH <= count) {
                read(Count<WIDTH * GROUP>());
            } else {
                for (int i = 0; i < WIDTH; i++)
                    columns[i] = words_of(
                        own + i * stride + number, part * WIDTH + i < count ? left : 0
                    );
            }
            transpose(columns);
            work(word, columns);
        }
    }

    static constexpr int64_t AHEAD = DEPTH * GROUP;  // numbers
};

// Sums of one row with a matrix as it is stored. Each word is multiplied when it is read.
template <class Kind, class T>
void add_lone(const StoredPanel<T>& panel, const uint32_t* row, int64_t words, Lanes* sums) {
    for (int64_t from = 0; from < words; from += DEPTH)
        for (int part = 0; part < PARTS; part++) {
            Lanes sum = {};
            panel.each_block(part, from, [&](int64_t word, Words (&columns)[WIDTH]) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++)
                    if (from + word + i < words)
                        sum = Kind::add(sum, columns[i], Words{} + row[from + word + i]);
            });
            sums[part] = from ? sums[part] + sum : sum;
        }
}

// The same sums for several rows. A part of the matrix is packed as a panel in a near cache.
template <class Kind, class T>
void add_laid(
    const StoredPanel<T>& panel, const uint32_t* rows, int64_t stride, int64_t count, int64_t words,
    Lanes* sums
) {
    alignas(64) uint32_t laid[DEPTH * COLUMNS];
    for (int64_t from = 0; from < words; from += DEPTH) {
        for (int part = 0; part < PARTS; part++)
            panel.each_block(part, from, [&](int64_t word, Words (&columns)[WIDTH]) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDTH; i++)
                    std::memcpy(
                        laid + (word + i) * COLUMNS + part * WIDTH, &columns[i], sizeof columns[i]
                    );
            });
        add_rows<Kind>(
            laid, rows + from, stride, count, std::min(DEPTH, words - from), sums, PARTS, from == 0
        );
    }
}

// The same sums with a matrix [outputs, inputs] as it is stored.
template <class Kind, class T>
auto stored(
    const T* matrix, int64_t matrix_stride, int64_t inputs, int64_t num_outputs,
    const uint32_t* rows, int64_t stride, int64_t words
) {
    return [=](int64_t panel, int64_t first, int64_t count, Lanes* sums) {
        const StoredPanel<T> own{
            matrix + panel * COLUMNS * matrix_stride, matrix_stride,
            std::min<int64_t>(COLUMNS, num_outputs - panel * COLUMNS), inputs
        };
        const uint32_t* inputs_of = rows + first * stride;
        if constexpr (!BY_TILE<Kind>)
            if (count == 1) return add_lone<Kind>(own, inputs_of, words, sums);
        add_laid<Kind>(own, inputs_of, stride, count, words, sums);
    };
}

// Calls work(kind, null pointer of the dtype) for a dtype whose products are exact.
template <class Work>
void multiplied(int dtype, Work work) {
    if (dtype == 0) work(Floats(), (float*)nullptr);
#if defined(__AVX512BF16__)
    if (dtype == 1) work(BfloatProducts(), (bfloat16*)nullptr);
#endif
}

// Rounds each number of a row to 8 bits, with 128 for 0, and returns their scale. Not finite if any
// number is not finite.
template <class T>
float quantised(const T* x, int64_t size, uint8_t* bytes, int64_t padded) {
    const Lanes zero = {};
    Lanes largest = zero, wrong = zero;
    for (int64_t i = 0; i < size; i += WIDTH) {
        Lanes value = load(x + i, size - i);
        wrong += value - value;
        value = value < 0 ? -value : value;
        largest = value > largest ? value : largest;
    }
    float most = 0;
    for (int i = 0; i < WIDTH; i++) most = std::max(most, largest[i]);
    float scale = 1e-30f + most * (1 / 127.0f) + sum(wrong);
    for (int64_t i = 0; i < size; i += WIDTH) {
        Ints rounded = __builtin_convertvector(load(x + i, size - i) / scale + 128.5f, Ints);
        typedef uint8_t Octets __attribute__((vector_size(WIDTH)));
        Octets octets = __builtin_convertvector(rounded, Octets);
        std::memcpy(bytes + i, &octets, std::min<int64_t>(WIDTH, padded - i));
    }
    return scale;
}

}  // namespace

extern "C" {

// The threads with which the other functions share their work, until the process ends.
Team* team_open(int threads) { return new Team(threads); }

// Returns which products this processor supports: bits for `float_product` (1: float32, 2: bfloat16) and
// `int8_product` (4).
int products() {
    int kinds = 0;
#if defined(__AVX512F__)
    kinds |= 1;
#endif
    if (!may_multiply()) return kinds;
#if defined(__AVX512BF16__)
    kinds |= 2;
#endif
#if defined(__AVX512VNNI__)
    kinds |= 4;
#endif
    return kinds;
}

// Packs a matrix [outputs, inputs] with numbers of `bytes` bytes into panels, padded with 0.
void pack_panels(
    int bytes, const char* matrix, int64_t outputs, int64_t inputs, char* panels, Team* team
) {
    int64_t words = (inputs * bytes + 3) / 4, num_panels = (outputs + COLUMNS - 1) / COLUMNS;
    each(num_panels, outputs * inputs * bytes, team, [&](int64_t panel) {
        char* own = panels + panel * words * COLUMNS * 4;
        int64_t count = std::min<int64_t>(COLUMNS, outputs - panel * COLUMNS);
        std::memset(own, 0, words * COLUMNS * 4);
        for (int64_t word = 0; word < words; word++)
            for (int64_t column = 0; column < count; column++) {
                int64_t size = std::min<int64_t>(4, inputs * bytes - word * 4);
                const char* from = matrix + (panel * COLUMNS + column) * inputs * bytes + word * 4;
                std::memcpy(own + (word * COLUMNS + column) * 4, from, size);
            }
    });
}

// Multiplies rows of float32 or bfloat16 by panels of the same dtype, and adds a bias unless it is null.
// stride: in words.
void float_product(
    int dtype, const uint32_t* panels, const uint32_t* rows, int64_t stride, const void* bias,
    void* out, int64_t num_rows, int64_t words, int64_t num_outputs, Team* team
) {
    multiplied(dtype, [&](auto kind, auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        using Kind = decltype(kind);
        multiply<Kind>(
            num_rows, words, num_outputs, team, packed<Kind>(panels, rows, stride, words),
            with_bias<T>(bias, out, num_outputs)
        );
    });
}

// The same for each head, with the panels of its own matrix, without a bias. Strides of `rows` are in
// words, strides of `out` in numbers.
void by_head_product(
    int dtype, const uint32_t* panels, const uint32_t* rows, int64_t stride, int64_t head_stride,
    void* out, int64_t out_stride, int64_t out_head_stride, int64_t num_rows, int64_t heads,
    int64_t words, int64_t num_outputs, Team* team
) {
    multiplied(dtype, [&](auto kind, auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        using Kind = decltype(kind);
        const int64_t size = (num_outputs + COLUMNS - 1) / COLUMNS * COLUMNS * words;
        const int64_t tiles = (num_rows + TILE - 1) / TILE;
        each(heads, heads * size * 4 * tiles, team, [&](int64_t head) {
            T* own = (T*)out + head * out_head_stride;
            auto add = packed<Kind>(panels + head * size, rows + head * head_stride, stride, words);
            auto finish = [=](int64_t row, int64_t column, Lanes sums) {
                store(own + row * out_stride + column, sums, num_outputs - column);
            };
            multiply<Kind>(num_rows, words, num_outputs, team, add, finish);
        });
    });
}

// Computes float_product bit for bit with a matrix as it is stored, whose rows are matrix_stride numbers
// apart.
void stored_product(
    int dtype, const void* matrix, int64_t matrix_stride, const uint32_t* rows, int64_t stride,
    const void* bias, void* out, int64_t num_rows, int64_t inputs, int64_t num_outputs, Team* team
) {
    multiplied(dtype, [&](auto kind, auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        using Kind = decltype(kind);
        int64_t words = (inputs * sizeof(T) + 3) / 4;
        auto add = stored<Kind>(
            (const T*)matrix, matrix_stride, inputs, num_outputs, rows, stride, words
        );
        multiply<Kind>(
            num_rows, words, num_outputs, team, add, with_bias<T>(bias, out, num_outputs)
        );
    });
}

// Multiplies rows of any dtype, each rounded to 8 bits with its own scale, by panels of int8. scales:
// [outputs]. zeros [outputs]: contribution of the offset 128 to each sum. Sums are integers. stride: in
// elements.
void int8_product(
    int dtype, const uint32_t* panels, const void* x, int64_t stride, const float* scales,
    const int32_t* zeros, const void* bias, void* out, int64_t num_rows, int64_t inputs,
    int64_t num_outputs, Team* team
) {
#if defined(__AVX512VNNI__)
    int64_t words = (inputs + 3) / 4;
    std::unique_ptr<uint32_t[]> rows(new uint32_t[num_rows * words]);
    std::unique_ptr<float[]> row_scales(new float[num_rows]);
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        each(num_rows, num_rows * inputs * sizeof(T), team, [&](int64_t row) {
            row_scales[row] = quantised(
                (const T*)x + row * stride, inputs, (uint8_t*)(rows.get() + row * words), words * 4
            );
        });
        auto finish = [&](int64_t row, int64_t column, Ints sums) {
            int64_t left = num_outputs - column;
            Lanes value = __builtin_convertvector(sums - load(zeros + column, left), Lanes);
            value = value * load(scales + column, left) * row_scales[row];
            if (bias) value += load((const T*)bias + column, left);
            store((T*)out + row * num_outputs + column, value, left);
        };
        auto add = packed<ByteProducts>(panels, rows.get(), words, words);
        multiply<ByteProducts>(num_rows, words, num_outputs, team, add, finish);
    });
#endif
}

}  // extern "C"
