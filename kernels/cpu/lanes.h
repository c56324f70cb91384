// Vectors of WIDTH floats: conversion between float32 and memory of any dtype, and elementary functions.
// Independent of torch and of operations.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

struct bfloat16 {
    uint16_t bits;
};
using float16 = _Float16;

namespace {

constexpr int WIDTH = 16;  // floats of a Lanes. Narrower machines split it

typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef _Float16 Float16s __attribute__((vector_size(2 * WIDTH)));

template <int n>
using Count = std::integral_constant<int, n>;

// ---- Memory of any dtype, rounded to nearest, ties to even

inline Lanes widened(const float* p) {
    Lanes lanes;
    std::memcpy(&lanes, p, sizeof lanes);
    return lanes;
}

inline Lanes widened(const bfloat16* p) {
    Halves halves;
    std::memcpy(&halves, p, sizeof halves);
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}

inline Lanes widened(const float16* p) {
    Float16s halves;
    std::memcpy(&halves, p, sizeof halves);
    return __builtin_convertvector(halves, Lanes);
}

inline void narrowed(float* p, Lanes lanes) { std::memcpy(p, &lanes, sizeof lanes); }

inline void narrowed(bfloat16* p, Lanes lanes) {
    Words bits = (Words)lanes;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Words nan = (Words)(lanes != lanes);  // all ones for NaN, which rounding could turn into inf
    Halves halves = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
    std::memcpy(p, &halves, sizeof halves);
}

inline void narrowed(float16* p, Lanes lanes) {
    Float16s halves = __builtin_convertvector(lanes, Float16s);
    std::memcpy(p, &halves, sizeof halves);
}

// The first `count` of WIDTH numbers. The others are read as 0 and not written.
template <class T>
inline Lanes load(const T* p, int64_t count = WIDTH) {
    if (count >= WIDTH) return widened(p);
    T part[WIDTH] = {};
    std::memcpy(part, p, count * sizeof(T));
    return widened(part);
}

inline Ints load(const int32_t* p, int64_t count) {
    Ints ints = {};
    if (count >= WIDTH) std::memcpy(&ints, p, sizeof ints);
    else std::memcpy(&ints, p, count * sizeof *p);
    return ints;
}

template <class T>
inline void store(T* p, Lanes lanes, int64_t count = WIDTH) {
    if (count >= WIDTH) return narrowed(p, lanes);
    T part[WIDTH];
    narrowed(part, lanes);
    std::memcpy(p, part, count * sizeof(T));
}

template <class T>
inline Lanes rounded(Lanes lanes) {
    T part[WIDTH];
    narrowed(part, lanes);
    return widened(part);
}

inline float sum(Lanes x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return x[0] + x[1];
}

inline float largest(Lanes x) {
    auto most = [](Lanes a, Lanes b) { return b > a ? b : a; };
    x = most(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = most(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    x = most(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    return x[1] > x[0] ? x[1] : x[0];
}

// e^x within 2 units in the last place. NaN stays NaN, and subnormal results become 0.
inline Lanes exponential(Lanes x) {
    const Lanes zero = {};
    Lanes clamped = x > 88.0f ? zero + 88.0f : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it removes the fraction
    Lanes n = (clamped * 1.44269504f + magic) - magic;
    Lanes r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Lanes power = (Lanes)((__builtin_convertvector(n, Ints) + 127) << 23);
    return x < -87.0f ? zero : p * power;
}

// Hyperbolic tangent, within an error of 2^-23.
inline Lanes tangent(Lanes x) { return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f); }

inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

// Calls work(start, count) for every WIDTH of `size` numbers. `count` is a compile-time constant in all
// calls but the last.
template <class Work>
inline __attribute__((always_inline)) void spans(int64_t size, Work work) {
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) work(i, Count<WIDTH>());
    if (i < size) work(i, size - i);
}

// ---- Dispatch

// Calls work with a null pointer of the dtype with this code, see operators.py.
template <class Work>
void typed(int code, Work work) {
    switch (code) {
        case 0: return work((float*)nullptr);
        case 1: return work((bfloat16*)nullptr);
        case 2: return work((float16*)nullptr);
    }
}

}  // namespace
