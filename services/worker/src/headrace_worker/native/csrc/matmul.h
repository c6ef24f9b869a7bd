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
constexpr std::int64_t kNearBytes = 256 << 10;  // of weights that stay in the second-level cache while rows pass by

// Elements from one row to the next of what is multiplied: an odd number of cache lines. Sixteen rows are read at a time, and
// those that are many twos apart share few places of the caches.
inline std::int64_t row_stride(std::int64_t size) {
    constexpr std::int64_t kLine = 64 / sizeof(bf16);
    return ((size + kLine - 1) / kLine | 1) * kLine;
}

struct PackedWeights {
    const std::byte* data;
    Format format;

    std::int64_t tile_bytes(int num_inputs) const { return num_inputs / kInputStep * block_bytes(format); }
};

// How weights are read. Either once, from memory, as a stream; or again and again from the second-level cache, into which
// what this thread needs next is fetched meanwhile: the memory must not be idle while sums are computed.
struct Access {
    bool streamed;
    const std::byte* next = nullptr;
    std::int64_t next_bytes = 0;

    // The same for one of `count` calls that do the work together.
    Access part(std::int64_t index, std::int64_t count) const {
        const auto begin = next_bytes * index / count / 64 * 64, end = next_bytes * (index + 1) / count / 64 * 64;
        return {streamed, next + begin, end - begin};
    }
};

// What a thread does bit by bit while it multiplies: beside the matrix unit those for vectors would be idle.
class Aside {
  public:
    static constexpr int kBits = 8;

    template <class Body>
    explicit Aside(Body& body) : run_([](void* body) { (*static_cast<Body*>(body))(); }), body_(&body) {}

    // The next bit of it. Up to kBits times in a product; what is left is done afterwards.
    void operator()() const { run_(body_); }

  private:
    void (*run_)(void* body);
    void* body_;
};

// How many rows `multiply` does best at once.
int rows_at_once(int num_rows);

// Rows [0, num_rows <= rows_at_once) of x (row stride `stride`) times `num_tiles` <= kPanelTiles tiles from the first of
// `weights` on. products: [num_rows][kPanel].
void multiply(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs, int num_tiles,
              const Access& access, float* products, const Aside& aside);

// The same weights in bfloat16, in memory of this thread that its next call uses again.
PackedWeights decoded(PackedWeights weights, int num_inputs, int num_tiles);

// amx, avx512_bf16 or portable.
const char* matmul_kind();

// Packs tiles [first_tile, last_tile) of weights [num_outputs, num_inputs]; outputs beyond the last are 0.
void pack_tiles(const bf16* weights, std::int64_t num_outputs, std::int64_t num_inputs, std::int64_t first_tile,
                std::int64_t last_tile, bf16* packed);

// Tiles whose weights are near while rows pass by, in whole panels.
inline int near_tiles(PackedWeights weights, int num_inputs) {
    if (weights.format != Format::bf16) return kPanelTiles;  // decoded panel by panel
    const auto panels = kNearBytes / (kPanelTiles * weights.tile_bytes(num_inputs));
    return static_cast<int>(panels < 1 ? 1 : panels) * kPanelTiles;
}

// What a thread reads first of its tiles, to be fetched while it multiplies with other weights.
inline Access first_near(PackedWeights weights, int num_inputs, std::int64_t first_tile, std::int64_t last_tile) {
    const std::int64_t most = near_tiles(weights, num_inputs);
    const auto count = last_tile - first_tile < most ? last_tile - first_tile : most;
    const auto tile_bytes = weights.tile_bytes(num_inputs);
    return {false, weights.data + first_tile * tile_bytes, count * tile_bytes};
}

// Calls finish(first_row, num_rows, first_tile, num_tiles, products) for tiles [first_tile, last_tile) of all rows.
// `after`: the first_near of this thread's next matrix.
template <class Finish>
void multiply_tiles(const bf16* x, std::int64_t stride, int num_rows, PackedWeights weights, int num_inputs,
                    std::int64_t first_tile, std::int64_t last_tile, const Access& after, Finish&& finish) {
    alignas(64) float products[2][kMostRows * kPanel];
    // The product before the one that is being computed: its rows are finished meanwhile.
    struct {
        int row, count;
        std::int64_t tile;
        int num_tiles;
        const float* products;
    } before{};
    int num_finished = 0;
    const auto finish_up_to = [&](int end) {
        if (num_finished < end)
            finish(before.row + num_finished, end - num_finished, before.tile, before.num_tiles,
                   before.products + num_finished * kPanel);
        num_finished = end;
    };
    auto finish_some = [&] {
        const int some = (before.count + Aside::kBits - 1) / Aside::kBits;
        finish_up_to(before.count - num_finished < some ? before.count : num_finished + some);
    };
    const Aside aside(finish_some);
    MatrixUnit unit;
    const int at_once = rows_at_once(num_rows);
    const bool streamed = at_once == num_rows;
    const int most_near = near_tiles(weights, num_inputs);
    int side = 0;
    for (auto near = first_tile; near < last_tile; near += most_near) {
        const auto end = last_tile - near < most_near ? last_tile : near + most_near;
        Access access = end < last_tile ? first_near(weights, num_inputs, end, last_tile) : after;
        if (streamed) access = {true};
        PackedWeights near_weights{weights.data + near * weights.tile_bytes(num_inputs), weights.format};
        if (weights.format != Format::bf16 && !streamed)
            near_weights = decoded(near_weights, num_inputs, static_cast<int>(end - near));
        const auto num_panels = (end - near + kPanelTiles - 1) / kPanelTiles;
        const auto num_calls = num_panels * ((num_rows + at_once - 1) / at_once);
        std::int64_t call = 0;
        for (int row = 0, count; row < num_rows; row += count) {
            count = num_rows - row < at_once ? num_rows - row : at_once;
            for (auto tile = near; tile < end; tile += kPanelTiles, ++call, side = 1 - side) {
                const int num_tiles = static_cast<int>(end - tile < kPanelTiles ? end - tile : kPanelTiles);
                const PackedWeights panel{near_weights.data + (tile - near) * near_weights.tile_bytes(num_inputs),
                                          near_weights.format};
                multiply(x + row * stride, stride, count, panel, num_inputs, num_tiles, access.part(call, num_calls),
                         products[side], aside);
                finish_up_to(before.count);
                before = {row, count, tile, num_tiles, products[side]};
                num_finished = 0;
            }
        }
    }
    finish_up_to(before.count);
}

}  // namespace headrace
