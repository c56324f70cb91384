// The operations of this library that other operations use. Each is documented at its definition.

#pragma once

#include <cstdint>

#include "team.h"

extern "C" {

void add_rms_norm(
    int dtype, int weight_dtype, const void* x, int64_t x_stride, const void* residual,
    int64_t residual_stride, const void* weight, const int64_t* rows, void* normed, void* total,
    int64_t num_rows, int64_t size, double eps, Team* team
);

void rope_and_store(
    int dtype, int norm_dtype, const void* qkv, int64_t qkv_stride, const float* angles, void* kv,
    int64_t page_stride, int64_t head_stride, int64_t kv_stride, int64_t token_stride,
    const int64_t* locations, const void* q_norm, const void* k_norm, void* q, int64_t num_tokens,
    int64_t heads, int64_t kv_heads, int64_t page_size, int64_t size, int64_t pairs, double eps,
    Team* team
);

void act_and_mul(
    int dtype, int activation, const void* x, void* out, int64_t num_rows, int64_t size, Team* team
);

void decode_attention(
    int dtype, const void* q, int64_t q_stride, const void* kv, int64_t page_stride,
    int64_t head_stride, int64_t kv_stride, int64_t token_stride, const int32_t* page_ids,
    const int32_t* page_starts, const int32_t* lengths, void* out, int64_t num_rows,
    int64_t kv_heads, int64_t group, int64_t page_size, int64_t size, int64_t window, double scale,
    double soft_cap, const float* sinks, Team* team
);

void extend_attention(
    int dtype, const void* q, int64_t q_stride, const void* kv, int64_t page_stride,
    int64_t head_stride, int64_t kv_stride, int64_t token_stride, const int32_t* page_ids,
    const int32_t* page_starts, const int32_t* lengths, const int32_t* query_starts, void* out,
    int64_t num_rows, int64_t value_size, int64_t kv_heads, int64_t group, int64_t page_size,
    int64_t size, int64_t window, double scale, double soft_cap, const float* sinks, Team* team
);

void float_product(
    int dtype, const uint32_t* panels, const uint32_t* rows, int64_t stride, const void* bias,
    void* out, int64_t num_rows, int64_t words, int64_t num_outputs, Team* team
);

void int8_product(
    int dtype, const uint32_t* panels, const void* x, int64_t stride, const float* scales,
    const int32_t* zeros, const void* bias, void* out, int64_t num_rows, int64_t inputs,
    int64_t num_outputs, Team* team
);

void weight_only_product(
    int dtype, int fp4, const uint32_t* panels, const void* scales, const uint8_t* zeros,
    int64_t group, const void* x, int64_t stride, const void* bias, void* out, int64_t num_rows,
    int64_t inputs, int64_t num_outputs, Team* team
);

}  // extern "C"
