// Operations that compute each row alone, in one pass over memory: norms, rotation and store of K and V,
// activations, embedding.
//
// The caller (operators.py) has checked shapes, and passes addresses, strides in elements and the team
// of threads. Arithmetic is float32, rounded where the operations' Python files say so.

#include <cmath>

#include "lanes.h"
#include "operations.h"

namespace {

// ---- RMSNorm

// Returns scale / sqrt(mean(x^2) + eps).
inline float norm_scale(Lanes squares, int64_t size, float eps) {
    return 1.0f / std::sqrt(sum(squares) / size + eps);
}

template <class T, class W>
inline Lanes weighted(Lanes x, float scale, const W* weight, int64_t count) {
    return rounded<W>(x * scale) * load(weight, count);
}

template <class T, class W>
void norm_row(
    const T* x, const T* residual, const W* weight, T* normed, T* total, int64_t size, float eps
) {
    Lanes squares = {};
    for (int64_t i = 0; i < size; i += WIDTH) {
        Lanes value = load(x + i, size - i);
        if (residual) value = rounded<T>(load(residual + i, size - i) + value);
        if (total) store(total + i, value, size - i);
        squares += value * value;
    }
    const T* source = total ? total : x;
    float scale = norm_scale(squares, size, eps);
    for (int64_t i = 0; i < size; i += WIDTH) {
        Lanes value = load(source + i, size - i);
        store(normed + i, weighted<T>(value, scale, weight + i, size - i), size - i);
    }
}

// See kernels/linear_attention/gated_norm.py.
template <class T, class W>
void norm_and_gate(
    const T* x, const T* gate, const W* weight, T* out, int64_t size, float eps
) {
    Lanes squares = {};
    for (int64_t i = 0; i < size; i += WIDTH) {
        Lanes value = load(x + i, size - i);
        squares += value * value;
    }
    float scale = norm_scale(squares, size, eps);
    for (int64_t i = 0; i < size; i += WIDTH) {
        Lanes value = weighted<T>(load(x + i, size - i), scale, weight + i, size - i);
        Lanes opened = load(gate + i, size - i);
        store(out + i, rounded<T>(value) * (opened * sigmoid(opened)), size - i);
    }
}

// ---- RoPE

// Norms a head if there is a weight, then rotates its first `half` pairs, whose numbers are `half`
// apart.
template <class T, class W>
void turn_head(
    const T* x, const W* weight, const float* cos, const float* sin, T* out, int64_t size,
    int64_t half, float eps
) {
    float scale = 1.0f;
    if (weight) {
        Lanes squares = {};
        for (int64_t i = 0; i < size; i += WIDTH) {
            Lanes value = load(x + i, size - i);
            squares += value * value;
        }
        scale = norm_scale(squares, size, eps);
    }
    for (int64_t i = 0; i < half; i += WIDTH) {
        int64_t left = half - i;
        Lanes low = load(x + i, left), high = load(x + half + i, left);
        if (weight) {
            low = rounded<T>(weighted<T>(low, scale, weight + i, left));
            high = rounded<T>(weighted<T>(high, scale, weight + half + i, left));
        }
        Lanes c = load(cos + i, left), s = load(sin + i, left);
        store(out + i, low * c - high * s, left);
        store(out + half + i, high * c + low * s, left);
    }
    for (int64_t i = 2 * half; i < size; i += WIDTH) {
        Lanes value = load(x + i, size - i);
        if (weight) value = weighted<T>(value, scale, weight + i, size - i);
        store(out + i, value, size - i);
    }
}

// Rotates `half` pairs of numbers that are adjacent or `half` apart. The results are `half` apart.
template <class T>
void turn_pairs(
    const T* x, const float* cos, const float* sin, T* out, int64_t half, bool interleaved
) {
    for (int64_t i = 0; i < half; i += WIDTH) {
        int64_t left = std::min<int64_t>(WIDTH, half - i);
        T low[WIDTH] = {}, high[WIDTH] = {};
        for (int64_t j = 0; j < left; j++) {
            low[j] = interleaved ? x[2 * (i + j)] : x[i + j];
            high[j] = interleaved ? x[2 * (i + j) + 1] : x[half + i + j];
        }
        Lanes a = load(low), b = load(high), c = load(cos + i, left), s = load(sin + i, left);
        store(out + i, a * c - b * s, left);
        store(out + half + i, b * c + a * s, left);
    }
}

// ---- Activations

constexpr int CLAMPED = 3;
constexpr float LIMIT = 7.0f, SLOPE = 1.702f;  // for it, see kernels/experts/grouped_mlp.py

inline Lanes activated(Lanes x, int activation) {
    switch (activation) {
        case 0: return x / (1.0f + exponential(-x));
        case 1:
            for (int i = 0; i < WIDTH; i++) x[i] *= 0.5f + 0.5f * std::erf(x[i] * 0.70710678f);
            return x;
        case 2:  // (1 + tanh(y)) / 2 is the sigmoid of 2 y
            return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
        default:
            x = x > LIMIT ? Lanes{} + LIMIT : x;  // NaN stays
            return x * sigmoid(SLOPE * x);
    }
}

// The factor of the activated gate.
inline Lanes multiplier(Lanes up, int activation) {
    if (activation != CLAMPED) return up;
    up = up > LIMIT ? Lanes{} + LIMIT : up;
    return (up < -LIMIT ? Lanes{} - LIMIT : up) + 1.0f;
}

}  // namespace

extern "C" {

// See kernels/layers/rms_norm.py. rows and residual may be null. total is null if it would equal x.
void add_rms_norm(
    int dtype, int weight_dtype, const void* x, int64_t x_stride, const void* residual,
    int64_t residual_stride, const void* weight, const int64_t* rows, void* normed, void* total,
    int64_t num_rows, int64_t size, double eps, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        auto run = [&](auto* kind) {
            using W = std::remove_pointer_t<decltype(kind)>;
            each(num_rows, num_rows * size * sizeof(T), team, [&](int64_t i) {
                int64_t row = rows ? rows[i] : i;
                norm_row(
                    (const T*)x + row * x_stride,
                    residual ? (const T*)residual + row * residual_stride : nullptr,
                    (const W*)weight, (T*)normed + i * size, total ? (T*)total + i * size : nullptr,
                    size, (float)eps
                );
            });
        };
        weight_dtype == 0 ? run((float*)nullptr) : run((T*)nullptr);
    });
}

// See kernels/linear_attention/gated_norm.py.
void gated_rms_norm(
    int dtype, int weight_dtype, const void* x, const void* gate, int64_t gate_stride,
    int64_t group_stride, const void* weight, void* out, int64_t num_tokens, int64_t groups,
    int64_t of_group, int64_t size, double eps, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        const int64_t heads = groups * of_group;
        auto run = [&](auto* kind) {
            using W = std::remove_pointer_t<decltype(kind)>;
            each(num_tokens, num_tokens * heads * size * 2 * sizeof(T), team, [&](int64_t token) {
                for (int64_t head = 0; head < heads; head++) {
                    int64_t place = (token * heads + head) * size;
                    const T* own = (const T*)gate + token * gate_stride +
                                   head / of_group * group_stride + head % of_group * size;
                    norm_and_gate(
                        (const T*)x + place, own, (const W*)weight, (T*)out + place, size, (float)eps
                    );
                }
            });
        };
        weight_dtype == 0 ? run((float*)nullptr) : run((T*)nullptr);
    });
}

// See kernels/layers/output_gate.py.
void gate_heads(
    int dtype, const void* x, const void* gate, int64_t gate_stride, int64_t head_stride, void* out,
    int64_t num_tokens, int64_t heads, int64_t size, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        each(num_tokens, num_tokens * heads * size * 2 * sizeof(T), team, [&](int64_t token) {
            for (int64_t head = 0; head < heads; head++) {
                int64_t place = (token * heads + head) * size;
                const T* own = (const T*)gate + token * gate_stride + head * head_stride;
                for (int64_t i = 0; i < size; i += WIDTH) {
                    Lanes open = rounded<T>(sigmoid(load(own + i, size - i)));
                    Lanes value = load((const T*)x + place + i, size - i) * open;
                    store((T*)out + place + i, value, size - i);
                }
            }
        });
    });
}

// See kernels/pages/rope_and_store.py. Both norms may be null. The first 2 * pairs numbers of a head are
// rotated.
void rope_and_store(
    int dtype, int norm_dtype, const void* qkv, int64_t qkv_stride, const float* angles, void* kv,
    int64_t page_stride, int64_t head_stride, int64_t kv_stride, int64_t token_stride,
    const int64_t* locations, const void* q_norm, const void* k_norm, void* q, int64_t num_tokens,
    int64_t heads, int64_t kv_heads, int64_t page_size, int64_t size, int64_t pairs, double eps,
    Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        int64_t columns = (heads + 2 * kv_heads) * size;
        auto run = [&](auto* kind) {
            using W = std::remove_pointer_t<decltype(kind)>;
            each(num_tokens, num_tokens * columns * sizeof(T), team, [&](int64_t token) {
                const T* x = (const T*)qkv + token * qkv_stride;
                const float* cos = angles + token * pairs;
                const float* sin = cos + num_tokens * pairs;
                T* turned = (T*)q + token * heads * size;
                for (int64_t head = 0; head < heads; head++, x += size, turned += size)
                    turn_head(x, (const W*)q_norm, cos, sin, turned, size, pairs, (float)eps);
                int64_t location = locations[token];
                if (location < 0) return;
                T* key = (T*)kv + location / page_size * page_stride +
                         location % page_size * token_stride;
                for (int64_t head = 0; head < kv_heads; head++, x += size, key += head_stride) {
                    turn_head(x, (const W*)k_norm, cos, sin, key, size, pairs, (float)eps);
                    std::memcpy(key + kv_stride, x + kv_heads * size, size * sizeof(T));
                }
            });
        };
        norm_dtype == 0 ? run((float*)nullptr) : run((T*)nullptr);
    });
}

// See kernels/pages/store_latents.py. Each token has one latent: `size` numbers that are normed, and 2 *
// half that are rotated.
void rope_and_store_latents(
    int dtype, const void* kv, int64_t kv_stride, const void* norm, double eps, const void* q,
    int64_t q_stride, int64_t q_head_stride, const float* angles, void* latents,
    int64_t page_stride, int64_t token_stride, const int64_t* locations, void* out,
    int64_t out_stride, int64_t out_head_stride, int64_t num_tokens, int64_t heads,
    int64_t page_size, int64_t size, int64_t half, int interleaved, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        int64_t bytes = num_tokens * (heads * 2 * half + size) * sizeof(T);
        each(num_tokens, bytes, team, [&](int64_t token) {
            const float* cos = angles + token * half;
            const float* sin = cos + num_tokens * half;
            for (int64_t head = 0; head < heads; head++)
                turn_pairs(
                    (const T*)q + token * q_stride + head * q_head_stride, cos, sin,
                    (T*)out + token * out_stride + head * out_head_stride, half, interleaved
                );
            int64_t location = locations[token];
            if (location < 0) return;
            const T* x = (const T*)kv + token * kv_stride;
            T* key = (T*)latents + location / page_size * page_stride +
                     location % page_size * token_stride;
            norm_row<T, T>(x, nullptr, (const T*)norm, key, nullptr, size, (float)eps);
            turn_pairs(x + size, cos, sin, key + size, half, interleaved);
        });
    });
}

// See kernels/layers/act_and_mul.py.
void act_and_mul(
    int dtype, int activation, const void* x, void* out, int64_t num_rows, int64_t size, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        each(num_rows, num_rows * size * 2 * sizeof(T), team, [&](int64_t row) {
            const T* gate = (const T*)x + row * 2 * size;
            for (int64_t i = 0; i < size; i += WIDTH) {
                Lanes up = load(gate + size + i, size - i);
                Lanes value = activated(load(gate + i, size - i), activation);
                value *= multiplier(up, activation);
                store((T*)out + row * size + i, value, size - i);
            }
        });
    });
}

// See kernels/layers/soft_cap.py.
void soft_cap(
    int dtype, const void* x, float* out, int64_t num_rows, int64_t size, double cap, Team* team
) {
    typed(dtype, [&](auto* number) {
        using T = std::remove_pointer_t<decltype(number)>;
        each(num_rows, num_rows * size * sizeof(T), team, [&](int64_t row) {
            const T* own = (const T*)x + row * size;
            for (int64_t i = 0; i < size; i += WIDTH) {
                Lanes value = tangent(load(own + i, size - i) / (float)cap) * (float)cap;
                store(out + row * size + i, value, size - i);
            }
        });
    });
}

// See kernels/layers/rope.py. Computed one by one, because vector functions of a library round
// differently from its scalar ones, so that a token's position in the batch would matter.
void rope_angles(
    const int32_t* positions, const float* frequencies, float* out, int64_t num_tokens,
    int64_t pairs, double scale, Team* team
) {
    each(num_tokens, num_tokens * pairs * 64, team, [&](int64_t token) {
        float* cos = out + token * pairs;
        float* sin = cos + num_tokens * pairs;
        for (int64_t i = 0; i < pairs; i++) {
            float angle = (float)positions[token] * frequencies[i];
            cos[i] = std::cos(angle) * (float)scale;
            sin[i] = std::sin(angle) * (float)scale;
        }
    });
}

// See kernels/layers/embedding.py. Rows of `bytes` bytes, stride_bytes apart.
void embed(
    const int32_t* token_ids, const int32_t* future, const char* weight, int64_t stride_bytes,
    char* out, int64_t num_tokens, int64_t bytes, Team* team
) {
    each(num_tokens, num_tokens * bytes, team, [&](int64_t i) {
        int64_t token = token_ids[i] < 0 ? future[-token_ids[i] - 1] : token_ids[i];
        std::memcpy(out + i * bytes, weight + token * stride_bytes, bytes);
    });
}

}  // extern "C"
