// The parts of a mixture of experts other than its matrix products: the choice of experts, and the sums.
//
// A token's result depends on no other token: each is computed alone, in a fixed order.

#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "operations.h"

namespace {

// Names are those of kernels/experts/routing.py.
struct Router {
    const float* bias;  // may be null
    int64_t num_experts, k, groups, chosen_groups, group_top;
    bool sigmoid, normalise;
    float scale;
};

// Scratch memory of a thread for one token.
struct Scores {
    std::vector<float> scores, choice, groups;
    std::vector<uint8_t> excluded, group_chosen;

    explicit Scores(const Router& router)
        : scores(router.num_experts + WIDTH),
          choice(router.num_experts),
          groups(router.groups),
          excluded(router.num_experts),
          group_chosen(router.groups) {}
};

// Index of the largest number that is not excluded, the first of equal ones. Valid also if numbers are
// NaN.
inline int64_t place_of_largest(
    const float* numbers, const uint8_t* excluded, int64_t first, int64_t end
) {
    int64_t best = -1;
    for (int64_t i = first; i < end; i++)
        if (!excluded[i] && (best < 0 || numbers[i] > numbers[best])) best = i;
    return best;
}

// Computes the scores of a row of logits. Returns their sum, which is NaN if any score is.
template <class T>
float score(const T* logits, const Router& router, Scores& own) {
    const int64_t size = router.num_experts;
    float most = -std::numeric_limits<float>::infinity();
    if (!router.sigmoid)
        for (int64_t i = 0; i < size; i += WIDTH) {
            Lanes value = load(logits + i, size - i);
            for (int64_t j = 0; j < std::min<int64_t>(WIDTH, size - i); j++)
                most = std::max(most, value[j]);
        }
    float total = 0;
    for (int64_t i = 0; i < size; i += WIDTH) {
        Lanes value = load(logits + i, size - i);
        value = router.sigmoid ? 1.0f / (1.0f + exponential(-value)) : exponential(value - most);
        narrowed(own.scores.data() + i, value);
        for (int64_t j = 0; j < std::min<int64_t>(WIDTH, size - i); j++) total += value[j];
    }
    if (router.sigmoid) return total;
    for (int64_t i = 0; i < size; i++) own.scores[i] /= total;
    return total;
}

// Excludes all experts except those of the groups with the largest sums.
void exclude_groups(const Router& router, Scores& own) {
    const int64_t size = router.num_experts / router.groups;
    for (int64_t group = 0; group < router.groups; group++) {
        const int64_t first = group * size, end = first + size;
        float sum = 0;
        int64_t found[2];
        for (int64_t top = 0; top < router.group_top; top++) {
            found[top] = place_of_largest(own.choice.data(), own.excluded.data(), first, end);
            sum += own.choice[found[top]];
            own.excluded[found[top]] = 1;
        }
        for (int64_t top = 0; top < router.group_top; top++) own.excluded[found[top]] = 0;
        own.groups[group] = sum;
        own.group_chosen[group] = 0;
    }
    for (int64_t chosen = 0; chosen < router.chosen_groups; chosen++)
        own.group_chosen[place_of_largest(
            own.groups.data(), own.group_chosen.data(), 0, router.groups
        )] = 1;
    for (int64_t i = 0; i < router.num_experts; i++)
        own.excluded[i] = !own.group_chosen[i / size];
}

template <class T>
void route_row(const T* logits, const Router& router, Scores& own, float* weights, int32_t* ids) {
    const float total = score(logits, router, own);
    for (int64_t i = 0; i < router.num_experts; i++) {
        own.choice[i] = router.bias ? own.scores[i] + router.bias[i] : own.scores[i];
        own.excluded[i] = 0;
    }
    if (router.groups > 1) exclude_groups(router, own);
    float sum = 0;
    for (int64_t j = 0; j < router.k; j++) {
        int64_t best =
            place_of_largest(own.choice.data(), own.excluded.data(), 0, router.num_experts);
        own.excluded[best] = 1;
        ids[j] = best;
        weights[j] = own.scores[best];
        sum += weights[j];
    }
    float share = router.normalise ? router.scale / (sum + 1e-20f) : router.scale;
    if (total != total) share = total;
    for (int64_t j = 0; j < router.k; j++) weights[j] *= share;
}

}  // namespace

extern "C" {

// See kernels/experts/routing.py. weights, ids: [num_rows, k].
void route(
    int dtype, const void* logits, const float* bias, float* weights, int32_t* ids,
    int64_t num_rows, int64_t num_experts, int64_t k, int sigmoid, int normalise, double scale,
    int64_t groups, int64_t chosen_groups, int64_t group_top, Team* team
) {
    const Router router{bias,      num_experts,   k,           groups,       chosen_groups,
                        group_top, sigmoid != 0, normalise != 0, (float)scale};
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        each(num_rows, num_rows * num_experts * k, team, [&](int64_t row) {
            Scores own(router);
            const T* of_row = (const T*)logits + row * num_experts;
            route_row(of_row, router, own, weights + row * k, ids + row * k);
        });
    });
}

// See `by_expert` in kernels/experts/grouped_mlp.py. Sum of a token's parts times their weights, in the
// order of its experts, in float32. parts: [any, size]. places: part of each pair.
void add_experts(
    int dtype, const void* parts, const int64_t* places, const float* weights, void* out,
    int64_t num_rows, int64_t k, int64_t size, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        each(num_rows, num_rows * k * size * sizeof(T), team, [&](int64_t row) {
            for (int64_t i = 0; i < size; i += WIDTH) {
                Lanes total = {};
                for (int64_t j = row * k; j < (row + 1) * k; j++)
                    total += load((const T*)parts + places[j] * size + i, size - i) * weights[j];
                store((T*)out + row * size + i, total, size - i);
            }
        });
    });
}

// See kernels/experts/shared_expert.py. gates: [num_rows].
void add_gated(
    int dtype, const void* y, const void* x, const void* gates, void* out, int64_t num_rows,
    int64_t size, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        each(num_rows, num_rows * size * 2 * sizeof(T), team, [&](int64_t row) {
            Lanes gate = load((const T*)gates + row, 1);
            const float open = (1.0f / (1.0f + exponential(-gate)))[0];
            const T *own = (const T*)y + row * size, *added = (const T*)x + row * size;
            for (int64_t i = 0; i < size; i += WIDTH)
                store(
                    (T*)out + row * size + i,
                    load(own + i, size - i) + load(added + i, size - i) * open, size - i
                );
        });
    });
}

}  // extern "C"
