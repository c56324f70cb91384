// Attention of prompts' queries over pages, which are read where they lie.
//
// A KV head's queries are cut into blocks, and each is a piece of work: it goes over its row's keys,
// COLUMNS at a time from multiples of that on, with the products of panels.h and a running softmax.
// So a query's result does not depend on the chunk that it came in, nor on the other rows.

#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "pages.h"
#include "panels.h"
#include "operations.h"

namespace {

constexpr int64_t BLOCK = 32 * TILE;   // queries of all of a KV head's heads that share its panels
constexpr float LOWEST = -1e30f;       // below every score, and finite: nothing has been seen yet

// What the products of numbers of type T take, and how they are computed.
template <class T>
struct Products {
    using Number = float;
    using Kind = Floats;
};

#if defined(__AVX512BF16__)
template <>
struct Products<bfloat16> {
    using Number = bfloat16;
    using Kind = Bfloats;
};
#endif

template <class T, class Number>
inline void converted(const T* from, Number* to, int64_t size) {
    if constexpr (std::is_same_v<T, Number>)
        std::memcpy(to, from, size * sizeof(T));
    else
        for (int64_t i = 0; i < size; i += WIDTH) store(to + i, load(from + i, size - i), size - i);
}

inline Lanes tangent(Lanes x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

// A block of queries of one KV head of a row, and what they have seen.
template <class T>
class Block {
    using Number = typename Products<T>::Number;
    using Kind = typename Products<T>::Kind;
    static constexpr int64_t GROUP = 4 / sizeof(Number);  // numbers of a word
    using Sums = Lanes[PARTS];

   public:
    // Head g of the query at `first` + i is row i * group + g here.
    Block(
        const T* q, int64_t q_stride, int64_t first, int64_t count, int64_t group, int64_t size,
        int64_t value_size
    )
        : first_(first),
          rows_(count * group),
          group_(group),
          size_(size),
          value_size_(value_size),
          words_((size + GROUP - 1) / GROUP),
          panels_((value_size + COLUMNS - 1) / COLUMNS),
          queries_(rows_ * words_ * GROUP),
          weights_(rows_ * COLUMNS),
          scores_(rows_ * PARTS),
          values_(panels_ * rows_ * PARTS),
          panel_(std::max(words_, panels_ * COLUMNS / GROUP) * COLUMNS * GROUP),
          largest_(rows_, LOWEST),
          total_(rows_, 0.0f) {
        for (int64_t row = 0; row < rows_; row++)
            converted(
                q + row / group * q_stride + row % group * size,
                queries_.data() + row * words_ * GROUP, size
            );
    }

    // Adds what the keys from `start` on give, up to COLUMNS of them, of which `count` are there.
    void see(
        const T* kv, const Pages& pages, int64_t row, int64_t head, int64_t start, int64_t count,
        float scale, float soft_cap
    ) {
        const T* tokens[COLUMNS];
        int64_t begin = pages.first_seen(first_);  // behind it there may be no pages
        for (int64_t i = 0; i < count; i++)
            tokens[i] = kv + pages.place(row, head, std::max(start + i, begin));
        // Queries before the first of these keys see none of them.
        int64_t from = std::max<int64_t>(0, start - first_) * group_, rest = rows_ - from;
        lay_keys(tokens, count);
        add_rows<Kind>(
            panel(), words(queries_) + from * words_, words_, rest, words_, sums(scores_) + from,
            true
        );
        for (int64_t i = from; i < rows_; i++) weigh(i, pages, start, scale, soft_cap);
        for (int64_t i = 0; i < count; i++) tokens[i] += pages.kv_stride;
        lay_values(tokens, count);
        const int64_t depth = COLUMNS / GROUP;
        for (int64_t part = 0; part < panels_; part++)
            add_rows<Kind>(
                panel() + part * depth * COLUMNS, words(weights_) + from * depth, depth, rest, depth,
                sums(values_) + part * rows_ + from, false
            );
    }

    // sinks: of the block's heads, or null; each is a score of a key without a value.
    void write(T* out, int64_t stride, const float* sinks) const {
        for (int64_t row = 0; row < rows_; row++) {
            T* own = out + row / group_ * stride + row % group_ * value_size_;
            float sink = sinks ? sinks[row % group_] : -std::numeric_limits<float>::infinity();
            float largest = std::max(largest_[row], sink);
            float less = std::exp(largest_[row] - largest);
            float scale = less / (total_[row] * less + std::exp(sink - largest));
            for (int64_t i = 0; i < value_size_; i += WIDTH) {
                int64_t place = (i / COLUMNS * rows_ + row) * PARTS + i % COLUMNS / WIDTH;
                store(own + i, values_[place] * scale, value_size_ - i);
            }
        }
    }

   private:
    // Scores of a row to weights by the largest score so far, and what is there to the same.
    void weigh(int64_t row, const Pages& pages, int64_t start, float scale, float soft_cap) {
        int64_t position = first_ + row / group_;
        int64_t seen = pages.first_seen(position) - start, end = position - start;
        Lanes* own = scores_.data() + row * PARTS;
        Lanes most = Lanes{} + largest_[row];
        for (int part = 0; part < PARTS; part++) {
            own[part] *= scale;
            if (soft_cap > 0) own[part] = soft_cap * tangent(own[part] / soft_cap);
            if (seen > part * WIDTH || end < (part + 1) * WIDTH - 1) {
                Ints place = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + part * WIDTH;
                Ints hidden = (place < (int32_t)seen) | (place > (int32_t)std::min<int64_t>(end, COLUMNS));
                own[part] = hidden ? Lanes{} - std::numeric_limits<float>::infinity() : own[part];
            }
            most = own[part] > most ? own[part] : most;
        }
        float largest = most[0];
        for (int i = 1; i < WIDTH; i++) largest = std::max(largest, most[i]);
        Lanes added = {};
        for (int part = 0; part < PARTS; part++) {
            Lanes weights = exponential(own[part] - largest);
            added += weights;
            store(weights_.data() + row * COLUMNS + part * WIDTH, weights);
        }
        if (largest != largest_[row]) {
            float less = std::exp(largest_[row] - largest);
            total_[row] *= less;
            for (int64_t i = 0; i < panels_; i++)
                for (int part = 0; part < PARTS; part++)
                    values_[(i * rows_ + row) * PARTS + part] *= less;
            largest_[row] = largest;
        }
        total_[row] += sum(added);
    }

    // Outputs are keys, inputs the numbers of a head.
    void lay_keys(const T* const* tokens, int64_t count) {
        Number* to = panel_.data();
        alignas(64) Number key[256 + WIDTH] = {};
        for (int64_t i = 0; i < COLUMNS; i++) {
            if (i < count) converted(tokens[i], key, size_);
            for (int64_t word = 0; word < words_; word++)
                std::memcpy(to + (word * COLUMNS + i) * GROUP, key + word * GROUP, 4);
        }
    }

    // Outputs are the numbers of a head, inputs keys. What no token has written may be NaN.
    void lay_values(const T* const* tokens, int64_t count) {
        alignas(64) Number value[GROUP][256 + COLUMNS] = {};
        for (int64_t i = 0; i < COLUMNS; i += GROUP) {
            for (int64_t one = 0; one < GROUP; one++) {
                if (i + one < count) converted(tokens[i + one], value[one], value_size_);
                else std::memset(value[one], 0, sizeof value[one]);
            }
            for (int64_t part = 0; part < panels_; part++) {
                Number* to = panel_.data() + (part * COLUMNS + i) * COLUMNS;
                for (int64_t column = 0; column < COLUMNS; column++)
                    for (int64_t one = 0; one < GROUP; one++)
                        to[column * GROUP + one] = value[one][part * COLUMNS + column];
            }
        }
    }

    const uint32_t* panel() const { return words(panel_); }
    static const uint32_t* words(const std::vector<Number>& numbers) {
        return (const uint32_t*)numbers.data();
    }
    static Sums* sums(std::vector<Lanes>& lanes) { return (Sums*)lanes.data(); }

    const int64_t first_, rows_, group_, size_, value_size_, words_, panels_;
    std::vector<Number> queries_, weights_;
    std::vector<Lanes> scores_, values_;
    std::vector<Number> panel_;
    std::vector<float> largest_, total_;
};

struct Piece {
    int64_t row, head, first, count;  // queries of a row
};

}  // namespace

// See kernels/attention. q: [num_tokens, kv_heads * group, size], rows q_stride apart; out:
// [num_tokens, kv_heads * group, value_size], contiguous; query_starts: [num_rows + 1]; sinks:
// [kv_heads * group] or null. Of a value the first value_size numbers are there, of `size` at most.
extern "C" void extend_attention(
    int dtype, const void* q, int64_t q_stride, const void* kv, int64_t page_stride,
    int64_t head_stride, int64_t kv_stride, int64_t token_stride, const int32_t* page_ids,
    const int32_t* page_starts, const int32_t* lengths, const int32_t* query_starts, void* out,
    int64_t num_rows, int64_t value_size, int64_t kv_heads, int64_t group, int64_t page_size,
    int64_t size, int64_t window, double scale, double soft_cap, const float* sinks, Team* team
) {
    Pages pages{page_stride, head_stride, kv_stride,   token_stride, page_ids,
                page_starts, lengths,     page_size, window};
    int64_t most = std::max<int64_t>(1, BLOCK / group);
    std::vector<Piece> pieces;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t queries = query_starts[row + 1] - query_starts[row];
        // From the end: what sees most keys takes longest, and should not be left for last.
        for (int64_t first = (queries - 1) / most * most; first >= 0; first -= most)
            for (int64_t head = 0; head < kv_heads; head++)
                pieces.push_back({row, head, first, std::min(most, queries - first)});
    }
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        int64_t heads = kv_heads * group;
        auto work = [&](int64_t number) {
            const Piece& piece = pieces[number];
            int64_t query = query_starts[piece.row] + piece.first;
            T* own = (T*)out + (query * heads + piece.head * group) * value_size;
            if (!lengths[piece.row]) {
                for (int64_t i = 0; i < piece.count; i++)
                    std::memset(own + i * heads * value_size, 0, group * value_size * sizeof(T));
                return;
            }
            int64_t behind = query_starts[piece.row + 1] - query;
            int64_t first = lengths[piece.row] - behind, end = first + piece.count;
            const T* own_q = (const T*)q + query * q_stride + piece.head * group * size;
            Block<T> block(own_q, q_stride, first, piece.count, group, size, value_size);
            int64_t start = pages.first_seen(first) / COLUMNS * COLUMNS;
            for (; start < end; start += COLUMNS)
                block.see(
                    (const T*)kv, pages, piece.row, piece.head, start,
                    std::min<int64_t>(COLUMNS, end - start), (float)scale, (float)soft_cap
                );
            block.write(own, heads * value_size, sinks ? sinks + piece.head * group : nullptr);
        };
        team->share(pieces.size(), work);
    });
}
