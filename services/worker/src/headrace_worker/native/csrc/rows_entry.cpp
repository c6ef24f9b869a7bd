#include "attention.h"
#include "rows.h"
#include "team.h"

using namespace headrace;

namespace {

template <class T>
void normalize(const T* rows, T* residual, std::int64_t num_rows, std::int64_t size, float epsilon, T* output,
               int num_threads) {
    auto body = [&](Team& team) {
        const auto own = team.share(num_rows);
        for (auto row = own.begin; row < own.end; ++row) {
            const T* source = rows + row * size;
            if (residual) {
                add_row(residual + row * size, source, size);
                source = residual + row * size;
            }
            normalize_row(source, size, epsilon, output + row * size);
        }
    };
    run_team(num_threads, body);
}

template <class T>
void rotate_and_write(T* qkv, std::int64_t num_tokens, const AttentionShape& shape, const float* rotations,
                      const std::int64_t* slots, std::int64_t slot_stride, T* pages, int num_threads) {
    const int dim = shape.head_dim;
    const int num_rotated = shape.num_heads + shape.num_kv_heads;
    const int num_all = num_rotated + shape.num_kv_heads;
    auto body = [&](Team& team) {
        const auto own = team.share(num_tokens);
        for (auto token = own.begin; token < own.end; ++token) {
            const float* angles = rotations + token * dim;
            for (int head = 0; head < num_all; ++head) {
                T* source = qkv + (token * num_all + head) * dim;
                for (int d = 0; d < dim; d += kLanes) {
                    Floats part = load(source + d);
                    if (head < num_rotated) part = rotated(part, load(angles + d));
                    if (head < shape.num_heads)
                        store(source + d, part);
                    else
                        put_cached(pages, shape, slots[token * slot_stride], head - shape.num_heads, d, part);
                }
            }
        }
    };
    run_team(num_threads, body);
}

template <class T>
void multiply_gated(const T* gate_up, std::int64_t num_rows, std::int64_t size, T* output, int num_threads) {
    auto body = [&](Team& team) {
        const auto own = team.share(num_rows);
        for (auto row = own.begin; row < own.end; ++row) {
            const T* gate = gate_up + row * 2 * size;
            for (std::int64_t i = 0; i < size; i += kLanes)
                store_part(output + row * size + i,
                           silu_mul<T>(load_part(gate + i, size - i), load_part(gate + size + i, size - i)), size - i);
        }
    };
    run_team(num_threads, body);
}

template <class T>
void argmax(const T* logits, std::int64_t num_rows, std::int64_t size, std::int64_t* output, int num_threads) {
    auto body = [&](Team& team) {
        const auto own = team.share(num_rows);
        for (auto row = own.begin; row < own.end; ++row) output[row] = argmax_range(logits + row * size, 0, size);
    };
    run_team(num_threads, body);
}

}  // namespace

// output = norm(rows); with `residual` (may be null): residual += rows, output = norm(residual).
HEADRACE_EXPORT void headrace_rms_norm(const void* rows, void* residual, std::int64_t num_rows, std::int64_t size, float epsilon,
                       void* output, int is_bf16, int num_threads) {
    if (is_bf16)
        normalize(static_cast<const bf16*>(rows), static_cast<bf16*>(residual), num_rows, size, epsilon,
                  static_cast<bf16*>(output), num_threads);
    else
        normalize(static_cast<const float*>(rows), static_cast<float*>(residual), num_rows, size, epsilon,
                  static_cast<float*>(output), num_threads);
}

// Rotates the queries of qkv [tokens, heads + 2 kv heads, head_dim] in place; writes rotated keys, and values, to the pages.
// Token t's first key goes to row slots[t * slot_stride] of head_dim elements; rotations are [tokens, head_dim / 2, 2].
HEADRACE_EXPORT void headrace_rotate_and_write(void* qkv, std::int64_t num_tokens, const AttentionShape* shape, const float* rotations,
                               const std::int64_t* slots, std::int64_t slot_stride, void* pages, int is_bf16,
                               int num_threads) {
    if (is_bf16)
        rotate_and_write(static_cast<bf16*>(qkv), num_tokens, *shape, rotations, slots, slot_stride,
                         static_cast<bf16*>(pages), num_threads);
    else
        rotate_and_write(static_cast<float*>(qkv), num_tokens, *shape, rotations, slots, slot_stride,
                         static_cast<float*>(pages), num_threads);
}

// output [rows, size] = silu(gate) * up of gate_up [rows, 2 size].
HEADRACE_EXPORT void headrace_silu_mul(const void* gate_up, std::int64_t num_rows, std::int64_t size, void* output, int is_bf16,
                       int num_threads) {
    if (is_bf16)
        multiply_gated(static_cast<const bf16*>(gate_up), num_rows, size, static_cast<bf16*>(output), num_threads);
    else
        multiply_gated(static_cast<const float*>(gate_up), num_rows, size, static_cast<float*>(output), num_threads);
}

HEADRACE_EXPORT void headrace_argmax(const void* logits, std::int64_t num_rows, std::int64_t size, std::int64_t* output, int is_bf16,
                     int num_threads) {
    if (is_bf16)
        argmax(static_cast<const bf16*>(logits), num_rows, size, output, num_threads);
    else
        argmax(static_cast<const float*>(logits), num_rows, size, output, num_threads);
}
