// Decoder layers in one call, with the same bits as their separate operations.
//
// Between separate calls from Python the memory is idle, while Python reads its own data, which the
// weights have displaced from the near caches.

#include <cstring>

#include "operations.h"

namespace {

struct Norm {
    const void* weight;  // null: no norm
    int64_t dtype;
    double eps;
};

struct Matrix {
    const uint32_t* panels;
    const void* scales;  // null: the numbers have the dtype of the inputs
    const void* zeros;   // for integers with scales
    const void* bias;    // may be null
    int64_t inputs, outputs;
    int64_t group;  // 4-bit inputs that share a scale. 0: int8, or the dtype of the inputs
};

struct Layer {
    Norm mixer_norm, mixer_post_norm, q_norm, k_norm, ffn_norm, ffn_post_norm;
    Matrix qkv, output, gate_up, down;
    int64_t heads, kv_heads, size, window, activation;
    int64_t rotation;  // index into the step's angles
    double scale, soft_cap;
};

struct Keys {  // of a layer. Strides in elements
    void* start;
    int64_t page_stride, head_stride, kv_stride, token_stride;
    int64_t table;  // index into the step's locations and page_starts
};

// Sums the output of a mixer or a net over all ranks, in place. Returns 0 if a rank is lost.
using Sum = int (*)();

struct Step {
    int64_t dtype, itemsize, hidden;
    int64_t num_tokens, num_rows, num_decodes;  // decodes are the last rows, with one token each
    int64_t page_size;
    const int32_t *page_ids, *query_starts, *lengths;
    const int64_t* const* locations;    // of each table
    const int32_t* const* page_starts;  // of each table
    const float* const* angles;         // of each rotation
    Team* team;
    Sum sum;  // null: there is one rank

    // Writes x [num_tokens, size] + residual to `total`, and its norm to `normed`. total is null if
    // residual is.
    void norm(const Norm& norm, const void* x, const void* residual, void* normed, void* total) const {
        add_rms_norm(
            dtype, norm.dtype, x, hidden, residual, hidden, norm.weight, nullptr, normed, total,
            num_tokens, hidden, norm.eps, team
        );
    }

    void multiply(const Matrix& matrix, const void* x, void* out) const {
        if (matrix.group)
            weight_only_product(
                dtype, !matrix.zeros, matrix.panels, matrix.scales, (const uint8_t*)matrix.zeros,
                matrix.group, x, matrix.inputs, matrix.bias, out, num_tokens, matrix.inputs,
                matrix.outputs, team
            );
        else if (matrix.scales)
            int8_product(
                dtype, matrix.panels, x, matrix.inputs, (const float*)matrix.scales,
                (const int32_t*)matrix.zeros, matrix.bias, out, num_tokens, matrix.inputs,
                matrix.outputs, team
            );
        else
            float_product(
                dtype, matrix.panels, (const uint32_t*)x, matrix.inputs * itemsize / 4, matrix.bias,
                out, num_tokens, matrix.inputs * itemsize / 4, matrix.outputs, team
            );
    }

    void attend(const Layer& layer, const Keys& keys, const char* q, char* out) const {
        int64_t width = layer.heads * layer.size, group = layer.heads / layer.kv_heads;
        int64_t extends = num_rows - num_decodes, queries = num_tokens - num_decodes;
        const int32_t* starts = page_starts[keys.table];
        if (extends)
            extend_attention(
                dtype, q, width, keys.start, keys.page_stride, keys.head_stride, keys.kv_stride,
                keys.token_stride, page_ids, starts, lengths, query_starts, out, extends,
                layer.size, layer.kv_heads, group, page_size, layer.size, layer.window, layer.scale,
                layer.soft_cap, nullptr, team
            );
        if (num_decodes)
            decode_attention(
                dtype, q + queries * width * itemsize, width, keys.start, keys.page_stride,
                keys.head_stride, keys.kv_stride, keys.token_stride, page_ids, starts + extends,
                lengths + extends, out + queries * width * itemsize, num_decodes, layer.kv_heads,
                group, page_size, layer.size, layer.window, layer.scale, layer.soft_cap,
                nullptr, team
            );
    }

    // Rotates Q and K of each token, and stores K and V.
    void turn(const Layer& layer, const Keys& keys, const void* qkv, void* q) const {
        int64_t columns = (layer.heads + 2 * layer.kv_heads) * layer.size;
        rope_and_store(
            dtype, layer.q_norm.dtype, qkv, columns, angles[layer.rotation], keys.start,
            keys.page_stride, keys.head_stride, keys.kv_stride, keys.token_stride,
            locations[keys.table], layer.q_norm.weight, layer.k_norm.weight, q, num_tokens,
            layer.heads, layer.kv_heads, page_size, layer.size, layer.size / 2, layer.q_norm.eps,
            team
        );
    }
};

}  // namespace

// Runs layers [first, past). x [num_tokens, hidden]: embeddings or the output of the layer before
// `first`. Afterwards it has the output of the last layer's net. residual: same shape, to be added to x.
// If `first` is 0, it is only written. wide, other: room for `num_tokens` rows of the widest outputs and
// of the widest inputs of any matrix. If a sum over ranks fails, the rest is not computed.
extern "C" void compute_layers(
    const Layer* layers, const Keys* keys, int64_t first, int64_t past, const Step* step, void* x,
    void* residual, void* wide, void* other
) {
    if (!first) std::memcpy(residual, x, step->num_tokens * step->hidden * step->itemsize);
    const void* added = first ? x : nullptr;  // output of the layer before
    for (int64_t number = first; number < past; number++) {
        const Layer& layer = layers[number];
        const Keys& own = keys[number];
        if (added) step->norm(layer.mixer_norm, x, residual, other, residual);
        else step->norm(layer.mixer_norm, residual, nullptr, other, nullptr);
        step->multiply(layer.qkv, other, wide);
        step->turn(layer, own, wide, other);
        step->attend(layer, own, (const char*)other, (char*)wide);
        step->multiply(layer.output, wide, x);
        if (step->sum && !step->sum()) return;
        if (layer.mixer_post_norm.weight) step->norm(layer.mixer_post_norm, x, nullptr, x, nullptr);
        step->norm(layer.ffn_norm, x, residual, other, residual);
        step->multiply(layer.gate_up, other, wide);
        act_and_mul(
            step->dtype, layer.activation, wide, other, step->num_tokens, layer.down.inputs,
            step->team
        );
        step->multiply(layer.down, other, x);
        if (step->sum && !step->sum()) return;
        if (layer.ffn_post_norm.weight) step->norm(layer.ffn_post_norm, x, nullptr, x, nullptr);
        added = x;
    }
}
