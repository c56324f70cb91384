// The steps of attention that both kernels share, see attention.h.

#include "attention.h"

#include <cmath>
#include <limits>

namespace {

inline float one_exponential(float x) { return exponential(Lanes{} + x)[0]; }

inline void scaled(Lanes* sums, float scale, int64_t num_lanes) {
    for (int64_t i = 0; i < num_lanes; i++) sums[i] *= scale;
}

// Reorders the sums into the order of their numbers.
inline void ordered(Count<1>, const Lanes* sums, Lanes* numbers) { numbers[0] = sums[0]; }

inline void ordered(Count<2>, const Lanes* sums, Lanes* numbers) {
    Lanes a = sums[0], b = sums[1];
    numbers[0] =
        __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    numbers[1] =
        __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
}

}  // namespace

template <class Number>
void weigh(
    const Lanes (&products)[PARTS], Visible visible, Scoring scoring, Softmax& segment, Lanes* sums,
    int64_t num_lanes, Number* weights
) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Lanes scores[PARTS], most = Lanes{} + segment.largest;
    for (int part = 0; part < PARTS; part++) {
        Lanes own = products[part] * scoring.scale;
        if (scoring.soft_cap > 0) own = scoring.soft_cap * tangent(own / scoring.soft_cap);
        if (visible.first > part * WIDTH || visible.last < (part + 1) * WIDTH - 1) {
            Ints key = lanes + part * WIDTH;
            int32_t last = std::min<int64_t>(visible.last, COLUMNS);
            Ints hidden = (key < (int32_t)std::max<int64_t>(visible.first, 0)) | (key > last);
            own = hidden ? Lanes{} - std::numeric_limits<float>::infinity() : own;
        }
        most = own > most ? own : most;
        scores[part] = own;
    }
    const float top = largest(most);
    Lanes total = {};
    for (int part = 0; part < PARTS; part++) {
        Lanes own = exponential(scores[part] - top);
        total += own;
        narrowed(weights + part * WIDTH, own);
    }
    if (top != segment.largest) {
        float less = one_exponential(segment.largest - top);
        scaled(sums, less, num_lanes);
        segment = {top, segment.total * less};
    }
    segment.total += sum(total);
}

void merge(
    Softmax& row, Lanes* sums, const Softmax& segment, const Lanes* added, int64_t num_lanes
) {
    if (segment.total == 0) return;
    float top = std::max(row.largest, segment.largest);
    float kept = one_exponential(row.largest - top);
    float share = one_exponential(segment.largest - top);
    row = {top, row.total * kept + segment.total * share};
    for (int64_t i = 0; i < num_lanes; i++) sums[i] = sums[i] * kept + added[i] * share;
}

template <class T>
void finish(const Softmax& row, const Lanes* sums, float sink, int64_t size, T* out) {
    constexpr int64_t GROUP = Products<T>::GROUP;
    float top = std::max(row.largest, sink), share = one_exponential(row.largest - top);
    float scale = share / (row.total * share + one_exponential(sink - top));
    for (int64_t i = 0; i < size; i += WIDTH * GROUP) {
        Lanes numbers[GROUP];
        ordered(Count<GROUP>(), sums + i / WIDTH, numbers);
        for (int64_t j = 0; j < GROUP && i + j * WIDTH < size; j++)
            store(out + i + j * WIDTH, numbers[j] * scale, size - i - j * WIDTH);
    }
}

template void weigh(
    const Lanes (&)[PARTS], Visible, Scoring, Softmax&, Lanes*, int64_t, float*
);
template void weigh(
    const Lanes (&)[PARTS], Visible, Scoring, Softmax&, Lanes*, int64_t, bfloat16*
);
template void finish(const Softmax&, const Lanes*, float, int64_t, float*);
template void finish(const Softmax&, const Lanes*, float, int64_t, bfloat16*);
template void finish(const Softmax&, const Lanes*, float, int64_t, float16*);
