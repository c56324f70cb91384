// Attention of prompts' queries over pages, which are read in place.
//
// A tile of a KV head's queries is one piece of work. It goes over its row's keys block by block as in
// attention.h, with the products of panels.h. So a query's result depends neither on its chunk nor on
// other rows.

#include <limits>
#include <vector>

#include "attention.h"
#include "operations.h"

namespace {

constexpr int64_t QUERIES = 32 * TILE;  // of all query heads of a KV head, which share its panels

// A tile of queries of one KV head of a row, and their sums over the keys so far.
template <class T>
class QueryTile {
    using Number = typename Products<T>::Number;
    using Kind = typename Products<T>::Kind;
    static constexpr int64_t GROUP = Products<T>::GROUP;
    static constexpr int64_t DEPTH_OF_VALUES = COLUMNS / GROUP;  // words of a block's keys

   public:
    // Row i * group + g of the tile is head g of the query at `first` + i.
    QueryTile(
        const T* q, int64_t q_stride, int64_t first, int64_t count, int64_t group, int64_t size,
        int64_t value_size, Scoring scoring
    )
        : first_(first),
          rows_(count * group),
          group_(group),
          size_(size),
          value_size_(value_size),
          words_((size + GROUP - 1) / GROUP),
          panels_((value_size + COLUMNS - 1) / COLUMNS),
          num_lanes_(panels_ * PARTS),
          scoring_(scoring),
          queries_(rows_ * words_ * GROUP),
          weights_(rows_ * COLUMNS),
          panel_(std::max(words_, panels_ * DEPTH_OF_VALUES) * COLUMNS),
          products_(rows_ * PARTS),
          sums_(rows_ * num_lanes_),
          merged_(rows_ * num_lanes_),
          segment_(rows_),
          total_(rows_) {
        for (int64_t row = 0; row < rows_; row++)
            converted(
                q + row / group * q_stride + row % group * size,
                queries_.data() + row * words_ * GROUP, size
            );
    }

    // Adds a block of keys from `start` on.
    void see(const KeyBlock<T>& keys, const Pages& pages, int64_t start) {
        // Queries before the first of these keys see none of them.
        int64_t from = std::max<int64_t>(0, start - first_) * group_, rest = rows_ - from;
        lay_keys(keys);
        add_rows<Kind>(
            panel_.data(), words(queries_) + from * words_, words_, rest, words_,
            products_.data() + from * PARTS, PARTS, true
        );
        for (int64_t row = from; row < rows_; row++) {
            int64_t position = first_ + row / group_;
            weigh(
                *(const Lanes(*)[PARTS])(products_.data() + row * PARTS),
                Visible{pages.first_seen(position) - start, position - start}, scoring_,
                segment_[row], sums_.data() + row * num_lanes_, num_lanes_,
                weights_.data() + row * COLUMNS
            );
        }
        lay_values(keys);
        const int64_t skipped = keys.begin / GROUP;
        for (int64_t panel = 0; panel < panels_; panel++)
            add_rows<Kind>(
                panel_.data() + (panel * DEPTH_OF_VALUES + skipped) * COLUMNS,
                words(weights_) + from * DEPTH_OF_VALUES + skipped, DEPTH_OF_VALUES, rest,
                (keys.count + GROUP - 1) / GROUP - skipped,
                sums_.data() + from * num_lanes_ + panel * PARTS, num_lanes_, false
            );
    }

    void end_segment() {
        for (int64_t row = 0; row < rows_; row++) {
            Lanes* sums = sums_.data() + row * num_lanes_;
            merge(
                total_[row], merged_.data() + row * num_lanes_, segment_[row], sums, num_lanes_
            );
            segment_[row] = {};
            std::fill(sums, sums + num_lanes_, Lanes{});
        }
    }

    // sinks: of the tile's heads, or null. Each is the score of a key without a value.
    void write(T* out, int64_t stride, const float* sinks) const {
        for (int64_t row = 0; row < rows_; row++)
            finish(
                total_[row], merged_.data() + row * num_lanes_,
                sinks ? sinks[row % group_] : -std::numeric_limits<float>::infinity(), value_size_,
                out + row / group_ * stride + row % group_ * value_size_
            );
    }

   private:
    // Packs keys as a panel: outputs are keys, inputs the numbers of a head.
    void lay_keys(const KeyBlock<T>& keys) {
        for (int part = 0; part * WIDTH < keys.count; part++)
            for (int64_t word = 0; word < words_; word += WIDTH) {
                int64_t number = word * GROUP;
                Words block[WIDTH];
#pragma GCC unroll 16
                for (int k = 0; k < WIDTH; k++)
                    block[k] =
                        key_words(keys.runs[part] + k * keys.stride + number, size_ - number);
                transpose(block);
                uint32_t* to = panel_.data() + word * COLUMNS + part * WIDTH;
                for (int64_t k = 0; k < std::min<int64_t>(WIDTH, words_ - word); k++)
                    std::memcpy(to + k * COLUMNS, &block[k], sizeof block[k]);
            }
    }

    // Packs values as a panel: outputs are the numbers of a head, inputs are keys.
    void lay_values(const KeyBlock<T>& keys) {
        for (int64_t i = keys.begin; i < keys.count; i += GROUP)
            for (int64_t lane = 0; lane < num_lanes_; lane += GROUP) {
                int64_t number = lane * WIDTH;
                Words stored[GROUP] = {}, laid[GROUP];
                for (int64_t one = 0; one < GROUP && i + one < keys.count; one++)
                    stored[one] = key_words(
                        keys.key(i + one) + keys.value + number, value_size_ - number
                    );
                value_words(stored, laid);
                int64_t word = lane / PARTS * DEPTH_OF_VALUES + i / GROUP;
                std::memcpy(
                    panel_.data() + word * COLUMNS + lane % PARTS * WIDTH, laid, sizeof laid
                );
            }
    }

    static const uint32_t* words(const std::vector<Number>& numbers) {
        return (const uint32_t*)numbers.data();
    }

    const int64_t first_, rows_, group_, size_, value_size_, words_, panels_, num_lanes_;
    const Scoring scoring_;
    std::vector<Number> queries_, weights_;
    std::vector<uint32_t> panel_;
    std::vector<Lanes> products_;
    std::vector<Lanes> sums_, merged_;      // of the segment, of the row
    std::vector<Softmax> segment_, total_;  // of the segment, of the row
};

struct Piece {
    int64_t row, head, first, count;  // first, count: queries of the row
};

}  // namespace

// See kernels/attention. q: [num_tokens, kv_heads * group, size], rows q_stride apart. out: [num_tokens,
// kv_heads * group, value_size], contiguous. query_starts: [num_rows + 1]. sinks: [kv_heads * group] or
// null. Only the first value_size (at most `size`) numbers of a value exist.
extern "C" void extend_attention(
    int dtype, const void* q, int64_t q_stride, const void* kv, int64_t page_stride,
    int64_t head_stride, int64_t kv_stride, int64_t token_stride, const int32_t* page_ids,
    const int32_t* page_starts, const int32_t* lengths, const int32_t* query_starts, void* out,
    int64_t num_rows, int64_t value_size, int64_t kv_heads, int64_t group, int64_t page_size,
    int64_t size, int64_t window, double scale, double soft_cap, const float* sinks, Team* team
) {
    Pages pages{page_stride, head_stride, kv_stride,   token_stride, page_ids,
                page_starts, lengths,     page_size, window};
    int64_t most = std::max<int64_t>(1, QUERIES / group);
    std::vector<Piece> pieces;
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t queries = query_starts[row + 1] - query_starts[row];
        // From the end, because tiles that see the most keys take longest and should not start last.
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
            QueryTile<T> tile(
                own_q, q_stride, first, piece.count, group, size, value_size,
                Scoring{(float)scale, (float)soft_cap}
            );
            int64_t first_key = pages.first_seen(first);  // pages before it may not exist
            for (int64_t start = first_key / COLUMNS * COLUMNS; start < end; start += COLUMNS) {
                KeyBlock<T> keys((const T*)kv, pages, piece.row, piece.head, start, first_key, end);
                tile.see(keys, pages, start);
                bool last = start + COLUMNS >= end;
                if (last || (start + COLUMNS) % SEGMENT == 0) tile.end_segment();
            }
            tile.write(own, heads * value_size, sinks ? sinks + piece.head * group : nullptr);
        };
        team->share(pieces.size(), work);
    });
}
