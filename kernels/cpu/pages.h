// The keys and values of a batch's rows: one layer of the pool, and the rows' pages in it.

#pragma once

#include <cstdint>

namespace {

struct Pages {  // strides in elements
    int64_t page_stride, head_stride, kv_stride, token_stride;
    const int32_t *page_ids, *page_starts, *lengths;
    int64_t page_size, window;  // window 0: no window

    // The first key that the query at `position` sees.
    int64_t first_seen(int64_t position) const {
        return window && position >= window ? position - window + 1 : 0;
    }

    // The first key that the query of the row's last token sees.
    int64_t first_key(int64_t row) const { return first_seen(lengths[row] - 1); }

    // Offset of a token's key from the layer's start. Its value follows kv_stride later.
    int64_t place(int64_t row, int64_t head, int64_t token) const {
        int64_t page = page_ids[page_starts[row] + token / page_size];
        return page * page_stride + head * head_stride + token % page_size * token_stride;
    }
};

}  // namespace
