// y = x W^T for bfloat16 with float32 sums.
//
// W [outputs, inputs] is packed in tiles of 16 outputs: [tile][inputs / 2][16][2]. A vector then holds a pair of inputs
// for 16 outputs, which is what the dot-product instructions of AVX-512 and the tiles of AMX take, and a sum over inputs
// needs no reduction across lanes. Weights of fewer bits (blocks.h) are packed in the same order and become bfloat16 just
// before their use. Each sum is one chain in the order of the inputs, whatever the number of rows: a row's result does not
// depend on the rows beside it.
#pragma once

#include "blocks.h"
#include "tiles.h"

namespace headrace {

constexpr int kPanelTiles = 4;    // tiles that are computed together
constexpr int kPanel = kTile * kPanelTiles;
constexpr int kMostRows = 32;     // rows of one call of `multiply`
constexpr int kNearTiles = 16;    // tiles that stay in the second-level cache while rows pass by

struct PackedWeights {
    const std::byte* data;
    Format format;

    std::int64_t tile_bytes(int num_inputs) const { return num_inputs / kInputStep * block_bytes(format); }
};

// How many rows `multiply` does best at once.
int rows_at_once(int num_rows);

// Rows [0, num_rows <= rows_at_once) of x (row stride `stride`) times `num_tiles` <= kPanelTiles tiles from the first of
// `weights` on. products: [num_rows][kPanel]. `streamed`: the weights are used this once, so they come from memory.
void multiply(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs, int num_tiles,
              bool streamed, float* products);

// The same weights in bfloat16, in memory of this thread that its next call uses again.
PackedWeights decoded(PackedWeights weights, int num_inputs, int num_tiles);

// amx, avx512_bf16 or portable.
const char* matmul_kind();

void pack(const bf16* weights, std::int64_t num_outputs, std::int64_t num_inputs, bf16* packed);

// Calls finish(first_row, num_rows, first_tile, num_tiles, products) for tiles [first_tile, last_tile) of all rows.
template <class Finish>
void multiply_tiles(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs,
                    std::int64_t first_tile, std::int64_t last_tile, Finish&& finish) {
    alignas(64) float products[kMostRows * kPanel];
    MatrixUnit unit;
    const bool streamed = rows_at_once(num_rows) == num_rows;
    const bool is_coded = weights.format != Format::bf16;
    const int near_tiles = is_coded ? kPanelTiles : kNearTiles;
    for (auto near = first_tile; near < last_tile; near += near_tiles) {
        const auto end = last_tile - near < near_tiles ? last_tile : near + near_tiles;
        PackedWeights near_weights{weights.data + near * weights.tile_bytes(num_inputs), weights.format};
        if (is_coded && !streamed) near_weights = decoded(near_weights, num_inputs, static_cast<int>(end - near));
        for (int row = 0, count; row < num_rows; row += count) {
            count = rows_at_once(num_rows - row);
            for (auto tile = near; tile < end; tile += kPanelTiles) {
                const int num_tiles = static_cast<int>(end - tile < kPanelTiles ? end - tile : kPanelTiles);
                const PackedWeights panel{near_weights.data + (tile - near) * near_weights.tile_bytes(num_inputs),
                                          near_weights.format};
                multiply(x + row * stride, stride, count, panel, num_inputs, num_tiles, streamed, products);
                finish(row, count, tile, num_tiles, products);
            }
        }
    }
}

}  // namespace headrace
