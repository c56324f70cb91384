// Sampling of one token per row of logits: the likeliest, or one drawn by seed and position.
//
// Tokens are ordered by descending logit, equal ones by ascending id. A filter (top_k, top_p) keeps the
// first tokens of that order. Its end is found without a sort, by sums over ever finer ranges of logits.
// Random numbers are those of kernels/sampling/generator.py.

#include <cmath>
#include <cstdint>
#include <limits>

#include "lanes.h"
#include "team.h"

namespace {

constexpr float LEAST_TEMPERATURE = 1e-37f;  // its reciprocal is finite
const Ints PLACES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Natural logarithm of normal positive numbers, within 2 units in the last place.
inline Lanes logarithm(Lanes x) {
    // Power of 2. The remaining factor is in [sqrt(1/2), sqrt(2)).
    Ints bits = (Ints)x, power = (bits - 0x3f3504f3) >> 23;
    Lanes scale = __builtin_convertvector(power, Lanes);
    Lanes f = (Lanes)(bits - (power << 23)) - 1.0f, square = f * f;
    Lanes p = 7.0376836292e-2f * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * square - scale * 2.12194440e-4f - 0.5f * square;
    return f + p + scale * 0.693359375f;
}

template <class T>
inline T mixed(T x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Gumbel noise for a row's tokens.
struct Noise {
    uint32_t first, second;

    Noise(const int32_t* seed, int32_t position)
        : first(mixed((uint32_t)seed[0] + mixed((uint32_t)position))),
          second(mixed((uint32_t)seed[1] ^ mixed((uint32_t)position + 0x9e3779b9u))) {}

    Lanes of(Ints tokens) const {
        Words bits = mixed(mixed((Words)tokens + first) + second);
        Lanes uniform = __builtin_convertvector((Ints)(bits >> 9), Lanes) + 0.5f;
        return -logarithm(-logarithm(uniform * (1.0f / 8388608)));
    }
};

// The largest number seen, and of equal ones the one with the lowest index.
struct Largest {
    Lanes values = Lanes{} - std::numeric_limits<float>::infinity();
    Ints where = {};

    void see(Lanes value, Ints places) {
        Ints better = value > values;
        values = better ? value : values;
        where = better ? places : where;
    }

    int place() const {
        int best = 0;
        for (int i = 1; i < WIDTH; i++)
            if (values[i] > values[best] || (values[i] == values[best] && where[i] < where[best]))
                best = i;
        return best;
    }
};

// A row of logits. Lanes beyond its end are below all logits.
template <class T>
struct Row {
    const T* logits;
    int64_t size;

    template <class Work>
    void each(Work work) const {
        Ints tokens = PLACES;
        for (int64_t i = 0; i < size; i += WIDTH, tokens += WIDTH) {
            Lanes value = load(logits + i, size - i);
            if (size - i < WIDTH)
                value = tokens < (int32_t)size ? value : -std::numeric_limits<float>::max();
            work(tokens, value, std::min<int64_t>(WIDTH, size - i));
        }
    }

    // Returns false if a number is not finite.
    bool likeliest(int32_t& token, float& logit) const {
        Largest largest;
        Lanes wrong = {};
        each([&](Ints tokens, Lanes value, int64_t) {
            wrong += value - value;  // NaN after the first infinity or NaN
            largest.see(value, tokens);
        });
        int place = largest.place();
        token = largest.where[place];
        logit = largest.values[place];
        return sum(wrong) == 0;
    }
};

// Maps logits to unsigned words in the same order. Zeros of both signs are equal.
inline Words key_of(Lanes logits) {
    Words bits = (Words)(logits + 0.0f);
    return bits ^ ((Words)((Ints)bits >> 31) | 0x80000000u);
}

// Weight and number of the tokens ahead of a token in the order.
struct Ahead {
    double mass = 0;
    int64_t count = 0;
};

// The first tokens of a row's order: those above `key`, and those equal to it up to the token `last`.
struct Kept {
    uint32_t key = 0;
    int32_t last = INT32_MAX;
    double mass = 0;

    bool fewer(const Kept& other) const {
        return key > other.key || (key == other.key && last < other.last);
    }
};

template <class T>
struct Draw {
    Row<T> row;
    float largest, inverse;  // largest: the likeliest logit. inverse: of the temperature

    Lanes score(Lanes logits) const { return (logits - largest) * inverse; }

    // Returns the first tokens for which `within` holds, given what is ahead of them. `within` is
    // monotone.
    template <class Within>
    Kept first(Within within) const {
        Ahead ahead;
        uint32_t prefix = 0, mask = 0;
        Ahead last;  // the range that contains the end of the kept tokens
        for (int shift : {21, 10, 0}) {
            constexpr int RANGES = 2048;
            Ahead ranges[RANGES];
            row.each([&](Ints, Lanes logits, int64_t count) {
                Words keys = key_of(logits);
                Lanes weights = exponential(score(logits));
                for (int64_t i = 0; i < count; i++) {
                    if ((keys[i] & mask) != prefix) continue;
                    Ahead& own = ranges[(keys[i] & ~mask) >> shift];
                    own.mass += weights[i];
                    own.count++;
                }
            });
            Ahead before;
            int chosen = -1;
            bool ends = false;
            for (int range = RANGES - 1; range >= 0 && !ends; range--) {
                if (!ranges[range].count) continue;
                before = ahead;
                chosen = range;
                ahead.mass += ranges[range].mass;
                ahead.count += ranges[range].count;
                ends = !within(ahead);
            }
            // Sums of finer ranges may be rounded differently. The end is then in the last of them.
            if (!ends && !mask) return Kept{0, INT32_MAX, ahead.mass};
            ahead = before;
            last = ranges[chosen];
            prefix |= (uint32_t)chosen << shift;
            mask = ~0u << shift;
        }
        int64_t equals = 0;
        double weight = last.mass / last.count;
        while (equals < last.count && within(ahead)) {
            equals++;
            ahead.mass += weight;
            ahead.count++;
        }
        return Kept{prefix, token_at(prefix, equals), ahead.mass};
    }

    // Returns the token up to which `number` tokens have this key.
    int32_t token_at(uint32_t key, int64_t number) const {
        int32_t token = -1;
        row.each([&](Ints tokens, Lanes logits, int64_t count) {
            Words keys = key_of(logits);
            for (int64_t i = 0; i < count && number; i++)
                if (keys[i] == key && !--number) token = tokens[i];
        });
        return token;
    }

    Kept filtered(int32_t top_k, float top_p) const {
        Kept kept;
        if (top_k > 0) kept = first([&](Ahead ahead) { return ahead.count < top_k; });
        if (top_p >= 1.0f) return kept;
        if (top_k <= 0) kept = first([](Ahead) { return true; });
        float limit = top_p * (float)kept.mass;
        Kept nucleus = first([&](Ahead ahead) { return !ahead.count || (float)ahead.mass < limit; });
        return nucleus.fewer(kept) ? nucleus : kept;
    }

    int32_t token(const Kept& kept, float min_p, const Noise& noise) const {
        float least = std::min(0.0f, std::log(min_p));
        Largest best;
        row.each([&](Ints tokens, Lanes logits, int64_t) {
            Words keys = key_of(logits);
            Ints in = (keys > kept.key) | ((keys == kept.key) & (tokens <= kept.last));
            Lanes value = score(logits);
            in &= ~(value < least) & (tokens < (int32_t)row.size);
            best.see(in ? value + noise.of(tokens) : -std::numeric_limits<float>::infinity(), tokens);
        });
        return best.where[best.place()];
    }
};

}  // namespace

extern "C" {

// See kernels/sampling/sample.py. Writes the likeliest token of every row, or not_finite.
void likeliest(
    int dtype, const void* logits, int64_t stride, int32_t* tokens, int64_t num_rows, int64_t size,
    int32_t not_finite, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        each(num_rows, num_rows * size * sizeof(T), team, [&](int64_t row) {
            float logit;
            if (!Row<T>{(const T*)logits + row * stride, size}.likeliest(tokens[row], logit))
                tokens[row] = not_finite;
        });
    });
}

// The same, but drawn if the temperature is not 0. seeds: [num_rows, 2], all others: [num_rows].
void sample(
    int dtype, const void* logits, int64_t stride, const float* temperature, const int32_t* top_k,
    const float* top_p, const float* min_p, const int32_t* seeds, const int32_t* positions,
    int32_t* tokens, int64_t num_rows, int64_t size, int32_t not_finite, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        auto work = [&](int64_t i) {
            Row<T> row{(const T*)logits + i * stride, size};
            float largest;
            if (!row.likeliest(tokens[i], largest)) {
                tokens[i] = not_finite;
            } else if (temperature[i] != 0) {
                Draw<T> draw{row, largest, 1.0f / std::max(temperature[i], LEAST_TEMPERATURE)};
                Noise noise(seeds + 2 * i, positions[i]);
                tokens[i] = draw.token(draw.filtered(top_k[i], top_p[i]), min_p[i], noise);
            }
        };
        each(num_rows, num_rows * size * 32, team, work);
    });
}

// See kernels/sampling/penalties.py. in_prompt: the bit of a count that marks prompt tokens.
void apply_penalties(
    float* logits, int64_t stride, const int64_t* rows, const int32_t* counts, int64_t counts_stride,
    const int64_t* count_rows, const float* repetition, const float* frequency,
    const float* presence, int64_t num_rows, int64_t size, int32_t in_prompt, Team* team
) {
    each(num_rows, num_rows * size * 8, team, [&](int64_t i) {
        float* own = logits + rows[i] * stride;
        const int32_t* seen = counts + count_rows[i] * counts_stride;
        for (int64_t start = 0; start < size; start += WIDTH) {
            int64_t left = size - start;
            Ints count = load(seen + start, left), outputs = count & (in_prompt - 1);
            Lanes value = load(own + start, left);
            Lanes repeated = value > 0 ? value / repetition[i] : value * repetition[i];
            value = count > 0 ? repeated : value;
            value -= frequency[i] * __builtin_convertvector(outputs, Lanes);
            value = outputs > 0 ? value - presence[i] : value;
            store(own + start, value, left);
        }
    });
}

}  // extern "C"
