#include "matmul.h"
#include "team.h"

using namespace headrace;

HEADRACE_EXPORT void headrace_initialize(void* parallel, void* thread_number, void* team_size) {
    runtime.parallel = reinterpret_cast<decltype(runtime.parallel)>(parallel);
    runtime.thread_number = reinterpret_cast<decltype(runtime.thread_number)>(thread_number);
    runtime.team_size = reinterpret_cast<decltype(runtime.team_size)>(team_size);
    request_matrix_unit();
}

HEADRACE_EXPORT const char* headrace_matmul_kind() { return matmul_kind(); }

HEADRACE_EXPORT void headrace_pack(const bf16* weights, std::int64_t num_outputs, std::int64_t num_inputs, bf16* packed,
                                   int num_threads) {
    auto body = [&](Team& team) {
        const auto tiles = team.share((num_outputs + kTile - 1) / kTile);
        pack_tiles(weights, num_outputs, num_inputs, tiles.begin, tiles.end, packed);
    };
    run_team(num_threads, body);
}

// y [num_rows, num_outputs] = x [num_rows, num_inputs] W^T (+ bias). `bias` may be null.
HEADRACE_EXPORT void headrace_linear(const bf16* x, std::int64_t num_rows, std::int64_t num_inputs, const void* packed,
                                     int format, std::int64_t num_outputs, const bf16* bias, bf16* y, int num_threads) {
    if (num_rows == 0) return;
    const PackedWeights weights{static_cast<const std::byte*>(packed), static_cast<Format>(format)};
    auto body = [&](Team& team) {
        const auto tiles = team.share((num_outputs + kTile - 1) / kTile);
        multiply_tiles(x, num_inputs, static_cast<int>(num_rows), weights, static_cast<int>(num_inputs), tiles.begin,
                       tiles.end, {false}, [&](int row, int count, std::int64_t tile, int num_tiles, const float* products) {
                           for (int r = 0; r < count; ++r)
                               for (int t = 0; t < num_tiles; ++t) {
                                   const auto column = (tile + t) * kTile;
                                   Floats sums = load(products + r * kPanel + t * kTile);
                                   bf16* target = y + (row + r) * num_outputs + column;
                                   if (column + kTile <= num_outputs) {
                                       if (bias) sums += load(bias + column);
                                       store(target, sums);
                                       continue;
                                   }
                                   for (int lane = 0; column + lane < num_outputs; ++lane)
                                       target[lane] = from_float<bf16>(
                                           sums[lane] + (bias ? to_float(bias[column + lane]) : 0.0f));
                               }
                       });
    };
    run_team(num_threads, body);
}
